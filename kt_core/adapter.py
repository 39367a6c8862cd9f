"""PEFT adapters for inference: put them on a loaded model, switch them per call, merge them into a
checkpoint.

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
import json
import os
import shutil
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from safetensors import safe_open
from torch import Tensor, nn

from kt_core.adapter_config import check_complete
from kt_core.adapter_format import AdapterData, Factors, read_adapter
from kt_core.experts import Experts, Lora
from kt_core.module import KTExpertsLinear, Runner

__all__ = [
    "AdapterData",
    "adapter",
    "adapters",
    "load_adapter",
    "merge",
    "read_adapter",
    "unload_adapter",
]

_FLOATS = (torch.bfloat16, torch.float16, torch.float32)

# Leaf names of expert projections in checkpoints, per-expert layout.
_CHECKPOINT_NAMES = {
    "gate": ("gate_proj", "w1"),
    "up": ("up_proj", "w3"),
    "down": ("down_proj", "w2"),
}


# ------------------------------------------------------------------------------- on a loaded model


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

    if not isinstance(module, nn.Linear):
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
            weight + _delta(factors).to(weight), requires_grad=False
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
    check_complete(data, [n for n, m in modules.items() if isinstance(m, nn.Linear)], where)
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


# ------------------------------------------------------------------------------- into a checkpoint


def merge(
    model_dir: str | os.PathLike[str],
    adapter_dir: str | os.PathLike[str],
    out_dir: str | os.PathLike[str],
    *,
    dtype: torch.dtype | None = None,
) -> None:
    """Writes the checkpoint `model_dir` with the adapter's delta added to its weights into the new
    directory `out_dir`.

    Works shard by shard; weights keep their names, and their dtypes unless `dtype` is given (W +
    scaling * B @ A is computed in fp32 and rounded once). Modules that were trained whole
    (modules_to_save) take the place of the base's, also with more rows for new tokens. Raises
    ValueError if a delta finds no weight or a weight of another shape; `out_dir` appears only when
    complete.
    """
    source, out = Path(model_dir), Path(out_dir)
    if out.exists():
        raise ValueError(f"{out} exists; give a directory that does not")
    shards = sorted(source.glob("*.safetensors"))
    if not shards:
        raise FileNotFoundError(f"{source} has no .safetensors file; give a checkpoint directory")
    config = json.loads((source / "config.json").read_text())
    hidden = config.get("hidden_size", config.get("text_config", {}).get("hidden_size"))
    data = read_adapter(adapter_dir, hidden=hidden)
    names: dict[str, tuple[int, ...]] = {}
    for shard in shards:
        with safe_open(shard, "pt") as file:
            names |= {k: tuple(file.get_slice(k).get_shape()) for k in list(file.keys())}
    deltas = _deltas(data, names, os.fspath(adapter_dir))
    whole = _replacements(data, names, os.fspath(adapter_dir))
    if whole or dtype is not None:
        _describe(config, whole, dtype)
    temporary = out.with_name(f".{out.name}.merging")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    try:
        for entry in source.iterdir():
            if entry.is_file() and entry not in shards:
                shutil.copy2(entry, temporary / entry.name)
        for shard in shards:
            _merge_shard(shard, temporary / shard.name, deltas, whole, dtype)
        if whole or dtype is not None:
            (temporary / "config.json").write_text(json.dumps(config, indent=2) + "\n")
        os.rename(temporary, out)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _replacements(
    data: AdapterData, names: Mapping[str, tuple[int, ...]], where: str
) -> dict[str, Tensor]:
    """By checkpoint key, the weights of modules that were trained whole."""
    out = {}
    for name, tensor in data.extra.items():
        key = _present([name, name.replace(".mlp.", ".block_sparse_moe.")], names, name, where)
        shape = tuple(tensor.shape)
        grown = "embed" in name or "head" in name  # tokens may have been added
        if shape != names[key] and not (grown and shape[1:] == names[key][1:]):
            raise ValueError(
                f"{where}: {name} has shape {shape} but the checkpoint's weight {names[key]}; the "
                "adapter belongs to another model"
            )
        out[key] = tensor
    return out


def _describe(
    config: dict[str, Any], whole: Mapping[str, Tensor], dtype: torch.dtype | None
) -> None:
    """Makes config.json say what the merged weights are: rows of embeddings, dtype."""
    text = config.get("text_config", config)
    rows = {t.shape[0] for key, t in whole.items() if "embed" in key or "head" in key}
    if len(rows) > 1:
        raise ValueError(
            f"embeddings and head were trained with {sorted(rows)} rows; train both with "
            "additional_target after resize_vocab"
        )
    if rows:
        text["vocab_size"] = rows.pop()
    if dtype is not None:
        for part in {id(config): config, id(text): text}.values():
            for key in ("dtype", "torch_dtype"):
                if key in part:
                    part[key] = str(dtype).removeprefix("torch.")


def _merge_shard(
    source: Path,
    target: Path,
    deltas: Mapping[str, Callable[[], Tensor]],
    whole: Mapping[str, Tensor],
    dtype: torch.dtype | None,
) -> None:
    tensors: dict[str, Tensor] = {}
    with safe_open(source, "pt") as file:
        metadata = file.metadata()
        for key in list(file.keys()):
            weight = file.get_tensor(key)
            if key in deltas:
                if weight.dtype not in _FLOATS:
                    raise ValueError(
                        f"{source}: {key} is {weight.dtype}, to which a delta cannot be added "
                        "exactly; merge into a bf16 "
                        "checkpoint"
                    )
                weight = (weight.float() + deltas[key]()).to(dtype or weight.dtype)
            elif key in whole:
                weight = whole[key].to(dtype or weight.dtype)
            elif dtype is not None and weight.dtype in _FLOATS:
                weight = weight.to(dtype)
            tensors[key] = weight.contiguous()
    safetensors.torch.save_file(tensors, target, metadata=metadata)


def _deltas(
    data: AdapterData, names: Mapping[str, tuple[int, ...]], where: str
) -> dict[str, Callable[[], Tensor]]:
    """By checkpoint key, a function that computes the delta; every factor of the adapter is in
    exactly one.
    """
    out: dict[str, Callable[[], Tensor]] = {}

    def put(key: str, shape: tuple[int, ...], delta: Callable[[], Tensor]) -> None:
        if names[key] != shape:
            raise ValueError(
                f"{where}: the delta of {key} has shape {shape} but the checkpoint's weight "
                f"{names[key]}; the adapter "
                "belongs to another model"
            )
        out[key] = delta

    for path, f in data.dense.items():
        stored = f"{path}.weight"
        options = [stored, stored.replace(".mlp.", ".block_sparse_moe.")]
        key = _present(options, names, path, where)
        put(key, (f.b.shape[0], f.a.shape[1]), lambda f=f: _delta(f))  # type: ignore[misc]
    for path, module in data.experts.items():
        fused = f"{path}.gate_up_proj" if f"{path}.gate_up_proj" in names else None
        down = f"{path}.down_proj" if f"{path}.down_proj" in names else None
        if fused or down:
            _put_fused(put, path, module)
            continue
        for p, f in module.items():
            for e in range(f.a.shape[0]):
                options = [f"{path}.{e}.{leaf}.weight" for leaf in _CHECKPOINT_NAMES[p]]
                options += [o.replace(".mlp.", ".block_sparse_moe.") for o in options]
                key = _present(options, names, f"{path}.{e}", where)
                one = Factors(f.a[e], f.b[e], f.scaling)
                put(key, (f.b.shape[1], f.a.shape[2]), lambda f=one: _delta(f))  # type: ignore[misc]
    return out


def _put_fused(put: Callable[..., None], path: str, module: Mapping[str, Factors]) -> None:
    halves = [module.get("gate"), module.get("up")]
    known = next((f for f in halves if f is not None), None)
    if known is not None:
        e, i, h = known.a.shape[0], known.b.shape[1], known.a.shape[2]

        def both() -> Tensor:
            return torch.cat([torch.zeros(e, i, h) if f is None else _delta(f) for f in halves], 1)

        put(f"{path}.gate_up_proj", (e, 2 * i, h), both)
    if "down" in module:
        f = module["down"]
        put(f"{path}.down_proj", (f.a.shape[0], f.b.shape[1], f.a.shape[2]), lambda: _delta(f))


def _delta(f: Factors) -> Tensor:
    return f.scaling * (f.b.float() @ f.a.float())


def _present(options: list[str], names: Mapping[str, Any], what: str, where: str) -> str:
    for option in options:
        if option in names:
            return option
    raise ValueError(
        f"{where} adapts {what}, of which the checkpoint has no weight ({options[0]}); it was "
        "trained on another model"
    )
