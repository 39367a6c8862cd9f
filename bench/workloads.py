"""The fixed workloads of the benchmark: shapes, batches, and what they cost at least."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Shape:
    """One MoE layer: E experts, top-k, hidden H, intermediate I."""

    name: str
    experts: int
    top_k: int
    hidden: int
    intermediate: int


SHAPES = {
    "S": Shape("S", 32, 4, 1024, 512),
    "Q": Shape("Q", 128, 8, 2048, 768),
    "D": Shape("D", 16, 8, 7168, 2048),
}
CODE_BITS = {"bf16": 16, "int8": 8, "int4": 4}
# (format, weights per scale) as we keep them; the first of a format is its default
VARIANTS = (("bf16", 0), ("int8", 128), ("int4", 32), ("int4", 128))


@dataclass(frozen=True)
class Batch:
    """Inputs of one call: x [T, H] bf16, index [T, K] int64, weights [T, K] fp32, dy [T, H]."""

    x: Tensor
    index: Tensor
    weights: Tensor
    dy: Tensor

    @property
    def experts_hit(self) -> int:
        return int(self.index.unique().numel())


def batch(shape: Shape, tokens: int, seed: int, zipf: float = 0.0) -> Batch:
    """Random inputs; expert e is drawn with probability ~ 1 / (e + 1)**zipf (0: uniform), distinct
    per token.

    A few tokens under uniform routing take turns instead: batch `seed` gets the experts after those
    of batch `seed` - 1 in a fixed random order. So an expert is read again only when all others
    have been, and a large last-level cache does not pass for memory.
    """
    g = torch.Generator().manual_seed(seed)
    p = (torch.arange(shape.experts) + 1.0) ** -zipf
    p = p[torch.randperm(shape.experts, generator=g)]
    index = torch.multinomial(p.expand(tokens, -1), shape.top_k, generator=g)
    picks = tokens * shape.top_k
    if not zipf and picks <= shape.experts:
        order = torch.randperm(shape.experts, generator=torch.Generator().manual_seed(0))
        index = order[(torch.arange(picks) + seed * picks) % shape.experts].view(tokens, -1)
    weights = torch.rand(tokens, shape.top_k, generator=g)
    weights = weights / weights.sum(-1, keepdim=True)
    x = torch.randn(tokens, shape.hidden, generator=g).bfloat16()
    dy = torch.randn(tokens, shape.hidden, generator=g).bfloat16()
    return Batch(x, index, weights, dy)


def forward_flops(s: Shape, tokens: int) -> float:
    """Multiply-adds count two: three matrices per assignment."""
    return 6.0 * tokens * s.top_k * s.hidden * s.intermediate


def step_flops(s: Shape, tokens: int) -> float:
    """Forward and backward with frozen experts and saved gate and up: 12 k H I per token."""
    return 2 * forward_flops(s, tokens)


def lora_flops(s: Shape, tokens: int, rank: int) -> float:
    """18 k r (H + I) per token: three projections, forward and backward with both gradients."""
    return 18.0 * tokens * s.top_k * rank * (s.hidden + s.intermediate)


def weight_bytes(s: Shape, format: str, group: int, hit: float) -> float:
    """Bytes of the experts a batch touches: codes and a bf16 scale per `group` weights of a channel
    (0: per channel, which is not counted)."""
    bits = CODE_BITS[format] + (16 / group if group else 0)
    return hit * 3.0 * s.hidden * s.intermediate * bits / 8
