"""What a load will need and what the machine allows, compared before a single weight is read.

Limits are read from the places the kernel enforces them: MemAvailable, every memory cgroup (v1 or
v2) from the process's own up to the root, and RLIMIT_AS. Tests bring a root directory of their own.
"""

from __future__ import annotations

import ctypes
import os
import resource
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from kt_core import _kt, formats


class _Names(NamedTuple):
    """Files of a memory cgroup, and fields of its memory.stat that count the page cache."""

    limit: str
    usage: str
    cache: tuple[str, str]


_V2 = _Names("memory.max", "memory.current", ("inactive_file", "active_file"))
_V1 = _Names(
    *("memory.limit_in_bytes", "memory.usage_in_bytes"),
    ("total_inactive_file", "total_active_file"),
)

# cgroup v1 writes "no limit" as the largest page-aligned int64; anything above 2**60 bytes means
# the same.
_UNLIMITED = 1 << 60

# Numbers of mallopt's parameters in glibc's malloc.h.
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3


@dataclass(frozen=True)
class MemoryNeed:
    """Bytes a load needs at its peak.

    experts: packed experts, in memory or mapped from the packed file. other: non-expert weights
    kept on the CPU. staging: what is held for a moment beside them. mapped: checkpoint files that
    are mapped, which costs address space but no memory that cannot be reclaimed. copies: processes
    of this host that load together and each hold `other`; the experts they share.
    """

    experts: int
    other: int
    staging: int
    mapped: int
    copies: int = 1

    @property
    def resident(self) -> int:
        """Bytes of memory that all processes need together."""
        return self.experts + self.other * self.copies + self.staging

    @property
    def address_space(self) -> int:
        """Bytes of address space that one process needs."""
        return self.experts + self.other + self.staging + self.mapped


def keep_freed_tensors() -> bool:
    """Has glibc keep freed blocks below 32 MiB for the next ones, until `return_freed_tensors`.

    Left alone it gives memory back while a training step still needs it, and the kernel clears the
    pages anew: at 1,024 tokens the demo took 9.2 s a step where every tensor's pages went back at
    once and 7.5 s where none did. But a heap that only grows is fragmented at its peak (1.22 times
    the sum of tensors). Kept, and returned once per forward where they have become many
    (kt_sft/cpu/malloc.py), a step takes 7.8 s and 1.06 times. For processes that train on the
    CPU; a choice in glibc's own environment variables stands.
    Returns whether it was set (False also where the libc has no mallopt).
    """
    chosen = ("MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_", "GLIBC_TUNABLES")
    if any(name in os.environ for name in chosen):
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError):
        return False
    return bool(mallopt(_M_TRIM_THRESHOLD, 2**31 - 1) and mallopt(_M_MMAP_THRESHOLD, 32 << 20))


def return_freed_tensors() -> None:
    """Gives the whole free pages of glibc's heaps back to the system."""
    ctypes.CDLL(None).malloc_trim(0)


def resident_bytes() -> int:
    """Bytes of memory that this process holds now, mapped files included."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize()


@dataclass(frozen=True)
class Limit:
    """One bound: `available` bytes may still be used; `address_space` tells whether mappings count
    too.
    """

    name: str
    available: int
    address_space: bool = False


def limits(root: Path = Path("/")) -> list[Limit]:
    """All bounds that apply to this process, unreadable ones are left out. Files are read below
    `root`.
    """
    found = list(_cgroup_limits(root))
    proc = root / "proc"
    meminfo = _fields(proc / "meminfo")
    if "MemAvailable:" in meminfo:
        found.append(Limit("the machine's MemAvailable", meminfo["MemAvailable:"] * 1024))
    soft, _ = resource.getrlimit(resource.RLIMIT_AS)
    if soft != resource.RLIM_INFINITY:
        pages = int((proc / "self" / "statm").read_text().split()[0])
        used = pages * resource.getpagesize()
        found.append(Limit("RLIMIT_AS (ulimit -v)", max(soft - used, 0), address_space=True))
    return found


def check(need: MemoryNeed, bounds: list[Limit], what: str) -> None:
    """Raises MemoryError naming needed and available bytes if `need` exceeds a bound. `what` names
    the model.
    """
    for bound in bounds:
        needed = need.address_space if bound.address_space else need.resident
        if needed > bound.available:
            maps = f", {need.mapped:,} mapped files" if bound.address_space else ""
            others = f"{need.other:,} other weights"
            if need.copies > 1 and not bound.address_space:
                others += f" in each of {need.copies} processes"
            raise MemoryError(
                f"loading {what} needs {needed:,} bytes ({need.experts:,} packed experts, "
                f"{others}, {need.staging:,} while loading{maps}) but {bound.name} leaves "
                f"{bound.available:,}; choose a smaller format ({', '.join(formats.scaled())}) or "
                "raise the limit"
            )


def _cgroup_limits(root: Path) -> Iterator[Limit]:
    """Bounds of this process's memory cgroups and of those above them."""
    for directory, v2 in _kt.cgroups("memory", str(root)):
        group, names = Path(directory), _V2 if v2 else _V1
        limit, usage = _number(group / names.limit), _number(group / names.usage)
        if limit is None or usage is None or limit >= _UNLIMITED:
            continue
        stat = _fields(group / "memory.stat")
        # what is reclaimed before anyone is killed
        cache = sum(stat.get(field, 0) for field in names.cache)
        yield Limit(f"the cgroup limit {group / names.limit}", max(limit - usage + cache, 0))


def _number(path: Path) -> int | None:
    """The integer a file holds; None where the file is absent or says `max`."""
    if not path.is_file():
        return None
    text = path.read_text().strip()
    return int(text) if text.isdigit() else None


def _fields(path: Path) -> dict[str, int]:
    """`name number ...` lines of a file as a dict; empty where the file is absent."""
    if not path.is_file():
        return {}
    rows = (line.split() for line in path.read_text().splitlines())
    return {row[0]: int(row[1]) for row in rows if len(row) > 1 and row[1].isdigit()}
