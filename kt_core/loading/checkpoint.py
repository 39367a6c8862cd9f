"""Finds the routed experts in a checkpoint by its headers, then streams them part by part.

Order of events, so that nothing is ever half-written: `collect` reads the headers of every file and
refuses whatever is missing, truncated, of a wrong shape or of a wrong dtype; only then does `fill`
read weights, one projection of one expert at a time. Names in the checkpoint need not be the
model's (Mixtral stores `block_sparse_moe.experts.0.w1.weight` for `mlp.experts`); the model's own
loader says where a stored tensor goes.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from kt_core.loading import dialect

if TYPE_CHECKING:
    from kt_core.experts import Experts

PROJECTIONS = ("gate", "up", "down")
# Safetensors dtype -> bytes per element; the ones `Experts.put` packs.
_READABLE = {"BF16": 2, "F16": 2, "F32": 4}

Shape = tuple[int, int, int]
"""num_experts, hidden, intermediate of one layer."""


@dataclass(frozen=True)
class Want:
    """What a model asks of a checkpoint.

    shapes: module name in the model -> (experts, hidden, intermediate). parameter: the model's own
    name for the parameter that a stored tensor goes to. projection: of the tensors that its loader
    collects by expert, gate, up or down; None for others. transposed: the model's own loader
    transposes fused expert tensors.
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
class Part:
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
        return self.dtype in _READABLE

    @property
    def nbytes(self) -> int:
        """Stored bytes of the part."""
        size = _READABLE[self.dtype]
        for n in self.shape:
            size *= n
        return size


@dataclass(frozen=True)
class Stored:
    """Header entry of one tensor in a safetensors file; `handle` is the open file."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    file: Path
    handle: Any = field(compare=False, repr=False)


class Source:
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
    def safetensors(self) -> list[Stored]:
        """Header entries of all `.safetensors` files. Raises ValueError naming a file that is
        truncated or not one.
        """
        return [s for f in self.files if f.suffix == ".safetensors" for s in _headers(f)]


def _headers(file: Path) -> list[Stored]:
    try:
        handle = safe_open(str(file), framework="pt", device="cpu")
    except SafetensorError as error:
        raise ValueError(
            f"checkpoint file {file} is truncated or not a safetensors file ({error}); download or "
            "copy it again"
        ) from error
    slices = ((name, handle.get_slice(name)) for name in handle.keys())  # noqa: SIM118 - not a dict
    return [Stored(n, tuple(s.get_shape()), s.get_dtype(), file, handle) for n, s in slices]


def collect(source: Source, want: Want) -> dict[str, list[Part]]:
    """Reads all headers and returns the parts of every wanted module, in the order in which they
    lie in the files.

    Raises ValueError, naming file and tensor, for a truncated or foreign file, an expert that is
    missing or stored twice, a wrong shape, or a dtype that is not bf16, fp16 or fp32.
    """
    parts = [part for scan in dialect.scanners() for part in scan(source, want)]
    chosen: dict[tuple[str, int, str], Part] = {}
    for part in parts:
        _check_shape(part, want.shapes[part.module])
        key = (part.module, part.expert, part.projection)
        other = chosen.get(key)
        if other is not None and other.readable and part.readable:
            raise ValueError(
                f"{part.projection} of expert {part.expert} of {part.module} is stored twice, as "
                f"{other.tensor} in "
                f"{other.file} and as {part.tensor} in {part.file}; remove one of them"
            )
        if other is None or part.readable:
            chosen[key] = part
    return {name: _layer(name, shape, chosen, source, want) for name, shape in want.shapes.items()}


def _layer(
    module: str,
    shape: Shape,
    chosen: Mapping[tuple[str, int, str], Part],
    source: Source,
    want: Want,
) -> list[Part]:
    files = source.files
    keys = [(module, e, p) for e in range(shape[0]) for p in PROJECTIONS]
    missing = [key for key in keys if key not in chosen]
    if missing:
        _, expert, projection = missing[0]
        where = files[0] if len(files) == 1 else f"{files[0].parent} ({len(files)} files)"
        if len(missing) == len(keys) and (others := _alike(module, source, want)):
            raise ValueError(
                f"checkpoint {where} has no tensor under a name that is known for the experts of "
                f"{module}, but others there, such as {others[0].name} {list(others[0].shape)}; "
                "the file may be good: install a transformers version that knows its names, or "
                "pass key_mapping to say what they mean"
            )
        raise ValueError(
            f"checkpoint {where} lacks the {projection} projection of expert {expert} of {module} "
            f"({len(missing)} of {len(keys)} missing there); check that config.json belongs to it "
            "and download it again"
        )
    for key in keys:
        part = chosen[key]
        if not part.readable:
            raise ValueError(
                f"tensor {part.tensor} in {part.file} has dtype {part.dtype}; experts are read "
                f"from {', '.join(_READABLE)}: convert the checkpoint to bf16"
            )
    order = {file: i for i, file in enumerate(files)}
    return sorted((chosen[key] for key in keys), key=lambda part: order[part.file])


def _alike(module: str, source: Source, want: Want) -> list[Stored]:
    """Tensors of the layer of `module` that could be its experts by their shape or number, but go
    to no module that is wanted.
    """
    numbers = list(re.finditer(r"\.\d+\.", f"{module}."))
    layer = module[: numbers[-1].end()] if numbers else module
    return [
        s
        for s in source.safetensors
        if want.module(s.name) is None
        and (s.name.startswith(layer) or want.parameter(s.name).startswith(layer))
        and (len(s.shape) == 3 or re.search(r"\.\d+\.", s.name[len(layer) - 1 :]))
    ]


def _check_shape(part: Part, shape: Shape) -> None:
    num_experts, hidden, intermediate = shape
    if part.expert >= num_experts:
        raise ValueError(
            f"tensor {part.tensor} in {part.file} belongs to expert {part.expert}, but the model "
            f"has {num_experts} experts; check that config.json belongs to this checkpoint"
        )
    expected = (hidden, intermediate) if part.projection == "down" else (intermediate, hidden)
    if part.shape != expected:
        raise bad_shape(part.tensor, part.file, part.shape, expected)


def bad_shape(
    tensor: str, file: Path, shape: tuple[int, ...], expected: tuple[int, ...]
) -> ValueError:
    """The error for a tensor whose stored shape is not the model's."""
    return ValueError(
        f"tensor {tensor} in {file} has shape {list(shape)} where the model needs "
        f"{list(expected)}; check that config.json belongs to this checkpoint"
    )


