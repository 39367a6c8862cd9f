"""What this package puts in the place of names of transformers, peft and accelerate; what else is
replaced, LLaMA-Factory's names for instance, is in DESIGN.md's table.

The hooks act on models that are loaded inside `session.loading` and on what peft does with those
models; every other model of the process takes the original code.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from accelerate.state import AcceleratorState
from accelerate.utils import fsdp_utils
from peft import PeftModel
from peft.tuners.lora import LoraModel
from peft.utils import hotswap
from transformers import Trainer
from transformers.integrations.peft import PeftAdapterMixin

from kt_core import hf, patches
from kt_sft import seams
from kt_sft.lora import adapter_io, dry_run, refusals
from kt_sft.ranks import cpu_fsdp, fsdp_buffers
from kt_sft.report import card, step_log
from kt_sft.run import interruption, layer_major, value_head

try:
    from peft.utils import transformers_weight_conversion as conversion
except ImportError:  # peft < 0.19 converts nothing
    conversion = None

_AFTER = "callbacks run after reporters, not between layers"
_WHOLE = "whole checkpoints, value heads, layer_major"
_EXPERTS = "experts as targets, in adapter files"
_REFUSED = "wrong for experts: refused"
_NAMES = "they rename what our models have not"
_FSDP = "FSDP2 on CPU ranks; persistent buffers"


def _unless_experts(original: Callable[..., Any], *args: Any, **kw: Any) -> Any:
    """Returns the state dict (or nothing, for a config) unchanged if the model has CPU experts."""
    bound = inspect.signature(original).bind(*args, **kw).arguments
    if adapter_io.has_experts(bound["model"]):
        return bound.get("adapter_state_dict")
    return original(*args, **kw)


# Owner: (name, what takes its place, names of its first parameters, why).
_HOOKS: dict[Any, list[tuple[str, Callable[..., Any], str, str]]] = {
    Trainer: [
        ("log", step_log.log, "self logs", _AFTER),
        ("create_model_card", card.create_model_card, "self language license", _AFTER),
        ("training_step", interruption.training_step, "self model inputs", _AFTER),
        ("_maybe_log_save_evaluate", interruption.after_step, "self tr_loss", _AFTER),
        ("save_model", interruption.save_model, "self output_dir _internal_call", _WHOLE),
        ("_save_checkpoint", interruption.save_checkpoint, "self model trial", _WHOLE),
        ("get_train_dataloader", layer_major.get_train_dataloader, "self", _WHOLE),
        (
            *("_load_from_checkpoint", value_head.load_from_checkpoint),
            *("self resume_from_checkpoint model", _WHOLE),
        ),
    ],
    PeftModel: [
        ("__init__", dry_run.created, "self model peft_config adapter_name", _EXPERTS),
        ("add_adapter", dry_run.added, "self adapter_name peft_config", _EXPERTS),
        (
            *("save_pretrained", adapter_io.save_pretrained),
            *("self save_directory safe_serialization selected_adapters", _EXPERTS),
        ),
        (
            *("load_adapter", adapter_io.load_adapter),
            *("self model_id adapter_name is_trainable", _EXPERTS),
        ),
        (
            *("from_pretrained", adapter_io.from_pretrained),
            *("cls model model_id adapter_name is_trainable config", _EXPERTS),
        ),
    ],
    LoraModel: [
        ("inject_adapter", adapter_io.inject_adapter, "self model adapter_name", _EXPERTS),
        ("merge_adapter", refusals.merge, "self adapter_names safe_merge", _REFUSED),
        (
            *("merge_and_unload", refusals.merge),
            *("self progressbar safe_merge adapter_names", _REFUSED),
        ),
        (
            *("add_weighted_adapter", refusals.add_weighted_adapter),
            *("self adapters weights adapter_name", _REFUSED),
        ),
    ],
    hotswap: [
        (
            *("hotswap_adapter_from_state_dict", refusals.hotswap),
            *("model state_dict adapter_name config", _REFUSED),
        )
    ],
    PeftAdapterMixin: [
        ("add_adapter", refusals.own_adapters, "self adapter_config adapter_name", _REFUSED),
        ("load_adapter", refusals.own_adapters, "self peft_model_id adapter_name", _REFUSED),
    ],
    AcceleratorState: [
        (
            *("__init__", cpu_fsdp.state_init),
            *("self mixed_precision cpu dynamo_plugin deepspeed_plugin fsdp_plugin", _FSDP),
        )
    ],
    fsdp_utils: [
        (
            *("fsdp2_load_full_state_dict", fsdp_buffers.load_full_state_dict),
            *("accelerator model full_sd", _FSDP),
        )
    ],
    conversion: [
        (
            *("convert_peft_config_for_transformers", _unless_experts),
            *("peft_config model conversions", _NAMES),
        ),
        (
            *("convert_peft_adapter_state_dict_for_transformers", _unless_experts),
            *("model peft_config adapter_state_dict", _NAMES),
        ),
    ],
}


def install() -> None:
    """Installs the hooks; again is harmless. Raises RuntimeError where a library's version does not
    fit.
    """
    if patches.replaced(__name__):
        return
    hf.install()
    interruption.read_on_numbered_cpus()
    for owner, found in _HOOKS.items():
        if owner is None:  # this peft has not got it
            continue
        for name, replacement, expected, why in found:
            seams.wrap(owner, name, replacement, expected, by=__name__, why=why)


def uninstall() -> None:
    """Puts back everything that this package and kt_core replaced, in LLaMA-Factory too. Models
    loaded meanwhile keep working, but their adapters can no longer be saved.
    """
    patches.restore()
    cpu_fsdp.want(False)
