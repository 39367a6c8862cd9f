"""What the containers of quantized weights share: unpacking of codes, and scales of blocks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from kt_core.loading.codes import Codes
from kt_core.loading.parts import TensorHeader


def nibbles(packed: Tensor) -> Tensor:
    """``[..., m]`` of any integer type -> the 4-bit codes in it, uint8, lowest bits first."""
    b = packed.contiguous().view(torch.uint8)
    return torch.stack([b & 15, b >> 4], dim=-1).flatten(-2)


def unpacked(packed: Tensor, bits: int) -> Tensor:
    """``[..., m]`` of any integer type -> the codes of `bits` bits in it, uint8, as a stream that
    begins with the lowest bit.
    """
    if bits == 8:
        return packed.contiguous().view(torch.uint8)
    if bits == 4:
        return nibbles(packed)
    b = packed.contiguous().view(torch.uint8)
    stream = (b[..., None] >> torch.arange(8, dtype=torch.uint8) & 1).flatten(-2)
    codes = stream.unflatten(-1, (-1, bits)) << torch.arange(bits, dtype=torch.uint8)
    return codes.sum(-1, dtype=torch.uint8)


def exponents(stored: Tensor) -> Tensor:
    """Powers of two of bytes (e8m0), fp32. Raises ValueError for its NaN."""
    if (stored == 255).any():
        raise ValueError("a scale is 255, which is NaN")
    return stored.contiguous().view(torch.float8_e8m0fnu).float()


def gathered(
    codes: Tensor, scale: Tensor, zero: Tensor, group: int, order: Tensor | None
) -> Tensor:
    """(code - zero) * scale, fp32 [n, k]; `order`: the group of every column, or None for runs of
    `group` (0: one run)."""
    k = codes.shape[1]
    which = torch.arange(k) // (group or k) if order is None else order.long()
    if which.min() < 0 or which.max() >= scale.shape[1]:
        raise ValueError(
            f"columns are said to be of groups {int(which.min())} to {int(which.max())}, but there "
            f"are {scale.shape[1]}"
        )
    return (codes.float() - zero[:, which]) * scale[:, which]


def part(tensors: Mapping[str, TensorHeader], name: str, of: TensorHeader) -> TensorHeader:
    """The tensor `name`, which belongs to `of`. Raises ValueError if it is missing."""
    if name not in tensors:
        raise ValueError(
            f"tensor {of.name} in {of.file} is quantized, but {name} is missing from the "
            "checkpoint; download it again"
        )
    return tensors[name]


def check(stored: TensorHeader, shape: tuple[int, ...], *dtypes: str) -> None:
    """Raises ValueError unless a tensor has this shape and one of these dtypes."""
    if stored.shape != shape or stored.dtype not in dtypes:
        raise ValueError(
            f"tensor {stored.name} in {stored.file} is {stored.dtype} {list(stored.shape)} where "
            f"its container has {' or '.join(dtypes)} {list(shape)}; check that config.json "
            "belongs to this checkpoint"
        )


# Dtypes of scales.
FLOATS = ("F32", "BF16", "F16")


@dataclass(frozen=True)
class Scales:
    """Scales of a weight ``[(E,) n, k]``, each for `rows` of them and for `group` values of a row,
    0 for whole rows. stacked: there are E of them.
    """

    stored: TensorHeader
    rows: int
    group: int
    stacked: bool

    @classmethod
    def of(
        cls,
        stored: TensorHeader,
        shape: tuple[int, ...],
        *,
        block: tuple[int, int] | None = None,
        group: int | None = None,
        dtypes: tuple[str, ...] = FLOATS,
    ) -> Scales:
        """The scales of a weight of this shape: one for each `block` where that is given; else one
        for each `group` of a row, for each row or for all, told apart by their shape. Raises
        ValueError for another.
        """
        n, k = shape[-2:]
        stacked = len(shape) == 3
        own = stored.shape[1:] if stacked else stored.shape
        found: tuple[int, int] | None = None
        if block is not None:
            found = block if own == (-(-n // block[0]), -(-k // block[1])) else None
        elif group and own == (n, -(-k // group)):
            found = (1, group)
        elif own in ((n,), (n, 1)):
            found = (1, 0)
        elif own in ((), (1,), (1, 1)):
            found = (n, 0)
        lacks = stacked and stored.shape[:1] != shape[:1]
        if found is None or lacks or stored.dtype not in dtypes:
            many = f"one for each {block[0]} x {block[1]} of them" if block else "one, one a row"
            many += f", one for each {group} of a row" if group else ""
            raise ValueError(
                f"tensor {stored.name} in {stored.file} is {stored.dtype} {list(stored.shape)}; "
                f"scales of a weight {list(shape)} are {' or '.join(dtypes)}, {many}: check that "
                "config.json belongs to this checkpoint"
            )
        return cls(stored, *found, stacked)

    def read(self, expert: int, first: int, last: int) -> Tensor:
        """fp32 ``[last - first, groups]`` for these rows of a matrix."""
        own = (self.stored[expert] if self.stacked else self.stored[...]).float()
        if own.ndim < 2:
            own = own.reshape(-1, 1)
        top, bottom = first // self.rows, -(-last // self.rows)
        rows = own[top:bottom].repeat_interleave(self.rows, 0)
        return rows[first - top * self.rows : last - top * self.rows]


def nvfp4(
    packed: TensorHeader,
    scale: TensorHeader,
    factor: TensorHeader,
    divide: bool,
    expert: int,
    first: int,
    last: int,
) -> Codes:
    """Rows of an NVFP4 weight; `divide`: the second scale is one that others are divided by."""
    whole = factor[...].float().reshape(1)
    if not whole.isfinite().all() or (divide and not whole.all()):
        raise ValueError(f"{factor.name} is {whole.item()}")
    whole = (1 / whole if divide else whole).expand(last - first).contiguous()
    return Codes("nvfp4", 16, nibbles(packed[first:last]), scale[first:last].float(), factor=whole)
