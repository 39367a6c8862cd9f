"""The files of a checkpoint and the weights that they hold."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from kt_core.loading import container, prequantized
from kt_core.loading.headers import read_header
from kt_core.loading.parts import Stored, TensorHeader


class CheckpointFiles:
    """The files of one checkpoint; headers are read once, on first use, and the files then stay
    open.
    """

    def __init__(self, files: Sequence[Path]) -> None:
        """Raises FileNotFoundError for a missing file, ValueError for a pickle."""
        for file in files:
            if not file.is_file():
                raise FileNotFoundError(
                    f"checkpoint file {file} is missing; download or copy it again"
                )
            if file.suffix in (".bin", ".pt", ".pth"):
                raise ValueError(
                    f"checkpoint file {file} is a pickle, which cannot be streamed; save the model "
                    "as safetensors (model.save_pretrained) and load that"
                )
        self.files = tuple(files)

    @cached_property
    def quantization(self) -> Mapping[str, Any] | None:
        """How config.json beside the files says that their weights are quantized."""
        return prequantized.settings_of(self.files[0].parent) if self.files else None

    @cached_property
    def safetensors(self) -> list[TensorHeader]:
        """Header entries of all `.safetensors` files. Raises ValueError naming a file that is
        truncated or not one.
        """
        return [s for f in self.files if f.suffix == ".safetensors" for s in _headers(f)]

    @cached_property
    def weights(self) -> Sequence[Stored]:
        """What is stored, the tensors of a quantized weight put together as one. Raises ValueError
        as `safetensors` does, or naming a tensor that its container does not have so.
        """
        if self.quantization is None:
            return self.safetensors
        return container.weights(self.safetensors, self.quantization)


def _headers(file: Path) -> list[TensorHeader]:
    try:
        handle = safe_open(str(file), framework="pt", device="cpu")
        header = read_header(file)
    except SafetensorError as error:
        raise ValueError(
            f"checkpoint file {file} is truncated or not a safetensors file ({error}); download or "
            "copy it again"
        ) from error
    return [
        TensorHeader(
            name,
            tuple(entry["shape"]),
            entry["dtype"],
            file,
            handle,
            _length(entry["data_offsets"]),
        )
        for name, entry in header.items()
    ]


def _length(offsets: Sequence[int]) -> int:
    return offsets[1] - offsets[0]
