"""Packed experts that this process holds already, for a second model from the same checkpoint.

The reference model of preference training is one: its adapter and its other weights are its own,
its experts are frozen, so they are those of the first model. Nothing is kept alive here.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from typing import Any

from kt_core import experts
from kt_core.loading.experts_contract import ExpertsLayout
from kt_core.loading.files import CheckpointFiles
from kt_core.settings import ExpertSettings

_held: weakref.WeakValueDictionary[Any, experts.Experts] = weakref.WeakValueDictionary()


def remember(
    packed: Mapping[str, experts.Experts],
    source: CheckpointFiles,
    layouts: Sequence[ExpertsLayout],
    settings: ExpertSettings,
) -> None:
    """Notes what was packed from `source` with `settings`."""
    for key, layout in zip(_keys(source, layouts, settings), layouts, strict=True):
        _held[key] = packed[layout.name]


def find(
    source: CheckpointFiles, layouts: Sequence[ExpertsLayout], settings: ExpertSettings
) -> dict[str, experts.Experts] | None:
    """The packed experts of every layout, if all are alive and the files have not changed."""
    found = [_held.get(key) for key in _keys(source, layouts, settings)]
    named = {x.name: e for x, e in zip(layouts, found, strict=True) if e is not None}
    return named if len(named) == len(layouts) else None


def _keys(
    source: CheckpointFiles, layouts: Sequence[ExpertsLayout], settings: ExpertSettings
) -> list[tuple[Any, ...]]:
    files = []
    for file in source.files:
        status = file.stat()
        files.append((file.resolve(), status.st_size, status.st_mtime_ns))
    form = settings.format, settings.weights_per_scale, settings.numa_nodes
    return [(experts.Experts, tuple(files), form, layout) for layout in layouts]
