"""A model without weights, built from a checkpoint's config.json: what names and shapes it has, and
which stored tensor is which of its parameters.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers.conversion_mapping import get_model_conversion_mapping

from kt_core import hf
from kt_core.adapters.merged_files import INDEX
from kt_core.loading.naming import Naming

_SINGLE = "model.safetensors"


@dataclass(frozen=True)
class Skeleton:
    """model: on the meta device. naming: what it calls stored tensors."""

    model: Any
    naming: Naming


def skeleton(directory: Path, *, trust_remote_code: bool = False) -> Skeleton:
    """The model of a checkpoint directory, of the class that the checkpoint was saved from where
    transformers has it, so with all parts of a multimodal one.
    """
    config = transformers.AutoConfig.from_pretrained(directory, trust_remote_code=trust_remote_code)
    classes = [c for auto in hf.AUTO_CLASSES for c in _classes(auto, config)]
    saved = [c for c in classes if c.__name__ in (config.architectures or ())]
    with torch.device("meta"):
        if not classes:
            auto = transformers.AutoModelForCausalLM
            model = auto.from_config(config, trust_remote_code=trust_remote_code)
        else:
            kind = (saved or classes)[0]
            is_text = kind.config_class is config.sub_configs.get("text_config")
            model = kind(config.get_text_config() if is_text else config)
    return Skeleton(model, Naming(model, get_model_conversion_mapping(model)))


def _classes(auto: Any, config: Any) -> list[Any]:
    if type(config) not in auto._model_mapping:
        return []
    found = auto._model_mapping[type(config)]
    return list(found) if isinstance(found, tuple) else [found]


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
