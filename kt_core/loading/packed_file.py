"""The packed expert file: all layers of one model, packed once, then mapped read-only by every
process of a host.

    0   8 bytes   magic "KTPACKED"
    8   u32 LE    version
    12  u32 LE    length of the JSON header
    16  u32 LE    CRC-32 of the JSON header
    20            JSON header: model, source fingerprint, format, group, slices, layers
    ...           layers, each at a multiple of 4096 bytes, as `Experts.packed()` gave them

The layers are independent of the machine's instruction set, so a file may be copied between
machines. The format's name says how scales are kept; whether codes are the checkpoint's own follows
from its fingerprint and that name. A file is written under a temporary name and renamed when
complete, so one that exists is whole; it is nevertheless checked (size, and CRC-32 of every layer,
which also brings the pages into memory) each time it is opened. `VERSION` changes whenever the
packed layout does.
"""

from __future__ import annotations

import fcntl
import json
import mmap
import os
import shutil
import struct
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, BinaryIO

from kt_core import atomic

MAGIC = b"KTPACKED"
VERSION = 2
# A page, so that every layer can be mapped alone; also a multiple of the 64-byte lines the kernels
# read.
ALIGN = 4096
# CRC in pieces: small enough for a smooth progress bar, large enough that Python's share is
# nothing.
_PIECE = 16 << 20

_FIXED = struct.Struct("<8sIII")


@dataclass(frozen=True)
class Layer:
    """Name, shape and activation of one packed layer."""

    name: str
    num_experts: int
    hidden: int
    intermediate: int
    activation: str
    nbytes: int


@dataclass(frozen=True)
class Identity:
    """What a packed file must match to be used: the model, the checkpoint's fingerprint, the
    format, the layers.
    """

    model: str
    source: str
    format: str
    group: int
    layers: tuple[Layer, ...]
    slices: int = 1

    @property
    def filename(self) -> str:
        """The file's name inside a packed_dir."""
        return filename(self.model, self.format, self.group)


def filename(model: str, format: str, group: int) -> str:
    """The name of a packed file inside a packed_dir, whatever its slices."""
    return f"{model}-{format}-g{group}.kt"


class PackedWriter:
    """Writes a packed file layer by layer; used as a context manager, it leaves a complete file or
    none.
    """

    def __init__(self, path: Path, identity: Identity) -> None:
        """Raises OSError if the directory has too little space for the file."""
        self._path, self._identity = path, identity
        self._temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
        self._crcs: list[int] = []
        header = _header(identity, [0] * len(identity.layers))
        self._offsets, self._size = _offsets(len(header), identity.layers)
        free = shutil.disk_usage(path.parent).free
        if free < self._size:
            raise OSError(
                f"packed_dir {path.parent} has {free:,} bytes free but the packed experts need "
                f"{self._size:,}; free some space or choose another packed_dir"
            )

    def __enter__(self) -> PackedWriter:
        self._stream = open(self._temporary, "wb")
        return self

    def add(self, packed: memoryview) -> None:
        """Appends the next layer of the identity. Raises ValueError if its size is not the one
        announced.
        """
        layer = self._identity.layers[len(self._crcs)]
        if packed.nbytes != layer.nbytes:
            raise ValueError(f"{layer.name} packs to {packed.nbytes} bytes, not {layer.nbytes}")
        self._stream.seek(self._offsets[len(self._crcs)])
        self._stream.write(packed)
        self._crcs.append(zlib.crc32(packed))

    def __exit__(self, kind: object, value: object, traceback: object) -> None:
        try:
            with self._stream as stream:
                if kind is None and len(self._crcs) != len(self._identity.layers):
                    raise ValueError(
                        f"{self._path}: {len(self._crcs)} of {len(self._identity.layers)} "
                        "layers were written"
                    )
                if kind is None:
                    stream.truncate(self._size)
                    stream.seek(0)
                    stream.write(_header(self._identity, self._crcs))
            if kind is None:
                atomic.put_in_place(self._temporary, self._path)
        finally:
            self._temporary.unlink(missing_ok=True)


