"""The specification: routed experts with LoRA in plain fp32 torch; autograd gives backward.

Weights per expert: gate, up [E, I, H], down [E, H, I]. LoRA: a[p] [E, r, in], b[p] [E, out, r].
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

ACTIVATIONS = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "relu": F.relu,
    "sigmoid": torch.sigmoid,
}


def round_bf16(x: torch.Tensor) -> torch.Tensor:
    """The values kernels see: rounded to bf16, kept as fp32."""
    return x.to(torch.bfloat16).to(torch.float32)


def linear(x, weight, a=None, b=None, scaling=0.0, mask=None):
    """x W^T + scaling * (mask o x) A^T B^T for one expert."""
    y = x @ weight.T
    if a is not None:
        xa = x if mask is None else x * mask
        y = y + scaling * (xa @ a.T) @ b.T
    return y


def experts(
    x, index, weights, gate, up, down, *, a=None, b=None, scaling=0.0, activation="silu", masks=None
):
    """Output [T, H]. masks[p] [T, K, in]: dropout multipliers (0 or 1 / (1 - p))."""
    a, b = a or {}, b or {}
    out = torch.zeros_like(x)
    act = ACTIVATIONS[activation]
    for e in range(gate.shape[0]):
        token, slot = torch.nonzero(index == e, as_tuple=True)
        if not len(token):
            continue

        def project(p, inp, weight, e=e, token=token, slot=slot):
            if p not in a:
                return linear(inp, weight)
            mask = masks[p][token, slot] if masks else None
            return linear(inp, weight, a[p][e], b[p][e], scaling, mask)

        rows = x[token]
        h = act(project("gate", rows, gate[e])) * project("up", rows, up[e])
        y = project("down", h, down[e])
        out = out.index_add(0, token, y * weights[token, slot, None])
    return out
