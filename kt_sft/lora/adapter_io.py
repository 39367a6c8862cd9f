"""What peft does differently on a model with CPU experts: injecting, saving and loading an adapter.

Each function here takes the place of a peft method (see hooks.py) and hands every other model to
the original.

Saving is one transaction: tensors are checked against the model's trained parameters, written in
the chosen layout to a temporary directory, read back and compared bit for bit, then renamed.
Loading uses every tensor or raises.
"""

from __future__ import annotations

import dataclasses
import logging
import os
import re
import shutil
import tempfile
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel
from peft.tuners.lora.layer import LoraLayer
from peft.utils.save_and_load import (
    get_peft_model_state_dict,
    load_peft_weights,
    set_peft_model_state_dict,
)
from safetensors import safe_open
from torch import Tensor, nn

from kt_core import atomic
from kt_core.adapters.factors import Factors
from kt_core.adapters.fit import fit, names_of, site_of, translated
from kt_core.adapters.peft_config import (
    adapter_tensors,
    training_config,
    write_adapter,
)
from kt_core.adapters.peft_format import (
    CONFIG_FILE,
    WEIGHTS_FILE,
    AdapterData,
    expert_names,
    manifest,
    parse_adapter,
    read_adapter,
    variant_of,
)
from kt_core.module import KTExpertsLinear, is_linear
from kt_core.names import PROJECTION_KEYS
from kt_sft.config import settings_of
from kt_sft.lora import model_parts, stock_peft, targets
from kt_sft.lora.layer import KTExpertsLoraLinear, check_supported
from kt_sft.seams import refuse_unknown

log = logging.getLogger("kt")
_PREFIX = "base_model.model."
_HUB = ("revision", "cache_dir", "token", "subfolder", "local_files_only")
# Of models that accelerate has spread over devices and disk, which ours are not.
_OFFLOADING = ("device_map", "max_memory", "offload_dir", "offload_folder", "offload_index")


def has_experts(model: nn.Module) -> bool:
    """Whether `model` holds experts in CPU memory."""
    return any(isinstance(m, KTExpertsLinear) for m in model.modules())


def inject_adapter(
    original: Callable[..., None],
    self: Any,
    model: nn.Module,
    adapter_name: str,
    *args: Any,
    **kw: Any,
) -> None:
    """LoraModel.inject_adapter: finds the expert projections that the config targets."""
    if not has_experts(model):
        return original(self, model, adapter_name, *args, **kw)
    config = self.peft_config[adapter_name]
    check_supported(config, experts=False)
    adapters = targets.resolve(config, model, targets.model_type_of(model))
    if adapters:
        check_supported(config, experts=True)
        config._register_custom_module({KTExpertsLinear: KTExpertsLoraLinear})
    with targets.injecting(adapters):
        original(self, model, adapter_name, *args, **kw)