def fill(experts: Experts, parts: Sequence[Part], progress: Callable[[int], None]) -> None:
    """Packs one layer; at most one part is held unpacked. `progress` is told the stored bytes of
    every part.

    Raises ValueError naming tensor and file if a weight is NaN or infinite or the file cannot be
    read.
    """
    for part in parts:
        try:
            experts.put(part.expert, part.projection, part.read())
        except (ValueError, SafetensorError, OSError) as error:
            raise ValueError(
                f"tensor {part.tensor} in {part.file} (expert {part.expert}, {part.projection}) "
                f"cannot be packed: {error}; repair or download that file again"
            ) from error
        progress(part.nbytes)
    missing = experts.missing()
    if missing:
        raise ValueError(
            f"{experts.name}: nothing was packed for {missing[:3]} ({len(missing)} in all)"
        )


# Fingerprint: files up to 1 MiB are read whole, larger ones by pages spread so that no 16 MiB go
# unsampled.
_SAMPLE, _STRIDE = 4096, 16 << 20


def fingerprint(files: Sequence[Path]) -> str:
    """A digest of names, sizes and sampled contents; it changes when a checkpoint is retrained, not
    when it is moved.
    """
    digest = hashlib.sha256()
    for file in sorted(set(files), key=lambda f: f.name):
        size = file.stat().st_size
        digest.update(f"{file.name}\0{size}\0".encode())
        with open(file, "rb") as stream:
            if size <= 1 << 20:
                digest.update(stream.read())
                continue
            steps = max(size // _STRIDE, 64)
            for i in range(steps + 1):
                stream.seek(i * (size - _SAMPLE) // steps)
                digest.update(stream.read(_SAMPLE))
    return digest.hexdigest()
