"""Loads transformers models with their routed experts in packed CPU memory.

One function of transformers is wrapped, `PreTrainedModel._load_pretrained_model`: there the model
is still on the meta device and the checkpoint files are at hand. Inside `experts_on_cpu` the
wrapper packs the experts, puts a parameter-free `KTExpertsLinear` in the place of every experts
module, and lets transformers load the rest; it then never reads an expert tensor. Outside, it
passes the call on untouched, so stock and KT models live in one process.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import re
from collections.abc import Callable, Iterator, Mapping, Set
from contextvars import ContextVar
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NoReturn

import torch
import transformers
from transformers import PreTrainedConfig
from transformers.integrations import is_fsdp_enabled
from transformers.modeling_utils import PreTrainedModel, is_local_dist_rank_0

from kt_core import experts, formats, patches, runtime
from kt_core.loading import memory, packing, prequantized, published, reuse
from kt_core.loading.checkpoint import Origin
from kt_core.loading.experts_contract import ExpertsLayout, find_experts
from kt_core.loading.files import CheckpointFiles
from kt_core.loading.host import Host
from kt_core.loading.naming import Naming
from kt_core.loading.parts import ExpertRequest
from kt_core.module import KTExpertsLinear, Runner, inference_runner
from kt_core.settings import ExpertSettings

_WRAPPED_ARGUMENTS = ["model", "state_dict", "checkpoint_files", "load_config"]

# Dtypes of weights in which NaN and Inf are looked for.
_CHECKED = (torch.bfloat16, torch.float16, torch.float32)


@dataclass(frozen=True)
class _Load:
    """What `experts_on_cpu` was given; see there."""

    settings: ExpertSettings
    runner: Runner
    host: Host
    reuse: bool


_active: ContextVar[_Load | None] = ContextVar("kt_load", default=None)


@contextlib.contextmanager
def experts_on_cpu(
    settings: ExpertSettings,
    *,
    runner: Runner = inference_runner,
    host: Host | None = None,
    reuse: bool = False,
) -> Iterator[None]:
    """Inside, `from_pretrained` of any PreTrainedModel on this thread keeps its routed experts in
    packed CPU memory.

    runner: of the modules in the place of the experts. host: the processes that load together;
    None: this one alone. reuse: experts that this process has packed from the same checkpoint, for
    a model that still lives, are shared with it.

    A model without experts, or with experts that are not understood, is refused with ValueError.
    """
    install()
    token = _active.set(_Load(settings, runner, host or Host(), reuse))
    try:
        yield
    finally:
        _active.reset(token)


def load_model(
    path: str | Path,
    *,
    format: str | None = None,
    group: int | None = None,
    threads: int | None = None,
    numa_nodes: int | None = None,
    packed_dir: str | Path | None = None,
    dtype: torch.dtype = torch.bfloat16,
    **from_pretrained: Any,
) -> PreTrainedModel:
    """`load` with the settings that are given; see ExpertSettings."""
    settings = ExpertSettings(format, group, threads, numa_nodes, packed_dir)
    return load(path, settings, dtype=dtype, **from_pretrained)


def load(
    path: str | Path,
    settings: ExpertSettings,
    *,
    dtype: torch.dtype = torch.bfloat16,
    **from_pretrained: Any,
) -> PreTrainedModel:
    """A model that generates text, its routed experts packed in CPU memory: of the text class of
    its configuration where there is one, else of the multimodal class.

    `dtype` is that of all other weights; further keywords go to `from_pretrained`. Raises
    ValueError, FileNotFoundError or MemoryError, in one sentence, before any weight is read.
    """
    device_map = from_pretrained.get("device_map")
    if isinstance(device_map, str) and device_map in (
        "auto",
        "balanced",
        "balanced_low_0",
        "sequential",
    ):
        raise ValueError(
            f"device_map={device_map!r} is computed as if the experts were on the devices; give a "
            "device, such as device_map='cpu' or device_map='cuda:0'"
        )
    refuse_quantized(path, from_pretrained)
    auto = auto_class(config_of(path, from_pretrained))
    with experts_on_cpu(settings):
        return auto.from_pretrained(path, dtype=dtype, **from_pretrained)


# Auto classes that generate text, in the order in which they are asked: a text class first, which
# leaves out the other parts of a multimodal checkpoint.
AUTO_CLASSES = (
    transformers.AutoModelForCausalLM,
    transformers.AutoModelForImageTextToText,
    transformers.AutoModelForMultimodalLM,
)
_HUB_KEYWORDS = ("trust_remote_code", "revision", "cache_dir", "token", "local_files_only")


def refuse_quantized(path: str | Path, from_pretrained: Mapping[str, Any]) -> None:
    """Raises ValueError if `from_pretrained(path, **from_pretrained)` would load weights quantized
    in a way that we do not read, or would have transformers' own quantizers load them, which would
    ask for packages, or hide the experts.
    """
    if getattr(from_pretrained.get("config"), "quantization_config", None) is not None:
        raise ValueError(
            "config.quantization_config asks transformers' own quantizer, which would hide the "
            "experts; delete it: how the checkpoint is quantized, its config.json says"
        )
    for key in ("quantization_config", "load_in_4bit", "load_in_8bit", "gguf_file"):
        if from_pretrained.get(key):
            raise ValueError(
                f"{key} asks transformers for quantized weights, which it would keep from the "
                "experts on the CPU; remove it and choose their format "
                f"({', '.join(formats.scaled())}) instead"
            )
    if Path(path).is_dir():
        prequantized.refuse_directory(path)
        return
    hub = {key: from_pretrained[key] for key in _HUB_KEYWORDS if key in from_pretrained}
    config, _ = transformers.PretrainedConfig.get_config_dict(path, **hub)
    prequantized.refuse(config, str(path))


def config_of(path: str | Path, from_pretrained: Mapping[str, Any]) -> Any:
    """The configuration with which `from_pretrained(path, **from_pretrained)` loads a model."""
    if from_pretrained.get("config") is not None:
        return from_pretrained["config"]
    hub = {key: from_pretrained[key] for key in _HUB_KEYWORDS if key in from_pretrained}
    return transformers.AutoConfig.from_pretrained(path, **hub)


def auto_class(config: Any) -> Any:
    """The auto class that loads a model of this configuration to generate text."""
    for auto in AUTO_CLASSES:
        if type(config) in auto._model_mapping:
            return auto
    return transformers.AutoModelForCausalLM  # which takes code from the checkpoint, or refuses


def install() -> None:
    """Wraps `PreTrainedModel._load_pretrained_model`; a second call does nothing.

    Raises ImportError naming the transformers version if that function is not the one we know.
    """
    if patches.replaced(__name__):
        return
    loader = PreTrainedModel.__dict__.get("_load_pretrained_model")
    known = isinstance(loader, staticmethod) and (
        list(inspect.signature(loader.__func__).parameters)[: len(_WRAPPED_ARGUMENTS)]
        == _WRAPPED_ARGUMENTS
    )
    if not known:
        raise ImportError(
            f"transformers {transformers.__version__} loads models in a way this package does not "
            "know; install a transformers version from constraints.txt"
        )
    _install_config_reader()
    ours = staticmethod(functools.partial(_load_pretrained_model, loader.__func__))
    patches.replace(
        *(PreTrainedModel, "_load_pretrained_model", ours),
        by=__name__,
        why="HfQuantizer, tried, LLaMA-Factory refuses under FSDP",
    )


def _install_config_reader() -> None:
    """Inside `experts_on_cpu` config.json does not say that weights are quantized: they reach
    transformers, and LLaMA-Factory before it, as bf16.
    """
    original = PreTrainedConfig.__dict__["get_config_dict"].__func__

    @functools.wraps(original)
    def get_config_dict(cls: Any, *args: Any, **kwargs: Any) -> Any:
        config, rest = original(cls, *args, **kwargs)
        return (prequantized.without(config) if _active.get() else config), rest

    patches.replace(
        *(PreTrainedConfig, "get_config_dict", classmethod(get_config_dict)),
        by=__name__,
        why="quantizers need CUDA packages",
    )


def _load_pretrained_model(
    original: Callable[..., Any],
    model: PreTrainedModel,
    state_dict: Mapping[str, Any] | None,
    checkpoint_files: list[str] | None,
    load_config: Any,
    *args: Any,
    **kwargs: Any,
) -> Any:
    asked = _active.get()
    if asked is None:
        return original(model, state_dict, checkpoint_files, load_config, *args, **kwargs)
    if state_dict is not None or not checkpoint_files:
        raise ValueError(
            f"{type(model).__name__} is loaded from a state_dict or a GGUF file, but experts are "
            "streamed from safetensors only; pass a checkpoint directory"
        )
    _check_devices(load_config.device_map)
    layouts = _layouts(model)
    host = asked.host
    with host.step("dividing the CPUs", everywhere=True):
        runtime.set_numa_nodes(1)  # what an earlier load chose must not limit the threads
        host.use_threads(asked.settings.threads)
    source_name = str(load_config.pretrained_model_name_or_path)
    source = CheckpointFiles([Path(file) for file in checkpoint_files])
    prequantized.refuse_directory(Path(checkpoint_files[0]).parent)  # of a hub model too
    naming = Naming(model, load_config.weight_mapping)
    request = naming.request({layout.name: layout.shape for layout in layouts})
    settings = replace(asked.settings, format=asked.settings.known_format)
    other_bytes = _other_bytes(model, layouts, load_config.device_map)
    # Under FSDP with cpu_ram_efficient_loading only the first process of a machine holds them.
    copies = 1 if is_fsdp_enabled() else host.size
    packed = reuse.find(source, layouts, settings) if asked.reuse else None
    if not host.all_have("looking for loaded experts", packed is not None) or packed is None:
        packed = packing.pack(
            layouts,
            source,
            request,
            model=source_name,
            other_bytes=other_bytes,
            copies=copies,
            settings=settings,
            host=host,
        )
        reuse.remember(packed, source, layouts, settings)
    else:
        need = memory.MemoryNeed(0, other_bytes, staging=0, mapped=0, copies=copies)
        with host.step("comparing the memory they need with what is there", everywhere=True):
            memory.check(need, memory.limits(), source_name)
    _swap(model, layouts, packed, replace(asked, settings=settings), Origin(source.files, request))
    with host.step("loading the other weights", everywhere=True):
        info, offload = _load_others(
            lambda state: original(model, state, checkpoint_files, load_config, *args, **kwargs),
            *(model, source, request, load_config),
        )
        if not is_fsdp_enabled() or is_local_dist_rank_0():  # else this process holds no weights
            _check_complete(model, info.missing_keys, where=source_name)
            _check_finite(model, where=source_name)
    patches.give(
        *(model, "save_pretrained", _refuse_saving),
        of="our models",
        by=__name__,
        why="would write a checkpoint without experts",
    )
    return info, offload


def _load_others(
    load: Callable[[Mapping[str, Any] | None], Any],
    model: PreTrainedModel,
    source: CheckpointFiles,
    request: ExpertRequest,
    load_config: Any,
) -> Any:
    """Has transformers, which no longer knows the experts, load the weights beside them: by itself
    or, where some are quantized, as what dequantizes when it is asked for a tensor.
    """
    state: dict[str, Any] | None = None
    if source.quantization is not None:
        dtype = load_config.dtype or torch.bfloat16
        beside = [w for w in source.weights if request.module(w.name) is None]
        state = {w.name: published.Lazy(w, dtype) for w in beside}
        published.say_what_is_dequantized(beside, dtype)
    renamed = Naming(model, load_config.weight_mapping)
    ours = {renamed.parameter(w.name) for w in source.weights if request.module(w.name)}
    info, offload = load(state)
    info.unexpected_keys -= ours
    return info, offload


def _check_complete(model: PreTrainedModel, missing: Set[str], where: str) -> None:
    """Raises ValueError if the checkpoint lacks a weight of the body or the token head, to which
    transformers would give random values. Heads of other tasks may be new.
    """
    tied: Mapping[str, str] = model.all_tied_weights_keys  # -> the weight it is the same as
    shared = set(tied) | {whole for twin, whole in tied.items() if twin not in missing}
    ignored = [re.compile(pattern) for pattern in model._keys_to_ignore_on_load_missing or ()]
    head = model.get_output_embeddings()
    needed = {id(p) for p in model.base_model.parameters()}
    needed |= {id(p) for p in head.parameters()} if head is not None else set()
    lost = sorted(
        name
        for name, parameter in model.named_parameters()
        if name in missing - shared
        and id(parameter) in needed
        and not any(pattern.search(name) for pattern in ignored)
    )
    if lost:
        raise ValueError(
            f"checkpoint {where} lacks {lost[0]} ({len(lost)} weights are missing), which would "
            "get random values; check that config.json belongs to it and download it again"
        )


def _check_finite(model: PreTrainedModel, where: str) -> None:
    """Raises ValueError naming the first weight that holds NaN or Inf; experts were checked when
    they were packed.
    """
    for name, parameter in model.named_parameters():
        if parameter.dtype not in _CHECKED or parameter.is_meta or parameter.numel() == 0:
            continue
        if not all(end.isfinite() for end in parameter.detach().aminmax()):  # NaN spreads to both
            raise ValueError(
                f"{name} in checkpoint {where} holds NaN or Inf; the checkpoint is damaged, "
                "download it again"
            )


def _layouts(model: PreTrainedModel) -> list[ExpertsLayout]:
    layouts = find_experts(model)
    if not layouts:
        raise ValueError(
            f"{type(model).__name__} has no routed experts that can be kept on the CPU; load it "
            "without use_kt"
        )
    for layout in layouts:
        if layout.activation not in experts.ACTIVATIONS:
            raise ValueError(
                f"{layout.name} uses the activation {layout.activation}, for which there is no "
                "kernel; load this model without use_kt"
            )
    return layouts


def _swap(
    model: PreTrainedModel,
    layouts: list[ExpertsLayout],
    packed: Mapping[str, experts.Experts],
    asked: _Load,
    origin: Origin,
) -> None:
    for position, layout in enumerate(layouts):
        parent, _, leaf = layout.name.rpartition(".")
        module = KTExpertsLinear(
            packed[layout.name],
            layer_index=_layer_index(layout.name, position),
            runner=asked.runner,
            settings=asked.settings,
            origin=origin,
        )
        setattr(model.get_submodule(parent), leaf, module)


def _other_bytes(
    model: PreTrainedModel, layouts: list[ExpertsLayout], device_map: Mapping[str, Any] | None
) -> int:
    """CPU bytes of all weights that are not routed experts."""
    if device_map and not any(str(device) == "cpu" for device in device_map.values()):
        return 0
    names = {layout.name for layout in layouts}
    return sum(
        tensor.numel() * tensor.element_size()
        for name, tensor in model.named_parameters()
        if name.rpartition(".")[0] not in names
    )


def _check_devices(device_map: Mapping[str, Any] | None) -> None:
    devices = {str(device) for device in (device_map or {}).values()}
    if "disk" in devices or ("cpu" in devices and len(devices) > 1):
        raise ValueError(
            f"device_map spreads the model over {sorted(devices)}, computed as if the experts were "
            "on the devices; give one device, such as device_map='cpu' or device_map='cuda:0'"
        )


def _layer_index(name: str, position: int) -> int:
    """The decoder layer: the last number in the module's name, else its position among the experts
    modules.
    """
    numbers = re.findall(r"\.(\d+)\.", f".{name}.")
    return int(numbers[-1]) if numbers else position


def _refuse_saving(*args: Any, **kwargs: Any) -> NoReturn:
    raise ValueError(
        "this model's routed experts are outside it, so save_pretrained would write a checkpoint "
        "without them; save the "
        "adapter (save_pretrained of the PEFT model) and keep the base checkpoint"
    )
