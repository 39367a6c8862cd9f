"""Checkpoint dialects: one file per container or naming, found by listing this folder.

A dialect is a module with one function

    scan(source: CheckpointFiles, request: ExpertRequest) -> Iterable[ExpertTensor]

(kt_core.loading.parts) which reads headers only and returns an `ExpertTensor` for every projection
of every expert that it can name and whose module `request` asks for. Tensors it does not know it
leaves out: another dialect may know them. Their dtype may be one nobody here decodes; the loader
then names it. Adding a container adds a file here and touches no other.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Iterable

from kt_core.loading.parts import CheckpointFiles, ExpertRequest, ExpertTensor

Scan = Callable[[CheckpointFiles, ExpertRequest], Iterable[ExpertTensor]]


def scanners() -> list[Scan]:
    """The scan functions of all dialects, by file name."""
    names = sorted(info.name for info in pkgutil.iter_modules(__path__))
    return [importlib.import_module(f"{__name__}.{name}").scan for name in names]
