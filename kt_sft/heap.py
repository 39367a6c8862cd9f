"""Freed memory of a training step on the CPU: kept for the next tensors, returned at the peak.

A step holds most when the logits appear: every activation is kept for backward, and a logit takes
ten bytes and more. What the heap holds beyond that is returned just before (kt_core.memory has the
measurement).
"""

from __future__ import annotations

from typing import Any

from torch import nn

from kt_core import memory


def tend(model: nn.Module) -> None:
    """From now on freed tensors are kept, and returned whenever `model`, a PreTrainedModel in
    training mode, is about to compute logits. Does nothing where glibc is not ours to set.
    """
    head: Any = model.get_output_embeddings()  # type: ignore[operator]
    if head is not None and memory.keep_freed_tensors():
        head.register_forward_pre_hook(_return_memory)


def _return_memory(head: nn.Module, _inputs: Any) -> None:
    if head.training:
        memory.return_freed_tensors()
