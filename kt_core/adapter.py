"""PEFT adapters for inference: put them on a loaded model and switch them per call; `merge`
(merge.py) writes one into a checkpoint.

    load_adapter(model, "demo/adapter", "tuned")
    with adapter(model, "tuned"):
        model.generate(...)
    with adapter(model, None): ...            # the base model

Reading directories and the orientation of factors are in adapter_format.py, what the config says is
in adapter_config.py; there is no peft import here.
"""

from __future__ import annotations

import contextvars
import copy
import os
import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from kt_core.adapter_config import check_complete
from kt_core.adapter_format import AdapterData, Factors, read_adapter
from kt_core.experts import Experts, Lora
from kt_core.merge import merge
from kt_core.module import KTExpertsLinear, Runner, is_linear

__all__ = [
    "AdapterData",
    "adapter",
    "adapters",
    "load_adapter",
    "merge",
    "read_adapter",
    "unload_adapter",
]


@dataclass
class _Attached:
    """The adapters of one model; its modules ask it at every call which factors to use."""

    active: contextvars.ContextVar[str | None]
    experts: dict[str, dict[str, Lora]] = field(default_factory=dict)  # name -> path
    dense: dict[str, dict[str, Factors]] = field(default_factory=dict)
    hooked: set[str] = field(default_factory=set)  # paths


_attached: weakref.WeakKeyDictionary[nn.Module, _Attached] = weakref.WeakKeyDictionary()


def load_adapter(model: Any, directory: str | os.PathLike[str], name: str) -> None:
    """Reads a PEFT LoRA directory and puts it on `model` (loaded by kt_core) under `name`; it is
    not active yet.

    Raises FileNotFoundError or ValueError, naming the tensor, for an adapter of another model, a
    rank or shape that does not fit, or anything that could not be applied; the model is then
    unchanged.
    """
    held = _attached.get(model)
    if held is not None and name in held.experts:
        raise ValueError(
            f"adapter {name!r} is loaded already; unload_adapter it first or choose another name"
        )
    config = model.config.get_text_config()
    data = read_adapter(directory, hidden=config.hidden_size)
    modules = dict(model.named_modules())
    where = os.fspath(directory)
    _check(data, modules, type(model).__name__, where)
    if held is None:
        held = _attached[model] = _Attached(contextvars.ContextVar("kt_adapter", default=None))
    held.experts[name] = {path: _lora(module) for path, module in data.experts.items()}
    held.dense[name] = {}
    for path, f in data.dense.items():
        device = modules[path].weight.device
        held.dense[name][path] = Factors(f.a.to(device), f.b.to(device), f.scaling)
    for path in (*data.experts, *data.dense):
        if path not in held.hooked:
            held.hooked.add(path)
            _hook(held, path, modules[path])


def unload_adapter(model: nn.Module, name: str) -> None:
    """Forgets an adapter. Raises KeyError naming those that exist."""
    held = _known(model, name)
    del held.experts[name], held.dense[name]


def adapters(model: nn.Module) -> list[str]:
    """Names of the adapters on `model`."""
    held = _attached.get(model)
    return [] if held is None else list(held.experts)


@contextmanager
def adapter(model: nn.Module, name: str | None) -> Iterator[None]:
    """Inside it, calls of `model` made by this thread use adapter `name`, or the base model for
    None.
    """
    if name is None and model not in _attached:
        yield
        return
    held = _attached[model] if name is None else _known(model, name)
    token = held.active.set(name)
    try:
        yield
    finally:
        held.active.reset(token)


def _known(model: nn.Module, name: str) -> _Attached:
    held = _attached.get(model)
    if held is None or name not in held.experts:
        raise KeyError(
            f"no adapter {name!r}; this model has {', '.join(adapters(model)) or 'none'}"
        )
    return held


def _lora(module: Mapping[str, Factors]) -> Lora:
    return Lora(
        {p: f.a.contiguous() for p, f in module.items()},
        {p: f.b.contiguous() for p, f in module.items()},
        {p: f.scaling for p, f in module.items()},
    )


