"""What the parts of loading say to each other: which weights are stored and how, which experts are
asked for, and where each of their matrices lies.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kt_core.loading.codes import Codes

# Safetensors dtypes that `Experts.put` packs.
READABLE = ("BF16", "F16", "F32")

# Values of a quantized weight that are dequantized at once: 4 MiB in fp32.
_PIECE = 1 << 20

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
class TensorHeader:
    """Header entry of one tensor in a safetensors file; `handle` is the open file, `nbytes` what
    the tensor takes there.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    file: Path
    handle: Any = field(compare=False, repr=False)
    nbytes: int = 0

    def __getitem__(self, index: Any) -> Tensor:
        """A part of the tensor, or (...) all of it; only that is read."""
        part: Tensor = self.handle.get_slice(self.name)[index]
        return part


@dataclass(frozen=True)
class Form:
    """What a quantized weight consists of, as far as its header says.

    codes: the format of its Codes; None where they are none and it is dequantized as it is read.
    group: values per scale, 0 for one per channel. scales: safetensors dtype of the scales. why:
    reason for None.
    """

    codes: str | None
    group: int = 0
    scales: str = "F32"
    why: str = ""


@dataclass(frozen=True)
class Quantized:
    """A weight that a container stores quantized, in one or more tensors, under the name that it
    would have in bf16: shape [out, in], or [E, out, in].

    dtype: how it is stored, for messages. file: of its codes. parts: the tensors it is made of.
    decode: (expert, first row, last row) -> those rows of a matrix, as Codes or as fp32 values.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    file: Path
    parts: tuple[TensorHeader, ...]
    form: Form
    decode: Callable[[int, int, int], Codes | Tensor] = field(compare=False, repr=False)

    @property
    def nbytes(self) -> int:
        """Stored bytes of all its tensors."""
        return sum(part.nbytes for part in self.parts)

    def __getitem__(self, index: Any) -> Tensor:
        """Dequantized to fp32: (expert, slice of rows) of stacked ones, or (...) everything."""
        if index is ...:
            return self.dequantized(torch.float32)
        expert, rows = index
        return self._rows(expert, rows.start, rows.stop)

    def dequantized(self, dtype: torch.dtype) -> Tensor:
        """All of it, in pieces, so that little is held in fp32 beside the result."""
        out = torch.empty(self.shape, dtype=dtype)
        rows = self.shape[-2]
        step = max(128, _PIECE // max(self.shape[-1], 1) // 128 * 128)
        for expert, matrix in enumerate(out.view(-1, *self.shape[-2:])):
            for first in range(0, rows, step):
                last = min(first + step, rows)
                matrix[first:last] = self._rows(expert, first, last)
        return out

    def _rows(self, expert: int, first: int, last: int) -> Tensor:
        found = self.decode(expert, first, last)
        return found.dequantize() if isinstance(found, Codes) else found


Stored = TensorHeader | Quantized


@dataclass(frozen=True)
class Rows:
    """Rows [first, last) of one expert in a stacked tensor; transposed: they are its columns."""

    expert: int
    first: int
    last: int
    transposed: bool = False

    def of(self, stored: Any) -> Tensor:
        """A view of a tensor, or what is read of a stored one: [last - first, in]."""
        if self.transposed:
            turned: Tensor = stored[self.expert, :, self.first : self.last].T
            return turned
        part: Tensor = stored[self.expert, self.first : self.last]
        return part


@dataclass(frozen=True)
class ExpertTensor:
    """One projection of one expert as it lies in a checkpoint, shape [out, in]: all of a stored
    tensor, or rows of it.
    """

    module: str
    expert: int
    projection: str
    shape: tuple[int, ...]
    stored: Stored
    rows: Rows | None = None

    @property
    def tensor(self) -> str:
        """Name of the stored tensor."""
        return self.stored.name

    @property
    def dtype(self) -> str:
        """As stored."""
        return self.stored.dtype

    @property
    def file(self) -> Path:
        """Where it is stored."""
        return self.stored.file

    @property
    def readable(self) -> bool:
        """Whether `read` gives what `Experts.put` takes."""
        return isinstance(self.stored, Quantized) or self.dtype in READABLE

    @property
    def nbytes(self) -> int:
        """Stored bytes of this matrix."""
        values, mine = 1, 1
        for n in self.stored.shape:
            values *= n
        for n in self.shape:
            mine *= n
        return self.stored.nbytes * mine // max(values, 1)

    def read(self) -> Tensor:
        """Its values, contiguous: in the dtype that is stored, fp32 for a quantized one."""
        return self.stored[...] if self.rows is None else self.rows.of(self.stored).contiguous()

    def codes(self) -> Codes:
        """Its codes, of a quantized one whose form has any."""
        assert isinstance(self.stored, Quantized)
        at = self.rows or Rows(0, 0, self.shape[0])
        found = self.stored.decode(at.expert, at.first, at.last)
        assert isinstance(found, Codes)
        return found

    def view(self, whole: Tensor) -> Tensor:
        """Its place in the whole stored tensor."""
        return whole if self.rows is None else self.rows.of(whole)


def bad_shape(
    tensor: str, file: Path, shape: tuple[int, ...], expected: tuple[int, ...]
) -> ValueError:
    """The error for a tensor whose stored shape is not the model's."""
    return ValueError(
        f"tensor {tensor} in {file} has shape {list(shape)} where the model needs "
        f"{list(expected)}; check that config.json belongs to this checkpoint"
    )
