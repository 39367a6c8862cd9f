"""The held-out loss on two bases: the model as it was trained, and the bf16 checkpoint with the
adapter merged into it, which is what others will run.

No second model is loaded. Inside `as_merged` every adapted Linear computes with bf16(W + delta),
made when it is called, and every experts module with its weights read from the checkpoint again,
merged and packed as bf16 for that one call; so memory grows by one layer, and every batch reads the
base checkpoint once.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from datasets import Dataset
from peft.tuners.lora.layer import Linear as LoraLinear
from torch import Tensor, nn
from torch.nn import functional as F

from kt_core import patches
from kt_core.experts import Experts
from kt_core.loading.parts import ExpertTensor
from kt_core.module import KTExpertsLinear, by_token
from kt_core.names import PROJECTION_KEYS
from kt_sft.lora.layer import KTExpertsLoraLinear

log = logging.getLogger("kt")


@dataclass(frozen=True)
class HeldOut:
    """Mean evaluation loss on the same `examples` records of a data set on both bases."""

    examples: int
    as_trained: float
    merged: float


def measure(trainer: Any, batches: int) -> dict[str, HeldOut]:
    """Losses on the first `batches` batches of every evaluation set of a transformers Trainer, by
    name ("" where there is one only); empty where there is none whose loss can be computed.
    Collective: every rank calls it.
    """
    sets = trainer.eval_dataset
    if sets is None or batches == 0 or vars(trainer.args).get("predict_with_generate"):
        return {}
    out = {}
    for name, data in (sets if isinstance(sets, dict) else {"": sets}).items():
        if not isinstance(data, Dataset):  # a stream, of which nobody knows the length
            continue
        count = min(len(data), batches * trainer.args.eval_batch_size * trainer.args.world_size)
        few = data.select(range(count))
        log.info(
            "kt: held-out loss as trained and merged into bf16, on %d records; the latter reads "
            "the base checkpoint for every batch (kt_config.merged_eval: 0 leaves it out)",
            count,
        )
        as_trained = _loss(trainer, few)
        with as_merged(trainer.accelerator.unwrap_model(trainer.model)):
            merged = _loss(trainer, few)
        out[name] = HeldOut(count, as_trained, merged)
    return out


def _loss(trainer: Any, data: Any) -> float:
    done = trainer.evaluation_loop(
        trainer.get_eval_dataloader(data),
        description="Held-out loss",
        prediction_loss_only=True,
        metric_key_prefix="eval",
    )
    return float(done.metrics["eval_loss"])


@contextmanager
def as_merged(model: nn.Module) -> Iterator[None]:
    """Inside it, forwards of `model` (without gradients) compute with bf16 weights into which the
    active adapters are merged, or with the base's where adapters are disabled.
    """
    origin = next(m.origin for m in model.modules() if isinstance(m, KTExpertsLinear))
    assert origin is not None  # a Trainer's model was loaded, not packed by hand
    parts = origin.parts()
    adapted = {
        id(m.get_base_layer()) for m in model.modules() if isinstance(m, KTExpertsLoraLinear)
    }
    changed = []
    try:
        for module in model.modules():
            replaced: Callable[..., Tensor] | None = None
            if isinstance(module, KTExpertsLoraLinear):
                replaced = _experts_forward(module.get_base_layer(), module, parts)
            elif isinstance(module, KTExpertsLinear) and id(module) not in adapted:
                replaced = _experts_forward(module, None, parts)
            elif isinstance(module, LoraLinear):
                replaced = _linear_forward(module)
            if replaced is not None:
                patches.give(
                    *(module, "forward", replaced),
                    of="our models' experts, LoRA linears",
                    by=__name__,
                    why="held-out losses of merged weights",
                )
                changed.append(module)
        yield
    finally:
        for module in changed:
            del module.forward


def _linear_forward(layer: Any) -> Callable[..., Tensor]:
    def forward(x: Tensor, *args: Any, **kw: Any) -> Tensor:
        base = layer.get_base_layer()
        weight = base.weight
        if not layer.disable_adapters:
            total = weight.float()
            for name in layer.active_adapters:
                if name in layer.lora_A:
                    a, b = layer.lora_A[name].weight, layer.lora_B[name].weight
                    total = total + layer.scaling[name] * (b.float() @ a.float())
            weight = total.to(torch.bfloat16).to(weight.dtype)
        return F.linear(x, weight, base.bias)

    return forward


def _experts_forward(
    base: KTExpertsLinear,
    lora: KTExpertsLoraLinear | None,
    parts: Mapping[str, Sequence[ExpertTensor]],
) -> Callable[..., Tensor]:
    stored = parts[base.experts.name]

    def forward(hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        merged = _merged(base.experts, stored, lora)

        def run(x: Tensor, index: Tensor, weights: Tensor) -> Tensor:
            return base.runner(merged, x, index, weights, None)

        return by_token(run, hidden_states, top_k_index, top_k_weights)

    return forward


def _merged(
    like: Experts, stored: Sequence[ExpertTensor], lora: KTExpertsLoraLinear | None
) -> Experts:
    experts = Experts(
        like.num_experts,
        like.hidden,
        like.intermediate,
        format="bf16",
        activation=like.activation,
        name=f"{like.name} (merged)",
    )
    active = [] if lora is None or lora.disable_adapters else lora.active_adapters
    for part in stored:
        weight = part.read().float()
        for name in active:
            assert lora is not None
            key = PROJECTION_KEYS[part.projection]
            if name not in lora.lora_A or key not in dict(lora.lora_A[name].named_parameters()):
                continue
            a = lora.lora_A[name].get_parameter(key)[part.expert].detach().float().cpu()
            b = lora.lora_B[name].get_parameter(key)[part.expert].detach().float().cpu()
            weight = weight + lora.projection_scaling(name)[part.projection] * (b @ a)
        experts.put(part.expert, part.projection, weight.to(torch.bfloat16))
    return experts
