"""bitsandbytes: 4 bits (nf4, fp4) in blocks of a flattened weight, or 8 bits.

    <weight> U8 [n k / 2, 1], the upper bits first
    <weight>.quant_state.bitsandbytes__nf4 U8, JSON: shape, blocksize, of nested scales the offset
    <weight>.quant_map F32 [16]
    <weight>.absmax F32 [blocks], or nested: U8 [blocks], <weight>.nested_absmax F32,
    <weight>.nested_quant_map F32 [256]
    <base>.weight I8 [n, k], <base>.SCB F32 [n]: 127 times the scales

The specification is bitsandbytes/functional.py, QuantState.as_dict(packed=True).
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from kt_core.loading.bits import check, part
from kt_core.loading.codes import Codes
from kt_core.loading.container import Variant
from kt_core.loading.parts import Form, Quantized, TensorHeader

METHODS = ("bitsandbytes",)
VARIANTS = (
    Variant("nf4, scales nested or not, blocks of 32, 64 or 128", "nf4"),
    Variant("nf4 whose blocks are no runs of a row", None, "our scales are of a row"),
    Variant("fp4", None, "its table of values is bitsandbytes' own"),
    Variant("8 bits (LLM.int8)", "int8"),
)
_STATE = ".quant_state.bitsandbytes__"


def weights(
    tensors: Mapping[str, TensorHeader], settings: Mapping[str, Any]
) -> Iterator[Quantized]:
    """Every weight that is stored quantized."""
    states = {n.split(_STATE)[0]: header for n, header in tensors.items() if _STATE in n}
    for name, stored in tensors.items():
        if name in states:
            yield _four_bits(stored, states[name], tensors)
        elif stored.dtype == "U8" and name.endswith(".weight"):
            part(tensors, f"{name}{_STATE}nf4", stored)
        elif stored.dtype == "I8" and name.endswith(".weight") and len(stored.shape) == 2:
            yield _eight_bits(stored, tensors)


def _four_bits(
    stored: TensorHeader, state: TensorHeader, tensors: Mapping[str, TensorHeader]
) -> Quantized:
    try:
        said = json.loads(bytes(state[...].tolist()))
        n, k = (int(size) for size in said["shape"])
        block, kind = int(said["blocksize"]), str(said["quant_type"])
        offset, nested = float(said.get("nested_offset", 0)), int(said.get("nested_blocksize", 0))
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"tensor {state.name} in {state.file} is no JSON of a quantized matrix ({error}); "
            "download the checkpoint again"
        ) from error
    if min(n, k, block) < 1 or (n * k) % 2:
        raise ValueError(f"tensor {state.name} in {state.file} says {said}, which cannot be")
    check(stored, (n * k // 2, 1), "U8")
    names = ["absmax", "quant_map"] + (["nested_absmax", "nested_quant_map"] if nested else [])
    parts = [part(tensors, f"{stored.name}.{end}", stored) for end in names]
    blocks = -(-n * k // block)
    check(parts[0], (blocks,), "U8" if nested else "F32")
    check(parts[1], (16,), "F32")
    if nested:
        check(parts[2], (-(-blocks // nested),), "F32")
        check(parts[3], (256,), "F32")
    runs = kind == "nf4" and k % block == 0
    why = "" if runs else ("blocks are no runs of a row" if kind == "nf4" else kind)
    return Quantized(
        name=stored.name,
        shape=(n, k),
        dtype=f"{kind} (bitsandbytes)",
        file=stored.file,
        parts=(stored, state, *parts),
        form=Form("nf4" if runs else None, block if runs else 0, "F32", why),
        decode=partial(_decode, stored, parts, (n, k), block, (nested, offset), runs),
    )


def _decode(
    stored: TensorHeader,
    parts: list[TensorHeader],
    shape: tuple[int, int],
    block: int,
    nesting: tuple[int, float],
    runs: bool,
    expert: int,
    first: int,
    last: int,
) -> Codes | Tensor:
    k = shape[1]
    begin, end = first * k, last * k
    packed = stored[begin // 2 : -(-end // 2)].reshape(-1)
    codes = torch.stack([packed >> 4, packed & 15], dim=-1).flatten()
    codes = codes[begin % 2 :][: end - begin].reshape(last - first, k)
    scale = _absmax(parts, *nesting, begin // block, -(-end // block))
    table = parts[1][...]
    if runs:
        found = Codes("nf4", block, codes, scale.reshape(last - first, -1))
        if not torch.equal(Codes("nf4", 16, _EVERY, _ONE).dequantize()[0], table):
            raise ValueError(f"{parts[1].name} is not the table of nf4")
        return found
    which = torch.arange(begin, end).reshape(last - first, k) // block - begin // block
    return table[codes.int()] * scale[which]


_EVERY, _ONE = torch.arange(16, dtype=torch.uint8)[None], torch.ones(1, 1)


def _absmax(parts: list[TensorHeader], nested: int, offset: float, first: int, last: int) -> Tensor:
    """Of blocks [first, last), fp32."""
    absmax = parts[0][first:last]
    if not nested:
        return absmax
    scale = parts[2][...][torch.arange(first, last) // nested]
    return parts[3][...][absmax.int()] * scale + offset


def _eight_bits(stored: TensorHeader, tensors: Mapping[str, TensorHeader]) -> Quantized:
    scales = part(tensors, f"{stored.name.removesuffix('.weight')}.SCB", stored)
    check(scales, stored.shape[:1], "F32")
    form = tensors.get(f"{stored.name.removesuffix('.weight')}.weight_format")
    return Quantized(
        name=stored.name,
        shape=stored.shape,
        dtype="INT8 (bitsandbytes)",
        file=stored.file,
        parts=(stored, scales, *([form] if form else [])),
        form=Form("int8", 0, "F32"),
        decode=partial(_bytes, stored, scales),
    )


def _bytes(stored: TensorHeader, scales: TensorHeader, expert: int, first: int, last: int) -> Codes:
    scale = scales[...][first:last, None] / 127
    return Codes("int8", 0, stored[first:last].view(torch.uint8), scale)
