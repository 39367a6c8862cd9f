"""MXFP4 as gpt-oss publishes it: 4-bit floats and one exponent for 32 of them.

    <weight>_blocks U8 [E, n, k / 32, 16], two codes a byte, the lower bits first
    <weight>_scales U8 [E, n, k / 32], exponents + 127

Rows are output channels, other than in transformers' own tensors of that name. The specification is
openai/gpt-oss (gpt_oss/torch/weights.py) and the OCP Microscaling formats.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

from kt_core.loading.bits import check, exponents, nibbles, part
from kt_core.loading.codes import Codes
from kt_core.loading.container import Variant
from kt_core.loading.parts import Form, Quantized, TensorHeader

METHODS = ("mxfp4",)
VARIANTS = (Variant("`_blocks` and `_scales`", "mxfp4"),)


def weights(
    tensors: Mapping[str, TensorHeader], settings: Mapping[str, Any]
) -> Iterator[Quantized]:
    """Every weight that is stored quantized."""
    for stored in tensors.values():
        name = stored.name.removesuffix("_blocks")
        if name == stored.name:
            continue
        shape = stored.shape[:-1] if len(stored.shape) == 4 else (0, 0, 0)
        check(stored, (*shape, 16), "U8")
        scales = part(tensors, f"{name}_scales", stored)
        check(scales, shape, "U8")
        yield Quantized(
            name=name,
            shape=(*shape[:2], 32 * shape[2]),
            dtype="MXFP4",
            file=stored.file,
            parts=(stored, scales),
            form=Form("mxfp4", 32, "F8_E8M0"),
            decode=partial(_decode, stored, scales),
        )


def _decode(
    stored: TensorHeader, scales: TensorHeader, expert: int, first: int, last: int
) -> Codes:
    codes = nibbles(stored[expert, first:last].flatten(1))
    return Codes("mxfp4", 32, codes, exponents(scales[expert, first:last]))
