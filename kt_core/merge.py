"""Merges a PEFT adapter into a checkpoint, shard by shard, without loading the model."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from safetensors import safe_open
from torch import Tensor

from kt_core.adapter_format import AdapterData, Factors, read_adapter

_FLOATS = (torch.bfloat16, torch.float16, torch.float32)

# Leaf names of expert projections in checkpoints, per-expert layout.
_CHECKPOINT_NAMES = {
    "gate": ("gate_proj", "w1"),
    "up": ("up_proj", "w3"),
    "down": ("down_proj", "w2"),
}


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
        put(key, (f.b.shape[0], f.a.shape[1]), lambda f=f: f.delta())  # type: ignore[misc]
    for path, f in data.embeddings.items():
        key = _present([f"{path}.weight"], names, path, where)
        put(key, (f.a.shape[1], f.b.shape[0]), lambda f=f: f.delta().T)  # type: ignore[misc]
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
                put(key, (f.b.shape[1], f.a.shape[2]), lambda f=one: f.delta())  # type: ignore[misc]
    return out


def _put_fused(put: Callable[..., None], path: str, module: Mapping[str, Factors]) -> None:
    halves = [module.get("gate"), module.get("up")]
    known = next((f for f in halves if f is not None), None)
    if known is not None:
        e, i, h = known.a.shape[0], known.b.shape[1], known.a.shape[2]

        def both() -> Tensor:
            return torch.cat([torch.zeros(e, i, h) if f is None else f.delta() for f in halves], 1)

        put(f"{path}.gate_up_proj", (e, 2 * i, h), both)
    if "down" in module:
        f = module["down"]
        put(f"{path}.down_proj", (f.a.shape[0], f.b.shape[1], f.a.shape[2]), lambda: f.delta())


def _present(options: list[str], names: Mapping[str, Any], what: str, where: str) -> str:
    for option in options:
        if option in names:
            return option
    raise ValueError(
        f"{where} adapts {what}, of which the checkpoint has no weight ({options[0]}); it was "
        "trained on another model"
    )
