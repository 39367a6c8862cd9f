"""From a checkpoint to packed experts: in memory of this process, in memory that all processes of
the host share, or mapped from the packed file.

What memory is needed first, then headers, then weights: a refusal leaves nothing half-made. At any
moment one part (one projection of one expert) is held unpacked and, where a packed file is written,
one packed layer. Of several processes of a host, the first reads and packs; the others map.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from torch import distributed
from tqdm import tqdm  # type: ignore[import-untyped]

from kt_core import experts, runtime
from kt_core.loading import checkpoint, encoding, memory, numa, packed_file, shared
from kt_core.loading.experts_contract import ExpertsLayout
from kt_core.loading.files import CheckpointFiles
from kt_core.loading.host import Host
from kt_core.loading.parts import ExpertRequest, ExpertTensor
from kt_core.settings import ExpertSettings

log = logging.getLogger("kt")

Parts = Mapping[str, list[ExpertTensor]]


@dataclass(frozen=True)
class _Layers:
    """The layers of a model, how they are kept, and the slices that each is cut into."""

    layouts: Sequence[ExpertsLayout]
    settings: ExpertSettings
    slices: int
    loss: encoding.Loss = field(default_factory=encoding.Loss)

    @cached_property
    def sizes(self) -> dict[str, int]:
        """Packed bytes of every layer, by its name."""
        s = self.settings
        return {
            x.name: experts.Experts.packed_nbytes(*x.shape, s.known_format, s.group, self.slices)
            for x in self.layouts
        }

    def empty(self, layout: ExpertsLayout, buffer: Any) -> experts.Experts:
        """One of the layers, nothing packed yet, in `buffer` or (None) in memory of its own."""
        layer = experts.Experts(
            *layout.shape,
            format=self.settings.known_format,
            group=self.settings.group,
            activation=layout.activation,
            slices=self.slices,
            buffer=buffer,
            name=layout.name,
        )
        if buffer is not None:
            layer.bind_slices()
        return layer

    def fill(self, layer: experts.Experts, parts: Parts, progress: Callable[[int], None]) -> None:
        """Packs one of the layers from the checkpoint, and adds to what re-encoding costs."""
        checkpoint.fill(layer, parts[layer.name], progress)
        self.loss.add(layer, parts[layer.name])

    def over(self, layout: ExpertsLayout, view: memoryview) -> experts.Experts:
        """One of the layers, whose packed bytes are `view`."""
        return experts.Experts.from_packed(
            *layout.shape,
            buffer=view,
            format=self.settings.known_format,
            group=self.settings.group,
            activation=layout.activation,
            slices=self.slices,
            name=layout.name,
        )


def pack(
    layouts: Sequence[ExpertsLayout],
    source: CheckpointFiles,
    request: ExpertRequest,
    *,
    model: str,
    other_bytes: int,
    copies: int,
    settings: ExpertSettings,
    host: Host,
) -> dict[str, experts.Experts]:
    """Packed experts of every layout, by module name.

    request: the names and shapes that `layouts` ask of `source`. model: directory or hub id.
    other_bytes: CPU bytes of all other weights, of which `copies` processes of the host hold a copy
    each. settings: how experts are kept. host: the processes that load together.
    Raises ValueError, FileNotFoundError, OSError or MemoryError, in one sentence, on all of them.
    """
    file = None
    if settings.packed_dir is not None:
        file = Path(settings.packed_dir) / packed_file.filename(
            _model_id(model), settings.known_format, settings.weights_per_scale
        )
    layers = _Layers(layouts, settings, _spread(layouts, settings, file, host))
    # Pages of a file lie where they were first read, and cannot be bound to a node.
    copied = file is not None and host.from_first("packing experts", runtime.numa_nodes() > 1)
    sizes = layers.sizes
    # Of one part, bytes per value: fp32 at most, or codes, scales and products while dequantized.
    wide = 4 if source.quantization is None else 24
    part = max(wide * x.hidden * x.intermediate for x in layouts)
    need = memory.MemoryNeed(
        experts=sum(sizes.values()),
        other=other_bytes,
        staging=part + (max(sizes.values()) if file else 0),
        mapped=sum(file.stat().st_size for file in source.files)
        + (sum(sizes.values()) if copied else 0),
        copies=copies,
    )
    with host.step("comparing the memory they need with what is there", everywhere=True):
        # before headers: opening a file maps it
        memory.check(need, memory.limits(), model)
    with host.step("packing experts on every host", everywhere=True):
        parts: Parts = {}
        with host.step("reading the checkpoint's headers"):
            if host.rank == 0:
                parts = checkpoint.collect(source, request)
        views: Mapping[str, memoryview] = {}
        if file is not None:
            identity = _identity(model, layers, parts, host)
            views = _through_file(file, identity, layers, parts, host)
        if file is not None and not copied:
            packed = {x.name: layers.over(x, views[x.name]) for x in layouts}
        else:
            packed = _in_memory(layers, parts, views, host)
    layers.loss.say(model, settings.known_format)
    log.info(
        "%s: %d layers of experts, %s bytes as %s%s%s",
        model,
        len(layouts),
        f"{need.experts:,}",
        settings.known_format,
        f", one copy for {host.size} processes" if host.size > 1 else "",
        f", on {runtime.numa_nodes()} NUMA nodes" if runtime.numa_nodes() > 1 else "",
    )
    return packed


def _spread(
    layouts: Sequence[ExpertsLayout], settings: ExpertSettings, file: Path | None, host: Host
) -> int:
    """Spreads this process over NUMA nodes; returns the slices of the experts."""
    slices = 0
    with host.step("dividing experts among NUMA nodes", everywhere=True):
        if host.rank == 0:
            most = min(
                experts.Experts.max_slices(x.intermediate, settings.known_format, settings.group)
                for x in layouts
            )
            exists = file is not None and file.exists()
            in_file = packed_file.slices_in(file) if file is not None and exists else None
            slices = numa.slices_for(settings.numa_nodes, most, file if exists else None, in_file)
    slices = host.from_first("dividing experts among NUMA nodes", slices)
    with host.step("spreading threads over NUMA nodes", everywhere=True):
        numa.spread(settings.numa_nodes, slices)
    return slices


def _in_memory(
    layers: _Layers, parts: Parts, views: Mapping[str, memoryview], host: Host
) -> dict[str, experts.Experts]:
    """Layers packed from the checkpoint or, where there are `views`, copied from the packed file:
    in memory of this process or of all processes of the host."""
    with _progress("Packing experts", 0 if views else _stored_bytes(parts)) as bar:

        def make(layout: ExpertsLayout, buffer: Any = None) -> experts.Experts:
            layer = layers.empty(layout, buffer)
            if views:
                layer.put_packed(views[layout.name])
            else:
                layers.fill(layer, parts, bar.update)
            return layer

        if host.size > 1:
            return _in_shared_memory(layers, make, host)
        return {layout.name: make(layout) for layout in layers.layouts}


def _in_shared_memory(
    layers: _Layers, make: Callable[[ExpertsLayout, Any], experts.Experts], host: Host
) -> dict[str, experts.Experts]:
    memory_of_host: shared.SharedLayers | None = None
    with host.step("reserving shared memory"):
        if host.rank == 0:
            memory_of_host = shared.SharedLayers([layers.sizes[x.name] for x in layers.layouts])
    try:
        for number, layout in enumerate(layers.layouts):
            # One wait a layer: however large the model, no wait is long.
            with host.step(f"packing {layout.name}"):
                if memory_of_host is not None:
                    make(layout, memory_of_host.writable(number))
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
    return {x.name: layers.over(x, view) for x, view in zip(layers.layouts, views, strict=True)}


def _identity(model: str, layers: _Layers, parts: Parts, host: Host) -> packed_file.Identity:
    """What the packed file must match; the host's first process has seen the checkpoint."""
    identity: packed_file.Identity | None = None
    with host.step("comparing the checkpoint with the packed file"):
        if host.rank == 0:
            identity = packed_file.Identity(
                model=_model_id(model),
                source=checkpoint.fingerprint(
                    [part.file for layer in parts.values() for part in layer]
                ),
                format=layers.settings.known_format,
                group=layers.settings.weights_per_scale,
                layers=tuple(
                    packed_file.Layer(x.name, *x.shape, x.activation, layers.sizes[x.name])
                    for x in layers.layouts
                ),
                slices=layers.slices,
            )
    identity = host.from_first("comparing the checkpoint with the packed file", identity)
    assert identity is not None
    return identity


