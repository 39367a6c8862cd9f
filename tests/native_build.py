"""A release build of the native code for the tests that look at its objects or run it."""

from __future__ import annotations

import functools
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
CSRC = ROOT / "csrc"
BUILD = ROOT / "build" / "gate"  # kept, so that a second run compiles what changed
TIERS = sorted(p.stem for p in (CSRC / "isa").glob("*.h") if p.read_text().startswith("// flags:"))


@functools.cache
def build(*targets: str) -> Path:
    """Builds these targets with exactly the flags of CMakeLists.txt; returns the build folder."""
    pybind = subprocess.check_output([sys.executable, "-m", "pybind11", "--cmakedir"], text=True)
    configure = [
        "cmake",
        "-S",
        str(ROOT),
        "-B",
        str(BUILD),
        "-DCMAKE_BUILD_TYPE=Release",
        "-DKT_WERROR=ON",
        f"-DPython_EXECUTABLE={sys.executable}",
        f"-Dpybind11_DIR={pybind.strip()}",
    ]
    chosen = [a for t in targets for a in ("--target", t)]
    for command in (configure, ["cmake", "--build", str(BUILD), *chosen, "-j2"]):
        done = subprocess.run(command, text=True, capture_output=True, check=False)
        assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    return BUILD


def isa_objects() -> dict[str, Path]:
    """The object of every tier."""
    files = build(*(f"kt_isa_{t}" for t in TIERS)) / "CMakeFiles"
    return {t: files / f"kt_isa_{t}.dir" / "csrc" / "gemm" / "kernel.cpp.o" for t in TIERS}


def extension() -> Path:
    """The extension module, linked."""
    (found,) = build("_kt").glob("_kt.*.so")
    return found


def generic_objects() -> dict[str, Path]:
    """The objects of the extension that run on every CPU, by the name of their source."""
    files = build("_kt") / "CMakeFiles"
    sources = {p for p in CSRC.rglob("*.cpp") if p.name != "kernel.cpp"}  # that one is the tiers'
    out = {}
    for source in sources:
        target = "_kt" if source.name == "bind.cpp" else "kt_generic"
        out[source.name] = files / f"{target}.dir" / f"{source.relative_to(ROOT)}.o"
    return out


def tier_check() -> Path:
    """The program of tests/csrc/tier_check.cpp."""
    return build("tier_check") / "tier_check"
