"""Sums, maxima and lists over the ranks of a run; the value itself where there is one rank."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, distributed


def joined() -> bool:
    """Whether this process is one rank of a group."""
    return distributed.is_available() and distributed.is_initialized()


def gather(value: Any, group: Any = None) -> list[Any]:
    """Everybody's `value` (anything that can be pickled), in the order of ranks; [value] where
    there is one process. group: of torch.distributed, None for all ranks. A collective.
    """
    if not joined():
        return [value]
    found: list[Any] = [None] * distributed.get_world_size(group)
    distributed.all_gather_object(found, value, group=group)
    return found


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
