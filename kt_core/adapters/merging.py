"""Merges a PEFT adapter into a checkpoint, shard by shard, without loading the model.

Names and shapes come from the model that config.json describes (skeleton.py), so the judge is that
of the server (fit.py); which stored tensor is which parameter, transformers says.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import safetensors.torch
import torch
from safetensors import safe_open
from torch import Tensor

from kt_core import atomic
from kt_core.adapters import merged_files
from kt_core.adapters.extra import Rows
from kt_core.adapters.factors import Factors
from kt_core.adapters.fit import Fitted, Site, fit, site_of
from kt_core.adapters.peft_format import read_adapter, refuse_variant
from kt_core.adapters.skeleton import Skeleton, skeleton, weight_files
from kt_core.loading import checkpoint, prequantized
from kt_core.loading.experts_contract import find_experts
from kt_core.loading.files import CheckpointFiles
from kt_core.loading.parts import Quantized, Stored

_FLOATS = (torch.bfloat16, torch.float16, torch.float32)


@dataclass
class _Edit:
    """What happens to one stored tensor: `value` takes its place, then every delta is added to its
    part of it, then rows are put in.
    """

    value: Tensor | None = None
    deltas: list[tuple[Callable[[Tensor], Tensor], Callable[[], Tensor]]] = field(
        default_factory=list
    )
    rows: Rows | None = None

    def apply(self, stored: Tensor, dtype: torch.dtype) -> Tensor:
        """The merged tensor; sums are computed in fp32 and rounded once."""
        weight = stored if self.value is None else self.value
        out = weight.to(dtype, copy=True)
        for view, delta in self.deltas:
            view(out).copy_(view(weight).float() + delta())
        if self.rows is not None:
            out[list(self.rows.indices)] = self.rows.values.to(dtype)
        return out.contiguous()


@dataclass(frozen=True)
class _Edits:
    """by_key: by key of a stored tensor. new: by key, the stored tensor that a tensor which the
    checkpoint does not have starts from, and its edit. rows: of embeddings and head afterwards.
    """

    by_key: Mapping[str, _Edit]
    new: Mapping[str, tuple[str, _Edit]]
    rows: int | None


def merge(
    model_dir: str | os.PathLike[str],
    adapter_dir: str | os.PathLike[str],
    out_dir: str | os.PathLike[str],
    *,
    dtype: torch.dtype | None = None,
    tokens: int | None = None,
    trust_remote_code: bool = False,
) -> None:
    """Writes the checkpoint `model_dir` with the adapter's delta added to its weights into the new
    directory `out_dir`.

    Works shard by shard; weights keep their names, and their dtypes unless `dtype` is given (W +
    scaling * B @ A is computed in fp32 and rounded once); quantized ones become bf16. Modules that
    were trained whole (modules_to_save) take the place of the base's, also with more rows for new
    tokens. Where input embeddings and head were tied and the adapter makes them differ, the head is
    written too and config.json says that they are not tied. `tokens` is the size of the tokenizer
    that will go with the result, refused where the embeddings have fewer rows. Raises ValueError
    for an adapter that does not fit, as `load_adapter` does; `out_dir` appears only when complete.
    """
    source, out, where = Path(model_dir), Path(out_dir), os.fspath(adapter_dir)
    if out.exists():
        raise ValueError(f"{out} exists; give a directory that does not")
    prequantized.refuse_directory(source)
    files = weight_files(source)
    bones = skeleton(source, trust_remote_code=trust_remote_code)
    data = read_adapter(adapter_dir, hidden=bones.model.config.get_text_config().hidden_size)
    refuse_variant(data, where)
    layouts = find_experts(bones.model) if data.experts else []
    site = site_of(bones.model, {layout.name: layout.shape for layout in layouts})
    fitted = fit(data, site, where)
    rows = fitted.token_rows or site.parameters[site.tokens[0]][0]
    if tokens is not None and rows < tokens:
        raise ValueError(
            f"the tokenizer has {tokens} tokens but the merged embeddings would have {rows} rows; "
            f"{where} was trained without these new tokens: remove them, or train it with "
            "resize_vocab"
        )
    stored = CheckpointFiles(files)
    edits = _edits(fitted, site, stored, bones, where)
    config = prequantized.without(json.loads((source / "config.json").read_text()))
    merged_files.describe(config, rows=edits.rows, untied=bool(edits.new), dtype=dtype)
    temporary = out.with_name(f".{out.name}.merging")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    try:
        merged_files.copy(source, temporary)
        (temporary / "config.json").write_text(json.dumps(config, indent=2) + "\n")
        for file in files:
            weights = [weight for weight in stored.weights if weight.file == file]
            if weights:
                _merge_shard(weights, temporary / file.name, edits, dtype)
        if (source / merged_files.INDEX).is_file() and len(files) > 1:
            merged_files.write_index(source, temporary)
        atomic.put_in_place(temporary, out)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _merge_shard(
    weights: Sequence[Stored], target: Path, edits: _Edits, dtype: torch.dtype | None
) -> None:
    """Writes the weights of one file, quantized ones dequantized to `dtype` or bf16."""
    tensors: dict[str, Tensor] = {}
    with safe_open(weights[0].file, "pt") as file:
        metadata = file.metadata()
    for entry in weights:
        edit = edits.by_key.get(entry.name)
        if isinstance(entry, Quantized):
            wanted = dtype or torch.bfloat16
            weight = entry.dequantized(torch.float32 if edit else wanted)
        else:
            weight = entry[...]
            wanted = dtype if dtype is not None and weight.dtype in _FLOATS else weight.dtype
        if edit is not None and weight.dtype not in _FLOATS:
            raise ValueError(
                f"{entry.file}: {entry.name} is {weight.dtype}, to which a delta cannot be added "
                "exactly; merge into a bf16 checkpoint"
            )
        tensors[entry.name] = (edit or _Edit()).apply(weight, wanted)
        for name, (origin, new) in edits.new.items():
            if origin == entry.name:
                tensors[name] = new.apply(weight, wanted)
    safetensors.torch.save_file(tensors, target, metadata=metadata)


def _edits(
    fitted: Fitted, site: Site, source: CheckpointFiles, bones: Skeleton, where: str
) -> _Edits:
    stored: dict[str, list[Stored]] = {}
    for entry in source.weights:
        stored.setdefault(bones.naming.parameter(entry.name), []).append(entry)
    by_parameter = _parameter_edits(fitted)
    new: dict[str, tuple[str, _Edit]] = {}
    for twin, origin in site.tied.items():
        _untie(twin, origin, by_parameter, stored, new)
    by_key: dict[str, _Edit] = {}
    for name, edit in by_parameter.items():
        found = stored.get(name, [])
        if len(found) != 1 or found[0].shape != site.parameters[name]:
            problem = (
                f"as {[(s.name, list(s.shape)) for s in found]}, not as one tensor of shape "
                f"{list(site.parameters[name])}"
                if found
                else "not at all"
            )
            raise ValueError(
                f"{where} changes {name}, which {source.files[0].parent} stores {problem}; it "
                "cannot be merged there: serve the adapter beside the base model"
            )
        by_key[found[0].name] = edit
    shapes = {path: site.experts[path] for path in fitted.experts}
    request = bones.naming.request(shapes)
    for path, parts in checkpoint.collect(source, request).items() if shapes else ():
        for part in parts:
            f = fitted.experts[path].get(part.projection)
            if f is not None:
                one = Factors(f.a[part.expert], f.b[part.expert], f.scaling)
                by_key.setdefault(part.tensor, _Edit()).deltas.append((part.view, one.delta))
    return _Edits(by_key, new, fitted.token_rows)


def _parameter_edits(fitted: Fitted) -> dict[str, _Edit]:
    out: dict[str, _Edit] = {name: _Edit(value) for name, value in fitted.values.items()}
    for path, f in fitted.dense.items():
        out.setdefault(f"{path}.weight", _Edit()).deltas.append((_all, f.delta))
    for path, f in fitted.embeddings.items():
        out.setdefault(f"{path}.weight", _Edit()).deltas.append((_all, partial(_transposed, f)))
    for path, rows in fitted.rows.items():
        out.setdefault(f"{path}.weight", _Edit()).rows = rows
    return out


def _all(weight: Tensor) -> Tensor:
    return weight


def _transposed(f: Factors) -> Tensor:
    return f.delta().T


def _untie(
    twin: str,
    origin: str,
    edits: dict[str, _Edit],
    stored: Mapping[str, Sequence[Stored]],
    new: dict[str, tuple[str, _Edit]],
) -> None:
    """Of two tied parameters, of which the checkpoint holds one: the edit of the other becomes a
    new tensor unless both end up the same.
    """
    if twin in stored and origin not in stored:
        twin, origin = origin, twin
    if origin not in stored or twin in stored or not {twin, origin} & edits.keys():
        return
    entry = stored[origin][0]
    weight = entry[...]
    ours, theirs = edits.pop(twin, _Edit()), edits.get(origin, _Edit())
    ends = [edit.apply(weight, torch.float32) for edit in (ours, theirs)]
    if not torch.equal(*ends):
        new[twin] = (entry.name, ours)
