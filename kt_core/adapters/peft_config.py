"""What adapter_config.json says: to stock peft, and to peft on a model with CPU experts. Writes the
directory too. No peft import.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import re
from collections.abc import Mapping, Sequence, Set
from pathlib import Path
from typing import Any

import safetensors.torch
from torch import Tensor

from kt_core.adapters.fused_layout import fuse, fused_tensors
from kt_core.adapters.peft_format import (
    CONFIG_FILE,
    METADATA,
    WEIGHTS_FILE,
    AdapterData,
    completed,
    expert_names,
    manifest,
    standard_tensors,
    variant_of,
)
from kt_core.names import PROJECTION_KEYS


def write_adapter(
    directory: str | os.PathLike[str],
    data: AdapterData,
    *,
    model_type: str,
    linear_paths: Sequence[str],
    other_paths: Sequence[str] = (),
    layout: str = "per_expert",
) -> None:
    """Writes `data` in the standard per-expert layout, or in the fused one:
    adapter_model.safetensors, with the manifest of all trained tensors in its metadata, and
    adapter_config.json.

    `linear_paths` are the paths of all Linear modules of the base model, adapted or not,
    `other_paths` those of all its other modules (peft adapts a Conv3d, too); targets are written by
    leaf name where that picks exactly the adapted ones. Raises ValueError for what
    stock peft cannot express. Writes straight into `directory`; the caller writes to a temporary
    place, verifies and renames.
    """
    directory = Path(directory)
    tensors, config, metadata = file_contents(
        data,
        model_type=model_type,
        linear_paths=linear_paths,
        other_paths=other_paths,
        layout=layout,
    )
    safetensors.torch.save_file(tensors, directory / WEIGHTS_FILE, metadata=metadata)
    (directory / CONFIG_FILE).write_text(config)


def file_contents(
    data: AdapterData,
    *,
    model_type: str,
    linear_paths: Sequence[str],
    other_paths: Sequence[str],
    layout: str,
) -> tuple[dict[str, Tensor], str, dict[str, str]]:
    """What `write_adapter` writes: tensors by PEFT key, adapter_config.json, safetensors metadata.
    Tensors of `data` may be on the meta device.
    """
    names = expert_names(model_type)
    config = adapter_config(data, names, linear_paths, layout, other_paths)
    own = {
        "projections": data.projections,
        "lora_dropout": data.dropout,
        "layout": layout,
        "trained": manifest(data),
    }
    metadata = {"format": "pt", METADATA: json.dumps(own)}
    text = json.dumps(config, indent=2, sort_keys=True) + "\n"
    return adapter_tensors(data, names, layout), text, metadata


def adapter_tensors(data: AdapterData, names: Mapping[str, str], layout: str) -> dict[str, Tensor]:
    """Tensors by PEFT key in a layout, per_expert or fused."""
    if layout == "per_expert":
        return standard_tensors(data, names)
    out = standard_tensors(dataclasses.replace(data, experts={}), names)
    for path, module in data.experts.items():
        fused = fused_tensors(path, module)
        out |= {f"base_model.model.{key}": tensor for key, tensor in fused.items()}
    return out


def adapter_config(
    data: AdapterData,
    names: Mapping[str, str],
    linear_paths: Sequence[str],
    layout: str,
    other_paths: Sequence[str] = (),
) -> dict[str, Any]:
    """adapter_config.json with which stock peft puts exactly these factors in place.

    Stock peft replaces targets named like expert projections by the fused expert parameters, for
    shared experts and dense MLPs too, so those are targeted as parameters
    (`shared_expert.gate_proj.weight`), which has the same keys; so is what is not a Linear, such as
    a router. Per expert, it doubles r and alpha for the fused gate and up, so r and alpha of the
    config are the experts'. Fused parameters take no dropout, and rslora would come out wrong by
    sqrt 2, so the scale is written as an ordinary alpha.
    """
    shape = _expert_shape(data)
    fused_names = set(PROJECTION_KEYS.values()) | set(names.values())
    targets: set[str] = set()
    parameters: set[str] = set()
    if layout == "fused":
        one = fuse(next(iter(data.experts.values()), {}))
        shape = {name: (f.rank, f.alpha) for name, f in one.items()}
        suffixes = {".".join(path.split(".")[-2:]) for path in data.experts}
        parameters = {f"{suffix}.{name}" for suffix in suffixes for name in shape}
    else:
        targets = {names[p] for p in shape}
    by_path = {p: (f.rank, f.alpha) for p, f in {**data.dense, **data.embeddings}.items()}
    default = next(iter(shape.values())) if shape else _commonest(list(by_path.values()))
    patterns: dict[str, tuple[int, float]] = {}
    down = shape.get("down", shape.get("down_proj", default))
    if down != default:
        patterns[r"experts\.down_proj"] = down
    linears = {*linear_paths, *data.embeddings}
    for target, paths in _grouped(
        list(by_path), [*linear_paths, *other_paths], fused_names
    ).items():
        as_parameter = target.rsplit(".", 1)[-1] in fused_names or not set(paths) <= linears
        (parameters if as_parameter else targets).add(
            f"{target}.weight" if as_parameter else target
        )
        suffix = r"\.weight" if as_parameter else ""
        values = {by_path[p] for p in paths}
        if len(values) == 1 and values != {default}:
            patterns[re.escape(target) + suffix] = values.pop()
        elif len(values) > 1:
            patterns.update({re.escape(p) + suffix: by_path[p] for p in paths})
    if data.variant and parameters:
        key = next(iter(data.variant))
        raise ValueError(
            f"{variant_of(key, data.config)}=True does not go with {sorted(parameters)[0]}, which "
            "stock PEFT adapts as a parameter; take one of them out"
        )
    config = dict(data.config)
    config.update(
        r=default[0],
        lora_alpha=_plain(default[1]),
        rank_pattern={k: r for k, (r, _) in patterns.items() if r != default[0]},
        alpha_pattern={k: _plain(a) for k, (_, a) in patterns.items() if a != default[1]},
        use_rslora=False,
        target_modules=sorted(targets),
        target_parameters=sorted(parameters) or None,
        exclude_modules=None,
        layers_to_transform=None,
        layers_pattern=None,
        lora_dropout=0.0 if shape or parameters else data.dropout,
        inference_mode=True,
    )
    return config


def _expert_shape(data: AdapterData) -> dict[str, tuple[int, float]]:
    """(rank, alpha) of the experts by projection, completed; gate first where there is one. Raises
    ValueError where layers differ, or gate and up.
    """
    modules = [completed(m) for m in data.experts.values()]
    shapes = [{p: (m[p].rank, m[p].alpha) for p in PROJECTION_KEYS if p in m} for m in modules]
    if any(shape != shapes[0] for shape in shapes):
        raise ValueError(
            "expert LoRA differs in rank, alpha or projections between layers, which a standard "
            "PEFT adapter cannot hold"
        )
    shape = shapes[0] if shapes else {}
    if "gate" in shape and shape["gate"] != shape["up"]:
        raise ValueError(
            f"gate_proj and up_proj differ in (rank, alpha) {shape['gate']} and {shape['up']}, "
            "which a standard PEFT adapter cannot hold"
        )
    return shape


def training_config(data: AdapterData, linear_paths: Set[str]) -> dict[str, Any]:
    """The LoraConfig fields with which peft on a model with CPU experts puts exactly these factors
    in place; `linear_paths` are the paths of its Linear modules.
    """
    shape = {p: (f.rank, f.alpha) for m in data.experts.values() for p, f in m.items()}
    linear_paths = linear_paths | data.embeddings.keys()
    values = {p: (f.rank, f.alpha) for p, f in {**data.dense, **data.embeddings}.items()}
    default = _commonest([*values.values(), *shape.values()])
    parameters = [f"{path}.weight" for path in values if path not in linear_paths]
    keyed = {
        re.escape(path if path in linear_paths else f"{path}.weight"): value
        for path, value in values.items()
    }
    keyed |= {rf"experts\.{PROJECTION_KEYS[p]}": value for p, value in shape.items()}
    return {
        "r": default[0],
        "lora_alpha": _plain(default[1]),
        "rank_pattern": {k: r for k, (r, _) in keyed.items() if r != default[0]},
        "alpha_pattern": {k: _plain(a) for k, (_, a) in keyed.items() if a != default[1]},
        "use_rslora": False,
        "lora_dropout": data.dropout,
        "target_modules": {path for path in values if path in linear_paths}
        | {f"experts.{PROJECTION_KEYS[p]}" for p in shape},
        "target_parameters": sorted(parameters) or None,
        "exclude_modules": None,
        "layers_to_transform": None,
        "layers_pattern": None,
    }


def _grouped(
    adapted: list[str], all_paths: Sequence[str], fused_names: set[str]
) -> dict[str, list[str]]:
    """The shortest targets that pick exactly `adapted`: leaf names, then names with their parent,
    then whole paths.

    Names in `fused_names` are never written bare, because stock peft gives those another meaning.
    """
    out: dict[str, list[str]] = {}
    everything = set(all_paths) | set(adapted)
    rest = list(adapted)
    for depth in (1, 2):
        groups: dict[str, list[str]] = {}
        for path in rest:
            groups.setdefault(".".join(path.split(".")[-depth:]), []).append(path)
        for target, paths in groups.items():
            hit = {p for p in everything if p == target or p.endswith(f".{target}")}
            if hit == set(paths) and target not in fused_names:
                out[target] = paths
        rest = [p for p in rest if not any(p in paths for paths in out.values())]
    return out | {path: [path] for path in rest}


def _commonest(values: list[tuple[int, float]]) -> tuple[int, float]:
    if not values:
        raise ValueError("the adapter holds no LoRA tensor; check its target_modules")
    return max(values, key=values.count)


def _plain(alpha: float) -> float | int:
    rounded = round(alpha)
    return rounded if math.isclose(alpha, rounded, rel_tol=1e-12) else alpha
