"""What checkpoint.py and the dialects say to each other: which files there are, which experts are
asked for, and where each of their matrices lies.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

# Safetensors dtype -> bytes per element; the ones `Experts.put` packs.
READABLE = {"BF16": 2, "F16": 2, "F32": 4}

Shape = tuple[int, int, int]
"""num_experts, hidden, intermediate of one layer."""


@dataclass(frozen=True)
class ExpertRequest:
    """What a model asks of a checkpoint.

    shapes: module name in the model -> (experts, hidden, intermediate). parameter: the model's own
    name for the parameter that a stored tensor goes to. projection: of the tensors that its loader
    collects by expert, gate, up or down; None for others. transposed: the model's own loader
    transposes stacked expert tensors.
    """

    shapes: Mapping[str, Shape]
    parameter: Callable[[str], str] = str
    projection: Callable[[str], str | None] = lambda tensor: None
    transposed: bool = False

    def module(self, tensor: str) -> str | None:
        """The experts module that a stored tensor belongs to; None if the model has none such."""
        name = self.parameter(tensor).rpartition(".")[0]
        return name if name in self.shapes else None


@dataclass(frozen=True)
class ExpertTensor:
    """One projection of one expert as it lies in a checkpoint: shape [out, in]; `read` gives that
    tensor, `view` its place in the whole stored tensor.
    """

    module: str
    expert: int
    projection: str
    shape: tuple[int, ...]
    dtype: str
    tensor: str
    file: Path
    read: Callable[[], Tensor] = field(compare=False, repr=False)
    view: Callable[[Tensor], Tensor] = field(compare=False, repr=False)

    @property
    def readable(self) -> bool:
        """Whether `Experts.put` takes this dtype."""
        return self.dtype in READABLE

    @property
    def nbytes(self) -> int:
        """Stored bytes of this matrix."""
        size = READABLE[self.dtype]
        for n in self.shape:
            size *= n
        return size


@dataclass(frozen=True)
class TensorHeader:
    """Header entry of one tensor in a safetensors file; `handle` is the open file."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    file: Path
    handle: Any = field(compare=False, repr=False)


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
    def safetensors(self) -> list[TensorHeader]:
        """Header entries of all `.safetensors` files. Raises ValueError naming a file that is
        truncated or not one.
        """
        return [s for f in self.files if f.suffix == ".safetensors" for s in _headers(f)]


def _headers(file: Path) -> list[TensorHeader]:
    try:
        handle = safe_open(str(file), framework="pt", device="cpu")
    except SafetensorError as error:
        raise ValueError(
            f"checkpoint file {file} is truncated or not a safetensors file ({error}); download or "
            "copy it again"
        ) from error
    slices = ((name, handle.get_slice(name)) for name in handle.keys())  # noqa: SIM118 - not a dict
    return [TensorHeader(n, tuple(s.get_shape()), s.get_dtype(), file, handle) for n, s in slices]


def bad_shape(
    tensor: str, file: Path, shape: tuple[int, ...], expected: tuple[int, ...]
) -> ValueError:
    """The error for a tensor whose stored shape is not the model's."""
    return ValueError(
        f"tensor {tensor} in {file} has shape {list(shape)} where the model needs "
        f"{list(expected)}; check that config.json belongs to this checkpoint"
    )
