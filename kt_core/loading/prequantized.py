"""Checkpoints whose weights are quantized already: recognised from config.json and from the names
of their tensors. Those that no container (kt_core/loading/container) reads are refused in one
sentence before anybody's quantizer looks at them.

A method that a container learns to read leaves the table of methods.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from kt_core.loading import container
from kt_core.loading.headers import read_header

# quant_method of config.json -> what it is, of those that no container reads. A method that is not
# here is named as it calls itself.
_METHODS = {
    "aqlm": "AQLM",
    "bitnet": "BitNet",
    "eetq": "EETQ",
    "hqq": "HQQ",
    "quanto": "quanto",
    "quark": "AMD Quark",
    "torchao": "torchao",
    "vptq": "VPTQ",
}
_KEYS = ("quantization_config", "compression_config")
# End of a tensor's name -> what has tensors with such names. Longer names first.
_NAMES = {
    ".quant_state.bitsandbytes__nf4": "bitsandbytes (4-bit)",
    ".weight_scale_inv": "FP8 in blocks",
    ".weight_packed": "compressed-tensors",
    ".weight_scale": "FP8 or compressed-tensors",
    ":_weight_qdata": "torchao",
    ".weight._data": "quanto",
    ".quant_map": "bitsandbytes (4-bit)",
    ".absmax": "bitsandbytes (4-bit)",
    ".qweight": "GPTQ or AWQ",
    "_blocks": "MXFP4",
    ".SCB": "bitsandbytes (8-bit)",
    ".W_q": "HQQ",
}
# Files of AutoGPTQ and AutoAWQ from before config.json said it -> quant_method
_OLD_CONFIGS = {"quantize_config.json": "gptq", "quant_config.json": "awq"}


def settings_of(directory: str | Path) -> Mapping[str, Any] | None:
    """How the weights of the checkpoint in `directory` are quantized, as its small files say; None
    if they are not, or if these files are silent.
    """
    directory = Path(directory)
    config = directory / "config.json"
    found = _in_config(json.loads(config.read_text())) if config.is_file() else None
    if found is not None:
        return found[1]
    for name, method in _OLD_CONFIGS.items():
        if (directory / name).is_file():
            return {"quant_method": method, **json.loads((directory / name).read_text())}
    return None


def without(config: Mapping[str, Any]) -> dict[str, Any]:
    """The contents of a config.json, its parts included, less what a container reads."""
    kept = {}
    for key, value in config.items():
        if isinstance(value, Mapping):
            if key in _KEYS and container.find(value) is not None:
                continue
            value = without(value)
        kept[key] = value
    return kept


def refuse(config: Mapping[str, Any], where: str) -> None:
    """Raises ValueError if `config`, the contents of a config.json, says that its weights are
    quantized in a way that no container reads. `where` names the checkpoint.
    """
    if (found := _in_config(config)) is not None and container.find(found[1]) is None:
        key, settings = found
        method = settings.get("quant_method") or "an unnamed method"
        said = f"{key}.quant_method: {method} in config.json"
        _refuse(where, _METHODS.get(str(method), str(method)), said)


def _in_config(config: Mapping[str, Any]) -> tuple[str, Mapping[str, Any]] | None:
    """The key and the settings of a config.json, or of a part of it (the text, a vision tower)."""
    for key in _KEYS:
        if found := config.get(key):
            return key, found
    parts = (_in_config(part) for part in config.values() if isinstance(part, Mapping))
    return next((found for found in parts if found is not None), None)


def refuse_names(names: Iterable[str], where: str) -> None:
    """Raises ValueError if tensors of these names are parts of quantized weights: nobody has said
    how.
    """
    for name in names:
        for end, what in _NAMES.items():
            if name.endswith(end):
                raise ValueError(
                    f"{where} holds weights quantized with {what} (its tensor {name}), but its "
                    "config.json has no quantization_config that says how; take config.json from "
                    "where the weights are from, or give the model's bf16 or fp16 checkpoint"
                )


def refuse_directory(directory: str | Path) -> None:
    """Raises ValueError if the checkpoint in `directory` is quantized, from its small files and the
    list of its tensors; nothing is raised for a directory without any of them.
    """
    directory = Path(directory)
    where = str(directory)
    if (config := directory / "config.json").is_file():
        refuse(json.loads(config.read_text()), where)
    if settings_of(directory) is not None:
        return  # its container looks at the tensors
    indices = sorted(directory.glob("*.index.json"))
    for index in indices:
        refuse_names(json.loads(index.read_text()).get("weight_map", {}), where)
    if not indices:
        for file in sorted(directory.glob("*.safetensors")):
            names: Iterable[str] = ()
            with contextlib.suppress(ValueError):  # a damaged file is named by who reads it
                names = read_header(file)
            refuse_names(names, where)
    files = [p.suffix for p in directory.iterdir()] if directory.is_dir() else []
    if ".gguf" in files and not {".safetensors", ".bin"} & set(files):
        _refuse(where, "GGUF", "its only weights are a .gguf file")


def _refuse(where: str, what: str, said: str) -> None:
    raise ValueError(
        f"{where} is a checkpoint quantized with {what} ({said}), which cannot be loaded with its "
        "experts on the CPU; give the model's bf16 or fp16 checkpoint, whose experts are "
        "quantized as they are loaded"
    )
