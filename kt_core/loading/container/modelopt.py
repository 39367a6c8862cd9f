"""NVIDIA ModelOpt: FP8 with one scale, and NVFP4.

<base>.weight F8_E4M3 [n, k], <base>.weight_scale []
<base>.weight U8 [n, k / 2], <base>.weight_scale F8_E4M3 [n, k / 16], <base>.weight_scale_2 [],
by which scales are multiplied
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

from kt_core.loading.bits import FLOATS, Scales, check, nvfp4, part
from kt_core.loading.container import Variant, fp8
from kt_core.loading.parts import Form, Quantized, TensorHeader

METHODS = ("modelopt",)
VARIANTS = (
    Variant("FP8 by tensor or channel", "fp8"),
    Variant("NVFP4", "nvfp4"),
    Variant("other values of `quant_algo`", None, "only these two are known here", True),
)


def weights(
    tensors: Mapping[str, TensorHeader], settings: Mapping[str, Any]
) -> Iterator[Quantized]:
    """Every weight that is stored quantized."""
    algorithm = settings.get("quant_algo")
    if algorithm not in ("FP8", "NVFP4"):
        raise ValueError(f"quant_algo of ModelOpt is {algorithm}; FP8 and NVFP4 are read")
    for stored in tensors.values():
        if not stored.name.endswith(".weight") or len(stored.shape) != 2:
            continue
        if stored.dtype == "F8_E4M3":
            scale = part(tensors, f"{stored.name}_scale", stored)
            yield fp8.scaled(stored, Scales.of(scale, stored.shape))
        elif stored.dtype == "U8":
            yield _nvfp4(stored, tensors)


def _nvfp4(stored: TensorHeader, tensors: Mapping[str, TensorHeader]) -> Quantized:
    n, k = stored.shape[0], 2 * stored.shape[1]
    scale, factor = (part(tensors, stored.name + end, stored) for end in ("_scale", "_scale_2"))
    check(scale, (n, -(-k // 16)), "F8_E4M3")
    check(factor, factor.shape if factor.shape in ((), (1,)) else (1,), *FLOATS)
    return Quantized(
        name=stored.name,
        shape=(n, k),
        dtype="NVFP4 (ModelOpt)",
        file=stored.file,
        parts=(stored, scale, factor),
        form=Form("nvfp4", 16, "F8_E4M3"),
        decode=partial(nvfp4, stored, scale, factor, False),
    )
