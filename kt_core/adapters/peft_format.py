"""The mapping between PEFT adapter directories and per-projection LoRA factors. No peft import;
orientation lives here.

In memory (`AdapterData`): for every experts module and projection (gate, up, down) A [E, r, in] and
B [E, out, r], for every other Linear A [r, in] and B [out, r]; delta W = scaling * B @ A, W being
[out, in]; gate, up: in = hidden H, out = intermediate I; down: in = I, out = H.

On disk three layouts are read, and the first is written unless another is asked for:

- per expert: <path>.experts.{e}.{gate_proj|up_proj|down_proj}.lora_{A|B}.weight, A [r, in] and
  B [out, r]; Mixtral-like models publish w1, w3, w2 instead. This is what stock peft >= 0.20 reads
  with transformers >= 5.5.4.
- fused 0.20: <path>.experts.base_layer (gate_up) and <path>.experts (down), A [E*r, in]
  expert-major, B [out, r*E] expert-minor, as peft's target_parameters writes them; written on
  request, see fused_layout.py.
- fused 0.18: the same with `in` and `out` exchanged, that is, for the transposed weight.
"""

from __future__ import annotations

import functools
import json
import math
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import safetensors
import torch
from safetensors import safe_open
from torch import Tensor

from kt_core.adapters.factors import Factors
from kt_core.adapters.fused_layout import split
from kt_core.adapters.rules import check_config, picks_expert
from kt_core.names import PROJECTION_KEYS, PROJECTION_OF, STACKED, projection_names

WEIGHTS_FILE, CONFIG_FILE = "adapter_model.safetensors", "adapter_config.json"
METADATA = "kt"  # our entry among the safetensors metadata: what the standard config cannot say
_EXPERT = re.compile(
    r"^(?P<path>.+\.experts)\.(?P<e>\d+)\.(?P<name>\w+)\.lora_(?P<ab>[AB])\.weight$"
)
_FUSED = re.compile(r"^(?P<path>.+\.experts)(?P<inner>\.base_layer)?\.lora_(?P<ab>[AB])\.weight$")
_DENSE = re.compile(r"^(?P<path>.+)\.lora_(?P<ab>[AB])\.weight$")
# End of a key -> the option of LoraConfig that brings it: for kinds of LoRA that stock peft applies
# and that are carried along here, but neither served nor merged.
VARIANTS = {".lora_magnitude_vector": "use_dora", ".lora_B.bias": "lora_bias"}
_EMBEDDING = re.compile(r"^(?P<path>.+)\.lora_embedding_(?P<ab>[AB])$")


@functools.cache
def expert_names(model_type: str) -> dict[str, str]:
    """Leaf names of the expert projections in published checkpoints of a model type, as
    transformers' table of conversions has them.
    """
    from transformers.conversion_mapping import get_checkpoint_conversion_mapping
    from transformers.core_model_loading import WeightConverter

    names = dict(PROJECTION_KEYS)
    for entry in get_checkpoint_conversion_mapping(model_type) or ():
        if isinstance(entry, WeightConverter):
            for pattern in entry.source_patterns:
                leaf = pattern.removesuffix("$").removesuffix(".weight").rpartition(".")[2]
                if leaf in PROJECTION_OF:
                    names[PROJECTION_OF[leaf]] = leaf
    return names


def pattern_value(patterns: Mapping[str, Any] | None, names: Sequence[str], default: Any) -> Any:
    """peft's rank_pattern / alpha_pattern rule: the first pattern that ends any of `names`, else
    `default`.
    """
    for pattern, value in (patterns or {}).items():
        if any(re.match(rf"(.*\.)?({pattern})$", name) for name in names):
            return value
    return default


