"""Recognises the routed experts of a transformers model by contract, not by model name.

The contract, that of transformers' `use_experts_implementation`: own parameters are exactly
gate_up_proj [E, 2I, H] (gate rows first) and down_proj [E, H, I]; no bias, not transposed, gated as
act_fn(gate) * up. A class without that decorator is a row in _UNDECORATED. Whatever looks like
experts and breaks it is refused by class name: a bias or an interleaved gate that is ignored gives
noise, not an error.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass

from torch import nn

from kt_core.loading.parts import Shape
from kt_core.names import PROJECTION_KEYS, STACKED

_EXPERT_PARAMETERS = {*STACKED, *PROJECTION_KEYS.values()}

# What the decorator says about a class -> the value that means what our kernels compute.
_TRAITS = {
    "is_transposed": False,
    "has_bias": False,
    "has_gate": True,
    "is_concatenated": True,  # False: gate and up rows alternate
    "has_post_expert_norm": False,
}

# Classes without the decorator whose forward computes exactly what _TRAITS says all the same. They
# say nothing about themselves, so nothing but reading them tells: tests/kt_sft/test_round_trip.py
# compares each with its own forward.
_UNDECORATED = {"transformers.models.lfm2_moe.modeling_lfm2_moe.Lfm2MoeExperts"}

# Class of act_fn, or its name where it is a function -> name of the activation in kt_core.experts.
_ACTIVATION = {
    "silu": "silu",
    "SiLUActivation": "silu",
    "SiLU": "silu",
    "GELUActivation": "gelu",
    "GELUTanh": "gelu_tanh",
    "PytorchGELUTanh": "gelu_tanh",
    "NewGELUActivation": "gelu_tanh",
    "ReLU": "relu",
}


@dataclass(frozen=True)
class ExpertsLayout:
    """One experts module of a model: its name, sizes and activation."""

    name: str
    num_experts: int
    hidden: int
    intermediate: int
    activation: str

    @property
    def shape(self) -> Shape:
        """(experts, hidden, intermediate)."""
        return self.num_experts, self.hidden, self.intermediate


def find_experts(model: nn.Module) -> list[ExpertsLayout]:
    """The experts modules of a model whose weights are still on the meta device, in order.

    Raises ValueError naming module and class for experts that do not follow the contract.
    """
    return [
        _understand(name, module)
        for name, module in model.named_modules()
        if any(
            p.dim() == 3 and n in _EXPERT_PARAMETERS
            for n, p in module.named_parameters(recurse=False)
        )
    ]


def _understand(name: str, module: nn.Module) -> ExpertsLayout:
    own = dict(module.named_parameters(recurse=False))
    problem = _broken_contract(module, {n: tuple(p.shape) for n, p in own.items()})
    if problem is not None:
        raise ValueError(
            f"{name} is a {type(module).__name__}, whose experts {problem}; supported are "
            "gate_up_proj [E, 2I, H] and "
            "down_proj [E, H, I] with act(gate) * up: load this model without use_kt"
        )
    if any(parameter.device.type != "meta" for parameter in own.values()):
        raise ValueError(
            f"the weights of {name} exist before loading begins, as under DeepSpeed ZeRO-3; use "
            "ZeRO-2 or FSDP2"
        )
    num_experts, hidden, intermediate = own["down_proj"].shape
    return ExpertsLayout(
        name, num_experts, hidden, intermediate, _ACTIVATION[_act_fn(module) or ""]
    )


def _broken_contract(module: nn.Module, shapes: dict[str, tuple[int, ...]]) -> str | None:
    """What about these experts our kernels do not compute; None if nothing."""
    if set(shapes) != set(STACKED):
        return f"have the parameters {', '.join(sorted(shapes))}"
    traits = {k: v for k, v in vars(module).items() if k.startswith(("is_", "has_"))}
    cls = type(module)
    undecorated = f"{cls.__module__}.{cls.__qualname__}" in _UNDECORATED
    activation = _act_fn(module)
    if activation is None or not ("is_transposed" in traits or undecorated):
        return "do not follow transformers' experts interface"
    strange = [f"{k}={v}" for k, v in traits.items() if k not in _TRAITS or v != _TRAITS[k]]
    if strange:
        return f"have the trait {', '.join(strange)}"
    gate = inspect.getattr_static(cls, "_apply_gate", None)
    if gate is not None and gate.__module__ != "transformers.integrations.moe":
        return "gate in a way of their own (_apply_gate)"
    num_experts, hidden, intermediate = shapes["down_proj"]
    if shapes["gate_up_proj"] != (num_experts, 2 * intermediate, hidden):
        return f"have the shapes {list(shapes['gate_up_proj'])} and {list(shapes['down_proj'])}"
    if activation not in _ACTIVATION:
        return f"use the activation {activation}"
    return None


def _act_fn(module: nn.Module) -> str | None:
    """What `_ACTIVATION` calls a module's act_fn; None if it has none."""
    act_fn = getattr(module, "act_fn", None)
    if isinstance(act_fn, nn.Module):
        return type(act_fn).__name__
    return getattr(act_fn, "__name__", None)
