"""From a checkpoint to packed experts, in anonymous memory or mapped from the packed file.

The memory plan first, then headers, then weights: a refusal leaves nothing half-made. At any
moment one part (one projection of one expert) is held unpacked and, where a packed file is written,
one packed layer.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import distributed
from tqdm import tqdm  # type: ignore[import-untyped]

from kt_core import checkpoint, experts, memory, store
from kt_core.layout import ExpertsLayout

log = logging.getLogger("kt")

Parts = Mapping[str, list[checkpoint.Part]]


def pack(
    layouts: Sequence[ExpertsLayout],
    source: checkpoint.Source,
    want: checkpoint.Want,
    *,
    model: str,
    other_bytes: int,
    format: str,
    group: int,
    packed_dir: str | Path | None,
) -> dict[str, experts.Experts]:
    """Packed experts of every layout, by module name.

    want: the names and shapes that `layouts` ask of `source`. model: directory or hub id.
    other_bytes: CPU bytes of all other weights. packed_dir: where the packed file is, or is made.
    Raises ValueError, FileNotFoundError, OSError or MemoryError, in one sentence.
    """
    sizes = {x.name: experts.Experts.packed_nbytes(*x.shape, format, group) for x in layouts}
    part = max(4 * x.hidden * x.intermediate for x in layouts)  # unpacked, fp32 at most
    plan = memory.MemoryPlan(
        experts=sum(sizes.values()),
        other=other_bytes,
        staging=part + (max(sizes.values()) if packed_dir else 0),
        mapped=sum(file.stat().st_size for file in source.files),
    )
    memory.check(plan, memory.limits(), model)  # before headers: opening a file maps it
    parts = checkpoint.collect(source, want)
    options = {
        x.name: {"format": format, "group": group, "activation": x.activation, "name": x.name}
        for x in layouts
    }
    if packed_dir is None:
        packed = {}
        with _progress("Packing experts", _stored_bytes(parts)) as bar:
            for layout in layouts:
                packed[layout.name] = _pack_layer(layout, parts, options, bar)
    else:
        identity = store.Identity(
            model=_model_id(model),
            source=checkpoint.fingerprint(
                [part.file for layer in parts.values() for part in layer]
            ),
            format=format,
            group=group,
            layers=tuple(
                store.Layer(x.name, *x.shape, x.activation, sizes[x.name]) for x in layouts
            ),
        )
        packed = _through_file(Path(packed_dir), identity, layouts, parts, options)
    log.info(
        "%s: %d layers of experts, %s bytes as %s", model, len(layouts), f"{plan.experts:,}", format
    )
    return packed


def _pack_layer(
    layout: ExpertsLayout, parts: Parts, options: Mapping[str, dict[str, Any]], bar: tqdm
) -> experts.Experts:
    layer = experts.Experts(*layout.shape, **options[layout.name])
    checkpoint.fill(layer, parts[layout.name], bar.update)
    return layer


def _through_file(
    directory: Path,
    identity: store.Identity,
    layouts: Sequence[ExpertsLayout],
    parts: Parts,
    options: Mapping[str, dict[str, Any]],
) -> dict[str, experts.Experts]:
    path = directory / identity.filename
    if not path.exists():
        with store.creation_lock(path):
            if not path.exists():  # another rank may have made it while we waited
                with (
                    store.PackedWriter(path, identity) as writer,
                    _progress(f"Packing {path.name}", _stored_bytes(parts)) as bar,
                ):
                    for layout in layouts:
                        writer.add(_pack_layer(layout, parts, options, bar).packed())
    with _progress("Checking packed experts", sum(x.nbytes for x in identity.layers)) as bar:
        views = store.open_packed(path, identity, bar.update)
    return {
        x.name: experts.Experts.from_packed(*x.shape, buffer=views[x.name], **options[x.name])
        for x in layouts
    }


def _stored_bytes(parts: Parts) -> int:
    return sum(part.nbytes for layer in parts.values() for part in layer)


def _progress(what: str, total: int) -> tqdm:
    """Bytes, rate, time left; silent where stderr is no terminal and on ranks but the first."""
    joined = distributed.is_available() and distributed.is_initialized()
    disable = True if joined and distributed.get_rank() > 0 else None  # None: only on a terminal
    return tqdm(
        desc=what, total=total, unit="B", unit_scale=True, unit_divisor=1024, disable=disable
    )


def _model_id(name: str) -> str:
    """A file name for a model: the directory's name, or the hub id with its slash replaced."""
    path = Path(name)
    return path.resolve().name if path.is_dir() else name.replace("/", "--")
