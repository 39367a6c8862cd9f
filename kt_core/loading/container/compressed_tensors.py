"""compressed-tensors (vLLM, llm-compressor): which of its formats a weight has, its tensors say.

    pack-quantized    weight_packed I32 [n, k bits / 32], weight_shape, weight_scale [n, k / group],
                      for asymmetric ones weight_zero_point I32 [n bits / 32, k / group], for
                      activation order weight_g_idx I32 [k]
    int-quantized     weight I8 [n, k], weight_scale, weight_zero_point I8
    float-quantized   weight F8_E4M3 [n, k], weight_scale
    nvfp4-pack-quantized  weight_packed U8 [n, k / 2], weight_scale F8_E4M3 [n, k / 16],
                      weight_global_scale [1], by which scales are divided
    mxfp4-pack-quantized  weight_packed U8 [n, k / 2], weight_scale U8 [n, k / 32], exponents
    mxfp8-quantized   weight F8_E4M3 [n, k], weight_scale U8 [n, k / 32], exponents

The package that writes them is not needed to read them: its readers take whole models.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from kt_core.loading.bits import (
    FLOATS,
    Scales,
    check,
    exponents,
    gathered,
    nibbles,
    nvfp4,
    part,
    unpacked,
)
from kt_core.loading.codes import Codes
from kt_core.loading.container import Variant, fp8
from kt_core.loading.parts import Form, Quantized, TensorHeader

METHODS = ("compressed-tensors",)
VARIANTS = (
    Variant("`pack-quantized`, 4 bits, symmetric", "int4"),
    Variant("`pack-quantized`, 4 bits, zero points", "uint4"),
    Variant("`pack-quantized` and `int-quantized`, 8 bits, symmetric", "int8"),
    Variant("8 bits with zero points", None, "no format of ours has 8 bits and zero points"),
    Variant("activation order (`weight_g_idx`)", None, "groups are not runs of columns"),
    Variant("`float-quantized`: e4m3 by block, channel or tensor", "fp8"),
    Variant("`nvfp4-pack-quantized`", "nvfp4"),
    Variant("`mxfp4-pack-quantized`", "mxfp4"),
    Variant("`mxfp8-quantized`", "mxfp8"),
    Variant("sparse and `marlin` formats", None, "their order is that of a GPU kernel", True),
    Variant("rotated weights (`transform_config`)", None, "inputs would have to be rotated", True),
)
_FORMATS = {
    "pack-quantized",
    "int-quantized",
    "float-quantized",
    "naive-quantized",
    "nvfp4-pack-quantized",
    "mxfp4-pack-quantized",
    "mxfp8-quantized",
    "mixed-precision",
    "dense",
}


@dataclass(frozen=True)
class _Scheme:
    """How config.json says that weights are quantized."""

    bits: int
    group: int | None
    block: tuple[int, int] | None


@dataclass(frozen=True)
class _Weight:
    """The tensors of one weight."""

    base: str
    main: TensorHeader
    tensors: Mapping[str, TensorHeader] = field(repr=False)

    def part(self, end: str) -> TensorHeader:
        return part(self.tensors, self.base + end, self.main)

    def maybe(self, end: str) -> TensorHeader | None:
        return self.tensors.get(self.base + end)

    def quantized(self, what: str, shape: tuple[int, ...], form: Form, decode: Any) -> Quantized:
        ends = ("_packed", "", "_scale", "_zero_point", "_g_idx", "_shape", "_global_scale")
        parts = tuple(found for end in ends if (found := self.maybe(end)) is not None)
        return Quantized(self.base, shape, what, self.main.file, parts, form, decode)


def weights(
    tensors: Mapping[str, TensorHeader], settings: Mapping[str, Any]
) -> Iterator[Quantized]:
    """Every weight that is stored quantized."""
    schemes = _schemes(settings)
    for stored in tensors.values():
        base = stored.name.removesuffix("_packed")
        if not base.endswith(".weight") or len(stored.shape) != 2:
            continue
        weight = _Weight(base, stored, tensors)
        if stored.name != base and stored.dtype == "I32":
            yield _packed(weight, schemes)
        elif stored.name != base and stored.dtype == "U8":
            yield _fp4(weight)
        elif stored.dtype == "F8_E4M3":
            yield _fp8(weight, schemes)
        elif stored.dtype == "I8":
            yield _int8(weight, schemes)
        elif stored.name != base:
            raise ValueError(
                f"tensor {stored.name} in {stored.file} has dtype {stored.dtype}; packed weights "
                "of compressed-tensors are I32 or U8"
            )
        elif weight.maybe("_scale") is not None:
            raise ValueError(
                f"tensor {stored.name} in {stored.file} is {stored.dtype} and has scales beside "
                "it: a model that was saved before it was compressed; compress it first"
            )


def _schemes(settings: Mapping[str, Any]) -> list[_Scheme]:
    """What config.json says of weights. Raises ValueError for what is refused."""
    groups = [g for g in settings.get("config_groups", {}).values() if g.get("weights")]
    for name in (settings.get("format"), *(g.get("format") for g in groups)):
        if name is not None and name not in _FORMATS:
            raise ValueError(
                f"format {name} of compressed-tensors is not read ({', '.join(sorted(_FORMATS))} "
                "are); give the model's bf16 checkpoint"
            )
    sparse = (settings.get("sparsity_config") or {}).get("format", "dense")
    if sparse != "dense":
        raise ValueError(
            f"sparsity_config.format {sparse} of compressed-tensors is not read; give the model's "
            "bf16 checkpoint"
        )
    if settings.get("transform_config"):
        raise ValueError(
            "transform_config of compressed-tensors rotates weights and needs rotated inputs, "
            "which is not supported; give a checkpoint without transforms"
        )
    found = []
    for scheme in (g["weights"] for g in groups):
        size = scheme.get("block_structure")
        block = None if size is None else (int(size[0]), int(size[1]))
        group = scheme.get("group_size")
        found.append(
            _Scheme(int(scheme["num_bits"]), group if group and group > 0 else None, block)
        )
    return found


def _scales(weight: _Weight, shape: tuple[int, ...], schemes: list[_Scheme], bits: int) -> Scales:
    """The scales of a weight, by the first scheme that they fit."""
    stored = weight.part("_scale")
    errors = []
    for scheme in [s for s in schemes if s.bits == bits] or [_Scheme(bits, None, None)]:
        try:
            return Scales.of(stored, shape, block=scheme.block, group=scheme.group)
        except ValueError as error:
            errors.append(error)
    raise errors[0]


def _packed(weight: _Weight, schemes: list[_Scheme]) -> Quantized:
    """4- or 8-bit integers in 32-bit words, stored + half the range."""
    n, words = weight.main.shape
    known = sorted({s.bits for s in schemes})
    fitting = []
    for bits in [b for b in known if b in (4, 8)]:
        try:
            fitting.append((bits, _scales(weight, (n, words * 32 // bits), schemes, bits)))
        except ValueError as error:
            wrong = error
    if not fitting:
        if known and set(known) <= {4, 8}:
            raise wrong
        raise ValueError(
            f"tensor {weight.main.name} in {weight.main.file} is packed, and num_bits of "
            f"config.json is {known}; 4 and 8 are read"
        )
    if len(fitting) > 1:  # scales for rows fit any number of columns: the stored shape decides
        k = int(weight.part("_shape")[...][1])
        fitting = [f for f in fitting if words * 32 // f[0] == k] or fitting
    bits, scales = fitting[0]
    shape = (n, words * 32 // bits)
    zeros, order = weight.maybe("_zero_point"), weight.maybe("_g_idx")
    if zeros is not None:
        check(zeros, (-(-n * bits // 32), -(-shape[1] // (scales.group or shape[1]))), "I32")
    if order is not None:
        check(order, (shape[1],), "I32")
    form = Form({4: "int4", 8: "int8"}[bits], scales.group, scales.stored.dtype)
    if order is not None:
        form = Form(None, why="activation order")
    elif zeros is not None:
        form = Form("uint4", scales.group, scales.stored.dtype) if bits == 4 else Form(None)
    decode = partial(_integers, weight.main, scales, zeros, order, weight.part("_shape"), bits)
    return weight.quantized(f"INT{bits} (compressed-tensors)", shape, form, decode)


def _integers(
    packed: TensorHeader,
    scales: Scales,
    zeros: TensorHeader | None,
    order: TensorHeader | None,
    shape: TensorHeader,
    bits: int,
    expert: int,
    first: int,
    last: int,
) -> Codes | Tensor:
    said = tuple(shape[...].tolist())
    if said != (packed.shape[0], packed.shape[1] * 32 // bits):
        raise ValueError(f"{shape.name} says {said}, but {packed.name} is {packed.shape}")
    codes = unpacked(packed[first:last], bits)
    scale = scales.read(expert, first, last)
    points = None
    if zeros is not None:
        per_word = 32 // bits
        top, bottom = first // per_word, -(-last // per_word)
        points = unpacked(zeros[top:bottom].T, bits).T[first - top * per_word :][: last - first]
    if order is not None or (points is not None and bits == 8):
        half = 1 << (bits - 1)
        zero = torch.full_like(scale, half) if points is None else points.float()
        return gathered(codes, scale, zero, scales.group, None if order is None else order[...])
    if points is not None:
        return Codes("uint4", scales.group, codes, scale, points)
    if bits == 4:
        return Codes("int4", scales.group, codes, scale)
    return Codes("int8", scales.group, codes ^ 128, scale)  # two's complement


def _fp4(weight: _Weight) -> Quantized:
    """4-bit floats: NVFP4 where there is a second scale, else MXFP4."""
    n, half = weight.main.shape
    shape, scale = (n, 2 * half), weight.part("_scale")
    factor = weight.maybe("_global_scale")
    if factor is None:
        check(scale, (n, -(-shape[1] // 32)), "U8")
        form = Form("mxfp4", 32, "F8_E8M0")
        decode = partial(_mx, "mxfp4", weight.main, scale)
        return weight.quantized("MXFP4 (compressed-tensors)", shape, form, decode)
    check(scale, (n, -(-shape[1] // 16)), "F8_E4M3")
    check(factor, (1,), *FLOATS)
    decode = partial(nvfp4, weight.main, scale, factor, True)
    return weight.quantized("NVFP4", shape, Form("nvfp4", 16, "F8_E4M3"), decode)


def _mx(
    format: str, packed: TensorHeader, scale: TensorHeader, expert: int, first: int, last: int
) -> Codes:
    rows = packed[first:last]
    codes = nibbles(rows) if format == "mxfp4" else rows.view(torch.uint8)
    return Codes(format, 32, codes, exponents(scale[first:last]))


def _fp8(weight: _Weight, schemes: list[_Scheme]) -> Quantized:
    scale = weight.part("_scale")
    if scale.dtype == "U8":
        check(scale, (weight.main.shape[0], -(-weight.main.shape[1] // 32)), "U8")
        decode = partial(_mx, "mxfp8", weight.main, scale)
        form = Form("mxfp8", 32, "F8_E8M0")
        return weight.quantized("MXFP8", weight.main.shape, form, decode)
    return fp8.scaled(weight.main, _scales(weight, weight.main.shape, schemes, 8))


def _int8(weight: _Weight, schemes: list[_Scheme]) -> Quantized:
    shape, zeros = weight.main.shape, weight.maybe("_zero_point")
    scales = _scales(weight, shape, schemes, 8)
    if zeros is not None:
        check(zeros, scales.stored.shape, "I8")
    form = Form("int8", scales.group, scales.stored.dtype) if zeros is None else Form(None)
    decode = partial(_bytes, weight.main, scales, zeros)
    return weight.quantized("INT8 (compressed-tensors)", shape, form, decode)


def _bytes(
    stored: TensorHeader,
    scales: Scales,
    zeros: TensorHeader | None,
    expert: int,
    first: int,
    last: int,
) -> Codes | Tensor:
    codes = stored[first:last].view(torch.uint8)
    scale = scales.read(expert, first, last)
    if zeros is None:
        return Codes("int8", scales.group, codes, scale)
    points = Scales(zeros, scales.rows, scales.group, False).read(expert, first, last)
    return gathered(codes ^ 128, scale, points + 128, scales.group, None)
