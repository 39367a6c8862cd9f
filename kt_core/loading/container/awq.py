"""AWQ: 4-bit integers with zero points, packed along the channels.

    <base>.qweight I32 [k, n / 8], <base>.qzeros I32 [groups, n / 8], <base>.scales F16 [groups, n]

A word holds eight channels, in the order 0 2 4 6 1 3 5 7 from its lowest bits. The specification is
AutoAWQ's WQLinear_GEMM (awq/modules/linear/gemm.py) and its utils/packing_utils.py.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from kt_core.loading.bits import FLOATS, check, nibbles, part
from kt_core.loading.codes import Codes
from kt_core.loading.container import Variant
from kt_core.loading.parts import Form, Quantized, TensorHeader

METHODS = ("awq",)
VARIANTS = (
    Variant("4 bits, zero points, version `gemm`", "uint4"),
    Variant("versions `gemv`, `marlin`, `exllama`", None, "orders of GPU kernels", True),
)
# Of the nibbles of a word, the one that holds each channel.
_NIBBLE = (0, 4, 1, 5, 2, 6, 3, 7)


def weights(
    tensors: Mapping[str, TensorHeader], settings: Mapping[str, Any]
) -> Iterator[Quantized]:
    """Every weight that is stored quantized."""
    bits = settings.get("bits", settings.get("w_bit"))
    group = settings.get("group_size", settings.get("q_group_size"))
    version = str(settings.get("version", "gemm")).lower()
    if bits != 4:
        raise ValueError(f"bits of AWQ is {bits!r}; it is 4")
    if type(group) is not int or group < -1 or group == 0:
        raise ValueError(f"group_size of AWQ is {group!r}; it is a size, or -1 for a channel")
    if version != "gemm" or not settings.get("zero_point", True):
        raise ValueError(
            f"AWQ with version {version} and zero_point {settings.get('zero_point', True)} is not "
            "read, gemm with zero_point true is; give the model's bf16 checkpoint"
        )
    for stored in tensors.values():
        base = stored.name.removesuffix(".qweight")
        if base == stored.name:
            continue
        zeros, scales = (part(tensors, f"{base}.{end}", stored) for end in ("qzeros", "scales"))
        shape = stored.shape if len(stored.shape) == 2 else (0, 0)
        check(stored, shape, "I32")
        k, n = shape[0], 8 * shape[1]
        groups = -(-k // (group if group > 0 else k))
        check(zeros, (groups, n // 8), "I32")
        check(scales, (groups, n), *FLOATS)
        yield Quantized(
            name=f"{base}.weight",
            shape=(n, k),
            dtype="AWQ",
            file=stored.file,
            parts=(stored, zeros, scales),
            form=Form("uint4", max(group, 0), scales.dtype),
            decode=partial(_decode, max(group, 0), stored, zeros, scales),
        )


def _decode(
    group: int,
    stored: TensorHeader,
    zeros: TensorHeader,
    scales: TensorHeader,
    expert: int,
    first: int,
    last: int,
) -> Codes:
    codes, points = (_channels(tensor, first, last) for tensor in (stored, zeros))
    return Codes("uint4", group, codes, scales[:, first:last].T.float(), points)


def _channels(packed: TensorHeader, first: int, last: int) -> Tensor:
    """``[last - first, rows]`` of a tensor whose words hold eight channels."""
    begin = first // 8
    found = nibbles(packed[:, begin : -(-last // 8)])  # [rows, 8 words]
    found = found.unflatten(1, (-1, 8))[:, :, torch.tensor(_NIBBLE)].flatten(1)
    return found[:, first - 8 * begin : last - 8 * begin].T
