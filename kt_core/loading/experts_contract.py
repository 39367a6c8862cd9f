"""Recognises the routed experts of a transformers model by contract, not by model name.

The contract, that of transformers' `use_experts_implementation`: own parameters are exactly
gate_up_proj [E, 2I, H] (gate rows first) and down_proj [E, H, I]; no bias, not transposed, gated as
act_fn(gate) * up. Whatever looks like experts and breaks it is refused by class name: a bias or an
interleaved gate that is ignored gives noise, not an error.
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

# Class of act_fn -> name of the activation in kt_core.experts.
_ACTIVATION = {
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
        name, num_experts, hidden, intermediate, _ACTIVATION[_class_of(module, "act_fn")]
    )


def _broken_contract(module: nn.Module, shapes: dict[str, tuple[int, ...]]) -> str | None:
    """What about these experts our kernels do not compute; None if nothing."""
    if set(shapes) != set(STACKED):
        return f"have the parameters {', '.join(sorted(shapes))}"
    traits = {k: v for k, v in vars(module).items() if k.startswith(("is_", "has_"))}
    if "is_transposed" not in traits or "act_fn" not in module._modules:
        return "do not follow transformers' experts interface"
    strange = [f"{k}={v}" for k, v in traits.items() if k not in _TRAITS or v != _TRAITS[k]]
    if strange:
        return f"have the trait {', '.join(strange)}"
    if (
        inspect.getattr_static(type(module), "_apply_gate").__module__
        != "transformers.integrations.moe"
    ):
        return "gate in a way of their own (_apply_gate)"
    num_experts, hidden, intermediate = shapes["down_proj"]
    if shapes["gate_up_proj"] != (num_experts, 2 * intermediate, hidden):
        return f"have the shapes {list(shapes['gate_up_proj'])} and {list(shapes['down_proj'])}"
    if _class_of(module, "act_fn") not in _ACTIVATION:
        return f"use the activation {_class_of(module, 'act_fn')}"
    return None


def _class_of(module: nn.Module, child: str) -> str:
    return type(module.get_submodule(child)).__name__
