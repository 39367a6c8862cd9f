"""The contestants: each builds one layer from seeded weights and times calls on a batch.

A contestant is a class with `name`, `prepare(shape, weights)`, and `forward(batch)`, `step(batch)`
(forward + backward) or both. `weights(shape, e)` gives bf16 gate, up [I, H] and down [H, I].
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from workloads import Batch, Shape

Weights = Callable[[Shape, int], tuple[Tensor, Tensor, Tensor]]


def seeded_weights(shape: Shape, expert: int) -> tuple[Tensor, Tensor, Tensor]:
    """bf16 weights with 1 / sqrt(in) deviation, the same for every contestant."""
    g = torch.Generator().manual_seed(1000 + expert)
    h, i = shape.hidden, shape.intermediate

    def draw(rows: int, cols: int) -> Tensor:
        return (torch.randn(rows, cols, generator=g) * cols**-0.5).bfloat16()

    return draw(i, h), draw(i, h), draw(h, i)


def lora_factors(shape: Shape, rank: int) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Expert LoRA, fp32: a[p] [E, r, in], b[p] [E, out, r]."""
    g = torch.Generator().manual_seed(5)
    h, i = shape.hidden, shape.intermediate
    a, b = {}, {}
    for p, (out, inner) in {"gate": (i, h), "up": (i, h), "down": (h, i)}.items():
        a[p] = torch.randn(shape.experts, rank, inner, generator=g) * inner**-0.5
        b[p] = torch.randn(shape.experts, out, rank, generator=g) * 0.02
    return a, b


class Ours:
    """kt_core.experts.Experts in one weight format, one compute domain, one tier."""

    name = "ours"

    def __init__(self, format: str, group: int) -> None:
        self.format, self.group, self.rank = format, group, 0
        self.compute = "bf16"
        self.isa: str | None = None  # None: the best tier
        self.lora: Any = None

    def twin(self, compute: str = "bf16", isa: str | None = None, rank: int = 0) -> Ours:
        """The same packed layer in another compute domain, on another tier, with expert LoRA."""
        from kt_core.experts import Lora

        other = Ours(self.format, self.group)
        other.layer, other.shape, other.compute, other.isa = self.layer, self.shape, compute, isa
        if rank:
            other.rank, other.lora = rank, Lora(*lora_factors(self.shape, rank), 1.0)
        return other

    def prepare(self, shape: Shape, weights: Weights) -> None:
        from kt_core.experts import Experts

        self.shape = shape
        self.layer = Experts(
            shape.experts, shape.hidden, shape.intermediate, format=self.format, group=self.group
        )
        for e in range(shape.experts):
            for projection, w in zip(("gate", "up", "down"), weights(shape, e), strict=True):
                self.layer.put(e, projection, w)

    def expert(self, e: int) -> tuple[Tensor, Tensor, Tensor]:
        """gate, up, down of one expert as fp32: the values its codes stand for."""
        gate, up, down = (self.layer.get(e, p) for p in ("gate", "up", "down"))
        return gate, up, down

    def forward(self, b: Batch) -> Tensor:
        from kt_core import runtime

        runtime.force_isa(self.isa)
        out, _ = self.layer.forward(b.x, b.index, b.weights, self.lora, compute=self.compute)
        return out

    def step(self, b: Batch) -> Tensor:
        """Forward and backward with all gradients; returns that of x."""
        from kt_core import runtime

        runtime.force_isa(self.isa)
        given = b.x, b.index, b.weights, self.lora
        _, saved = self.layer.forward(*given, save=True, compute=self.compute)
        return self.layer.backward(b.dy, *given, saved, compute=self.compute).dx


class Transformers:
    """transformers' own Qwen3-MoE experts, bf16, eager or grouped_mm; LoRA through PEFT's
    target_parameters when rank > 0."""

    def __init__(self, implementation: str, rank: int = 0) -> None:
        self.implementation, self.rank = implementation, rank
        self.name = f"transformers_{implementation}" if not rank else f"peft_{implementation}"

    def prepare(self, shape: Shape, weights: Weights) -> None:
        from transformers import Qwen3MoeConfig
        from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

        config = Qwen3MoeConfig(
            hidden_size=shape.hidden,
            moe_intermediate_size=shape.intermediate,
            num_experts=shape.experts,
            num_experts_per_tok=shape.top_k,
        )
        config._experts_implementation = self.implementation
        holder = nn.Module()
        with torch.device("meta"):
            holder.experts = Qwen3MoeExperts(config)
        holder = holder.to_empty(device="cpu").bfloat16()
        with torch.no_grad():
            for e in range(shape.experts):
                gate, up, down = weights(shape, e)
                holder.experts.gate_up_proj[e].copy_(torch.cat([gate, up]))
                holder.experts.down_proj[e].copy_(down)
        holder.requires_grad_(False)
        self.module: Any = holder.experts
        if self.rank:
            from peft import LoraConfig, inject_adapter_in_model

            config_lora = LoraConfig(
                r=self.rank,
                lora_alpha=self.rank,
                target_modules=[],
                target_parameters=["experts.gate_up_proj", "experts.down_proj"],
            )
            inject_adapter_in_model(config_lora, holder)
            self.module = holder.experts

    def forward(self, b: Batch) -> Tensor:
        with torch.no_grad():
            return self.module(b.x, b.index, b.weights.bfloat16())

    def step(self, b: Batch) -> Tensor:
        """Forward and backward with all gradients; returns that of x."""
        x = b.x.clone().requires_grad_()
        self.module(x, b.index, b.weights.bfloat16()).backward(b.dy)
        self.module.zero_grad()
        assert x.grad is not None
        return x.grad


class TorchInt8:
    """torch's own int8: a dynamically quantized nn.Linear per projection and expert, on oneDNN."""

    name = "torch_onednn_int8"

    def prepare(self, shape: Shape, weights: Weights) -> None:
        quant = torch.ao.quantization
        torch.backends.quantized.engine = "onednn"
        config = {nn.Linear: quant.per_channel_dynamic_qconfig}

        def quantized(w: Tensor) -> Any:
            linear = nn.Linear(w.shape[1], w.shape[0], bias=False)
            linear.weight = nn.Parameter(w.float(), requires_grad=False)
            with warnings.catch_warnings():  # deprecated in favour of torchao: still what ships
                warnings.simplefilter("ignore")
                return quant.quantize_dynamic(nn.Sequential(linear), config)[0]

        self.experts = [[quantized(w) for w in weights(shape, e)] for e in range(shape.experts)]

    def forward(self, b: Batch) -> Tensor:
        x = b.x.float()
        total = torch.zeros_like(x)
        with torch.no_grad():
            for e in b.index.unique().tolist():
                token, slot = torch.nonzero(b.index == e, as_tuple=True)
                gate, up, down = self.experts[e]
                rows = x[token]
                h = nn.functional.silu(gate(rows)) * up(rows)
                total.index_add_(0, token, down(h) * b.weights[token, slot, None])
        return total
