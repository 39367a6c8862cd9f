"""What a use_kt run of LLaMA-Factory is refused for, before anything is loaded. Every check raises
ValueError in one sentence: key, value, fix.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch

from kt_core.loading import prequantized
from kt_sft.llamafactory import stages
from kt_sft.llamafactory.arguments import KEYS, settings_of


def check_run(model_args: Any, training_args: Any, finetuning_args: Any) -> None:
    """Raises ValueError, in one sentence, for a use_kt training run that would ignore a setting or
    fail later.
    """
    config = settings_of(model_args)
    if finetuning_args.finetuning_type != "lora":
        raise ValueError(
            "use_kt keeps the experts frozen, so "
            f"finetuning_type={finetuning_args.finetuning_type} is not possible; "
            "set finetuning_type: lora"
        )
    stages.check(model_args, finetuning_args, training_args)
    check_adapters(model_args)
    if finetuning_args.stage == "rm" and uses_fsdp(training_args):
        raise ValueError(
            "stage=rm cannot run under FSDP: trl's value head hides the other weights from "
            "accelerate; launch it as DDP, or with DeepSpeed ZeRO-2"
        )
    if config.lora_rank and model_args.adapter_name_or_path is not None:
        raise ValueError(
            f"kt_config: lora_rank={dict(config.lora_rank)} has no effect on the adapter that "
            f"adapter_name_or_path={model_args.adapter_name_or_path[-1]} continues, whose ranks "
            "are given; remove one of them"
        )
    if finetuning_args.create_new_adapter and model_args.adapter_name_or_path is not None:
        raise ValueError(
            "create_new_adapter=True needs the old adapter merged into the packed experts, which "
            "use_kt cannot do; "
            "merge it first with llamafactory-cli export, or continue it without create_new_adapter"
        )
    if config.activation == "retain" and model_args.use_unsloth_gc:
        raise ValueError(
            "use_unsloth_gc=True cannot keep expert activations (activation=retain); remove it or "
            "set kt_config.activation: recompute"
        )
    if model_args.use_unsloth_gc and not torch.cuda.is_available():
        raise ValueError(
            "use_unsloth_gc=True needs a CUDA device, which this machine does not have; remove it"
        )
    if config.check_finite and training_args.fp16:
        raise ValueError(
            "kt_config.check_finite=true would end a run with fp16=True at the first gradients "
            "that its loss scaler makes overflow, which it does on purpose; set bf16: true instead "
            "of fp16, or remove check_finite"
        )
    from transformers.integrations import is_deepspeed_zero3_enabled

    if is_deepspeed_zero3_enabled():
        raise ValueError(
            "use_kt cannot run under DeepSpeed ZeRO-3, which partitions the experts before they "
            "can be packed; use ZeRO-2, or FSDP2 with accelerate_configs/fsdp2.yaml"
        )
    if uses_fsdp(training_args):
        _check_fsdp(training_args)
    check_load(model_args)
    # Several GPUs in one process would be wrapped in nn.DataParallel; the experts serve one replica
    # per process.
    if training_args.n_gpu > 1:
        training_args._n_gpu = 1


def choose_reentrant(model_args: Any, given: dict[str, Any] | list[str]) -> None:
    """use_reentrant_gc is True by default, but reentrant checkpoints lose the gradient of a router
    loss and cannot `retain`: they are for those who ask for them. `given`: the user's own
    arguments, a mapping or a command line.
    """
    words = given if isinstance(given, dict) else [word.lstrip("-").split("=")[0] for word in given]
    retains = settings_of(model_args).activation == "retain"
    if "use_reentrant_gc" not in words:
        if not retains:  # retain_experts switches it off, and says so
            model_args.use_reentrant_gc = False
        return
    checkpoints = not model_args.disable_gradient_checkpointing
    if model_args.use_reentrant_gc and checkpoints and retains:
        raise ValueError(
            "use_reentrant_gc=True cannot keep expert activations (activation=retain); remove it "
            "or set kt_config.activation: recompute"
        )


def uses_fsdp(training_args: Any) -> bool:
    """Whether the run is configured for FSDP, in the YAML or by `accelerate launch` (which tells so
    in its variable).
    """
    by_launcher = os.environ.get("ACCELERATE_USE_FSDP", "false").lower() == "true"
    return by_launcher or bool(training_args.fsdp)


def _check_fsdp(training_args: Any) -> None:
    # `fsdp` of the YAML makes transformers read fsdp_config alone, whatever the launcher has set
    if training_args.fsdp:
        version = training_args.fsdp_config.get("version", 1)
        fix = "fsdp_config: {fsdp_version: 2}, or remove fsdp and launch with"
    else:
        version, fix = os.environ.get("FSDP_VERSION", "1"), "fsdp_version: 2, as in"
    if int(version) != 2:
        raise ValueError(
            f"use_kt cannot run under FSDP {version}, which flattens frozen and trained weights "
            f"together; set {fix} accelerate_configs/fsdp2.yaml or fsdp2_cpu.yaml"
        )
    if training_args.world_size == 1 and not torch.accelerator.is_available():
        raise ValueError(
            "FSDP is configured, but this run has one process on the CPU and would go without; "
            "launch more with accelerate_configs/fsdp2_cpu.yaml, or this one with cpu.yaml"
        )


def check_adapters(model_args: Any) -> None:
    names = model_args.adapter_name_or_path or []
    if len(names) > 1:
        raise ValueError(
            f"adapter_name_or_path={','.join(names)} names {len(names)} adapters, of which use_kt "
            "loads one; merge the others into the base model first, with llamafactory-cli export"
        )


def check_load(model_args: Any) -> None:
    settings_of(model_args)
    if model_args.infer_backend != "huggingface":
        raise ValueError(
            f"infer_backend={model_args.infer_backend} does not know experts in CPU memory; set "
            "infer_backend: huggingface"
        )
    from kt_sft import hooks

    hooks.install()
    if Path(model_args.model_name_or_path).is_dir():  # else when it has been downloaded
        prequantized.refuse_directory(model_args.model_name_or_path)


def check_unused(model_args: Any) -> None:
    for key in KEYS:
        value = vars(model_args)[key]
        if value is not None:
            raise ValueError(
                f"{key}={value!r} has no effect without use_kt; set use_kt: true or remove it"
            )


def check_resume(model_args: Any, training_args: Any) -> None:
    import accelerate
    from packaging.version import Version
    from transformers.trainer_utils import get_last_checkpoint

    from kt_sft.run import interruption

    checkpoint = training_args.resume_from_checkpoint
    if not checkpoint:
        return
    if checkpoint is True:  # the last of output_dir
        checkpoint = get_last_checkpoint(training_args.output_dir)
    if checkpoint is None:  # the Trainer refuses that
        return
    interruption.check_resumable(checkpoint, training_args.world_size)
    if not uses_fsdp(training_args):
        return
    if Version(accelerate.__version__) < Version("1.15") and not model_args.adapter_name_or_path:
        raise ValueError(
            f"accelerate {accelerate.__version__} restores only part of a LoRA adapter under FSDP; "
            f"set adapter_name_or_path: {checkpoint} beside resume_from_checkpoint, or install "
            "accelerate >= 1.15"
        )
