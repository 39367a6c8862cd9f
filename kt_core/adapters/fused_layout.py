"""The fused layout of an adapter, as peft's target_parameters writes it (peft 0.20): one LoRA for
gate_up_proj and one for down_proj, all experts in one matrix. vLLM wants it for models whose
experts it keeps as 3-D weights.

Gate and up have factors of their own, of rank r each; gate_up_proj gets both, block by block: A of
rank 2 r is A_gate above A_up, B is block diagonal. Delta and scale stay what they were, and
`split` gives the blocks back.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from kt_core.adapters.factors import Factors
from kt_core.names import STACKED


def fuse(module: Mapping[str, Factors]) -> dict[str, Factors]:
    """From factors by projection to factors by stacked parameter (those that have any): a
    [E, R, in], b [E, out, R], R = 2 r where gate and up are both there. Gate and up must agree in
    scale.
    """
    out = {}
    for parameter, projections in STACKED.items():
        parts = [module[p] for p in projections if p in module]
        if not parts:
            continue
        b = []
        for p in projections:  # rows of the fused output, in this order
            rows = [f.b if module.get(p) is f else torch.zeros_like(f.b) for f in parts]
            b.append(torch.cat(rows, dim=2))
        a = torch.cat([f.a for f in parts], dim=1)
        out[parameter] = dataclasses.replace(parts[0], a=a, b=torch.cat(b, dim=1))
    return out


def fused_tensors(path: str, module: Mapping[str, Factors]) -> dict[str, Tensor]:
    """Tensors of one experts module by key without prefix: A [E * R, in] expert-major, B [out,
    R * E] expert-minor. peft nests the two parameters, gate_up_proj inside.
    """
    fused = fuse(module)
    out = {}
    for parameter, f in fused.items():
        inner = ".base_layer" if parameter == "gate_up_proj" and len(fused) == 2 else ""
        flat = flattened(f)
        out[f"{path}{inner}.lora_A.weight"] = flat.a
        out[f"{path}{inner}.lora_B.weight"] = flat.b
    return out


def flattened(f: Factors) -> Factors:
    """a [E, R, in] and b [E, out, R] as peft holds them: [E * R, in] and [out, R * E]."""
    count, rank, fan_in = f.a.shape
    b = f.b.permute(1, 2, 0).reshape(f.b.shape[1], rank * count)
    a = f.a.reshape(count * rank, fan_in)
    return dataclasses.replace(f, a=a.contiguous(), b=b.contiguous())


def split(
    module: Mapping[str, Factors], projections: Sequence[str], where: str
) -> dict[str, Factors]:
    """The factors that `fuse` got, from gate and up that share its A; raises ValueError if
    something lies outside of their blocks.
    """
    halves = [p for p in ("gate", "up") if p in projections]
    out = {p: f for p, f in module.items() if p == "down" and p in projections}
    for p, f in module.items():
        if p == "down":
            continue
        outside = f.b.clone()
        if p in halves:
            rank, start = f.rank // len(halves), halves.index(p)
            block = slice(start * rank, (start + 1) * rank)
            outside[..., block] = 0
            a, b = f.a[:, block].contiguous(), f.b[..., block].contiguous()
            out[p] = dataclasses.replace(f, a=a, b=b)
        if not outside.is_meta and outside.any():  # a dry run's have no values
            raise ValueError(
                f"{where}: {p} is not zero outside of the factors that were trained "
                f"({', '.join(projections)}); the file was changed, save the adapter again"
            )
    return out
