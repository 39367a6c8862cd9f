"""A model without weights, built from a checkpoint's config.json: what names and shapes it has, and
which stored tensor is which of its parameters.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers.conversion_mapping import get_model_conversion_mapping

from kt_core import hf
from kt_core.merged_files import INDEX

_SINGLE = "model.safetensors"


@dataclass(frozen=True)
class Skeleton:
    """model: on the meta device. parameter: its name for a stored tensor. transposed: its loader
    transposes fused expert tensors.
    """

    model: Any
    parameter: Callable[[str], str]
    transposed: bool


def skeleton(directory: Path, *, trust_remote_code: bool = False) -> Skeleton:
    """The model of a checkpoint directory, of the class that `hf.load_model` gives it."""
    config = transformers.AutoConfig.from_pretrained(directory, trust_remote_code=trust_remote_code)
    auto = transformers.AutoModelForCausalLM
    if type(config) in auto._model_mapping:
        kind = auto._model_mapping[type(config)]
        if kind.config_class is config.sub_configs.get("text_config"):
            config = config.get_text_config()
    with torch.device("meta"):
        model = auto.from_config(config, trust_remote_code=trust_remote_code)
    mapping = get_model_conversion_mapping(model)
    return Skeleton(model, hf.renaming(model, mapping), hf.transposed(model, mapping))


def weight_files(directory: Path) -> list[Path]:
    """The weight files that transformers would load. Raises FileNotFoundError for a directory
    without safetensors.
    """
    if (directory / _SINGLE).is_file():
        return [directory / _SINGLE]
    if (directory / INDEX).is_file():
        index = json.loads((directory / INDEX).read_text())
        return [directory / name for name in sorted(set(index["weight_map"].values()))]
    raise FileNotFoundError(
        f"{directory} has no {_SINGLE} and no {INDEX}; give a checkpoint directory with safetensors"
    )
