"""A weight matrix as a checkpoint publishes it quantized: codes, one a byte, and what scales them.

What any container of quantized weights yields and what `Experts.put_codes` packs bit for bit.
`dequantize` is the plain meaning of a format, the one that tests compare kernels with.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from kt_core import formats
from kt_core.experts import Experts


def _table(*values: float) -> Callable[[Tensor], Tensor]:
    """Codes as indices into these values."""
    return lambda codes: torch.tensor(values, dtype=torch.float32)[codes.int()]


_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # bit 3 is the sign
_FP4 = _table(*_E2M1, *(-v for v in _E2M1))
# The quantiles of a normal distribution that bitsandbytes publishes (functional.py), scaled to 1.
_NF4 = _table(
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453),
    *(-0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0),
    *(0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224),
    *(0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
)


def _fp8(codes: Tensor) -> Tensor:
    return codes.contiguous().view(torch.float8_e4m3fn).float()


_VALUES: dict[str, Callable[[Tensor], Tensor]] = {
    "int8": lambda codes: codes.contiguous().view(torch.int8).float(),  # two's complement
    "int4": lambda codes: codes.float() - 8,  # stored + 8
    "uint4": lambda codes: codes.float(),  # less a zero point of the group
    "fp8": _fp8,  # e4m3fn
    "mxfp8": _fp8,
    "mxfp4": _FP4,
    "nvfp4": _FP4,
    "nf4": _NF4,
}


@dataclass(frozen=True)
class Codes:
    """A matrix ``[n, k]``, value = (code's value - zero) * scale * factor.

    format  which values codes stand for: "int8" (two's complement), "int4" (stored + 8), "uint4"
            (with zero points), "fp8" and "mxfp8" (e4m3fn), "mxfp4" and "nvfp4" (e2m1), "nf4"
    group   values of k that share a scale; 0: all of a channel
    codes   uint8 ``[n, k]``, one code a byte
    scales  fp32 ``[n, ceil(k / group)]``
    zeros   uint8 of the shape of scales, of "uint4" only: zero points as codes
    factor  fp32 ``[n]``: a second scale of whole channels

    Tensors may be views with any strides. Raises ValueError if formats, shapes or dtypes are
    others.
    """

    format: str
    group: int
    codes: Tensor
    scales: Tensor
    zeros: Tensor | None = None
    factor: Tensor | None = None

    def __post_init__(self) -> None:
        if self.format not in _VALUES:
            raise ValueError(
                f"codes are of format {self.format!r}; give one of {', '.join(sorted(_VALUES))}"
            )
        if (self.zeros is None) == (self.format == "uint4"):
            raise ValueError(
                f"codes of format {self.format} come "
                f"{'without' if self.zeros is None else 'with'} zero points; give them for uint4 "
                "and for nothing else"
            )
        if self.codes.ndim != 2 or self.group < 0:
            raise ValueError(
                f"codes have shape {tuple(self.codes.shape)} and group {self.group}; give [n, k] "
                "and a group of at least 0"
            )
        n, k = self.codes.shape
        of_group = (n, -(-k // (self.group or max(k, 1))))
        for what, tensor, dtype, shape in (
            ("codes", self.codes, torch.uint8, (n, k)),
            ("scales", self.scales, torch.float32, of_group),
            ("zeros", self.zeros, torch.uint8, of_group),
            ("factor", self.factor, torch.float32, (n,)),
        ):
            if tensor is not None and (tensor.dtype != dtype or tuple(tensor.shape) != shape):
                raise ValueError(
                    f"{what} of {n} x {k} codes with group {self.group} are {tensor.dtype} "
                    f"{tuple(tensor.shape)}; give {dtype} {shape}"
                )

    def dequantize(self) -> Tensor:
        """The matrix, fp32 ``[n, k]``: one product is rounded to fp32, two where there is a
        factor."""
        values = _VALUES[self.format](self.codes)
        if self.zeros is not None:
            values = values - self._per_value(self.zeros.float())
        values = values * self._per_value(self.scales)
        return values if self.factor is None else values * self.factor[:, None]

    def in_groups(self, group: int) -> Codes | None:
        """The same values with `group` values per scale, scales repeated; None where groups would
        have to be joined."""
        k = self.codes.shape[1]
        own = self.group if 0 < self.group < k else 0  # 0: one group is all
        if own and (not group or own % group):
            return None
        if not group or not k:
            return replace(self, group=group)
        count = -(-k // group)
        at = torch.arange(count) * group // (own or k)
        zeros = None if self.zeros is None else self.zeros[:, at]
        return replace(self, group=group, scales=self.scales[:, at], zeros=zeros)

    def _per_value(self, per_group: Tensor) -> Tensor:
        """``[n, groups]`` as ``[n, k]``."""
        k = self.codes.shape[1]
        return per_group.repeat_interleave(self.group or max(k, 1), dim=1)[:, :k]


def put(layer: Experts, expert: int, projection: str, codes: Codes) -> bool:
    """Packs a matrix into a layer: bit for bit where the layer's format and group can have it so,
    else its values, rounded to that format. Returns whether bit for bit.

    Raises ValueError as `Experts.put` and `Experts.put_codes` do.
    """
    kept = as_kept(codes, layer.format, layer.group)
    if kept is None:
        layer.put(expert, projection, codes.dequantize())
        return False
    layer.put_codes(expert, projection, kept.codes, kept.scales, kept.zeros, kept.factor)
    return True


def as_kept(codes: Codes, format: str, group: int) -> Codes | None:
    """What `Experts.put_codes` of a layer in this format and group packs without changing a value;
    None if there is no such thing.

    Symmetric int4 codes are uint4 codes with zero points of 8. The format int8 has no code -128.
    """
    kept = formats.of(format)
    if codes.format == "int4" and kept.codes == "uint4":
        codes = replace(
            codes, format="uint4", zeros=torch.full(codes.scales.shape, 8, dtype=torch.uint8)
        )
    if codes.format != kept.codes or (codes.factor is not None and not kept.factor):
        return None
    if format == "int8" and bool((codes.codes == 0x80).any()):
        return None
    if kept.scale_bits == 16 and not torch.equal(codes.scales.bfloat16().float(), codes.scales):
        return None
    return codes.in_groups(group)
