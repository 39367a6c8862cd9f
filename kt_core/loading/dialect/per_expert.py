"""Safetensors with one 2-D tensor per expert and projection.

    <module>.<expert>.{gate_proj,up_proj,down_proj}.weight     Qwen, DeepSeek, OLMoE and most others
    <module>.<expert>.{w1,w3,w2}.weight                        Mixtral and its kin: w1 gate, w3 up,
    w2 down

and others that the model's own loader collects by expert (its table says which is gate, up or
down). Shapes: gate and up [I, H], down [H, I].
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from kt_core.loading.parts import ExpertRequest, ExpertTensor, Stored
from kt_core.names import PROJECTION_OF

_NAME = re.compile(r"(?P<module>.+)\.(?P<expert>\d+)\.(?P<leaf>\w+)\.weight")


def scan(weights: Sequence[Stored], request: ExpertRequest) -> Iterator[ExpertTensor]:
    """The matrices of the per-expert weights among `weights`."""
    for stored in weights:
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
                stored=stored,
            )
