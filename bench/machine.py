"""What the benchmark runs on: roofs probed in the same run, CPU, load, commit."""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent


ROOFS = {  # kind of bench/roofs.cpp -> key in result files
    "fp32_avx2": "fp32_avx2_gflops",
    "fp32": "fp32_gflops",
    "bf16": "bf16_gflops",
    "int8": "int8_gops",
    "dram": "dram_gbps",
}
VENDORS = {"GenuineIntel": "intel", "AuthenticAMD": "amd"}


class Roofs:
    """Compiles and samples bench/roofs.cpp; keeps the best of every kind since `start`."""

    def __init__(self, threads: int) -> None:
        self.threads = threads
        self._folder = tempfile.TemporaryDirectory()
        library = Path(self._folder.name) / "roofs.so"
        flags = ["-O2", "-std=c++20", "-march=native", "-pthread", "-shared", "-fPIC"]
        source = str(ROOT / "bench" / "roofs.cpp")
        subprocess.run(["g++", *flags, source, "-o", str(library)], check=True)
        self._roof = ctypes.CDLL(str(library)).roof
        self._roof.restype, self._roof.argtypes = ctypes.c_double, [ctypes.c_char_p, ctypes.c_int]
        self.best: dict[str, float] = {}  # of the whole run
        self.start()

    def start(self) -> None:
        """Forgets `now`: what follows is compared with samples taken beside it."""
        self.now: dict[str, float] = {}

    def sample(self, kinds: tuple[str, ...] | None = None) -> None:
        """One sample of these kinds (None: of all, 0.15 s); those that this CPU lacks are left
        out."""
        time.sleep(0.05)  # OpenMP threads spin for up to 15 ms after a contestant's last call
        for kind, key in ROOFS.items():
            if kinds and kind not in kinds:
                continue
            value = float(self._roof(kind.encode(), self.threads)) * 1e-9
            if value:
                self.now[key] = max(value, self.now.get(key, 0.0))
                self.best[key] = max(value, self.best.get(key, 0.0))


def _cpuinfo(key: str) -> str:
    """The first value of a key of /proc/cpuinfo."""
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith(key):
            return line.split(":", 1)[1].strip()
    raise SystemExit(f"/proc/cpuinfo has no {key}")


def cpu_name() -> str:
    return _cpuinfo("model name")


def cpu_kind() -> str:
    """Vendor and the tier that the kernels run on: results of one kind of CPU share a file."""
    from kt_core import runtime  # here: processes that measure stock software import this file

    vendor = _cpuinfo("vendor_id")
    return f"{VENDORS.get(vendor, vendor.lower())}-{runtime.isa()}"


def csrc_hash() -> str:
    """Of everything the kernels are made of; the README table names it."""
    total = hashlib.sha256()
    for path in sorted((ROOT / "csrc").rglob("*")):
        if path.is_file():
            total.update(path.relative_to(ROOT).as_posix().encode() + path.read_bytes())
    return total.hexdigest()[:16]


def commit() -> str:
    """The commit checked out; "+" when tracked files differ from it."""
    rev = subprocess.check_output(["git", "rev-parse", "--short=12", "HEAD"], cwd=ROOT, text=True)
    dirty = subprocess.run(["git", "diff", "--quiet", "HEAD"], cwd=ROOT, check=False).returncode
    return rev.strip() + ("+" if dirty else "")


def about() -> dict[str, Any]:
    """CPU, load and commit: what every result file says of its run."""
    return {
        "cpu": cpu_name(),
        "kind": cpu_kind(),
        "cpus": os.cpu_count(),
        "load": list(os.getloadavg()),
        "commit": commit(),
        "csrc": csrc_hash(),
        "kernel": platform.release(),
    }


def describe(threads: int, roofs: Roofs) -> dict[str, Any]:
    """The "machine" object of a timed run; "roofs" follows `roofs.best`."""
    return about() | {"threads": threads, "roofs": roofs.best}
