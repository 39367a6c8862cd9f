"""Safetensors with one 2-D tensor per expert and projection.

    <module>.<expert>.{gate_proj,up_proj,down_proj}.weight     Qwen, DeepSeek, OLMoE and most others
    <module>.<expert>.{w1,w3,w2}.weight                        Mixtral and its kin: w1 gate, w3 up,
    w2 down

and others that the model's own loader collects by expert (its table says which is gate, up or
down). Shapes: gate and up [I, H], down [H, I].
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import partial

from torch import Tensor

from kt_core.loading.parts import CheckpointFiles, ExpertRequest, ExpertTensor
from kt_core.names import PROJECTION_OF

_NAME = re.compile(r"(?P<module>.+)\.(?P<expert>\d+)\.(?P<leaf>\w+)\.weight")


def scan(source: CheckpointFiles, request: ExpertRequest) -> Iterator[ExpertTensor]:
    """The matrices of the per-expert tensors of `source`."""
    for stored in source.safetensors:
        match = _NAME.fullmatch(stored.name)
        if match is None:
            continue
        projection = request.projection(stored.name) or PROJECTION_OF.get(match["leaf"])
        # Where the model's loader knows only stacked names, the module of those is the one.
        stacked = f"{match['module']}.gate_up_proj"
        module = request.module(stored.name) or request.module(stacked)
        if module is not None and projection is not None:
            yield ExpertTensor(
                module=module,
                expert=int(match["expert"]),
                projection=projection,
                shape=stored.shape,
                dtype=stored.dtype,
                tensor=stored.name,
                file=stored.file,
                read=partial(stored.handle.get_tensor, stored.name),
                view=_all,
            )


def _all(stored: Tensor) -> Tensor:
    return stored
