"""What it costs where weights that are published quantized are re-encoded."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field

from kt_core import experts
from kt_core.loading.parts import ExpertTensor, Quantized

log = logging.getLogger("kt")


@dataclass
class Loss:
    """Squares of differences and of values, of the first expert of each layer; `kinds`: how they
    were stored.
    """

    difference: float = 0.0
    values: float = 0.0
    kinds: set[str] = field(default_factory=set)

    def add(self, layer: experts.Experts, parts: Sequence[ExpertTensor]) -> None:
        """Compares a packed layer with what is stored quantized of it."""
        for part in (p for p in parts if p.expert == 0 and isinstance(p.stored, Quantized)):
            self.kinds.add(part.dtype)
            stored = part.read()
            self.difference += float((layer.get(0, part.projection) - stored).square().sum())
            self.values += float(stored.square().sum())

    def say(self, model: str, format: str) -> None:
        """One line, if anything was stored quantized."""
        if self.values:
            error = (self.difference / self.values) ** 0.5
            log.warning(
                "%s: experts are stored as %s and were re-encoded as %s, with a relative error of "
                "%.2g %% (first expert of each layer)",
                *(model, ", ".join(sorted(self.kinds)), format, 100 * error),
            )
