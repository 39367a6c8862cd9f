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

from kt_core.loading.checkpoint import Part, Source, Want

_NAME = re.compile(r"(?P<module>.+)\.(?P<expert>\d+)\.(?P<leaf>\w+)\.weight")
_PROJECTION = {
    "gate_proj": "gate",
    "up_proj": "up",
    "down_proj": "down",
    "w1": "gate",
    "w3": "up",
    "w2": "down",
}


def scan(source: Source, want: Want) -> Iterator[Part]:
    """Parts of the per-expert tensors of `source`."""
    for stored in source.safetensors:
        match = _NAME.fullmatch(stored.name)
        if match is None:
            continue
        projection = want.projection(stored.name) or _PROJECTION.get(match["leaf"])
        # Where the model's loader knows only fused names, the module of those is the one.
        fused = f"{match['module']}.gate_up_proj"
        module = want.module(stored.name) or want.module(fused)
        if module is not None and projection is not None:
            yield Part(
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
