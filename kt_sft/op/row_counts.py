"""Counts of what a run has trained on: tokens, and tokens per expert.

Rows are counted in backward, which runs once per micro-batch and layer whatever is checkpointed or
recomputed, and neither in evaluation nor for a reference model.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from kt_core.experts import Experts

# Rows per expert and pass below which reading the weights is a sixth of a pass or more, so that it
# pays to bring more rows to one reading: two ranks that gather theirs gain 1.37x at 8 rows, 1.23x
# at 16, 1.12x at 32 and less than 1.09x at 64, before the wait for the slower one (bench/rows.py;
# docs/performance.md, "Rows per weight read").
FEW_ROWS = 32

_rows: weakref.WeakKeyDictionary[Experts, Tensor] = weakref.WeakKeyDictionary()
_passes: weakref.WeakKeyDictionary[Experts, Passes] = weakref.WeakKeyDictionary()


@dataclass(frozen=True)
class Passes:
    """Backward passes of a layer's experts in this process: how many, how many of them together
    with other ranks, and how often the weights were read for them (a part of once by each rank).
    """

    calls: int = 0
    together: int = 0
    reads: float = 0.0


def count_rows(experts: Experts, top_k_index: Tensor, ranks: int = 1) -> None:
    """Adds the assignments of one backward, which `ranks` ranks computed together.

    top_k_index [T, K] int64 on the CPU, in [0, E), of this rank's tokens.
    """
    added = torch.bincount(top_k_index.reshape(-1), minlength=experts.num_experts)
    before = _rows.get(experts)
    _rows[experts] = added if before is None else before + added
    p = passes(experts)
    _passes[experts] = Passes(p.calls + 1, p.together + (ranks > 1), p.reads + 1 / ranks)


def rows(experts: Experts) -> Tensor:
    """Rows [E] int64 that each expert has been trained on in this process; padding counts too."""
    counted = _rows.get(experts)
    return torch.zeros(experts.num_experts, dtype=torch.int64) if counted is None else counted


def passes(experts: Experts) -> Passes:
    """Those of these experts so far."""
    return _passes.get(experts, Passes())


class TokenCount:
    """Counts the tokens that a model is trained on, padding left out where a mask tells it."""

    def __init__(self, model: nn.Module) -> None:
        self.tokens = 0
        self._hook = model.register_forward_pre_hook(self._count, with_kwargs=True)

    def remove(self) -> None:
        """Stops counting."""
        self._hook.remove()

    def _count(self, model: nn.Module, inputs: tuple[Any, ...], kw: dict[str, Any]) -> None:
        if not torch.is_grad_enabled() or not model.training:
            return
        mask, ids = kw.get("attention_mask"), kw.get("input_ids")
        if isinstance(mask, Tensor) and mask.dim() == 2:
            self.tokens += int((mask != 0).sum())
        elif isinstance(ids, Tensor):
            self.tokens += ids.numel()
