"""FP8: bytes of e4m3fn under the weight's own name, and scales under that name with an end.

    <weight> F8_E4M3 [n, k] or [E, n, k]
    <weight>_scale_inv   DeepSeek-V3, Qwen3-FP8, MiniMax-M2: [ceil(n / 128), ceil(k / 128)], or one
    <weight>_scale       fbgemm and others: one for each row, or one

Despite its name `_scale_inv` is what codes are multiplied with. The specification is transformers'
FineGrainedFP8 (integrations/finegrained_fp8.py) and DeepSeek-V3's inference/kernel.py.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import torch

from kt_core.loading.bits import FLOATS, Scales
from kt_core.loading.codes import Codes
from kt_core.loading.container import Variant
from kt_core.loading.parts import Form, Quantized, TensorHeader

METHODS = ("fp8", "fbgemm_fp8")
VARIANTS = (
    Variant("e4m3, scales of blocks of 128 x 128 (`weight_scale_inv`)", "fp8"),
    Variant("e4m3, one scale per channel or tensor", "fp8"),
    Variant("blocks of other sizes", None, "our scales are of 32, 64 or 128 values or a channel"),
    Variant("e5m2", None, "no published checkpoint has it", refused=True),
)

# e8m0: powers of two
_SCALES = (*FLOATS, "F8_E8M0")


def weights(
    tensors: Mapping[str, TensorHeader], settings: Mapping[str, Any]
) -> Iterator[Quantized]:
    """Every tensor of FP8 codes with its scales."""
    size = settings.get("weight_block_size")
    sizes = isinstance(size, list) and len(size) == 2 and all(type(n) is int for n in size)
    if size is not None and not (sizes and min(size) > 0):
        raise ValueError(
            f"weight_block_size of config.json is {size!r}; it is two sizes, such as [128, 128]"
        )
    block = None if size is None else (size[0], size[1])
    for stored in tensors.values():
        if stored.dtype == "F8_E5M2":
            raise ValueError(
                f"tensor {stored.name} in {stored.file} has dtype F8_E5M2, of which FP8 "
                "checkpoints have no weights; give one in e4m3"
            )
        if stored.dtype == "F8_E4M3" and len(stored.shape) in (2, 3):
            names = [stored.name + end for end in ("_scale_inv", "_scale")]
            found = next((tensors[name] for name in names if name in tensors), None)
            if found is None:
                raise ValueError(
                    f"tensor {stored.name} in {stored.file} is FP8, but neither {names[0]} nor "
                    f"{names[1]} is in the checkpoint; download it again"
                )
            yield scaled(stored, Scales.of(found, stored.shape, block=block, dtypes=_SCALES))


def scaled(stored: TensorHeader, scales: Scales) -> Quantized:
    """The weight of FP8 codes with these scales."""
    size = f"blocks of {scales.rows} x {scales.group}" if scales.rows > 1 else "groups"
    return Quantized(
        name=stored.name,
        shape=stored.shape,
        dtype=f"FP8 in {size}" if scales.group else "FP8",
        file=stored.file,
        parts=(stored, scales.stored),
        form=Form("fp8", scales.group, scales.stored.dtype),
        decode=partial(_decode, stored, scales),
    )


def _decode(stored: TensorHeader, scales: Scales, expert: int, first: int, last: int) -> Codes:
    rows = stored[expert, first:last] if scales.stacked else stored[first:last]
    return Codes("fp8", scales.group, rows.view(torch.uint8), scales.read(expert, first, last))
