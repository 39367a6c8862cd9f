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
from dataclasses import dataclass
from pathlib import Path

from safetensors import SafetensorError

from kt_core.experts import Experts
from kt_core.loading import dialect
from kt_core.loading.files import CheckpointFiles
from kt_core.loading.parts import (
    READABLE,
    ExpertRequest,
    ExpertTensor,
    Shape,
    Stored,
    bad_shape,
)
from kt_core.names import PROJECTIONS


def collect(source: CheckpointFiles, request: ExpertRequest) -> dict[str, list[ExpertTensor]]:
    """Reads all headers and returns the parts of every wanted module, in the order in which they
    lie in the files.

    Raises ValueError, naming file and tensor, for a truncated or foreign file, an expert that is
    missing or stored twice, a wrong shape, or a dtype that is not bf16, fp16 or fp32.
    """
    parts = [part for scan in dialect.scanners() for part in scan(source.weights, request)]
    chosen: dict[tuple[str, int, str], ExpertTensor] = {}
    for part in parts:
        _check_shape(part, request.shapes[part.module])
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
    return {
        name: _layer(name, shape, chosen, source, request) for name, shape in request.shapes.items()
    }


def _layer(
    module: str,
    shape: Shape,
    chosen: Mapping[tuple[str, int, str], ExpertTensor],
    source: CheckpointFiles,
    request: ExpertRequest,
) -> list[ExpertTensor]:
    files = source.files
    keys = [(module, e, p) for e in range(shape[0]) for p in PROJECTIONS]
    missing = [key for key in keys if key not in chosen]
    if missing:
        _, expert, projection = missing[0]
        where = files[0] if len(files) == 1 else f"{files[0].parent} ({len(files)} files)"
        if len(missing) == len(keys) and (others := _alike(module, source, request)):
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
                f"from {', '.join(READABLE)}: convert the checkpoint to bf16"
            )
    order = {file: i for i, file in enumerate(files)}
    return sorted((chosen[key] for key in keys), key=lambda part: order[part.file])


def _alike(module: str, source: CheckpointFiles, request: ExpertRequest) -> list[Stored]:
    """Tensors of the layer of `module` that could be its experts by their shape or number, but go
    to no module that is wanted.
    """
    numbers = list(re.finditer(r"\.\d+\.", f"{module}."))
    layer = module[: numbers[-1].end()] if numbers else module
    return [
        s
        for s in source.weights
        if request.module(s.name) is None
        and (s.name.startswith(layer) or request.parameter(s.name).startswith(layer))
        and (len(s.shape) == 3 or re.search(r"\.\d+\.", s.name[len(layer) - 1 :]))
    ]


def _check_shape(part: ExpertTensor, shape: Shape) -> None:
    num_experts, hidden, intermediate = shape
    if part.expert >= num_experts:
        raise ValueError(
            f"tensor {part.tensor} in {part.file} belongs to expert {part.expert}, but the model "
            f"has {num_experts} experts; check that config.json belongs to this checkpoint"
        )
    expected = (hidden, intermediate) if part.projection == "down" else (intermediate, hidden)
    if part.shape != expected:
        raise bad_shape(part.tensor, part.file, part.shape, expected)


def fill(experts: Experts, parts: Sequence[ExpertTensor], progress: Callable[[int], None]) -> None:
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


@dataclass(frozen=True)
class Origin:
    """The checkpoint that a model's experts were packed from."""

    files: tuple[Path, ...]
    request: ExpertRequest

    def parts(self) -> dict[str, list[ExpertTensor]]:
        """Every projection of every expert by module name, to be read again."""
        return collect(CheckpointFiles(self.files), self.request)


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
