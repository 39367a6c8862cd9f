"""What of LLaMA-Factory's stages and options a use_kt run can do, and how its own code for
KTransformers' forks is kept out of it.

That code refuses what works with our experts (run_sft: predict_with_generate, compute_accuracy) or
calls libraries that are not there (load_model of 0.9.6: the checkpoint context and the adapters of
kt-kernel). So both run as stock, with use_kt off (arguments.as_stock).
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Any

from kt_sft.llamafactory.arguments import as_stock

log = logging.getLogger("kt")

STAGES = ("pt", "sft", "rm", "dpo", "kto")

# Liger has kernels in the place of experts modules, and calls ours as if they were its own.
_LIGER = "remove it: it replaces the experts, and the loss is computed in blocks without it"
# (arguments, key, accepted value, fix) of stock options that use_kt would ignore or break on
_REFUSED = (
    ("model", "quantization_bit", None, "remove it and choose kt_config.format for the experts"),
    ("model", "use_unsloth", False, "remove it"),
    ("model", "mixture_of_depths", None, "remove it"),
    ("model", "export_quantization_bit", None, "export without it and quantize the result"),
    ("model", "train_from_scratch", False, "remove it: the experts are frozen"),
    ("model", "kt_weight_path", None, "use kt_config.packed_dir"),
    ("model", "kt_expert_checkpoint_path", None, "remove it: model_name_or_path is read"),
    ("model", "kt_non_expert_weight_path", None, "remove it: model_name_or_path is read"),
    ("model", "kt_use_lora_experts", None, "remove it: name experts in lora_target"),
    ("model", "kt_lora_expert_num", None, "remove it"),
    ("model", "kt_lora_expert_intermediate_size", None, "remove it"),
    ("finetuning", "pissa_init", False, "remove it: experts are packed"),
    ("finetuning", "use_llama_pro", False, "remove it"),
    ("finetuning", "use_galore", False, "remove it"),
    ("finetuning", "use_apollo", False, "remove it"),
    ("finetuning", "use_badam", False, "remove it"),
    ("finetuning", "use_mca", False, "remove it"),
    ("finetuning", "use_megatron_bridge", False, "remove it"),
    ("finetuning", "use_hyper_parallel", False, "remove it"),
    ("finetuning", "pissa_convert", False, "remove it: there is no PiSSA adapter to convert"),
    ("finetuning", "ref_model_quantization_bit", None, "remove it"),
    ("trained model", "enable_liger_kernel", False, _LIGER),
    ("trained model", "use_v1_kernels", False, "remove it: it may replace the experts"),
    ("training", "fp8", False, "set bf16: true instead"),
    ("training", "use_liger_kernel", False, _LIGER),
    ("training", "optim_target_modules", None, "remove it, and choose another optim"),
    ("training", "parallelism_config", None, "remove it: a process computes whole experts"),
)  # fmt: skip


def check(model_args: Any, finetuning_args: Any, training_args: Any) -> None:
    """Raises ValueError, in one sentence, for a stage or an option that a use_kt run cannot do."""
    if finetuning_args.stage == "ppo":
        raise ValueError(
            "stage=ppo is not supported with use_kt: LLaMA-Factory's own PPO needs trl <= 0.9.6, "
            "which does not run with the transformers that this package needs; use stage: dpo or "
            "kto"
        )
    if finetuning_args.stage not in STAGES:
        raise ValueError(
            f"stage={finetuning_args.stage} is not supported with use_kt; use one of "
            f"{', '.join(STAGES)}"
        )
    check_load(model_args)
    _refuse("finetuning", finetuning_args)
    _refuse("trained model", model_args)
    _refuse("training", training_args)
    if training_args.use_ray:
        raise ValueError(
            "USE_RAY=1 is not supported with use_kt; unset it and launch with llamafactory-cli or "
            "accelerate"
        )
    if finetuning_args.use_asft_loss and finetuning_args.ref_model is None:
        raise ValueError(
            "use_asft_loss=True compares with a reference model, which LLaMA-Factory loads for a "
            "LoRA run only where ref_model names it; set ref_model, e.g. to model_name_or_path"
        )
    if finetuning_args.use_dora and {"all", "experts"} & set(finetuning_args.lora_target):
        raise ValueError(
            f"use_dora=True is not supported on experts in CPU memory, which lora_target="
            f"{','.join(finetuning_args.lora_target)} includes; remove it, or name other parts"
        )
    if "experts" in (finetuning_args.additional_target or ()):
        raise ValueError(
            "additional_target=experts asks for a trainable copy of all experts, which use_kt "
            "keeps frozen; name experts in lora_target instead"
        )


def check_load(model_args: Any) -> None:
    """Raises ValueError, in one sentence, for an option of ModelArguments that no use_kt model can
    have, trained or not.
    """
    _refuse("model", model_args)


def _refuse(kind: str, arguments: Any) -> None:
    for of, key, accepted, fix in _REFUSED:
        value = vars(arguments).get(key, accepted)
        if of == kind and value != accepted:
            raise ValueError(f"{key}={value!r} is not supported with use_kt; {fix}")


def check_model(model: Any, model_args: Any, finetuning_args: Any, *, reentrant: bool) -> None:
    """What shows with a loaded model and its adapters only. Raises ValueError, in one sentence, for
    an optimizer that has no rule for the experts' factors; warns of a router loss without gradient
    (`reentrant`: gradient checkpoints are).
    """
    from transformers import PreTrainedModel

    from kt_sft.lora import model_parts
    from kt_sft.lora.layer import KTExpertsLoraLinear

    factors = [n for n, m in model.named_modules() if isinstance(m, KTExpertsLoraLinear)]
    for option in ("use_muon", "use_adam_mini"):
        if factors and vars(finetuning_args)[option]:
            raise ValueError(
                f"{option}=True has a rule for matrices, but the LoRA factors of {factors[0]} are "
                f"stacks of one per expert, which it would not treat so; remove {option}, or name "
                "no experts in lora_target"
            )
    base = next(m for m in model.modules() if isinstance(m, PreTrainedModel))
    checkpoints = not model_args.disable_gradient_checkpointing
    if (
        checkpoints
        and model_parts.has_router_loss(base.config)
        and (reentrant or model_args.use_unsloth_gc)
    ):
        log.warning(
            "kt: %s=True keeps no gradient of the router loss, as in stock LLaMA-Factory; remove "
            "it to train with that gradient",
            "use_unsloth_gc" if model_args.use_unsloth_gc else "use_reentrant_gc",
        )


def without_asking(run: Callable[..., Any]) -> Callable[..., Any]:
    """LLaMA-Factory's run_sft, for which predict_with_generate and compute_accuracy are not refused
    in a use_kt run.
    """

    @functools.wraps(run)
    def run_sft(model_args: Any, *args: Any, **kw: Any) -> Any:
        if not model_args.use_kt:
            return run(model_args, *args, **kw)
        with as_stock(model_args):
            return run(model_args, *args, **kw)

    return run_sft
