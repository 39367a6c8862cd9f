"""What an adapter file holds beside LoRA factors: values for parameters of the base model.

peft writes a module that was trained whole (modules_to_save) under its own name, biases and copies
of adapted or resized embeddings under the names they have in the wrapped model (`base_layer`), and
rows of single tokens (trainable_token_indices) as `token_adapter.trainable_tokens_delta`, which
holds the rows' values in spite of its name. Stock peft puts all of them in the place of the base's.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from kt_core.adapters.peft_format import AdapterData

_WRAPPED = re.compile(r"\.(token_adapter\.base_layer|token_adapter|base_layer|original_module)\b")
_ROWS = ".token_adapter.trainable_tokens_delta"


def plain(name: str) -> str:
    """The name that a module or parameter of a model with adapters has without them."""
    return _WRAPPED.sub("", name)


@dataclass(frozen=True)
class Rows:
    """Rows of an embedding: `values` [n, H] stand in the place of rows `indices`."""

    indices: tuple[int, ...]
    values: Tensor


@dataclass(frozen=True)
class Extra:
    """values: by parameter of the model, what stands in its place. rows: by module path."""

    values: Mapping[str, Tensor]
    rows: Mapping[str, Rows]


def understand(data: AdapterData, where: str) -> Extra:
    """`data.extra` by meaning. Raises ValueError for rows whose tokens the config does not name."""
    values: dict[str, Tensor] = {}
    rows: dict[str, Rows] = {}
    for name, tensor in data.extra.items():
        if ".original_module." in name:  # the base's own, beside what was trained in its place
            continue
        if name.endswith(_ROWS):
            path = name.removesuffix(_ROWS)
            indices = _indices(data.config, path)
            if len(indices) != len(tensor):
                raise ValueError(
                    f"{where}: {name} holds {len(tensor)} rows but the config's "
                    f"trainable_token_indices name {len(indices)} for {path}; config and weights "
                    "belong to different adapters"
                )
            rows[path] = Rows(indices, tensor)
        else:  # peft writes a resized module twice, the second time inside of its wrapper
            values.setdefault(plain(name.replace(".modules_to_save.", ".")), tensor)
    return Extra(values, rows)


def _indices(config: Mapping[str, Any], path: str) -> tuple[int, ...]:
    chosen = config.get("trainable_token_indices") or ()
    if isinstance(chosen, Mapping):
        fits = [v for k, v in chosen.items() if path == k or path.endswith(f".{k}")]
        chosen = fits[0] if fits else ()
    return tuple(int(i) for i in chosen)
