"""The dtype in which the layers beside the experts are computed where there is no accelerator.

`bf16: true` means mixed precision to transformers: bf16 weights and, under autocast, bf16 products.
On a CPU without units that multiply bf16 at full rate this is the slow choice: on Emerald Rapids
without AMX torch's bf16 products reach 136 GFLOP/s on two cores where its fp32 products reach 300,
attention in bf16 is slower still, and every step from bf16 to fp32 and back is a pass over memory
(bench/results/side_by_side.json has both). So there the run is given to transformers as one in
fp32. The experts are not concerned: they multiply bf16 activations with packed weights either way.
"""

from __future__ import annotations

import dataclasses
import logging
from typing import Any

import torch
from torch import nn

from kt_core import runtime
from kt_sft.config import KTConfig

log = logging.getLogger("kt")


def choose(config: KTConfig, model_args: Any, training_args: Any, finetuning_args: Any) -> KTConfig:
    """Decides `dense_dtype` for a LLaMA-Factory run, changes its arguments to it and returns the
    settings with the decision. Raises ValueError where the setting cannot act.
    """
    asked = config.dense_dtype
    reason = _no_choice(training_args, finetuning_args)
    if reason and asked != "auto":
        raise ValueError(f"kt_config: dense_dtype={asked} cannot act: {reason}; remove dense_dtype")
    if reason or asked == "bf16" or (asked == "auto" and runtime.multiplies_bf16()):
        return config
    model_args.compute_dtype = torch.float32
    training_args.bf16, training_args.mixed_precision = False, "no"
    why = "this CPU multiplies it faster than bf16" if asked == "auto" else "as asked"
    log.info("kt: layers beside the experts are in fp32, not bf16: %s (dense_dtype)", why)
    return dataclasses.replace(config, dense_dtype="fp32")


def widen(model: nn.Module) -> None:
    """Parameters of a loaded model in fp32, one after the other."""
    for parameter in model.parameters():
        if parameter.is_floating_point():
            parameter.data = parameter.data.float()


def _no_choice(training_args: Any, finetuning_args: Any) -> str | None:
    if training_args.device.type != "cpu":
        return f"this run computes on {training_args.device}"
    if finetuning_args.pure_bf16:
        return "pure_bf16=True asks for bf16 throughout"
    if not training_args.bf16:
        return "it is for runs with bf16: true"
    if training_args.deepspeed_plugin is not None:
        return "DeepSpeed has its own setting of bf16"
    return None