@dataclass(frozen=True)
class AdapterData:
    """An adapter in memory; module paths are those of the transformers model, e.g.
    model.layers.0.mlp.experts.

    embeddings: LoRA of nn.Embedding modules, a [r, V] and b [H, r] as peft stores them: the delta
    of the weight [V, H] is the transpose of scaling * b @ a. extra: every tensor that is not LoRA,
    by the key it has in the file without peft's prefix (whole modules, biases, copies of base
    weights; see extra.py). variant: what DoRA and lora_bias train beside the factors of
    dense modules, by the key it has there. dropout: of the training run.
    """

    config: Mapping[str, Any]
    experts: Mapping[str, Mapping[str, Factors]]
    dense: Mapping[str, Factors]
    extra: Mapping[str, Tensor] = field(default_factory=dict)
    dropout: float = 0.0
    embeddings: Mapping[str, Factors] = field(default_factory=dict)
    whole: bool = False  # a manifest in the file says that every tensor of the training is there
    variant: Mapping[str, Tensor] = field(default_factory=dict)

    @property
    def projections(self) -> list[str]:
        """The projections that carry LoRA, in the order gate, up, down."""
        found = {p for module in self.experts.values() for p in module}
        return [p for p in PROJECTION_KEYS if p in found]


# ----------------------------------------------------------------------------------------- reading


def read_adapter(directory: str | os.PathLike[str], *, hidden: int | None = None) -> AdapterData:
    """Reads a PEFT LoRA directory of any of the three layouts.

    `hidden` is the hidden size of the model it is for, needed only where a fused layout cannot be
    told from its shapes. Raises FileNotFoundError for missing files, ValueError for anything that
    cannot be applied exactly as it was meant.
    """
    directory = Path(directory)
    for name in (CONFIG_FILE, WEIGHTS_FILE):
        if not (directory / name).is_file():
            raise FileNotFoundError(
                f"{directory} has no {name}; give a directory that PEFT's save_pretrained wrote"
            )
    config = json.loads((directory / CONFIG_FILE).read_text())
    try:
        with safe_open(directory / WEIGHTS_FILE, "pt") as file:
            metadata = file.metadata() or {}
            tensors = {key: file.get_tensor(key) for key in list(file.keys())}
    except safetensors.SafetensorError as error:
        raise ValueError(
            f"{directory / WEIGHTS_FILE} is damaged ({error}); copy or save the adapter again"
        ) from error
    return parse_adapter(tensors, config, metadata, hidden=hidden, where=str(directory))


def parse_adapter(
    tensors: Mapping[str, Tensor],
    config: Mapping[str, Any],
    metadata: Mapping[str, str],
    *,
    hidden: int | None = None,
    where: str = "adapter",
) -> AdapterData:
    """`read_adapter` on contents that were read already: tensors by PEFT key, the config, the
    safetensors metadata.
    """
    check_config(config, where)
    experts: dict[str, dict[str, dict[str, dict[int, Tensor]]]] = {}
    fused: dict[str, dict[bool, dict[str, Tensor]]] = {}
    dense: dict[str, dict[str, Tensor]] = {}
    embeddings: dict[str, dict[str, Tensor]] = {}
    extra: dict[str, Tensor] = {}
    variant: dict[str, Tensor] = {}
    for key, tensor in tensors.items():
        name = key.removeprefix("base_model.model.")
        if not tensor.is_meta and not torch.isfinite(tensor).all():  # a dry run has no values
            raise ValueError(f"{where}: {key} holds NaN or Inf; use an earlier checkpoint")
        if (m := _EXPERT.match(name)) and m["name"] in PROJECTION_OF:
            module = experts.setdefault(m["path"], {})
            factors = module.setdefault(PROJECTION_OF[m["name"]], {"A": {}, "B": {}})
            factors[m["ab"]][int(m["e"])] = tensor
        elif m := _FUSED.match(name):
            fused.setdefault(m["path"], {}).setdefault(bool(m["inner"]), {})[m["ab"]] = tensor
        elif m := _DENSE.match(name):
            dense.setdefault(m["path"], {})[m["ab"]] = tensor
        elif m := _EMBEDDING.match(name):
            embeddings.setdefault(m["path"], {})[m["ab"]] = tensor
        elif variant_of(name, config) is not None:
            variant[name] = tensor
        elif ".lora_" in name:
            raise ValueError(
                f"{where}: {key} is a kind of LoRA tensor that is not supported; only lora_A and "
                "lora_B of linear layers and experts are"
            )
        else:
            extra[name] = tensor
    stacked = {
        path: {
            p: _factors(
                _stack(factors, config, path, projection_names(p), where),
                config,
                _virtual(path, p),
                where,
            )
            for p, factors in module.items()
        }
        for path, module in experts.items()
    }
    own = json.loads(metadata.get(METADATA, "{}"))
    swapped = False if "layout" in own else None  # ours is the one of peft 0.20
    for path, pairs in fused.items():
        if path in stacked:
            raise ValueError(f"{where}: {path} appears per expert and fused; keep one of them")
        stacked[path] = _unfuse(path, pairs, config, hidden, where, swapped)
    if own.get("layout") == "fused":
        projections = own["projections"]
        stacked = {p: split(m, projections, f"{where}: {p}") for p, m in stacked.items()}
    data = AdapterData(
        config=config,
        experts=_only(stacked, own.get("projections"), where),
        dense={
            path: _factors(pair, config, [path, f"{path}.weight"], where)
            for path, pair in dense.items()
        },
        embeddings={
            path: _factors(pair, config, [path], where) for path, pair in embeddings.items()
        },
        extra=extra,
        variant=variant,
        dropout=float(own.get("lora_dropout", config.get("lora_dropout", 0.0))),
    )
    _check_variant(data, where)
    if "trained" in own:
        _check_manifest(manifest(data), own["trained"], where)
        data = replace(data, whole=True)
    return data