def _hook(held: _Attached, path: str, module: nn.Module) -> None:
    if isinstance(module, KTExpertsLinear):
        module.runner = _switched(held, path, module.runner)
        return

    if not is_linear(module):
        _adapt_weight(held, path, module)
        return

    def add(linear: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
        name = held.active.get()
        factors = None if name is None else held.dense[name].get(path)
        if factors is None:
            return output
        x = inputs[0].to(factors.a.dtype)
        delta = (x @ factors.a.T) @ factors.b.T
        return (output + delta * factors.scaling).to(output.dtype)

    module.register_forward_hook(add)


def _adapt_weight(held: _Attached, path: str, module: nn.Module) -> None:
    """For a module that computes more than a product with its weight, e.g. a router."""

    def forward(*args: Any, **kw: Any) -> Any:
        name = held.active.get()
        factors = None if name is None else held.dense[name].get(path)
        if factors is None:
            return type(module).forward(module, *args, **kw)
        weight = module.get_parameter("weight")
        # A twin, because other threads may be inside this module with another adapter.
        twin = copy.copy(module)
        twin._parameters = dict(module._parameters)
        twin._parameters["weight"] = nn.Parameter(
            weight + factors.delta().to(weight), requires_grad=False
        )
        return type(module).forward(twin, *args, **kw)

    module.forward = forward


def _switched(held: _Attached, path: str, inner: Runner) -> Runner:
    def run(
        experts: Experts, x: Tensor, index: Tensor, weights: Tensor, lora: Lora | None
    ) -> Tensor:
        name = held.active.get()
        if lora is None and name is not None:
            lora = held.experts[name].get(path)
        return inner(experts, x, index, weights, lora)

    return run


def _check(data: AdapterData, modules: Mapping[str, nn.Module], model: str, where: str) -> None:
    base = data.config.get("base_model_name_or_path")
    if data.extra:
        raise ValueError(
            f"{where} holds the whole module {next(iter(data.extra))}, which cannot be switched "
            "per call; train without "
            "modules_to_save (additional_target)"
        )
    if data.embeddings:
        raise ValueError(
            f"{where} adapts the embedding {next(iter(data.embeddings))}, which cannot be switched "
            "per call yet; merge it"
        )
    check_complete(data, [n for n, m in modules.items() if is_linear(m)], where)
    experts_paths = [n for n, m in modules.items() if isinstance(m, KTExpertsLinear)]
    lost = [n for n in experts_paths if n not in data.experts]
    chosen = ("layers_to_transform", "layers_pattern", "exclude_modules", "target_parameters")
    if data.experts and lost and not any(data.config.get(key) for key in chosen):
        raise ValueError(
            f"{where} has expert tensors but none for {lost[0]} ({len(lost)} layers are missing); "
            f"the file is incomplete or was trained on another model ({base})"
        )
    for path, module in data.experts.items():
        experts = modules.get(path)
        if not isinstance(experts, KTExpertsLinear):
            raise ValueError(
                f"{where} adapts {path}, where {model} has no experts; it was trained on another "
                f"model ({base})"
            )
        sizes = (experts.num_experts, experts.hidden_dim, experts.intermediate_dim)
        for p, f in module.items():
            e, h, i = sizes
            fan_in, fan_out = (i, h) if p == "down" else (h, i)
            _same(f.a, (e, f.rank, fan_in), f"{path} {p}_proj lora_A", where, base)
            _same(f.b, (e, fan_out, f.rank), f"{path} {p}_proj lora_B", where, base)
    for path, f in data.dense.items():
        weight = dict(modules[path].named_parameters(recurse=False)) if path in modules else {}
        if "weight" not in weight or weight["weight"].dim() != 2:
            raise ValueError(
                f"{where} adapts {path}, where {model} has no matrix; it was trained on another "
                f"model ({base})"
            )
        fan_out, fan_in = weight["weight"].shape
        _same(f.a, (f.rank, fan_in), f"{path} lora_A", where, base)
        _same(f.b, (fan_out, f.rank), f"{path} lora_B", where, base)


def _same(tensor: Tensor, shape: tuple[int, ...], what: str, where: str, base: object) -> None:
    if tuple(tensor.shape) != shape:
        raise ValueError(
            f"{where}: {what} has shape {tuple(tensor.shape)} but this model needs {shape}; it was "
            "trained on another "
            f"model ({base})"
        )
