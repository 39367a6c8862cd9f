"""Packed experts in memory that all processes of a host map: one copy, nameless, gone with the
last of them.

The memory is a memfd, so no file system limits it (Docker's /dev/shm holds 64 MB) and nothing is
left behind by a crash. The first process creates and fills it; the others open it read-only below
/proc/<pid>/fd, which processes of one user and one PID namespace may do. Before it is shared it is
sealed: no process can change or resize it any more.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
from collections.abc import Sequence
from dataclasses import dataclass

# A huge page, so that a layer may consist of them. Holes between layers take no memory.
_ALIGN = 2 << 20
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE


@dataclass(frozen=True)
class Ticket:
    """What another process of the host needs to map the memory."""

    path: str
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]


class SharedLayers:
    """Memory for layers of the given sizes in bytes, created by the first process of a host.

    `writable(i)` maps one layer; drop it when it is filled. `seal()` ends writing. `close()` gives
    up the descriptor: whoever has mapped the memory keeps it.
    """

    def __init__(self, sizes: Sequence[int]) -> None:
        """Raises OSError where the system has no such memory."""
        offsets, end = [], 0
        for size in sizes:
            offsets.append(end)
            end += -(-size // _ALIGN) * _ALIGN
        self._fd = os.memfd_create("kt-experts", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(self._fd, end)
        self.ticket = Ticket(f"/proc/{os.getpid()}/fd/{self._fd}", tuple(offsets), tuple(sizes))

    def writable(self, index: int) -> mmap.mmap:
        """The memory of one layer, zero so far."""
        layer = mmap.mmap(
            self._fd, self.ticket.sizes[index], mmap.MAP_SHARED, offset=self.ticket.offsets[index]
        )
        with contextlib.suppress(OSError):  # where the kernel has no huge pages for shared memory
            layer.madvise(mmap.MADV_HUGEPAGE)
        return layer

    def seal(self) -> None:
        """Makes the memory read-only for everybody. Raises OSError while a layer is writable."""
        fcntl.fcntl(self._fd, fcntl.F_ADD_SEALS, _SEALS)

    def close(self) -> None:
        """No further process can map it."""
        os.close(self._fd)


def map_layers(ticket: Ticket) -> list[memoryview]:
    """The read-only bytes of every layer. Raises OSError naming the fix where the memory of the
    other process cannot be reached.
    """
    try:
        fd = os.open(ticket.path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        raise OSError(
            f"the experts packed by another rank of this machine cannot be mapped from "
            f"{ticket.path} ({error.strerror}); run all ranks as one user, or set "
            "kt_config.packed_dir"
        ) from error
    try:
        whole = memoryview(
            mmap.mmap(fd, os.fstat(fd).st_size, mmap.MAP_SHARED, prot=mmap.PROT_READ)
        )
    finally:
        os.close(fd)
    return [whole[o : o + n] for o, n in zip(ticket.offsets, ticket.sizes, strict=True)]
