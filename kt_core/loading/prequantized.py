"""Checkpoints whose weights are quantized already: recognised from config.json and from the names
and dtypes of their tensors, and refused in one sentence before anybody's quantizer looks at them.

Which containers can be read is decided here and nowhere else: one that a dialect learns to read
leaves the tables below.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from kt_core.loading.headers import read_header

# quant_method of config.json -> what it is. A method that is not here is named as it calls itself.
_METHODS = {
    "awq": "AWQ (4-bit)",
    "bitsandbytes": "bitsandbytes (4- or 8-bit)",
    "compressed-tensors": "compressed-tensors",
    "fbgemm_fp8": "FP8",
    "fp8": "FP8",
    "gptq": "GPTQ",
    "modelopt": "NVIDIA ModelOpt (FP8 or NVFP4)",
    "mxfp4": "MXFP4",
}
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
_OLD_CONFIGS = {"quantize_config.json": "GPTQ", "quant_config.json": "AWQ"}


def refuse(config: Mapping[str, Any], where: str) -> None:
    """Raises ValueError if `config`, the contents of a config.json, says that its weights are
    quantized. `where` names the checkpoint.
    """
    for key in ("quantization_config", "compression_config"):
        if found := config.get(key):
            method = found.get("quant_method") or _old_bitsandbytes(found) or "an unnamed method"
            said = f"{key}.quant_method: {method} in config.json"
            _refuse(where, _METHODS.get(str(method), str(method)), said)
    for part in config.values():  # of the text, of a vision tower
        if isinstance(part, Mapping):
            refuse(part, where)


def refuse_names(names: Iterable[str], where: str) -> None:
    """Raises ValueError if tensors of these names are parts of quantized weights."""
    for name in names:
        for end, what in _NAMES.items():
            if name.endswith(end):
                _refuse(where, what, f"its tensor {name}")


def refuse_directory(directory: str | Path) -> None:
    """Raises ValueError if the checkpoint in `directory` is quantized, from its small files and the
    list of its tensors; nothing is raised for a directory without any of them.
    """
    directory = Path(directory)
    where = str(directory)
    if (config := directory / "config.json").is_file():
        refuse(json.loads(config.read_text()), where)
    for name, what in _OLD_CONFIGS.items():
        if (directory / name).is_file():
            _refuse(where, what, f"its file {name}")
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


def _old_bitsandbytes(found: Mapping[str, Any]) -> str | None:
    """transformers wrote no quant_method before 4.33, when there was one quantizer."""
    return "bitsandbytes" if found.get("load_in_4bit") or found.get("load_in_8bit") else None


def _refuse(where: str, what: str, said: str) -> None:
    raise ValueError(
        f"{where} is a checkpoint quantized with {what} ({said}), which cannot be loaded with its "
        "experts on the CPU yet; give the model's bf16 or fp16 checkpoint, whose experts are "
        "quantized as they are loaded"
    )
