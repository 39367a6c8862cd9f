"""Gradient checkpointing that does not run the experts twice.

With `activation: retain`, a checkpointed decoder layer keeps the outputs of `kt::experts_forward`
(layer output and gate/up pre-activations) and recomputes everything else. torch offers that as
selective checkpointing, which works with non-reentrant checkpoints only; so the layers' checkpoint
function is switched to that, on this model alone.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Any

import torch
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from kt_core import patches

log = logging.getLogger("kt")


def _policy(_ctx: Any, op: Any, *_args: Any, **_kwargs: Any) -> CheckpointPolicy:
    if op is torch.ops.kt.experts_forward.default:
        return CheckpointPolicy.MUST_SAVE
    return CheckpointPolicy.PREFER_RECOMPUTE


keep_experts = functools.partial(create_selective_checkpoint_contexts, _policy)
"""`context_fn` for torch.utils.checkpoint.checkpoint(..., use_reentrant=False)."""

_give = functools.partial(
    patches.give, of="our models", by=__name__, why="LLaMA-Factory gives no context_fn"
)


def retain_experts(model: Any) -> None:
    """Makes gradient checkpointing of `model`, enabled already or later, keep the experts' outputs.

    `model` is a transformers PreTrainedModel. Raises ValueError where a checkpoint function other
    than torch's is set (for example use_unsloth_gc), which cannot keep anything.
    """
    original = model._set_gradient_checkpointing

    def set_gradient_checkpointing(
        enable: bool = True,
        gradient_checkpointing_func: Callable[..., Any] = checkpoint,
        *args: Any,
        **kw: Any,
    ) -> None:
        if enable:
            gradient_checkpointing_func = _keeping(gradient_checkpointing_func)
        original(enable, gradient_checkpointing_func, *args, **kw)

    _give(model, "_set_gradient_checkpointing", set_gradient_checkpointing)
    for module in model.modules():
        if "_gradient_checkpointing_func" in vars(module):
            kept = _keeping(module._gradient_checkpointing_func)
            _give(module, "_gradient_checkpointing_func", kept)


def _keeping(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function` with the torch checkpoint inside it made non-reentrant and selective.

    transformers passes `partial(checkpoint, ...)`, LLaMA-Factory a wrapper around one that it marks
    with `functools.wraps`; the wrapper stays in charge and only the keywords of the partial change.
    """
    if function is checkpoint:
        return functools.partial(checkpoint, use_reentrant=False, context_fn=keep_experts)
    inner = function
    while not isinstance(inner, functools.partial):
        if "__wrapped__" not in vars(inner):
            raise ValueError(
                f"activation=retain cannot be kept under the checkpoint function {function!r}; "
                "set kt_config.activation: recompute, or turn use_unsloth_gc off"
            )
        inner = vars(inner)["__wrapped__"]
    if inner.func is not checkpoint:
        raise ValueError(
            f"activation=retain needs torch's own checkpoint but found {inner.func!r}; "
            "set kt_config.activation: recompute"
        )
    if inner.keywords.get("context_fn") is not keep_experts:
        inner.keywords.update(use_reentrant=False, context_fn=keep_experts)
        log.info(
            "kt: activation=retain: gradient checkpointing set to non-reentrant and selective "
            "(expert outputs kept)"
        )
    return function
