"""The trainer callback: counts what is trained, watches the first gradients, and writes
kt_stats.json at the end.
"""

from __future__ import annotations

import json
import logging
import os
import resource
import time
from collections import Counter
from math import inf, isfinite
from typing import Any

import torch
from torch import nn
from transformers import (
    PreTrainedModel,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
)

from kt_core import runtime
from kt_core.module import KTExpertsLinear
from kt_sft.lora.adapter_io import has_experts
from kt_sft.lora.model_parts import GROUPS, group_of
from kt_sft.op import row_counts
from kt_sft.ranks.collective import over_ranks

_TOWER = "tower"

log = logging.getLogger("kt")
STATS_FILE = "kt_stats.json"


def count_trainable(model: nn.Module) -> dict[str, int]:
    """Trainable parameters by group; sharded parameters count with their global size."""
    counts: Counter[str] = Counter()
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            counts[group_of(name)] += parameter.numel()
    return {group: counts[group] for group in GROUPS if counts[group] or group != "other"}


class KTCallback(TrainerCallback):
    """Added by the LLaMA-Factory seam; may be given to any transformers Trainer of a model with CPU
    experts.

    Prints the trainable parameters by part and raises if the optimizer holds others; stops the run
    if a whole part has only zero gradients at the first step; writes kt_stats.json into output_dir
    when training ends.
    """

    def __init__(self) -> None:
        self.started = 0.0
        self.before: dict[str, float] = {}
        self.checked = False

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kw: Any
    ) -> None:
        """Counts, compares with the optimizer, starts the clock."""
        model = kw["model"]
        if not has_experts(model):
            raise ValueError(
                "this callback is for models with experts in CPU memory; set use_kt: true or leave "
                "it out"
            )
        counts = count_trainable(model)
        total = sum(counts.values())
        if state.is_world_process_zero:
            parts = ", ".join(f"{group} {n:,}" for group, n in counts.items())
            print(f"kt: trainable parameters: {total:,} ({parts})", flush=True)
        held = _optimizer_parameters(kw.get("optimizer"))
        if held is not None and held != total:
            raise RuntimeError(
                f"the optimizer holds {held:,} parameters but the model trains {total:,}; some "
                "would never change, check the LoRA targets and the optimizer setting"
            )
        self.counts = counts
        self._tokens = row_counts.TokenCount(model)
        self.before = dict(runtime.seconds())
        self.started = time.perf_counter()

    def on_pre_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kw: Any
    ) -> None:
        """At the first step of this run: a part whose gradients are all zero will not learn."""
        if self.checked:
            return
        self.checked = True
        if args.deepspeed_plugin is None:  # DeepSpeed keeps gradients to itself
            check_gradients(kw["model"], overflow=args.fp16)

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kw: Any
    ) -> None:
        """Writes kt_stats.json (on the first process, numbers of all)."""
        elapsed = time.perf_counter() - self.started
        self._tokens.remove()
        runtime.release_recycled()
        after = runtime.seconds()
        seconds = {key: after[key] - self.before.get(key, 0.0) for key in after}
        tokens = int(_over_ranks(float(self._tokens.tokens), "sum"))
        if not state.is_world_process_zero or args.output_dir is None:
            return
        losses = [entry["loss"] for entry in state.log_history if "loss" in entry]
        stats = {
            "tokens": tokens,
            "tokens_per_s": tokens / elapsed if elapsed else 0.0,
            "train_seconds": elapsed,
            "expert_seconds": seconds,
            "peak_rss_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
            "steps": state.global_step,
            "trainable": self.counts,
            "first_loss": losses[0] if losses else None,
            "last_loss": losses[-1] if losses else None,
        }
        os.makedirs(args.output_dir, exist_ok=True)
        with open(os.path.join(args.output_dir, STATS_FILE), "w") as file:
            json.dump(stats, file, indent=2)
        print(
            f"kt: {tokens:,} tokens, {stats['tokens_per_s']:.1f} tokens/s, "
            f"{sum(seconds.values()):.1f} s in experts, peak memory "
            f"{stats['peak_rss_bytes'] / 2**30:.2f} GiB",
            flush=True,
        )


def check_gradients(model: nn.Module, *, overflow: bool = False) -> None:
    """Raises RuntimeError if every trainable parameter of a part (attention, experts, ...) has a
    zero gradient, or if any is NaN or Inf; `overflow` allows the latter (a loss scaler skips it).
    A tower for pictures or sound may have none: a batch need not bring it any.
    """
    largest: dict[str, float] = {}
    towers = _towers(model)
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        gradient = parameter.grad
        if isinstance(gradient, torch.distributed.tensor.DTensor):
            gradient = gradient.to_local()
        peak = float(gradient.abs().max()) if gradient is not None and gradient.numel() else 0.0
        group = _TOWER if name.startswith(towers) else group_of(name)
        # NaN compares as false and would get lost in max()
        largest[group] = max(largest.get(group, 0.0), peak if isfinite(peak) else inf)
    for group in (*GROUPS, _TOWER):  # the same order, and so the same collectives, on every rank
        if group not in largest:
            continue
        peak = _over_ranks(largest[group], "max")
        if peak == inf and not overflow:
            raise RuntimeError(
                f"gradients of the adapter's {group} parameters are NaN or Inf at the first step; "
                "check the data, lower learning_rate, or use bf16 instead of a narrower type"
            )
        if peak == 0.0 and group != _TOWER:
            raise RuntimeError(
                f"all gradients of the adapter's {group} parameters are zero at the first step, so "
                "they would never be "
                "trained; check that the labels are not all masked and that the adapter is active"
            )


def _towers(model: nn.Module) -> tuple[str, ...]:
    """Beginnings of the names of what is in a transformers model inside of `model` that has no
    routed experts: the encoders of a multimodal model.
    """
    inner = {n: m for n, m in model.named_modules() if isinstance(m, PreTrainedModel)}
    return tuple(
        f"{name}."
        for name, module in inner.items()
        if name and not any(isinstance(m, KTExpertsLinear) for m in module.modules())
    )


def _over_ranks(value: float, how: str) -> float:
    return float(over_ranks(torch.tensor([value], dtype=torch.float64), how))


def _optimizer_parameters(optimizer: Any) -> int | None:
    """Parameters in a torch optimizer, also behind accelerate's wrapper; None where it has no such
    groups.
    """
    inner = optimizer
    while inner is not None and not isinstance(inner, torch.optim.Optimizer):
        inner = vars(inner).get("optimizer")
    if inner is None or "Deep" in type(inner).__name__:
        return None
    unique = {id(p): p.numel() for group in inner.param_groups for p in group["params"]}
    return sum(unique.values())
