"""Moves a call's tensors to the CPU and its results back, whatever device the caller uses.

Tensors of a GPU go through page-locked host buffers with asynchronous copies and one wait per call;
torch's caching host allocator keeps a buffer from being reused before its copy is done. CPU tensors
are used where they are.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def _foreign(device: torch.device) -> bool:
    """A function of its own, so that a test can send CPU tensors through the same code."""
    return device.type != "cpu"


def to_host(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Contiguous CPU tensors with the contents of `tensors` (any device, shape, dtype), in order.

    CPU tensors that are contiguous already are returned as they are. Waits until all copies have
    arrived.
    """
    host: list[Tensor] = []
    waits: set[torch.device] = set()
    for tensor in tensors:
        tensor = tensor.detach()
        if not _foreign(tensor.device):
            host.append(tensor.contiguous())
            continue
        away = tensor.device.type != "cpu"
        buffer = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=away)
        buffer.copy_(tensor, non_blocking=away)
        host.append(buffer)
        if away:
            waits.add(tensor.device)
    for device in waits:
        torch.accelerator.current_stream(device).synchronize()
    return host


def to_device(result: Tensor, like: Tensor) -> Tensor:
    """The CPU tensor `result` on the device and in the dtype of `like`; asynchronous to the host
    for a GPU.
    """
    if not _foreign(like.device):
        return result.to(like.dtype)
    away = like.device.type != "cpu"
    buffer = torch.empty(result.shape, dtype=like.dtype, pin_memory=away)
    buffer.copy_(result)
    return buffer.to(like.device, non_blocking=True) if away else buffer
