"""Expert kernels on the OpenMP threads that torch computes with.

GNU's OpenMP runtime keeps its threads spinning for some milliseconds after each parallel operator
of torch. Between operators our own workers would have to be woken onto cores where those spin: in
a decode step an expert layer then took 1.8 times what it takes alone. So tasks run on torch's
threads wherever their number is ours (csrc/machine/parallel.h). Nothing links the runtime: its
addresses are taken from the library that torch has loaded.
"""

from __future__ import annotations

import ctypes
from pathlib import Path

import torch

from kt_core import _kt


def share_threads() -> bool:
    """Use torch's OpenMP threads from now on; False where torch brings no GNU OpenMP runtime."""
    path = loaded_runtime(Path("/proc/self/maps").read_text())
    if path is None:
        return False
    library = ctypes.CDLL(path)  # loaded already: this is a handle of it
    address = [
        ctypes.cast(library[name], ctypes.c_void_p).value or 0
        for name in ("GOMP_parallel", "omp_get_max_threads")
    ]
    _kt.use_openmp(*address)
    return True


def keep_apart() -> None:
    """Compute on threads of our own again."""
    _kt.use_openmp(0, 0)


def loaded_runtime(maps: str) -> str | None:
    """Path of torch's libgomp among the mappings of a process (the text of /proc/self/maps).

    Several may be loaded; torch's lies in its own folders, or is the system's when torch was built
    on it.
    """
    paths = [line.split(maxsplit=5)[5] for line in maps.splitlines() if len(line.split()) > 5]
    found = [p for p in dict.fromkeys(paths) if Path(p).name.startswith("libgomp")]
    home = Path(torch.__file__).parent
    mine = [p for p in found if Path(p).is_relative_to(home) or "torch.libs" in Path(p).parts]
    return next(iter(mine or found), None)