def _through_file(
    path: Path, identity: packed_file.Identity, layers: _Layers, parts: Parts, host: Host
) -> dict[str, memoryview]:
    """The packed bytes of every layer, mapped from the file, which is made if it is not there."""
    with host.step(f"packing experts into {path.parent}"):
        if host.rank == 0:
            _create_file(path, identity, layers, parts)
    with host.step(f"checking {path}"):
        if host.rank == 0:  # the others trust what it has read
            size = sum(x.nbytes for x in identity.layers)
            with _progress("Checking packed experts", size) as bar:
                views = packed_file.open_packed(path, identity, bar.update)
    with host.step(f"mapping {path}"):
        if host.rank > 0:
            views = packed_file.open_packed(path, identity, verify=False)
    return views


def _create_file(path: Path, identity: packed_file.Identity, layers: _Layers, parts: Parts) -> None:
    """Makes the packed file if it is not there; another run may make it meanwhile."""
    if path.exists():
        return
    with packed_file.creation_lock(path):
        if path.exists():
            return
        with (
            packed_file.PackedWriter(path, identity) as writer,
            _progress(f"Packing {path.name}", _stored_bytes(parts)) as bar,
        ):
            for layout in layers.layouts:
                layer = layers.empty(layout, None)
                layers.fill(layer, parts, bar.update)
                writer.add(layer.packed())


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