def planned(model: PeftModel, name: str) -> AdapterData:
    """What `collect` would give for a save at this moment, on the meta device."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # peft warns again at every save
        tensors = state_of(model, name)
    return collect(model, name, {k: torch.empty_like(t, device="meta") for k, t in tensors.items()})


def state_of(model: PeftModel, name: str, **kw: Any) -> dict[str, Tensor]:
    """peft's state dict of adapter `name`; `kw` as get_peft_model_state_dict takes them. That
    of 0.18 gives every tensor whose key contains the name: for "q" all of q_proj too.
    """
    tensors = get_peft_model_state_dict(model, adapter_name=name, **kw)
    others = "|".join(re.escape(other) for other in model.peft_config if other != name)
    if not others:
        return dict(tensors)
    foreign = re.compile(rf"\.lora_\w+\.(?:{others})(?:\.|$)")
    return {key: tensor for key, tensor in tensors.items() if not foreign.search(key)}


def layout_of(model: PeftModel, name: str = "default") -> stock_peft.Choice:
    """The layout in which adapter `name` of `model` is saved, and what stock peft makes of it."""
    return choose_layout(model.get_base_model(), planned(model, name))


def choose_layout(base: nn.Module, data: AdapterData) -> stock_peft.Choice:
    """The layout in which `data` is saved."""
    names = expert_names(targets.model_type_of(base))
    wanted = settings_of(base).export_layout
    return stock_peft.choose(base, data, names, linear_paths(base), other_paths(base), wanted)


# ------------------------------------------------------------------------------------------ saving


def save_pretrained(
    original: Callable[..., None],
    self: PeftModel,
    save_directory: str | os.PathLike[str],
    safe_serialization: bool = True,
    selected_adapters: list[str] | None = None,
    save_embedding_layers: str | bool = "auto",
    is_main_process: bool = True,
    path_initial_model_for_weight_conversion: str | None = None,
    **kw: Any,
) -> None:
    """PeftModel.save_pretrained: a layout that stock peft reads, verified; see the module text.

    On every rank of a sharded model: either pass a gathered `state_dict`, or call it on all ranks.
    """
    if not has_experts(self):
        return original(
            self,
            save_directory,
            safe_serialization,
            selected_adapters,
            save_embedding_layers,
            is_main_process,
            path_initial_model_for_weight_conversion,
            **kw,
        )
    for key, value, fix in (
        ("safe_serialization", not safe_serialization, "leave it True"),
        (
            "path_initial_model_for_weight_conversion",
            path_initial_model_for_weight_conversion,
            "leave it out",
        ),
    ):
        if value:
            raise ValueError(f"{key} is not supported on a model with experts in CPU memory; {fix}")
    refuse_unknown(kw, ("state_dict",), "PeftModel.save_pretrained", "peft")
    names = list(self.peft_config) if selected_adapters is None else selected_adapters
    if unknown := [n for n in names if n not in self.peft_config]:
        raise ValueError(
            f"adapter {unknown[0]!r} does not exist; this model has {', '.join(self.peft_config)}"
        )
    for name in names:
        try:
            tensors = state_of(
                self,
                name,
                state_dict=kw.get("state_dict"),
                save_embedding_layers=save_embedding_layers,
            )
        except KeyError as error:
            raise RuntimeError(
                f"{error.args[0]} was trained but is not in the state dict to be saved; under a "
                "sharded model pass the gathered state_dict or call save_pretrained on every rank"
            ) from error
        tensors = _apart({k: _whole(t) for k, t in tensors.items()})  # collective if sharded
        if is_main_process:
            target = Path(save_directory) / (name if name != "default" else "")
            _save_one(self, name, tensors, target)
    if is_main_process:
        self.create_or_update_model_card(os.fspath(save_directory))


def _whole(tensor: Tensor) -> Tensor:
    """The full CPU tensor of a sharded parameter (all ranks must call), or the tensor itself on the
    CPU.
    """
    if isinstance(tensor, torch.distributed.tensor.DTensor):
        tensor = tensor.full_tensor()
    return tensor.detach().cpu()


def _apart(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """`tensors` without shared memory, which safetensors does not write: tied weights are copied,
    as peft does.
    """
    seen: set[int] = set()
    out = {}
    for key, tensor in tensors.items():
        out[key] = tensor.clone() if tensor.data_ptr() in seen else tensor
        seen.add(tensor.data_ptr())
    return out


def _save_one(model: PeftModel, name: str, tensors: Mapping[str, Tensor], target: Path) -> None:
    trained = _trained_shapes(model, name)
    for key, shape in trained.items():
        if key not in tensors:
            raise RuntimeError(
                f"{key} was trained but is not in the state dict to be saved ({len(tensors)} "
                "tensors); under a sharded "
                "model pass the gathered state_dict or call save_pretrained on every rank"
            )
        if tuple(tensors[key].shape) != shape:
            raise RuntimeError(
                f"{key} has shape {tuple(tensors[key].shape)} in the state dict but {shape} in the "
                "model: one rank's shard; pass the gathered state_dict"
            )
    data = collect(model, name, tensors)
    base = model.get_base_model()
    model_type = targets.model_type_of(base)
    choice = choose_layout(base, data)
    layout = choice.layout
    target.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix=".kt-saving-", dir=target))
    try:
        write_adapter(
            temporary,
            data,
            model_type=model_type,
            linear_paths=linear_paths(base),
            other_paths=other_paths(base),
            layout=layout,
        )
        _verify(temporary, data, model_type, layout)
        for file in (WEIGHTS_FILE, CONFIG_FILE):
            atomic.sync(temporary / file)
        # New weights beside an old config would load and be wrong; without a config nothing loads.
        (target / CONFIG_FILE).unlink(missing_ok=True)
        for file in (WEIGHTS_FILE, CONFIG_FILE):
            atomic.rename(temporary / file, target / file)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    log.info(
        "kt: saved %d trained parameters in %d tensors to %s, read back and verified",
        sum(tensors[k].numel() for k in trained),
        len(trained),
        target,
    )
    stock_peft.say(choice, base, logging.INFO)


def _trained_shapes(model: PeftModel, name: str) -> dict[str, tuple[int, ...]]:
    """Global shapes of every parameter of adapter `name`, by the key `state_of` gives it."""
    keys = state_of(model, name, save_embedding_layers=False)
    return {k: tuple(p.shape) for k, p in keys.items()}


def collect(model: PeftModel, name: str, tensors: Mapping[str, Tensor]) -> AdapterData:
    """The adapter as AdapterData, from peft's state dict and the scales that the layers use.

    Raises ValueError for a LoRA tensor of a kind that is not known.
    """
    config = model.peft_config[name]
    if config.base_model_name_or_path is None:
        config.base_model_name_or_path = model.get_base_model().name_or_path
    plain = {k: sorted(v) if isinstance(v, set) else v for k, v in config.to_dict().items()}
    rest = {k.removeprefix(_PREFIX): t for k, t in tensors.items()}
    experts: dict[str, dict[str, Factors]] = {}
    dense: dict[str, Factors] = {}
    embeddings: dict[str, Factors] = {}
    for path, module in model.get_base_model().named_modules():
        if not isinstance(module, LoraLayer) or name not in module.scaling:
            continue
        key, scale = path.replace(".base_layer", ""), module.scaling[name]
        if isinstance(module, KTExpertsLoraLinear):
            experts[path] = {
                p: Factors(
                    rest.pop(f"{path}.lora_A.{PROJECTION_KEYS[p]}"),
                    rest.pop(f"{path}.lora_B.{PROJECTION_KEYS[p]}"),
                    one,
                )
                for p, one in module.projection_scaling(name).items()
            }
        elif f"{key}.lora_A.weight" in rest:
            a, b = rest.pop(f"{key}.lora_A.weight"), rest.pop(f"{key}.lora_B.weight")
            dense[key] = Factors(a, b, scale)
        elif f"{key}.lora_embedding_A" in rest:
            a, b = rest.pop(f"{key}.lora_embedding_A"), rest.pop(f"{key}.lora_embedding_B")
            embeddings[key] = Factors(a, b, scale)
    variant = {k: rest.pop(k) for k in list(rest) if variant_of(k, plain)}
    if lost := [k for k in rest if ".lora_" in k]:
        raise ValueError(
            f"{lost[0]} cannot be expressed in a standard LoRA adapter; take its module out of the "
            "LoRA targets"
        )
    return AdapterData(
        plain, experts, dense, rest, config.lora_dropout, embeddings=embeddings, variant=variant
    )


def linear_paths(base: nn.Module) -> list[str]:
    """Paths of the Linears of `base`, as on the model without any adapter."""
    found = []
    for path, module in base.named_modules():
        if is_linear(module) and ".lora_" not in f".{path}":
            found.append(path.removesuffix(".base_layer"))
    return found


def other_paths(base: nn.Module) -> list[str]:
    """Paths of the modules that are no Linear, as on the model without any adapter."""
    names = {n.replace(".base_layer", "") for n, _ in base.named_modules() if ".lora_" not in n}
    return sorted(names - {""} - set(linear_paths(base)))


class NotWrittenError(RuntimeError):
    """What was read back is not what was written."""


def _verify(directory: Path, data: AdapterData, model_type: str, layout: str) -> None:
    """Reads the file back, compares it bit for bit with what was to be written, and reads it as an
    adapter.
    """
    expected = adapter_tensors(data, expert_names(model_type), layout)
    with safe_open(directory / WEIGHTS_FILE, "pt") as file:
        stored = set(file.keys())
        for key, tensor in expected.items():
            if key not in stored or not _same_bits(file.get_tensor(key), tensor):
                raise NotWrittenError(
                    f"{key} was not written as it is in memory; the disk under {directory.parent} "
                    "may be full or faulty"
                )
    if extra := stored - set(expected):
        raise RuntimeError(f"{sorted(extra)[0]} was written but is not part of the adapter")
    if all(t.isfinite().all() for t in expected.values()):
        stored_data = read_adapter(directory)
        if manifest(stored_data) != manifest(data):
            raise RuntimeError(f"{directory} reads back as another adapter than was written")
    else:
        log.warning("kt: the adapter holds NaN or Inf; it is saved as it is and will not load")


def _same_bits(a: Tensor, b: Tensor) -> bool:
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    return torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


# ----------------------------------------------------------------------------------------- loading


def from_pretrained(
    original: Callable[..., PeftModel],
    cls: type[PeftModel],
    model: nn.Module,
    model_id: str | os.PathLike[str],
    adapter_name: str = "default",
    is_trainable: bool = False,
    config: Any = None,
    **kw: Any,
) -> PeftModel:
    """PeftModel.from_pretrained: the config is made to say what the file's tensors need before
    modules are created.
    """
    if has_experts(model) and config is None:
        config, _ = _read(model_id, model, kw)
    with model_parts.rules(model_parts.NewAdapters()):  # this one is not new
        return original(cls, model, model_id, adapter_name, is_trainable, config, **kw)


def load_adapter(
    original: Callable[..., Any],
    self: PeftModel,
    model_id: str | os.PathLike[str],
    adapter_name: str,
    is_trainable: bool = False,
    torch_device: str | None = None,
    autocast_adapter_dtype: bool = True,
    ephemeral_gpu_offload: bool = False,
    low_cpu_mem_usage: bool = False,
    **kw: Any,
) -> Any:
    """PeftModel.load_adapter: reads every layout, puts every tensor in place, and raises where one
    has no place.
    """
    if not has_experts(self):
        return original(
            self,
            model_id,
            adapter_name,
            is_trainable,
            torch_device,
            autocast_adapter_dtype,
            ephemeral_gpu_offload,
            low_cpu_mem_usage,
            **kw,
        )
    known = (*_HUB, *_OFFLOADING)
    refuse_unknown(kw, known, "PeftModel.load_adapter", "peft")
    config, data = _read(model_id, self.get_base_model(), kw)
    if adapter_name not in self.peft_config:
        config.inference_mode = not is_trainable
        with model_parts.rules(model_parts.NewAdapters()):  # this one is not new
            self.add_adapter(adapter_name, config, low_cpu_mem_usage=low_cpu_mem_usage)
    state = _native(data)
    _check_places(self, adapter_name, state, os.fspath(model_id))
    result = set_peft_model_state_dict(
        self, state, adapter_name=adapter_name, low_cpu_mem_usage=low_cpu_mem_usage
    )
    missing = [k for k in result.missing_keys if ".lora_" in k and f".{adapter_name}" in k]
    if missing or result.unexpected_keys:
        key = (missing or result.unexpected_keys)[0]
        raise ValueError(
            f"{model_id}: {key} "
            f"{'is not in the file' if missing else 'has no place in this model'}; load the "
            "adapter on the model and with the targets it was trained with"
        )
    result.missing_keys.clear()
    self.base_model._cast_adapter_dtype(
        adapter_name=adapter_name, autocast_adapter_dtype=autocast_adapter_dtype
    )
    if not is_trainable:
        self.eval()
    return result


def _read(
    model_id: str | os.PathLike[str], base: Any, kw: Mapping[str, Any]
) -> tuple[LoraConfig, AdapterData]:
    """A directory's or hub repository's adapter, and the LoraConfig that gives its tensors a place
    in `base`.
    """
    hub = {k: kw[k] for k in _HUB if kw.get(k) is not None}
    config = LoraConfig.from_pretrained(model_id, **hub)
    folder = Path(model_id) / kw["subfolder"] if kw.get("subfolder") else Path(model_id)
    hidden = base.config.get_text_config().hidden_size
    if folder.is_dir():
        data = read_adapter(folder, hidden=hidden)
    else:
        tensors = load_peft_weights(os.fspath(model_id), device="cpu", **hub)
        data = parse_adapter(tensors, config.to_dict(), {}, hidden=hidden, where=str(model_id))
    site = site_of(base)
    fitted = fit(data, site, str(model_id))
    data = dataclasses.replace(translated(data, names_of(data, site)), experts=fitted.experts)
    for key, value in training_config(data, set(linear_paths(base))).items():
        setattr(config, key, value)
    return config, data


def _native(data: AdapterData) -> dict[str, Tensor]:
    """The tensors under the names they have in a model with CPU experts, without the adapter's
    name.
    """
    # peft writes a resized module that was trained whole twice
    whole = {k: v for k, v in data.extra.items() if ".modules_to_save." not in k}
    out = {f"{_PREFIX}{k}": v for k, v in {**whole, **data.variant}.items()}
    for path, f in data.dense.items():
        out[f"{_PREFIX}{path}.lora_A.weight"], out[f"{_PREFIX}{path}.lora_B.weight"] = f.a, f.b
    for path, f in data.embeddings.items():
        out[f"{_PREFIX}{path}.lora_embedding_A"] = f.a
        out[f"{_PREFIX}{path}.lora_embedding_B"] = f.b
    for path, module in data.experts.items():
        for p, f in module.items():
            for ab, tensor in (("A", f.a), ("B", f.b)):
                out[f"{_PREFIX}{path}.lora_{ab}.{PROJECTION_KEYS[p]}"] = tensor
    return out


def _check_places(model: PeftModel, name: str, state: Mapping[str, Tensor], where: str) -> None:
    """Raises ValueError unless the file's tensors are exactly those of adapter `name`, with their
    shapes.
    """
    shapes = _trained_shapes(model, name)
    for key, tensor in state.items():
        if ".lora_" not in key:
            continue
        if key not in shapes:
            raise ValueError(
                f"{where}: {key} has no place in adapter {name!r} of this model; train or load it "
                "with the same LoRA targets"
            )
        if tuple(tensor.shape) != shapes[key]:
            raise ValueError(
                f"{where}: {key} has shape {tuple(tensor.shape)} but the model needs "
                f"{shapes[key]}; rank or base model differ from those it was trained with"
            )
    if lost := [k for k in shapes if k not in state]:
        raise ValueError(
            f"{where}: {lost[0]} is missing; the file was trained with other LoRA targets or is "
            "incomplete"
        )
