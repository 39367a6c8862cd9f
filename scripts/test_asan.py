#!/usr/bin/env python3
"""Run the kernel tests on an extension built with AddressSanitizer and UBSan: `make test-asan`.

The extension goes into build/asan; a sitecustomize.py there makes `kt_core._kt` mean it, in this
run's processes only, so what `make setup` installed stays as it is. Before the tests, known errors
in every tier's kernels must be reported: else silence would prove nothing. Needs g++.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BUILD = ROOT / "build" / "asan"
TESTS = (
    *("test_kernels.py", "test_experts.py", "test_slices.py"),
    *("test_packed_file.py", "test_autograd.py"),
)

# First in sys.meta_path: the finder of the editable install would answer with the release build.
SITE = """\
import importlib.util
import pathlib
import sys


class Sanitized:
    @staticmethod
    def find_spec(name, path=None, target=None):
        if name == "kt_core._kt":
            file = next(pathlib.Path(__file__).parent.glob("_kt.*.so"))
            return importlib.util.spec_from_file_location(name, file)


sys.meta_path.insert(0, Sanitized)
"""

# Calls of the bindings as kt_core/experts.py never makes them, and what the report must say.
# 64 x 64 fp32 values are 16,384 bytes; the layer has one expert.
SETUP = """
import ctypes, sys
import _kt
layer = _kt.Layer(1, 64, 64, "int8", 32, 0)
layer.attach(_kt.Arena(layer.nbytes))
malloc = ctypes.CDLL(None).malloc
malloc.restype = ctypes.c_void_p
_kt.force_isa(sys.argv[1])
"""
KNOWN_ERRORS = {
    "layer.pack(0, 0, malloc(16380), 2, 64)": "heap-buffer-overflow.*READ of size",
    "layer.unpack(0, 0, malloc(16380))": "heap-buffer-overflow.*WRITE of size",
    "layer.unpack(1, 0, malloc(16384))": "use-after-poison.*READ of size",
    "_kt.Layer(1 << 40, 1 << 40, 64, 'int8', 32, 0).nbytes": "signed integer overflow",
}


def build() -> None:
    os.environ["PATH"] = f"{Path(sys.executable).parent}:{os.environ['PATH']}"  # cmake may be there
    pybind = subprocess.check_output([sys.executable, "-m", "pybind11", "--cmakedir"], text=True)
    configure = [
        *("cmake", "-S", ROOT, "-B", BUILD, "-DKT_SANITIZE=ON", "-DCMAKE_CXX_COMPILER=g++"),
        *(f"-DPython_EXECUTABLE={sys.executable}", f"-Dpybind11_DIR={pybind.strip()}"),
    ]
    subprocess.run(configure, check=True, stdout=subprocess.DEVNULL)
    subprocess.run(["cmake", "--build", BUILD, f"-j{os.cpu_count()}"], check=True)
    (BUILD / "sitecustomize.py").write_text(SITE)


def environment() -> dict[str, str]:
    """Python is not instrumented, so ASan's library must be loaded before it.

    libstdc++ beside it: ASan looks for its __cxa_throw when the process starts.
    """
    libraries = [
        subprocess.check_output(["g++", f"-print-file-name={name}"], text=True).strip()
        for name in ("libasan.so", "libstdc++.so")
    ]
    return {
        **os.environ,
        "LD_PRELOAD": " ".join(libraries),
        "PYTHONPATH": str(BUILD),
        "OMP_NUM_THREADS": "1",
        # abort: pytest then says in which test. Leaks: Python and torch keep much on purpose.
        "ASAN_OPTIONS": "abort_on_error=1:detect_leaks=0",
        "UBSAN_OPTIONS": "abort_on_error=1:halt_on_error=1:print_stacktrace=1",
    }


def check_known_errors(env: dict[str, str]) -> None:
    list_tiers = "import _kt; print(*{k['isa'] for k in _kt.kernels() if k['usable']})"
    tiers = subprocess.check_output([sys.executable, "-c", list_tiers], env=env, text=True).split()
    for tier in sorted(tiers):
        for call, report in KNOWN_ERRORS.items():
            command = [sys.executable, "-c", SETUP + call, tier]
            done = subprocess.run(command, env=env, text=True, capture_output=True, check=False)
            if done.returncode == 0 or not re.search(report, done.stderr, re.DOTALL):
                sys.exit(f"{done.stderr}\ntest-asan: {tier}: {call} gave no report of '{report}'")
    print(f"test-asan: {len(KNOWN_ERRORS)} known errors found on {' '.join(sorted(tiers))}")


def main() -> None:
    if shutil.which("g++") is None:
        sys.exit("test-asan: no g++ on PATH; install it, the build uses its sanitizers.")
    build()
    env = environment()
    check_known_errors(env)
    # --capture=sys: a report goes to file descriptor 2 of a process that then dies
    command = [sys.executable, "-m", "pytest", "--capture=sys", "-m", "not slow"]
    tests = sys.argv[1:] or [str(next((ROOT / "tests").rglob(name))) for name in TESTS]
    sys.exit(subprocess.run([*command, *tests], env=env, cwd=ROOT, check=False).returncode)


if __name__ == "__main__":
    main()
