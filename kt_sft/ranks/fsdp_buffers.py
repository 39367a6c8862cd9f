"""Persistent buffers under accelerate's FSDP2 with fsdp_cpu_ram_efficient_loading.

There only the first rank has read the checkpoint; the model goes to the meta device, is sharded
and filled from the first rank's state dict. accelerate takes every entry of it for a sharded
parameter, which a buffer is not (fully_shard leaves buffers whole): a router's
e_score_correction_bias ends the run. `load_full_state_dict` stands in the place of accelerate's
fsdp2_load_full_state_dict and gives every rank the buffers of the first, whole, as they are without
efficient loading.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, distributed, nn

from kt_core.module import KTExpertsLinear


def load_full_state_dict(
    original: Callable[..., Any],
    accelerator: Any,
    model: nn.Module,
    full_sd: dict[str, Tensor],
    *args: Any,
    **kw: Any,
) -> Any:
    """accelerate.utils.fsdp_utils.fsdp2_load_full_state_dict; of a model with experts in CPU
    memory, the buffers are filled too. A collective.
    """
    if not any(isinstance(m, KTExpertsLinear) for m in model.modules()):
        return original(accelerator, model, full_sd, *args, **kw)
    buffers = _persistent(model)
    with _left_out(buffers):
        result = original(accelerator, model, full_sd, *args, **kw)
    # Ranks that have read nothing may hold a buffer in another dtype, or on the meta device.
    first = accelerator.is_main_process
    kinds = [(full_sd[key].dtype, full_sd[key].shape) for _, _, key in buffers] if first else None
    told = [kinds]
    distributed.broadcast_object_list(told, src=0)
    for (owner, name, key), (dtype, shape) in zip(buffers, told[0] or (), strict=True):
        value = torch.empty(shape, dtype=dtype, device=accelerator.device)
        if first:
            value.copy_(full_sd[key])
        distributed.broadcast(value, src=0)
        owner.register_buffer(name, value)
    return result


def _persistent(model: nn.Module) -> list[tuple[nn.Module, str, str]]:
    """(module, name there, name in the state dict) of every buffer that a state dict has, in the
    same order on every rank.
    """
    return [
        (owner, name, f"{path}.{name}" if path else name)
        for path, owner in model.named_modules()
        for name, buffer in owner.named_buffers(recurse=False)
        if name not in owner._non_persistent_buffers_set
    ]


@contextmanager
def _left_out(buffers: list[tuple[nn.Module, str, str]]) -> Iterator[None]:
    """Inside it, the buffers are in no state dict."""
    for owner, name, _ in buffers:
        owner._non_persistent_buffers_set.add(name)
    try:
        yield
    finally:
        for owner, name, _ in buffers:
            owner._non_persistent_buffers_set.discard(name)
