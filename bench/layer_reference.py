"""The fp32 definition of one routed-expert layer that every contestant is checked against."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import torch
from torch import Tensor
from torch.nn.functional import silu
from workloads import Batch

ExpertWeights = Callable[[int], tuple[Tensor, Tensor, Tensor]]
Factors = tuple[Mapping[str, Tensor], Mapping[str, Tensor]]


def forward(x: Tensor, b: Batch, weights: ExpertWeights, lora: Factors | None = None) -> Tensor:
    """fp32 [T, H] of x [T, H]: sum over slots of w * down(silu(gate(x)) * up(x)).

    `weights(e)` gives gate, up [I, H] and down [H, I]; `lora` holds a[p] [E, r, in] and
    b[p] [E, out, r], scaling 1. Differentiable in x and in the factors.
    """

    def linear(rows: Tensor, e: int, projection: str, weight: Tensor) -> Tensor:
        out = rows @ weight.float().T
        if lora is None:
            return out
        a, factor_b = lora[0][projection][e], lora[1][projection][e]
        return out + (rows @ a.float().T) @ factor_b.float().T

    rows = x.float()
    total = torch.zeros(rows.shape)
    for e in b.index.unique().tolist():
        token, slot = torch.nonzero(b.index == e, as_tuple=True)
        gate, up, down = weights(e)
        mine = rows[token]
        h = silu(linear(mine, e, "gate", gate)) * linear(mine, e, "up", up)
        out = linear(h, e, "down", down) * b.weights[token, slot, None]
        total = total.index_add(0, token, out)
    return total


def relative_error(actual: Tensor, expected: Tensor) -> float:
    """|actual - expected| / |expected| in the Frobenius norm; inf when either is not finite."""
    actual, expected = actual.detach().float(), expected.detach().float()
    error = float((actual - expected).norm() / expected.norm())
    return error if math.isfinite(error) else math.inf
