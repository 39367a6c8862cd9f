"""What transformers will call the tensors of a checkpoint, from the model's own table of renamings
and conversions; no family is listed here.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

from kt_core.loading.parts import ExpertRequest, Shape
from kt_core.names import STACKED

# What transformers does to expert tensors when it loads them, as far as the dialects do the same.
_KNOWN_CONVERSIONS = {"MergeModulelist", "Concatenate", "Transpose", "Force16BytesAlignment"}


class Naming:
    """The names of one model, from its weight mapping (`load_config.weight_mapping`, or
    `get_model_conversion_mapping`).

    transposed: its loader transposes stacked expert tensors. Raises ValueError for a conversion of
    experts that we do not do.
    """

    def __init__(self, model: Any, weight_mapping: Sequence[Any] | None) -> None:
        mapping = list(weight_mapping or ())
        self._renamings = [entry for entry in mapping if isinstance(entry, WeightRenaming)]
        self._converters = [entry for entry in mapping if isinstance(entry, WeightConverter)]
        # Not the model: what keeps the names would keep it.
        self._parameters = model.state_dict()
        self._prefix = model.base_model_prefix
        self._known: dict[str, tuple[str, str | None]] = {}
        self.transposed = "Transpose" in self._operations_on_experts(type(model).__name__)

    def parameter(self, tensor: str) -> str:
        """The name of the parameter that a stored tensor goes to."""
        return self._renamed(tensor)[0]

    def projection(self, tensor: str) -> str | None:
        """gate, up or down for a stored tensor that the loader collects by expert, else None."""
        name, pattern = self._renamed(tensor)
        parts = STACKED.get(name.rpartition(".")[2])
        for converter in self._converters if parts and pattern else ():
            sources = list(converter.source_patterns)
            if pattern in sources and parts is not None and len(sources) == len(parts):
                return parts[sources.index(pattern)]
        return None

    def request(self, shapes: Mapping[str, Shape]) -> ExpertRequest:
        """What a model with experts of these shapes asks of a checkpoint."""
        return ExpertRequest(shapes, self.parameter, self.projection, self.transposed)

    def _renamed(self, tensor: str) -> tuple[str, str | None]:
        """The parameter, and the pattern of the converter that takes the tensor."""
        if tensor not in self._known:
            name, pattern = rename_source_key(
                tensor, self._renamings, self._converters, self._prefix, self._parameters
            )
            if name not in self._parameters and tensor in self._parameters:
                name, pattern = rename_source_key(tensor, [], [], self._prefix, self._parameters)
            self._known[tensor] = str(name), pattern
        return self._known[tensor]

    def _operations_on_experts(self, model: str) -> set[str]:
        operations = {
            type(operation).__name__
            for entry in self._converters
            if any(re.search(r"\bexperts\b", target) for target in entry.target_patterns)
            for operation in entry.operations
        }
        if unknown := sorted(operations - _KNOWN_CONVERSIONS):
            raise ValueError(
                f"{model} loads its experts through {', '.join(unknown)}, which is not supported; "
                "load it without use_kt"
            )
        return operations
