"""An adapter is saved once on the meta device as soon as it has been created, before anything is
trained: an option that could only fail at the first save ends the run here.

The functions `created` and `added` take the place of peft's (see hooks.py).
"""

from __future__ import annotations

import json
import logging
import warnings
from collections.abc import Callable
from typing import Any

import peft
import torch
from peft import LoraConfig, PeftModel
from torch import nn

from kt_core.adapters.peft_config import file_contents, training_config
from kt_core.adapters.peft_format import manifest, parse_adapter
from kt_sft.lora import adapter_io, stock_peft, targets


def created(
    original: Callable[..., None],
    self: PeftModel,
    model: nn.Module,
    peft_config: Any,
    adapter_name: str = "default",
    *args: Any,
    **kw: Any,
) -> None:
    """PeftModel.__init__."""
    original(self, model, peft_config, adapter_name, *args, **kw)
    check(self, adapter_name)


def added(
    original: Callable[..., None],
    self: PeftModel,
    adapter_name: str,
    peft_config: Any,
    *args: Any,
    **kw: Any,
) -> None:
    """PeftModel.add_adapter."""
    original(self, adapter_name, peft_config, *args, **kw)
    check(self, adapter_name)


def check(model: PeftModel, name: str) -> None:
    """Raises ValueError if adapter `name` of `model`, were it trained now, could not be saved and
    read again in full; warns where stock peft would not read it. Writes nothing.
    """
    config = model.peft_config[name]
    if not adapter_io.has_experts(model) or config.inference_mode:
        return
    if not isinstance(config, LoraConfig):
        raise ValueError(
            f"peft_type={config.peft_type.value} is not supported beside experts in CPU memory; "
            "use a LoraConfig"
        )
    try:
        _all_is_saved(model, name)
        _reads_back(model, name)
    except (ValueError, MemoryError):
        raise
    except Exception as error:
        raise ValueError(
            f"an adapter with this LoraConfig could not be saved ({type(error).__name__}: {error});"
            " remove its last option"
        ) from error


def _all_is_saved(model: PeftModel, name: str) -> None:
    """Every parameter that is trained now is in what peft saves of adapter `name`."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        state = model.state_dict(keep_vars=True)
        kept = adapter_io.state_of(model, name, state_dict=state)
    saved = {id(tensor) for tensor in kept.values()}
    others = [f".{other}." for other in model.peft_config if other != name]
    for key, parameter in model.named_parameters():
        elsewhere = any(other in f"{key}." for other in others)
        if parameter.requires_grad and id(parameter) not in saved and not elsewhere:
            bias = vars(model.peft_config[name])["bias"]
            fix = (
                f"bias={bias!r} does that; set it to all or none"
                if key.endswith("bias")
                else "take it out of the LoraConfig"
            )
            raise ValueError(
                f"{key} would be trained, but peft {peft.__version__} does not save it: {fix}"
            )


def _reads_back(model: PeftModel, name: str) -> None:
    """The way of `save_pretrained` and back, without values."""
    base = model.get_base_model()
    data = adapter_io.planned(model, name)
    choice = adapter_io.choose_layout(base, data)
    tensors, text, metadata = file_contents(
        data,
        model_type=targets.model_type_of(base),
        linear_paths=adapter_io.linear_paths(base),
        other_paths=adapter_io.other_paths(base),
        layout=choice.layout,
    )
    config = json.loads(text)
    where = "the adapter of this LoraConfig"
    again = parse_adapter(tensors, config, metadata, where=where)
    if manifest(again) != manifest(data):
        raise ValueError(f"{where} would read back as another one; remove its last option")
    training_config(again, set(adapter_io.linear_paths(base)))
    if not torch.distributed.is_initialized() or torch.distributed.get_rank() == 0:
        stock_peft.say(choice, base, logging.WARNING)
