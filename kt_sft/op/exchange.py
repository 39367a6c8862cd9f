"""The rows of a host's ranks in one pass of the experts: each weight is read by one rank only.

Every rank gives the tokens of its batch to the others, computes its share of the experts for all
of them, and gives every rank the part of the result that is its own. Who computes which expert
follows from what all have routed where, so nobody is asked. A rank may have more tokens than
another, or none. LoRA gradients of an expert come from the rank that computed it, for the tokens of
all, and are zero on the others: their sum over ranks, which DDP, FSDP and ZeRO take, is what it is
when every rank computes its own tokens.

Messages go through gloo's alltoall, which knows unequal sizes, as bytes; partial sums are added in
fp32 in the order of ranks, so repeating a pass repeats its bits.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor, distributed

from kt_core.experts import Experts, Grads, Lora, Share

# An expert's weights take as long to read and unpack as 20 of its rows to compute: 85 ms against
# 4.3 ms per row (bench/rows.py; docs/performance.md, "Rows per weight read").
_ROWS_OF_A_READ = 20


class HostRanks:
    """The ranks of one host; `group`: of gloo, with all of them."""

    def __init__(self, group: Any) -> None:
        self._group = group
        self.size = distributed.get_world_size(group)
        self.rank = distributed.get_rank(group)

    def forward(
        self,
        experts: Experts,
        x: Tensor,
        top_k_index: Tensor,
        top_k_weights: Tensor,
        lora: Lora | None,
        *,
        save: bool,
    ) -> tuple[Tensor, Tensor | None]:
        """As `Experts.forward` for this rank's tokens; out is fp32 and `saved` this rank's share of
        the rows of all. A collective.
        """
        share, (x, index, weights) = self._gather(
            experts, [x, top_k_index, top_k_weights], 1, _seed(lora)
        )
        compute = experts.training_compute
        out, saved = experts.forward(
            x, index, weights, lora, save=save, compute=compute, share=share
        )
        return self._sum(out, share), saved

    def backward(
        self,
        experts: Experts,
        grad_out: Tensor,
        x: Tensor,
        top_k_index: Tensor,
        top_k_weights: Tensor,
        lora: Lora | None,
        saved: Tensor | None,
        *,
        need_dx: bool,
        need_dw: bool,
        need_lora: bool,
    ) -> Grads:
        """As `Experts.backward` for this rank's tokens (dx is fp32), and LoRA gradients of its
        share of the experts. A collective; what is needed must be the same on every rank.
        """
        share, (grad, x, index, weights) = self._gather(
            experts, [grad_out, x, top_k_index, top_k_weights], 2, _seed(lora)
        )
        grads = experts.backward(
            grad,
            x,
            index,
            weights,
            lora,
            saved,
            need_dx=need_dx,
            need_dw=need_dw,
            need_lora=need_lora,
            compute=experts.training_compute,
            share=share,
        )
        wanted = [t for t in (grads.dx, grads.dw) if t is not None]
        if not wanted:
            return grads
        sums = self._sum(torch.cat(wanted, 1), share)
        parts = [t.clone() for t in sums.split([t.shape[1] for t in wanted], 1)]
        dx = parts.pop(0) if need_dx else None
        return Grads(dx, parts.pop(0) if need_dw else None, grads.a, grads.b)

    def tell(self, *values: int) -> list[list[int]]:
        """The values of every rank, in their order. A collective."""
        own = torch.tensor(values)
        found = [torch.empty_like(own) for _ in range(self.size)]
        distributed.all_gather(found, own, group=self._group)
        return [given.tolist() for given in found]

    def _gather(
        self, experts: Experts, tensors: Sequence[Tensor], index: int, seed: int
    ) -> tuple[Share, list[Tensor]]:
        """Tensors [tokens, any] with the tokens of all, `tensors[index]` being the top_k_index."""
        own = torch.cat([t.contiguous().view(torch.uint8) for t in tensors], 1)
        parts = [(tokens, given) for tokens, given in self.tell(len(own), seed)]
        tokens = [n for n, _ in parts]
        found = own.new_empty(sum(tokens), own.shape[1])
        distributed.all_to_all_single(
            found, own.repeat(self.size, 1), tokens, [len(own)] * self.size, group=self._group
        )
        widths = [t.shape[1] * t.element_size() for t in tensors]
        columns = zip(found.split(widths, 1), tensors, strict=True)
        whole = [  # cloned, so that it begins where its dtype may
            column.clone(memory_format=torch.contiguous_format).view(t.dtype)
            for column, t in columns
        ]
        rows = torch.bincount(whole[index].view(-1), minlength=experts.num_experts)
        mine = torch.tensor(owners(rows.tolist(), self.size)) == self.rank
        return Share(mine, parts), whole

    def _sum(self, partial: Tensor, share: Share) -> Tensor:
        """This rank's tokens of `partial` [tokens of all, any] fp32, summed over the ranks."""
        tokens = [n for n, _ in share.parts]
        own = tokens[self.rank]
        found = partial.new_empty(self.size * own, partial.shape[1])
        distributed.all_to_all_single(found, partial, [own] * self.size, tokens, group=self._group)
        return found.view(self.size, own, partial.shape[1]).sum(0)


def owners(rows: Sequence[int], ranks: int) -> list[int]:
    """The rank that computes each expert, from the rows of each: the largest go first, each to the
    rank that has least to do so far.
    """
    who = [0] * len(rows)
    busy = [(0, rank) for rank in range(ranks)]
    for expert in sorted(range(len(rows)), key=lambda e: -rows[e]):
        if rows[expert]:
            work, who[expert] = busy[0]
            heapq.heapreplace(busy, (work + rows[expert] + _ROWS_OF_A_READ, who[expert]))
    return who


def _seed(lora: Lora | None) -> int:
    return 0 if lora is None else lora.seed


_together: ContextVar[bool] = ContextVar("kt_together", default=False)


@contextmanager
def in_one_pass(wanted: bool) -> Iterator[None]:
    """Inside it, runners compute together with the host's other ranks, if wanted."""
    token = _together.set(wanted)
    try:
        yield
    finally:
        _together.reset(token)


def together() -> bool:
    """Whether the runner that asks is inside `in_one_pass(True)`."""
    return _together.get()


_ranks: HostRanks | None = None


def use(ranks: HostRanks | None) -> None:
    """Sets the ranks for the operators that gather; None: nobody gathers any more."""
    global _ranks
    _ranks = ranks


def ranks() -> HostRanks:
    """Those of `use`. Raises RuntimeError where there are none."""
    if _ranks is None:
        raise RuntimeError(
            "the rows of this host's ranks are gathered while a Trainer trains; call backward "
            "before its training has ended"
        )
    return _ranks