def manifest(data: AdapterData) -> dict[str, list[int]]:
    """Every trained tensor: paths of Linears, embeddings and expert projections with the shapes of
    their A and B one after the other, and of whole modules with theirs.
    """
    linear = {**data.dense, **data.embeddings}
    out = {path: [*f.a.shape, *f.b.shape] for path, f in linear.items()}
    for path, module in data.experts.items():
        for p, f in module.items():
            out[f"{path}.{PROJECTION_KEYS[p]}"] = [*f.a.shape, *f.b.shape]
    other = {**data.extra, **data.variant}
    return out | {name: list(tensor.shape) for name, tensor in other.items()}


def variant_of(key: str, config: Mapping[str, Any]) -> str | None:
    """The option that is on in `config` and brings the tensor `key`, see VARIANTS."""
    for end, option in VARIANTS.items():
        if key.endswith(end) and config.get(option):
            return option
    return None


def refuse_variant(data: AdapterData, where: str) -> None:
    """Raises ValueError if `data` is more than LoRA factors that are added to weights."""
    for option in VARIANTS.values():
        if data.config.get(option):
            raise ValueError(
                f"{where} was trained with {option}=True, which only stock PEFT applies; serve or "
                "merge it there, on the stock model"
            )


def _check_variant(data: AdapterData, where: str) -> None:
    for end, option in VARIANTS.items():
        linear_only = option == "lora_bias"
        for path in (*data.dense, *(() if linear_only else data.embeddings)):
            if data.config.get(option) and f"{path}{end}" not in data.variant:
                raise ValueError(
                    f"{where}: {option}=True but {path} has no {end[1:]}; the file is incomplete, "
                    "save the adapter again"
                )


def _check_manifest(found: Mapping[str, Any], trained: Mapping[str, Any], where: str) -> None:
    for name, shape in trained.items():
        if found.get(name) != shape:
            is_now = f"has shapes {found[name]} there" if name in found else "is not there"
            raise ValueError(
                f"{where}: {name} was trained with shapes {shape} but {is_now}; the file is "
                "incomplete or was changed, save or copy the adapter again"
            )
    if added := [name for name in found if name not in trained]:
        raise ValueError(
            f"{where}: {added[0]} was not trained with this adapter; the file was changed, save or "
            "copy the adapter again"
        )


def _virtual(path: str, projection: str) -> list[str]:
    names = sorted(projection_names(projection))
    return [f"{path}{e}.{n}" for e in ("", ".0") for n in names] + [path]


