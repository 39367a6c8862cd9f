"""From a checkpoint to packed experts: in memory of this process, in memory that all processes of
the host share, or mapped from the packed file.

The memory plan first, then headers, then weights: a refusal leaves nothing half-made. At any
moment one part (one projection of one expert) is held unpacked and, where a packed file is written,
one packed layer. Of several processes of a host, the first reads and packs; the others map.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import distributed
from tqdm import tqdm  # type: ignore[import-untyped]

from kt_core import checkpoint, experts, memory, shared, store
from kt_core.host import Host
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
    copies: int,
    format: str,
    group: int,
    packed_dir: str | Path | None,
    host: Host,
) -> dict[str, experts.Experts]:
    """Packed experts of every layout, by module name.

    want: the names and shapes that `layouts` ask of `source`. model: directory or hub id.
    other_bytes: CPU bytes of all other weights, of which `copies` processes of the host hold a copy
    each. packed_dir: where the packed file is, or is made. host: the processes that load together.
    Raises ValueError, FileNotFoundError, OSError or MemoryError, in one sentence, on all of them.
    """
    sizes = {x.name: experts.Experts.packed_nbytes(*x.shape, format, group) for x in layouts}
    part = max(4 * x.hidden * x.intermediate for x in layouts)  # unpacked, fp32 at most
    plan = memory.MemoryPlan(
        experts=sum(sizes.values()),
        other=other_bytes,
        staging=part + (max(sizes.values()) if packed_dir else 0),
        mapped=sum(file.stat().st_size for file in source.files),
        copies=copies,
    )
    with host.step("comparing the memory they need with what is there", everywhere=True):
        # before headers: opening a file maps it
        memory.check(plan, memory.limits(), model)
    options = {
        x.name: {"format": format, "group": group, "activation": x.activation, "name": x.name}
        for x in layouts
    }
    with host.step("packing experts on every host", everywhere=True):
        parts: Parts = {}
        with host.step("reading the checkpoint's headers"):
            if host.rank == 0:
                parts = checkpoint.collect(source, want)
        if packed_dir is not None:
            packed = _through_file(
                Path(packed_dir), model, format, group, layouts, sizes, parts, options, host
            )
        elif host.size > 1:
            packed = _in_shared_memory(layouts, sizes, parts, options, host)
        else:
            packed = {}
            with _progress("Packing experts", _stored_bytes(parts)) as bar:
                for layout in layouts:
                    packed[layout.name] = _pack_layer(layout, parts, options, bar)
    log.info(
        "%s: %d layers of experts, %s bytes as %s%s",
        model,
        len(layouts),
        f"{plan.experts:,}",
        format,
        f", one copy for {host.size} processes" if host.size > 1 else "",
    )
    return packed


def _pack_layer(
    layout: ExpertsLayout,
    parts: Parts,
    options: Mapping[str, dict[str, Any]],
    bar: tqdm,
    buffer: Any = None,
) -> experts.Experts:
    layer = experts.Experts(*layout.shape, buffer=buffer, **options[layout.name])
    checkpoint.fill(layer, parts[layout.name], bar.update)
    return layer


def _in_shared_memory(
    layouts: Sequence[ExpertsLayout],
    sizes: Mapping[str, int],
    parts: Parts,
    options: Mapping[str, dict[str, Any]],
    host: Host,
) -> dict[str, experts.Experts]:
    memory_of_host: shared.SharedLayers | None = None
    with host.step("reserving shared memory"):
        if host.rank == 0:
            memory_of_host = shared.SharedLayers([sizes[x.name] for x in layouts])
    try:
        with _progress("Packing experts", _stored_bytes(parts)) as bar:
            for number, layout in enumerate(layouts):
                # One wait a layer: however large the model, no wait is long.
                with host.step(f"packing {layout.name}"):
                    if memory_of_host is not None:
                        _pack_layer(layout, parts, options, bar, memory_of_host.writable(number))
        with host.step("mapping the packed experts"):
            if memory_of_host is not None:
                memory_of_host.seal()
        ticket = None if memory_of_host is None else memory_of_host.ticket
        ticket = host.from_first("mapping the packed experts", ticket)
        with host.step("mapping the packed experts"):
            views = shared.map_layers(ticket)
    finally:
        if memory_of_host is not None:
            memory_of_host.close()
    return {
        x.name: experts.Experts.from_packed(*x.shape, buffer=view, **options[x.name])
        for x, view in zip(layouts, views, strict=True)
    }


def _through_file(
    directory: Path,
    model: str,
    format: str,
    group: int,
    layouts: Sequence[ExpertsLayout],
    sizes: Mapping[str, int],
    parts: Parts,
    options: Mapping[str, dict[str, Any]],
    host: Host,
) -> dict[str, experts.Experts]:
    identity: store.Identity | None = None
    with host.step(f"packing experts into {directory}"):
        if host.rank == 0:
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
            _create_file(directory / identity.filename, identity, layouts, parts, options)
    identity = host.from_first(f"packing experts into {directory}", identity)
    assert identity is not None
    path = directory / identity.filename
    with host.step(f"checking {path}"):
        if host.rank == 0:  # the others trust what it has read
            size = sum(x.nbytes for x in identity.layers)
            with _progress("Checking packed experts", size) as bar:
                views = store.open_packed(path, identity, bar.update)
    with host.step(f"mapping {path}"):
        if host.rank > 0:
            views = store.open_packed(path, identity, verify=False)
    return {
        x.name: experts.Experts.from_packed(*x.shape, buffer=views[x.name], **options[x.name])
        for x in layouts
    }


def _create_file(
    path: Path,
    identity: store.Identity,
    layouts: Sequence[ExpertsLayout],
    parts: Parts,
    options: Mapping[str, dict[str, Any]],
) -> None:
    """Makes the packed file if it is not there; another run may make it meanwhile."""
    if path.exists():
        return
    with store.creation_lock(path):
        if path.exists():
            return
        with (
            store.PackedWriter(path, identity) as writer,
            _progress(f"Packing {path.name}", _stored_bytes(parts)) as bar,
        ):
            for layout in layouts:
                writer.add(_pack_layer(layout, parts, options, bar).packed())


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
