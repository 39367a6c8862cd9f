"""GPTQ: integers packed along the reduction, transposed.

    <base>.qweight I32 [k bits / 32, n]
    <base>.qzeros  I32 [groups, n bits / 32], less one each in the first version of the format
    <base>.scales  F16 [groups, n]
    <base>.g_idx   I32 [k], the group of every column; runs of group_size without desc_act

The specification is AutoGPTQ's QuantLinear.pack (auto_gptq/nn_modules/qlinear) and GPTQModel's.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from kt_core.loading.bits import FLOATS, check, gathered, part, unpacked
from kt_core.loading.codes import Codes
from kt_core.loading.container import Variant
from kt_core.loading.parts import Form, Quantized, TensorHeader

METHODS = ("gptq",)
VARIANTS = (
    Variant("4 bits, symmetric", "int4"),
    Variant("4 bits, zero points (`sym: false`)", "uint4"),
    Variant("8 bits, symmetric", "int8"),
    Variant("activation order (`desc_act: true`)", None, "groups are not runs of columns"),
    Variant("2 and 3 bits, 8 bits with zero points", None, "no format of ours has them"),
    Variant("`checkpoint_format: marlin`", None, "its order is that of a GPU kernel", True),
)
_BITS = (2, 3, 4, 8)


@dataclass(frozen=True)
class _Settings:
    """What config.json says."""

    bits: int
    group: int  # 0: all of a channel
    symmetric: bool
    order: bool
    offset: int  # what was subtracted from zero points

    @classmethod
    def of(cls, found: Mapping[str, Any]) -> _Settings:
        bits, group = found.get("bits"), found.get("group_size", -1)
        if bits not in _BITS:
            raise ValueError(f"bits of GPTQ is {bits!r}; {', '.join(map(str, _BITS))} are read")
        if type(group) is not int or group < -1 or group == 0:
            raise ValueError(f"group_size of GPTQ is {group!r}; it is a size, or -1 for a channel")
        version = found.get("checkpoint_format") or "gptq"
        if version not in ("gptq", "gptq_v2"):
            raise ValueError(
                f"checkpoint_format of GPTQ is {version!r}; gptq and gptq_v2 are read: convert it, "
                "or give the model's bf16 checkpoint"
            )
        for key in ("sym", "desc_act"):
            if not isinstance(found.get(key, False), bool):
                raise ValueError(f"{key} of GPTQ is {found[key]!r}; it is true or false")
        symmetric, order = bool(found.get("sym", False)), bool(found.get("desc_act", False))
        return cls(bits, max(group, 0), symmetric, order, int(version == "gptq"))

    @property
    def form(self) -> Form:
        if self.order:
            return Form(None, why="activation order")
        names = {(4, True): "int4", (4, False): "uint4", (8, True): "int8"}
        name = names.get((self.bits, self.symmetric))
        return Form(name, self.group, "F16", why="" if name else f"{self.bits} bits")


def weights(
    tensors: Mapping[str, TensorHeader], settings: Mapping[str, Any]
) -> Iterator[Quantized]:
    """Every weight that is stored quantized."""
    how = _Settings.of(settings)
    for stored in tensors.values():
        base = stored.name.removesuffix(".qweight")
        if base == stored.name:
            continue
        if len(stored.shape) != 2:
            check(stored, (0, 0), "I32")
        k, n = stored.shape[0] * 32 // how.bits, stored.shape[1]
        check(stored, stored.shape, "I32")
        zeros, scales = (part(tensors, f"{base}.{end}", stored) for end in ("qzeros", "scales"))
        groups = -(-k // (how.group or k))
        check(zeros, (groups, -(-n * how.bits // 32)), "I32")
        check(scales, (groups, n), *FLOATS)
        order = part(tensors, f"{base}.g_idx", stored) if how.order else None
        order = order or tensors.get(f"{base}.g_idx")
        if order is not None:
            check(order, (k,), "I32")
        yield Quantized(
            name=f"{base}.weight",
            shape=(n, k),
            dtype=f"GPTQ ({how.bits} bits)",
            file=stored.file,
            parts=tuple(t for t in (stored, zeros, scales, order) if t is not None),
            form=how.form,
            decode=partial(_decode, how, stored, zeros, scales, order),
        )


def _decode(
    how: _Settings,
    stored: TensorHeader,
    qzeros: TensorHeader,
    scales: TensorHeader,
    order: TensorHeader | None,
    expert: int,
    first: int,
    last: int,
) -> Codes | Tensor:
    bits, whole = how.bits, 1 << how.bits
    codes = unpacked(stored[:, first:last].T, bits)
    scale = scales[:, first:last].T.float()
    zero = unpacked(qzeros[...], bits)[:, first:last].T + how.offset & whole - 1
    if order is not None and not how.order:
        runs = torch.arange(len(order[...])) // (how.group or len(order[...]))
        if not torch.equal(order[...], runs.int()):
            raise ValueError(
                f"{order.name} permutes columns, but desc_act of config.json is not true"
            )
    if how.form.codes is None:
        which = None if order is None else order[...]
        return gathered(codes, scale, zero.float(), how.group, which)
    if how.symmetric and not (zero == whole // 2).all():
        raise ValueError(f"{qzeros.name} has zero points, but sym of config.json is true")
    if bits == 8:
        return Codes("int8", how.group, codes ^ 128, scale)
    if how.symmetric:
        return Codes("int4", how.group, codes, scale)
    return Codes("uint4", how.group, codes, scale, zero)
