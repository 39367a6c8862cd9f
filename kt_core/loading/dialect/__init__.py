"""Checkpoint dialects: one file per container or naming, found by listing this folder.

A dialect is a module with one function

    scan(source: Source, want: Want) -> Iterable[Part]

which reads headers only and returns a `Part` (kt_core.loading.checkpoint) for every projection of
every expert that it can name and whose module `want` asks for. Tensors it does not know it leaves
out: another dialect may know them. A part's dtype may be one nobody here decodes; the loader then
names it. Adding a container adds a file here and touches no other.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kt_core.loading.checkpoint import Part, Source, Want

Scan = Callable[["Source", "Want"], "Iterable[Part]"]


def scanners() -> list[Scan]:
    """The scan functions of all dialects, by file name."""
    names = sorted(info.name for info in pkgutil.iter_modules(__path__))
    return [importlib.import_module(f"{__name__}.{name}").scan for name in names]
