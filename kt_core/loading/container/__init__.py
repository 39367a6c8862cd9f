"""Containers of quantized weights: how one weight is stored in several tensors, one file each,
found by listing this folder. How weights are named and laid out is the other axis:
kt_core/loading/dialect.

A container is a module with

    METHODS    values of config.json's quant_method that it reads
    VARIANTS   what it reads and refuses, for docs/containers.md
    weights(tensors, settings) -> Iterator[Quantized]
               tensors: header entries by name; settings: of config.json. Headers only, and small
               tensors that say how the others are to be read. Raises ValueError, naming tensor and
               file, for what is missing, of a wrong shape or of a variant that is not known.

Adding a container adds a file here and touches no other.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from kt_core.loading.parts import Stored, TensorHeader

# What quantizers store of activations and caches, which are computed in bf16 here.
_ACTIVATIONS = (
    ".input_scale",
    ".input_scale_ub",
    ".activation_scale",
    ".input_zero_point",
    ".input_global_scale",
    ".output_scale",
    ".q_scale",
    ".k_scale",
    ".v_scale",
    ".kv_scale",
)


@dataclass(frozen=True)
class Variant:
    """One way in which a container stores weights.

    codes: the format whose codes they are, so that experts can be kept as published; None: their
    values are re-encoded, or they are refused, for the reason `why`.
    """

    what: str
    codes: str | None
    why: str = ""
    refused: bool = False


def modules() -> list[ModuleType]:
    """All containers, by file name."""
    names = sorted(info.name for info in pkgutil.iter_modules(__path__))
    return [importlib.import_module(f"{__name__}.{name}") for name in names]


def find(settings: Mapping[str, Any]) -> ModuleType | None:
    """The container that reads what a quantization_config describes."""
    method = settings.get("quant_method")
    if method is None and (settings.get("load_in_4bit") or settings.get("load_in_8bit")):
        method = "bitsandbytes"  # transformers wrote none before 4.33, when it was the one
    return next((m for m in modules() if method in m.METHODS), None)


def weights(stored: Sequence[TensorHeader], settings: Mapping[str, Any]) -> list[Stored]:
    """The weights of a checkpoint: those that the container of `settings` puts together, and all
    other tensors as they are. Raises ValueError as the container does.
    """
    module = find(settings)
    if module is None:  # refused before, by prequantized.py
        raise ValueError(f"no container reads quant_method {settings.get('quant_method')!r}")
    quantized = list(module.weights({header.name: header for header in stored}, settings))
    used = {part.name for weight in quantized for part in weight.parts}
    rest = [s for s in stored if s.name not in used and not s.name.endswith(_ACTIVATIONS)]
    return [*quantized, *rest]