def open_packed(
    path: Path,
    identity: Identity,
    progress: Callable[[int], None] = lambda n: None,
    *,
    verify: bool = True,
) -> dict[str, memoryview]:
    """Maps a packed file and returns the read-only bytes of every layer, 4096-byte aligned.

    `progress` is told every piece of bytes checked; verify=False skips the layers' checksums, for a
    file that another process of this host has just read. Raises ValueError naming the file, what
    differs and the fix.
    """
    with open(path, "rb") as stream:
        header, length = _read_header(path, stream)
        _compare(path, header, identity)
        offsets, size = _offsets(length, identity.layers)
        actual = os.fstat(stream.fileno()).st_size
        if actual != size:
            raise _refuse(path, f"is {actual:,} bytes long instead of {size:,}")
        mapped = memoryview(mmap.mmap(stream.fileno(), size, mmap.MAP_SHARED, mmap.PROT_READ))
    views = {}
    for layer, offset, crc_text in zip(identity.layers, offsets, header["crc"], strict=True):
        view = mapped[offset : offset + layer.nbytes]
        if verify and _crc(view, progress) != int(crc_text, 16):
            raise _refuse(path, f"has a damaged layer {layer.name} (checksum differs)")
        views[layer.name] = view
    return views


def slices_in(path: Path) -> int:
    """The slices of a packed file's experts. Raises ValueError as `open_packed` does."""
    with open(path, "rb") as stream:
        return int(_read_header(path, stream)[0]["slices"])


@contextmanager
def creation_lock(path: Path) -> Iterator[None]:
    """Lets one process of a host create `path` while the others wait; leftovers of killed writers
    are removed.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        lock = open(path.with_name(f".{path.name}.lock"), "w")  # noqa: SIM115 - closed below
    except OSError as error:
        raise OSError(
            f"packed_dir {path.parent} cannot be written to ({error.strerror}); choose another "
            "packed_dir"
        ) from error
    with lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        for leftover in path.parent.glob(f".{path.name}.*.tmp"):
            leftover.unlink()
        yield


def _read_header(path: Path, stream: BinaryIO) -> tuple[dict[str, Any], int]:
    """The JSON header, and the bytes up to its end."""
    fixed = stream.read(_FIXED.size)
    if len(fixed) < _FIXED.size or fixed[:8] != MAGIC:
        raise _refuse(path, "is not a packed expert file")
    _, version, length, crc = _FIXED.unpack(fixed)
    if version != VERSION:
        raise _refuse(path, f"has version {version}, this program reads version {VERSION}")
    text = stream.read(length)
    if len(text) != length or zlib.crc32(text) != crc:
        raise _refuse(path, "has a damaged header (checksum differs)")
    return json.loads(text), _FIXED.size + length


def _compare(path: Path, header: Mapping[str, object], identity: Identity) -> None:
    for key, value in (
        ("model", identity.model),
        ("format", identity.format),
        ("group", identity.group),
    ):
        if header[key] != value:
            raise _refuse(path, f"was packed with {key} {header[key]!r}, not {value!r}")
    if header["layers"] != [asdict(layer) for layer in identity.layers]:
        raise _refuse(path, "holds layers of other names, shapes or activation than the model's")
    if header["slices"] != identity.slices:
        raise _refuse(path, f"is cut into {header['slices']} slices, not {identity.slices}")
    if header["source"] != identity.source:
        raise _refuse(path, f"was packed from another checkpoint than the one of {identity.model}")


def _refuse(path: Path, why: str) -> ValueError:
    return ValueError(
        f"packed expert file {path} {why}; delete it (it is created again) or set another "
        "packed_dir"
    )


def _header(identity: Identity, crcs: Sequence[int]) -> bytes:
    """Fixed part and JSON; its length does not depend on the checksums."""
    body = asdict(identity) | {"crc": [f"{crc:08x}" for crc in crcs]}
    text = json.dumps(body).encode()
    return _FIXED.pack(MAGIC, VERSION, len(text), zlib.crc32(text)) + text


def _offsets(header: int, layers: Sequence[Layer]) -> tuple[list[int], int]:
    """Offset of every layer and the size of the file."""
    offsets, end = [], header
    for layer in layers:
        start = -(-end // ALIGN) * ALIGN
        offsets.append(start)
        end = start + layer.nbytes
    return offsets, end


def _crc(view: memoryview, progress: Callable[[int], None]) -> int:
    crc = 0
    for start in range(0, view.nbytes, _PIECE):
        piece = view[start : start + _PIECE]
        crc = zlib.crc32(piece, crc)
        progress(piece.nbytes)
    return crc
