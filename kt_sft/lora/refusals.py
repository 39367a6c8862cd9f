"""What peft and transformers do with an adapter that LoRA on experts in CPU memory cannot take part
in: refused in one sentence, before anything has changed, with the way that is.

Each function here takes the place of one of theirs (see hooks.py) and hands models without such
LoRA to the original.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from kt_core.module import KTExpertsLinear
from kt_sft.lora.layer import MERGE, KTExpertsLoraLinear


def _on_experts(model: nn.Module, adapters: list[str] | None = None) -> str | None:
    """An adapter, of `adapters` where given, that has LoRA on experts in CPU memory."""
    for module in model.modules():
        if isinstance(module, KTExpertsLoraLinear):
            for name in module.lora_A if adapters is None else adapters:
                if name in module.lora_A:
                    return str(name)
    return None


def merge(original: Callable[..., Any], self: Any, *args: Any, **kw: Any) -> Any:
    """LoraModel.merge_adapter and merge_and_unload, which would merge the modules before the first
    experts.
    """
    if _on_experts(self) is not None:
        raise ValueError(MERGE)
    return original(self, *args, **kw)


def add_weighted_adapter(
    original: Callable[..., None], self: Any, adapters: list[str], *args: Any, **kw: Any
) -> None:
    """LoraModel.add_weighted_adapter."""
    if (name := _on_experts(self, adapters)) is not None:
        raise ValueError(
            f"add_weighted_adapter cannot combine adapter {name!r}, which has LoRA on experts in "
            f"CPU memory; use them together with model.base_model.set_adapter({adapters}), or "
            "merge them into a checkpoint one after the other with kt_core.adapters.merge"
        )
    original(self, adapters, *args, **kw)


def hotswap(original: Callable[..., None], model: nn.Module, *args: Any, **kw: Any) -> None:
    """peft.utils.hotswap's function under hotswap_adapter."""
    if _on_experts(model) is not None:
        raise ValueError(
            "hotswap_adapter cannot swap LoRA on experts in CPU memory; load the other adapter "
            "beside this one with model.load_adapter(directory, name), then model.set_adapter(name)"
        )
    original(model, *args, **kw)


def own_adapters(original: Callable[..., None], self: Any, *args: Any, **kw: Any) -> None:
    """add_adapter and load_adapter of transformers' models: their save_pretrained does not know
    such adapters, and per-expert tensors find no place.
    """
    if any(isinstance(m, KTExpertsLinear) for m in self.modules()):
        raise ValueError(
            f"{type(self).__name__}.add_adapter and load_adapter cannot save or load LoRA beside "
            "experts in CPU memory; use peft.get_peft_model(model, config) or "
            "peft.PeftModel.from_pretrained(model, directory)"
        )
    original(self, *args, **kw)
