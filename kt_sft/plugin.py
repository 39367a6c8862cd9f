"""install() and uninstall() of the hooks into transformers, peft and accelerate. What else is
replaced in other libraries is listed in DESIGN.md.

The hooks act on models that are loaded inside `loading(config)` and on what peft does with those
models; every other model of the process takes the original code.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from kt_core import hf
from kt_core.module import KTExpertsLinear
from kt_sft import seams
from kt_sft.config import KTConfig, settings_of
from kt_sft.cpu import malloc
from kt_sft.lora import model_parts
from kt_sft.op import autograd
from kt_sft.op.checkpointing import retain_experts
from kt_sft.ranks import cpu_fsdp, fsdp_buffers
from kt_sft.ranks.host import host_of_run
from kt_sft.run import layer_major

_installed: list[tuple[Any, str, Any]] = []  # owner, attribute, what stood there
_ACCELERATOR_STATE = [
    *("self", "mixed_precision", "cpu", "dynamo_plugin", "deepspeed_plugin", "fsdp_plugin")
]


def install() -> None:
    """Installs the hooks; again is harmless. Raises RuntimeError where a library's version does not
    fit.
    """
    if _installed:
        return
    import peft
    from accelerate.state import AcceleratorState
    from accelerate.utils import fsdp_utils
    from peft.tuners.lora import LoraModel
    from peft.utils import hotswap
    from transformers import Trainer
    from transformers.integrations.peft import PeftAdapterMixin

    from kt_sft.lora import adapter_io, dry_run, refusals
    from kt_sft.report import card, step_log
    from kt_sft.run import interruption, value_head

    hf.install()
    interruption.read_on_numbered_cpus()
    wrap(Trainer, "log", step_log.log, ["self", "logs"])
    wrap(Trainer, "create_model_card", card.create_model_card, ["self", "language", "license"])
    wrap(
        Trainer,
        "_load_from_checkpoint",
        value_head.load_from_checkpoint,
        ["self", "resume_from_checkpoint", "model"],
    )
    wrap(Trainer, "get_train_dataloader", layer_major.get_train_dataloader, ["self"])
    wrap(Trainer, "training_step", interruption.training_step, ["self", "model", "inputs"])
    wrap(Trainer, "_maybe_log_save_evaluate", interruption.after_step, ["self", "tr_loss"])
    wrap(Trainer, "save_model", interruption.save_model, ["self", "output_dir", "_internal_call"])
    wrap(Trainer, "_save_checkpoint", interruption.save_checkpoint, ["self", "model", "trial"])
    wrap(LoraModel, "inject_adapter", adapter_io.inject_adapter, ["self", "model", "adapter_name"])
    names = ["self", "model", "peft_config", "adapter_name"]
    wrap(peft.PeftModel, "__init__", dry_run.created, names)
    names = ["self", "adapter_name", "peft_config"]
    wrap(peft.PeftModel, "add_adapter", dry_run.added, names)
    names = ["self", "adapter_names", "safe_merge"]
    wrap(LoraModel, "merge_adapter", refusals.merge, names)
    names = ["self", "progressbar", "safe_merge", "adapter_names"]
    wrap(LoraModel, "merge_and_unload", refusals.merge, names)
    wrap(
        LoraModel,
        "add_weighted_adapter",
        refusals.add_weighted_adapter,
        ["self", "adapters", "weights", "adapter_name"],
    )
    names = ["model", "state_dict", "adapter_name", "config"]
    wrap(hotswap, "hotswap_adapter_from_state_dict", refusals.hotswap, names)
    for name, first in (("add_adapter", "adapter_config"), ("load_adapter", "peft_model_id")):
        wrap(PeftAdapterMixin, name, refusals.own_adapters, ["self", first, "adapter_name"])
    wrap(
        peft.PeftModel,
        "save_pretrained",
        adapter_io.save_pretrained,
        ["self", "save_directory", "safe_serialization", "selected_adapters"],
    )
    wrap(AcceleratorState, "__init__", cpu_fsdp.state_init, _ACCELERATOR_STATE)
    wrap(
        fsdp_utils,
        "fsdp2_load_full_state_dict",
        fsdp_buffers.load_full_state_dict,
        ["accelerator", "model", "full_sd"],
    )
    wrap(
        peft.PeftModel,
        "load_adapter",
        adapter_io.load_adapter,
        ["self", "model_id", "adapter_name", "is_trainable"],
    )
    wrap(
        peft.PeftModel,
        "from_pretrained",
        adapter_io.from_pretrained,
        ["cls", "model", "model_id", "adapter_name", "is_trainable", "config"],
    )
    try:
        from peft.utils import transformers_weight_conversion as conversion
    except ImportError:  # peft < 0.19 converts nothing
        return
    # peft rewrites per-expert names for fused parameters, which a model with CPU experts does not
    # have.
    wrap(
        conversion,
        "convert_peft_config_for_transformers",
        _unless_experts,
        ["peft_config", "model", "conversions"],
    )
    wrap(
        conversion,
        "convert_peft_adapter_state_dict_for_transformers",
        _unless_experts,
        ["model", "peft_config", "adapter_state_dict"],
    )


def uninstall() -> None:
    """Puts the originals back. Models loaded meanwhile keep working, but their adapters can no
    longer be saved.
    """
    while _installed:
        owner, name, original = _installed.pop()
        setattr(owner, name, original)
    cpu_fsdp.want(False)


def _unless_experts(original: Callable[..., Any], *args: Any, **kw: Any) -> Any:
    """Returns the state dict (or nothing, for a config) unchanged if the model has CPU experts."""
    from kt_sft.lora.adapter_io import has_experts

    bound = inspect.signature(original).bind(*args, **kw).arguments
    if has_experts(bound["model"]):
        return bound.get("adapter_state_dict")
    return original(*args, **kw)


def wrap(owner: Any, name: str, replacement: Callable[..., Any], expected: list[str]) -> None:
    """Puts `replacement(original, ...)` in the place of owner.name, whose first parameters must be
    `expected`, until uninstall().
    """
    stored = inspect.getattr_static(owner, name)
    function = stored.__func__ if isinstance(stored, classmethod) else stored
    found = list(inspect.signature(function).parameters)[: len(expected)]
    if found != expected:
        import peft
        import transformers

        raise RuntimeError(
            f"{owner.__module__}.{owner.__name__}.{name} (peft {peft.__version__}, transformers "
            f"{transformers.__version__}) takes {found}, not {expected}; this version is not "
            "supported, install one from constraints.txt"
        )

    hooked = functools.wraps(function)(seams.by_name(function, replacement))
    vars(hooked)["kt_replacement"] = replacement

    own = name in vars(owner)
    _installed.append((owner, name, stored if own else function))
    setattr(owner, name, classmethod(hooked) if isinstance(stored, classmethod) else hooked)


@contextmanager
def loading(config: KTConfig, *, router: bool = True, again: bool = False) -> Iterator[None]:
    """Inside it, `from_pretrained` of a causal language model puts the experts into CPU memory,
    ready for training, one copy per host, and new adapters get the ranks of `config`; for `router`
    see NewAdapters. `again`: a second model of the run, which shares the experts of the first if it
    is from the same checkpoint. Collective: every rank of a run loads the model.
    """
    install()
    cpu_fsdp.want(True)
    runner = autograd.runner(config.activation)
    new = model_parts.NewAdapters(config.lora_rank or {}, router)
    with (
        host_of_run() as host,
        hf.experts_on_cpu(config, runner=runner, host=host, reuse=again),
        model_parts.rules(new),
    ):
        yield


def load_for_training(path: str, config: KTConfig | None = None, **kw: Any) -> nn.Module:
    """The model at `path` with the experts in CPU memory, ready for peft and training; `kw` go to
    `from_pretrained`. The class is that of `kt_core.hf.load_model`.
    """
    config = config or KTConfig()
    hf.refuse_quantized(path, kw)
    auto = hf.auto_class(hf.config_of(path, kw))
    with loading(config):
        model: nn.Module = auto.from_pretrained(path, **kw)
    prepare(model)
    return model


def prepare(model: nn.Module) -> None:
    """What a model that was loaded inside `loading` needs beside its experts: checkpointing that
    keeps their outputs (activation: retain), their checks, and, without an accelerator, a heap that
    suits training.
    """
    modules = [m for m in model.modules() if isinstance(m, KTExpertsLinear)]
    if not modules:
        raise ValueError(
            f"{type(model).__name__} has no experts in CPU memory; use_kt is for "
            "mixture-of-experts models, remove it"
        )
    config = settings_of(model)
    for module in modules:
        module.experts.check_finite = config.check_finite
    if not torch.accelerator.is_available():
        malloc.tend(model)
    if config.activation == "retain":
        retain_experts(model)


# Python looks up PeftModel.from_pretrained before it calls load_for_training for its argument, so
# the hooks are there from the moment this module is imported.
install()
