"""Checkpoint dialects: how the weights of experts are named and laid out, one file each, found by
listing this folder. How a single weight is stored is the other axis: kt_core/loading/container.

A dialect is a module with one function

    scan(weights: Sequence[Stored], request: ExpertRequest) -> Iterable[ExpertTensor]

(kt_core.loading.parts) which looks at names and shapes only and returns an `ExpertTensor` for every
projection of every expert that it can name and whose module `request` asks for. Weights it does not
know it leaves out: another dialect may know them. Their dtype may be one nobody here decodes; the
loader then names it. Adding a naming adds a file here and touches no other.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Iterable, Sequence

from kt_core.loading.parts import ExpertRequest, ExpertTensor, Stored

Scan = Callable[[Sequence[Stored], ExpertRequest], Iterable[ExpertTensor]]


def scanners() -> list[Scan]:
    """The scan functions of all dialects, by file name."""
    names = sorted(info.name for info in pkgutil.iter_modules(__path__))
    return [importlib.import_module(f"{__name__}.{name}").scan for name in names]