def _stack(
    factors: Mapping[str, Mapping[int, Tensor]],
    config: Mapping[str, Any],
    path: str,
    names: Sequence[str],
    where: str,
) -> dict[str, Tensor]:
    """A and B of all experts up to the last that has any; zeros for those that the config leaves
    out.
    """
    count = 1 + max(max(by, default=-1) for by in factors.values())
    out = {}
    for ab, by in factors.items():
        missing = [e for e in range(count) if e not in by]
        meant = [e for e in missing if e in factors["A"] or e in factors["B"]]
        meant += [e for e in missing if picks_expert(config, path, e, names) is not None]
        if meant or (missing and not config.get("target_modules")):
            raise ValueError(
                f"{where}: {path}.{names[0]}: lora_{ab} of expert {missing[0]} is missing "
                f"({len(missing)} of {count} are); the file is incomplete, save the adapter again"
            )
        shapes = {tuple(t.shape) for t in by.values()}
        if len(shapes) != 1:
            raise ValueError(
                f"{where}: {path}.{names[0]}: experts differ in the shape of lora_{ab} "
                f"({sorted(shapes)}); one rank is needed"
            )
        zeros = torch.zeros_like(next(iter(by.values())))
        out[ab] = torch.stack([by.get(e, zeros) for e in range(count)])
    return out


def _factors(
    pair: Mapping[str, Tensor], config: Mapping[str, Any], names: Sequence[str], where: str
) -> Factors:
    if set(pair) != {"A", "B"}:
        raise ValueError(
            f"{where}: {names[0]} has lora_{''.join(pair)} but not the other factor; save the "
            "adapter again"
        )
    a, b = pair["A"], pair["B"]
    rank = int(pattern_value(config.get("rank_pattern"), names, config["r"]))
    if a.shape[-2] != rank or b.shape[-1] != rank:
        raise ValueError(
            f"{where}: {names[0]} has lora_A {tuple(a.shape)} and lora_B {tuple(b.shape)} but the "
            f"config says rank {rank}; config and weights belong to different adapters"
        )
    alpha = pattern_value(config.get("alpha_pattern"), names, config["lora_alpha"])
    return Factors(a, b, alpha / (math.sqrt(rank) if config.get("use_rslora") else rank))


def _unfuse(
    path: str,
    pairs: Mapping[bool, Mapping[str, Tensor]],
    config: Mapping[str, Any],
    hidden: int | None,
    where: str,
    swapped: bool | None,
) -> dict[str, Factors]:
    """Splits peft's target_parameters layout; pairs by whether they sit at `.base_layer`, swapped:
    whether it is that of peft 0.18, None: to be found out.
    """
    by_parameter: dict[str, Mapping[str, Tensor]] = {}
    targets = [str(t).rsplit(".", 1)[-1] for t in config.get("target_parameters") or ()]
    for inner, pair in pairs.items():
        alone = len(pairs) == 1 and "gate_up_proj" in targets and "down_proj" not in targets
        by_parameter["gate_up_proj" if inner or alone else "down_proj"] = pair
    for name, pair in by_parameter.items():
        if set(pair) != {"A", "B"}:
            raise ValueError(
                f"{where}: {path}.{name} has only lora_{''.join(pair)}; save the adapter again"
            )
    if swapped is None:
        swapped = _is_018(path, by_parameter, config, hidden, where)
    out: dict[str, Factors] = {}
    for name, pair in by_parameter.items():
        names = [f"{path}.{name}"]
        rank = int(pattern_value(config.get("rank_pattern"), names, config["r"]))
        a, b = pair["A"], pair["B"]
        if a.shape[0] % rank or a.shape[0] != b.shape[1]:
            raise ValueError(
                f"{where}: {path}.{name} has lora_A {tuple(a.shape)} and lora_B {tuple(b.shape)}, "
                "no whole number of "
                f"experts of rank {rank}; config and weights belong to different adapters"
            )
        count = a.shape[0] // rank
        a3 = a.reshape(count, rank, -1)
        b3 = b.reshape(b.shape[0], rank, count).permute(2, 0, 1)
        if swapped:
            a3, b3 = b3.transpose(1, 2), a3.transpose(1, 2)
        parts = dict(zip(STACKED[name], b3.chunk(len(STACKED[name]), 1), strict=True))
        for p, part in parts.items():
            pair3 = {"A": a3.contiguous(), "B": part.contiguous()}
            out[p] = _factors(pair3, config, names, where)
    return out


