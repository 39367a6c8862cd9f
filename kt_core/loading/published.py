"""The weights beside the experts of a checkpoint that is published quantized: dequantized, one at a
time, when transformers' loader asks for them.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from kt_core.loading.parts import Quantized, Stored

log = logging.getLogger("kt")


class Lazy:
    """A stored weight that transformers' loader asks for with [...], dequantized then."""

    def __init__(self, stored: Stored, dtype: torch.dtype) -> None:
        self._stored, self._dtype = stored, dtype

    def __getitem__(self, index: Any) -> Tensor:
        if isinstance(self._stored, Quantized) and index is ...:
            return self._stored.dequantized(self._dtype)
        return self._stored[index]


def say_what_is_dequantized(beside: Sequence[Stored], dtype: torch.dtype) -> None:
    """One line, if any of these weights are quantized."""
    quantized = [w for w in beside if isinstance(w, Quantized)]
    if quantized:
        kinds = ", ".join(sorted({w.dtype for w in quantized}))
        log.info(
            "%d weights beside the experts are stored as %s and are dequantized to %s",
            *(len(quantized), kinds, str(dtype).removeprefix("torch.")),
        )
