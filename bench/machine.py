"""What the benchmark runs on: roofs probed in the same run, CPU, load, commit."""

from __future__ import annotations

import hashlib
import json
import os
import platform
import subprocess
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent


def probe_roofs(threads: int) -> dict[str, float]:
    """Compiles and runs bench/roofs.cpp: GFLOP/s of fp32, bf16, int8 and GB/s of DRAM reads."""
    with tempfile.TemporaryDirectory() as folder:
        binary = Path(folder) / "roofs"
        source = ROOT / "bench" / "roofs.cpp"
        flags = ["-O2", "-std=c++20", "-march=native", "-pthread"]
        subprocess.run(["g++", *flags, str(source), "-o", str(binary)], check=True)
        text = subprocess.check_output([str(binary), str(threads)], text=True)
    return dict(json.loads(text))


def cpu_name() -> str:
    """Model name of /proc/cpuinfo."""
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.processor()


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


def describe(threads: int) -> dict[str, Any]:
    """The "machine" object of a result file."""
    return {
        "cpu": cpu_name(),
        "cpus": os.cpu_count(),
        "threads": threads,
        "load": list(os.getloadavg()),
        "roofs": probe_roofs(threads),
        "commit": commit(),
        "csrc": csrc_hash(),
        "kernel": platform.release(),
    }