def _is_018(
    path: str,
    pairs: Mapping[str, Mapping[str, Tensor]],
    config: Mapping[str, Any],
    hidden: int | None,
    where: str,
) -> bool:
    """Whether a fused adapter is for the transposed weight, as peft 0.18 wrote it; see the module
    text.
    """
    possible = set()
    for swapped in (False, True):
        sizes = set()
        for name, pair in pairs.items():
            fan_in, fan_out = pair["A"].shape[1], pair["B"].shape[0]
            if swapped:
                fan_in, fan_out = fan_out, fan_in
            # (hidden, intermediate) by what this reading would mean; halves keep odd sizes apart
            sizes.add((fan_in, fan_out / 2) if name == "gate_up_proj" else (fan_out, fan_in))
        if len(sizes) == 1 and (hidden is None or sizes.pop()[0] == hidden):
            possible.add(swapped)
    if not possible:
        raise ValueError(
            f"{where}: the fused factors of {path} fit no layout of peft 0.18 or 0.20"
            + (f" with hidden size {hidden}" if hidden else "")
            + "; load the adapter on the model it was trained on"
        )
    if len(possible) == 1:
        return possible.pop()
    version = re.match(r"(\d+)\.(\d+)", str(config.get("peft_version", "")))
    if version is None:
        raise ValueError(
            f"{where}: the fused factors of {path} fit the layouts of peft 0.18 and of peft 0.20 "
            "and the config names no peft_version; save the adapter again with peft >= 0.20"
        )
    return (int(version[1]), int(version[2])) < FUSED_020_SINCE


FUSED_020_SINCE = (0, 20)  # first peft version that writes the untransposed fused layout


def _only(
    experts: dict[str, dict[str, Factors]], projections: list[str] | None, where: str
) -> dict[str, dict[str, Factors]]:
    """Without the zero factors that `write_adapter` adds so that stock peft can load a subset of
    projections.
    """
    if projections is None:
        return experts
    for path, module in experts.items():
        for p in [p for p in module if p not in projections]:
            # a dry run's tensors, on the meta device, have no values
            if not module[p].a.is_meta and (module[p].a.any() or module[p].b.any()):
                raise ValueError(
                    f"{where}: {path}.{PROJECTION_KEYS[p]} is not zero although only "
                    f"{', '.join(projections)} were "
                    "trained; the file was changed, save the adapter again"
                )
            del module[p]
    return experts


# ----------------------------------------------------------------------------------------- writing


def standard_tensors(data: AdapterData, names: Mapping[str, str]) -> dict[str, Tensor]:
    """Tensors by PEFT key, per expert; projections that stock peft needs beside the trained ones
    are zero.
    """
    whole = {**data.extra, **data.variant}
    out = {f"base_model.model.{k}": v.contiguous() for k, v in whole.items()}
    for path, f in data.dense.items():
        out[f"base_model.model.{path}.lora_A.weight"] = f.a.contiguous()
        out[f"base_model.model.{path}.lora_B.weight"] = f.b.contiguous()
    for path, f in data.embeddings.items():
        out[f"base_model.model.{path}.lora_embedding_A"] = f.a.contiguous()
        out[f"base_model.model.{path}.lora_embedding_B"] = f.b.contiguous()
    for path, module in data.experts.items():
        for p, f in completed(module).items():
            for e in range(f.a.shape[0]):
                key = f"base_model.model.{path}.{e}.{names[p]}"
                out[f"{key}.lora_A.weight"] = f.a[e].clone()
                out[f"{key}.lora_B.weight"] = f.b[e].clone()
    return out


def completed(module: Mapping[str, Factors]) -> dict[str, Factors]:
    """Stock peft fuses gate with up and expects down beside them; what was not trained is added as
    zeros.
    """
    full = dict(module)
    if {"gate", "up"} & set(module):
        known = module["gate"] if "gate" in module else module["up"]
        for p in ("gate", "up"):
            full.setdefault(
                p, Factors(torch.zeros_like(known.a), torch.zeros_like(known.b), known.scaling)
            )
        (count, rank, hidden), intermediate = known.a.shape, known.b.shape[1]
        a, b = known.a.new_zeros(count, rank, intermediate), known.b.new_zeros(count, hidden, rank)
        full.setdefault("down", Factors(a, b, known.scaling))
    return full
