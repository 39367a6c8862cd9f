"""Sums and maxima over the ranks of a run; the values themselves where there is one rank."""

from __future__ import annotations

import torch
from torch import Tensor, distributed


def joined() -> bool:
    """Whether this process is one rank of a group."""
    return distributed.is_available() and distributed.is_initialized()


def over_ranks(values: Tensor, how: str) -> Tensor:
    """`values` (CPU, any shape) summed ("sum") or maximised ("max") over all ranks, on the CPU.

    A collective: every rank must call it, in the same order, with the same shape and dtype.
    """
    if not joined():
        return values
    device = "cpu"
    if distributed.get_backend() == "nccl":
        device = f"cuda:{torch.cuda.current_device()}"
    held = values.to(device, copy=True)
    operation = {"sum": distributed.ReduceOp.SUM, "max": distributed.ReduceOp.MAX}[how]
    distributed.all_reduce(held, operation)
    return held.cpu()
