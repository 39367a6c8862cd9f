"""Adapters on a loaded model, switched per call: modules ask which factors to use."""

from __future__ import annotations

import contextvars
import copy
import functools
import os
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from kt_core.adapters.extra import Rows
from kt_core.adapters.factors import Factors
from kt_core.adapters.fit import Fitted, fit, site_of
from kt_core.adapters.peft_format import read_adapter, refuse_variant
from kt_core.experts import Experts, Lora, in_one_dtype
from kt_core.module import KTExpertsLinear, Runner, is_linear


@dataclass(frozen=True)
class _Change:
    """What an adapter changes about a module that is not experts, on the module's device."""

    lora: Factors | None = None
    values: Mapping[str, Tensor] = field(default_factory=dict)  # by name within the module
    rows: Rows | None = None


@dataclass
class _Attached:
    """The adapters of one model; its modules ask it at every call which factors to use."""

    active: contextvars.ContextVar[str | None]
    experts: dict[str, dict[str, Lora]] = field(default_factory=dict)  # name -> path
    others: dict[str, dict[str, _Change]] = field(default_factory=dict)
    hooked: set[str] = field(default_factory=set)  # paths

    def change(self, path: str) -> _Change | None:
        """What the active adapter changes about a module."""
        name = self.active.get()
        return None if name is None else self.others[name].get(path)


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
    where = os.fspath(directory)
    data = read_adapter(directory, hidden=config.hidden_size)
    refuse_variant(data, where)
    fitted = fit(data, site_of(model), where)
    modules = dict(model.named_modules(remove_duplicate=False))
    others = _changes(fitted, model, modules, where)
    if held is None:
        held = _attached[model] = _Attached(contextvars.ContextVar("kt_adapter", default=None))
    held.experts[name] = {path: _lora(module) for path, module in fitted.experts.items()}
    held.others[name] = others
    for path in (*fitted.experts, *others):
        if path not in held.hooked:
            held.hooked.add(path)
            _hook(held, path, modules[path])


def _changes(
    fitted: Fitted, model: nn.Module, modules: Mapping[str, nn.Module], where: str
) -> dict[str, _Change]:
    """By module path. Values that are the base's already are left out."""
    own = model.state_dict()
    values: dict[str, dict[str, Tensor]] = {}
    for parameter, value in fitted.values.items():
        if value.shape != own[parameter].shape:
            raise ValueError(
                f"{where} brings {len(value)} rows of {parameter} where the base model has "
                f"{len(own[parameter])}, for tokens that the base does not know; merge it "
                "(llamafactory-cli export) and serve the result"
            )
        if not _same_values(value, own[parameter]):
            path, _, leaf = parameter.rpartition(".")
            values.setdefault(path, {})[leaf] = value.to(own[parameter])
    linear = {**fitted.dense, **fitted.embeddings}
    out = {}
    for path in {**linear, **values, **fitted.rows}:
        device = next(modules[path].parameters(recurse=False)).device
        f, rows = linear.get(path), fitted.rows.get(path)
        out[path] = _Change(
            None if f is None else Factors(f.a.to(device), f.b.to(device), f.scaling),
            values.get(path, {}),
            None if rows is None else Rows(rows.indices, rows.values.to(device)),
        )
    return out


def _same_values(a: Tensor, b: Tensor) -> bool:
    """Whether one of them is the other, perhaps rounded to its dtype."""
    a = a.to(b.device)
    return torch.equal(a.to(b.dtype), b) or torch.equal(b.to(a.dtype), a)


def unload_adapter(model: nn.Module, name: str) -> None:
    """Forgets an adapter. Raises KeyError naming those that exist."""
    held = _known(model, name)
    del held.experts[name], held.others[name]


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
    factors = in_one_dtype([t for f in module.values() for t in (f.a, f.b)])
    return Lora(
        {p: t.contiguous() for p, t in zip(module, factors[::2], strict=True)},
        {p: t.contiguous() for p, t in zip(module, factors[1::2], strict=True)},
        {p: f.scaling for p, f in module.items()},
    )


def _hook(held: _Attached, path: str, module: nn.Module) -> None:
    if isinstance(module, KTExpertsLinear):
        module.runner = _switched(held, path, module.runner)
        return

    def change(module: nn.Module, inputs: Any, keywords: Any, output: Any) -> Any:
        wanted = held.change(path)
        return output if wanted is None else _changed(module, wanted, inputs, keywords, output)

    module.register_forward_hook(change, with_kwargs=True)


def _changed(module: nn.Module, change: _Change, inputs: Any, keywords: Any, output: Any) -> Any:
    """The output of `module`, which was `output`, with an adapter's change."""
    lookup, linear = isinstance(module, nn.Embedding), is_linear(module)
    values = dict(change.values)
    if change.lora is not None and not lookup and not linear:
        # It computes more than a product with its weight, e.g. a router.
        weight = values.get("weight", module.get_parameter("weight"))
        values["weight"] = weight + change.lora.delta().to(weight)
    if values:
        output = _with_values(module, values)(*inputs, **keywords)
    if lookup:
        return _changed_lookup(module, change, inputs[0], output)
    if linear and change.lora is not None:
        x = inputs[0].to(change.lora.a.dtype)
        delta = (x @ change.lora.a.T) @ change.lora.b.T
        output = (output + delta * change.lora.scaling).to(output.dtype)
    if change.rows is not None:  # of a head
        output = output.clone()
        output[..., list(change.rows.indices)] = inputs[0] @ change.rows.values.to(inputs[0]).T
    return output


def _changed_lookup(module: nn.Module, change: _Change, ids: Tensor, output: Tensor) -> Tensor:
    # An embedding may scale its rows (Gemma), so it looks up the changed ones itself.
    used, place = ids.unique(return_inverse=True)
    if change.lora is not None:
        f = change.lora
        delta = f.scaling * (f.a.float()[:, used].T @ f.b.float().T)
        added = _with_values(module, {"weight": delta.to(output.dtype)})(place)
        output = output + added
    if change.rows is not None:
        indices = torch.tensor(change.rows.indices, device=ids.device)
        new = _with_values(module, {"weight": change.rows.values.to(output.dtype)})
        hits = ids[..., None] == indices
        output = torch.where(hits.any(-1, keepdim=True), new(hits.int().argmax(-1)), output)
    return output


def _with_values(module: nn.Module, values: Mapping[str, Tensor]) -> Callable[..., Any]:
    """The forward of a twin of `module` with other parameters or buffers; a twin, because other
    threads may be inside this module with another adapter.
    """
    twin = copy.copy(module)
    twin._parameters, twin._buffers = dict(module._parameters), dict(module._buffers)
    for name, value in values.items():
        if name in twin._buffers:
            twin._buffers[name] = value
        else:
            twin._parameters[name] = nn.Parameter(value, requires_grad=False)
    return functools.partial(type(module).forward, twin)


def _switched(held: _Attached, path: str, inner: Runner) -> Runner:
    def run(
        experts: Experts, x: Tensor, index: Tensor, weights: Tensor, lora: Lora | None
    ) -> Tensor:
        name = held.active.get()
        if lora is None and name is not None:
            lora = held.experts[name].get(path)
        return inner(experts, x, index, weights, lora)

    return run
