"""Small checkpoints in every container of quantized weights, and what their weights mean.

A case makes the tensors of one weight and its values as the reference dequantizes them: the package
that writes the container where it is installed (compressed-tensors, bitsandbytes, transformers),
else arithmetic from the published specification, written here a word at a time.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import bitsandbytes
import models
import numpy as np
import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from compressed_tensors.quantization.utils import calculate_qparams
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

SIZES = {"hidden_size": 256, "moe_intermediate_size": 128, "num_experts": 8, "head_dim": 64}


@dataclass(frozen=True)
class Case:
    """A way to store weights.

    settings: quantization_config. quantize: weight [n, k] fp32 -> (tensors by the end of their
    names, values fp32). native: format and group that keep its codes; None if they are re-encoded.
    error: relative, of the reference where it multiplies in another order or in bf16. stacked: the
    tensors are of all experts of a layer.
    """

    settings: dict[str, Any]
    quantize: Callable[[Tensor], tuple[dict[str, Tensor], Tensor]]
    native: tuple[str, int] | None
    error: float = 0.0
    stacked: bool = False
    family: str = "qwen3_moe"
    sizes: dict[str, Any] = field(default_factory=lambda: dict(SIZES))


def write(case: Case, root: Path, **build: Any) -> tuple[Path, Path]:
    """A checkpoint of the case and the same one dequantized, in fp32."""
    published, plain = root / "published", root / "plain"
    for path in (published, plain):
        models.build(case.family, path, dtype=torch.float32, **case.sizes, **build)
    stored: dict[str, Tensor] = {}
    values: dict[str, Tensor] = {}
    for name, weight in load_file(plain / "model.safetensors").items():
        stored[name], values[name] = weight, weight
        if case.stacked or (".mlp." not in name and "_proj" not in name) or ".mlp.gate." in name:
            continue
        del stored[name]
        tensors, values[name] = case.quantize(weight)
        stored |= {name.removesuffix(".weight") + end: t for end, t in tensors.items()}
    if case.stacked:
        _stack(case, stored, values)
    save(published, stored)
    save(plain, values)
    config = json.loads((published / "config.json").read_text())
    config["quantization_config"] = case.settings
    (published / "config.json").write_text(json.dumps(config))
    return published, plain


def save(path: Path, tensors: dict[str, Tensor]) -> None:
    """Writes the one file of a checkpoint."""
    kept = {name: t.contiguous().clone() for name, t in tensors.items()}
    save_file(kept, path / "model.safetensors", metadata={"format": "pt"})


def _stack(case: Case, stored: dict[str, Tensor], values: dict[str, Tensor]) -> None:
    """Puts the experts of a layer together: gate_up_proj [E, 2I, H] and down_proj [E, H, I]."""
    layers = sorted({name.split(".experts.")[0] for name in values if ".experts." in name})
    for layer in layers:
        take = {
            p: torch.stack([stored.pop(f"{layer}.experts.{e}.{p}_proj.weight") for e in range(8)])
            for p in ("gate", "up", "down")
        }
        fused = {"gate_up_proj": torch.cat([take["gate"], take["up"]], 1)}
        fused["down_proj"] = take["down"]
        for name, weight in fused.items():
            tensors, dequantized = case.quantize(weight)
            stored |= {f"{layer}.experts.{name}{end}": t for end, t in tensors.items()}
            for e, matrix in enumerate(dequantized):
                rows = matrix.chunk(2) if name == "gate_up_proj" else [matrix]
                leaves = ("gate_proj", "up_proj") if len(rows) == 2 else ("down_proj",)
                for leaf, part in zip(leaves, rows, strict=True):
                    values[f"{layer}.experts.{e}.{leaf}.weight"] = part


# -- FP8, as transformers' Fp8Dequantize reads it (whose module needs triton) ---------------------


def fp8_blocks(weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    n, k = (size // 128 for size in weight.shape)
    blocks = weight.reshape(n, 128, k, 128)
    scale = blocks.abs().amax((1, 3)) / 448
    codes = (blocks / scale[:, None, :, None]).reshape(weight.shape).to(torch.float8_e4m3fn)
    values = codes.float().reshape(n, 128, k, 128) * scale[:, None, :, None]
    return {".weight": codes, ".weight_scale_inv": scale}, values.reshape(weight.shape)


def fp8_channels(weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    scale = weight.abs().amax(1, keepdim=True) / 448
    codes = (weight / scale).to(torch.float8_e4m3fn)
    return {".weight": codes, ".weight_scale": scale}, codes.float() * scale


def fp8_tensor(weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    scale = weight.abs().max() / 448
    codes = (weight / scale).to(torch.float8_e4m3fn)
    activation = torch.tensor(1.0)  # of static activations, which nobody reads here
    tensors = {".weight": codes, ".weight_scale_inv": scale, ".activation_scale": activation}
    return tensors, codes.float() * scale


# -- compressed-tensors ---------------------------------------------------------------------------


def compressed(
    format: str, *, order: bool = False, **args: Any
) -> tuple[dict[str, Any], Callable[[Tensor], tuple[dict[str, Tensor], Tensor]]]:
    """quantization_config and quantizer of one of its formats."""
    weights = QuantizationArgs(**args)
    scheme = QuantizationScheme(targets=["Linear"], weights=weights)
    compressor = BaseCompressor.get_value_from_registry(format)
    settings = {
        "quant_method": "compressed-tensors",
        "format": format,
        "quantization_status": "compressed",
        "config_groups": {"group_0": json.loads(scheme.model_dump_json())},
        "ignore": ["lm_head"],
    }

    def quantize(weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        n, k = weight.shape
        size = {"channel": k, "tensor": k}.get(weights.strategy, weights.group_size or 128)
        grouped = weight.reshape(n, -1, size)
        low, high = grouped.amin(2), grouped.amax(2)
        state = {"weight": weight}
        if weights.strategy == "tensor_group":
            state["weight_global_scale"] = 448 * 6 / weight.abs().max().reshape(1)
        if weights.strategy == "tensor":
            low, high = weight.min().reshape(1), weight.max().reshape(1)
        if weights.strategy == "block":
            grouped = weight.reshape(n // 128, 128, k // 128, 128)
            low, high = grouped.amin((1, 3)), grouped.amax((1, 3))
        scale, zero = calculate_qparams(low, high, weights, state.get("weight_global_scale"))
        state |= {"weight_scale": scale}
        if not weights.symmetric:
            state["weight_zero_point"] = zero
        tensors = compressor.compress(state, scheme)
        values = compressor.decompress(tensors, scheme)["weight"].float()
        return {f".{name}": t for name, t in tensors.items()}, values

    return settings, quantize


# -- GPTQ and AWQ, from their specifications ------------------------------------------------------


def gptq(
    bits: int, *, group: int = 128, symmetric: bool, order: bool = False, version: int = 1
) -> tuple[dict[str, Any], Callable[[Tensor], tuple[dict[str, Tensor], Tensor]]]:
    """AutoGPTQ's QuantLinear.pack: bit i of the stream of a column of qweight is bit i % 32 of word
    i // 32."""
    settings = {
        "quant_method": "gptq",
        "bits": bits,
        "group_size": group,
        "sym": symmetric,
        "desc_act": order,
    } | ({"checkpoint_format": "gptq_v2"} if version == 2 else {})

    def quantize(weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        n, k = weight.shape
        size = k if group == -1 else group
        g = torch.Generator().manual_seed(n + k)
        runs = torch.arange(k) // size
        which = runs[torch.randperm(k, generator=g)] if order else runs
        scale = (torch.rand(k // size, n, generator=g) + 0.5).half() * 0.3 / 2**bits
        zero = torch.full((k // size, n), 1 << bits - 1)
        if not symmetric:
            zero = torch.randint(1, (1 << bits) - 1, zero.shape, generator=g)
        codes = torch.randint(0, 1 << bits, (k, n), generator=g)
        values = (codes - zero[which]).float() * scale.float()[which]
        tensors = {
            ".qweight": _words(codes.numpy(), bits),
            ".qzeros": _words((zero - int(version == 1)).numpy().T, bits).T,
            ".scales": scale,
            ".g_idx": which.int(),
        }
        return tensors, values.T

    return settings, quantize


def _words(codes: np.ndarray, bits: int) -> Tensor:
    """[rows, columns] of codes -> int32 [rows * bits / 32, columns], streams down the columns."""
    rows, columns = codes.shape
    out = np.zeros((rows * bits // 32, columns), dtype=np.uint64)
    for i in range(rows * bits):
        bit = codes[i // bits].astype(np.uint64) >> np.uint64(i % bits) & np.uint64(1)
        out[i // 32] |= bit << np.uint64(i % 32)
    return torch.from_numpy(out.astype(np.uint32).view(np.int32))


AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


def awq(weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    """AutoAWQ's WQLinear_GEMM.from_linear."""
    n, k = weight.shape
    g = torch.Generator().manual_seed(n + k)
    scale = (torch.rand(k // 64, n, generator=g) + 0.5).half() * 0.02
    zero = torch.randint(0, 16, scale.shape, generator=g)
    codes = torch.randint(0, 16, (k, n), generator=g)
    runs = torch.arange(k) // 64
    values = (codes - zero[runs]).float() * scale.float()[runs]

    def packed(matrix: Tensor) -> Tensor:
        words = np.zeros((len(matrix), n // 8), dtype=np.uint32)
        for column in range(n // 8):
            for place, channel in enumerate(AWQ_ORDER):
                code = matrix[:, 8 * column + channel].numpy().astype(np.uint32)
                words[:, column] |= code << np.uint32(4 * place)
        return torch.from_numpy(words.view(np.int32))

    return {".qweight": packed(codes), ".qzeros": packed(zero), ".scales": scale}, values.T


# -- MXFP4, bitsandbytes, ModelOpt ----------------------------------------------------------------


def mxfp4(weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    """Random codes as gpt-oss stores them; transformers says what they are, transposed."""
    e, n, k = weight.shape
    g = torch.Generator().manual_seed(n + k)
    blocks = torch.randint(0, 256, (e, n, k // 32, 16), generator=g, dtype=torch.uint8)
    scales = torch.randint(121, 124, (e, n, k // 32), generator=g, dtype=torch.uint8)
    values = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32).transpose(1, 2)
    return {"_blocks": blocks, "_scales": scales}, values


def bnb(kind: str, *, nested: bool = False, block: int = 64) -> Callable[..., Any]:
    """bitsandbytes' own quantization to 4 bits."""

    def quantize(weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        f = bitsandbytes.functional
        codes, state = f.quantize_4bit(
            weight.contiguous(), quant_type=kind, compress_statistics=nested, blocksize=block
        )
        packed = {f".weight.{name}": t for name, t in state.as_dict(packed=True).items()}
        return {".weight": codes, **packed}, f.dequantize_4bit(codes, state).float()

    return quantize


def bnb_int8(weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    codes, scale, _ = bitsandbytes.functional.int8_vectorwise_quant(weight.half())
    values = bitsandbytes.functional.int8_vectorwise_dequant(codes, scale)
    return {".weight": codes, ".SCB": scale}, values.float()


def modelopt_nvfp4(weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    """The same codes as compressed-tensors', with the reciprocal of its second scale."""
    _, quantize = NVFP4
    tensors, values = quantize(weight)
    factor = (1 / tensors[".weight_global_scale"]).reshape(())
    scale = tensors[".weight_scale"]
    stored = {".weight": tensors[".weight_packed"], ".weight_scale": scale}
    return stored | {".weight_scale_2": factor}, values


INT4 = {"num_bits": 4, "type": "int", "strategy": "group"}
NVFP4 = compressed(
    "nvfp4-pack-quantized",
    num_bits=4,
    type="float",
    strategy="tensor_group",
    group_size=16,
    scale_dtype="torch.float8_e4m3fn",
)
_FP8 = {"quant_method": "fp8"}
_BNB = {"quant_method": "bitsandbytes", "load_in_4bit": True}

CASES: dict[str, Case] = {
    "fp8 blocks": Case({**_FP8, "weight_block_size": [128, 128]}, fp8_blocks, ("fp8", 128)),
    "fp8 channels": Case({"quant_method": "fbgemm_fp8"}, fp8_channels, ("fp8", 0)),
    "fp8 tensor": Case({**_FP8, "weight_block_size": None}, fp8_tensor, ("fp8", 0)),
    "gptq": Case(*gptq(4, symmetric=True), ("uint4", 128)),
    "gptq zeros": Case(*gptq(4, group=32, symmetric=False), ("uint4", 32)),
    "gptq v2": Case(*gptq(4, group=64, symmetric=False, version=2), ("uint4", 64)),
    "gptq act": Case(*gptq(4, group=64, symmetric=True, order=True), None),
    "gptq 3": Case(*gptq(3, group=64, symmetric=False), None),
    "gptq 8": Case(*gptq(8, group=-1, symmetric=True), ("int8_fp32", 0)),
    "awq": Case({"quant_method": "awq", "bits": 4, "group_size": 64}, awq, ("uint4", 64)),
    "mxfp4": Case({"quant_method": "mxfp4"}, mxfp4, ("mxfp4", 32), stacked=True),
    "nf4": Case({**_BNB, "bnb_4bit_quant_type": "nf4"}, bnb("nf4"), ("nf4", 64)),
    "nf4 nested": Case(
        {**_BNB, "bnb_4bit_quant_type": "nf4"}, bnb("nf4", nested=True, block=128), ("nf4", 128)
    ),
    "fp4": Case({**_BNB, "bnb_4bit_quant_type": "fp4"}, bnb("fp4"), None),
    "bnb int8": Case(
        {"quant_method": "bitsandbytes", "load_in_8bit": True},
        bnb_int8,
        ("int8_fp32", 0),
        error=2e-7,
    ),
    "ct int4": Case(*compressed("pack-quantized", **INT4, group_size=32), ("uint4", 32)),
    "ct int4 zeros": Case(
        *compressed("pack-quantized", **INT4, group_size=64, symmetric=False), ("uint4", 64)
    ),
    "ct int8": Case(
        *compressed("int-quantized", num_bits=8, type="int", strategy="channel"), ("int8_fp32", 0)
    ),
    "ct int8 packed": Case(
        *compressed("pack-quantized", num_bits=8, type="int", strategy="group", group_size=128),
        ("int8_fp32", 128),
    ),
    "ct fp8": Case(
        *compressed("float-quantized", num_bits=8, type="float", strategy="channel"), ("fp8", 0)
    ),
    "ct fp8 blocks": Case(
        *compressed(
            "float-quantized",
            num_bits=8,
            type="float",
            strategy="block",
            block_structure=[128, 128],
        ),
        ("fp8", 128),
    ),
    "ct nvfp4": Case(*NVFP4, ("nvfp4", 16), error=4e-3),
    "ct mxfp4": Case(
        *compressed(
            "mxfp4-pack-quantized",
            num_bits=4,
            type="float",
            strategy="group",
            group_size=32,
            scale_dtype="torch.uint8",
        ),
        ("mxfp4", 32),
    ),
    "modelopt nvfp4": Case(
        {"quant_method": "modelopt", "quant_algo": "NVFP4"},
        modelopt_nvfp4,
        ("nvfp4", 16),
        error=4e-3,
    ),
}
