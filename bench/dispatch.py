"""The overheads of dispatch: a kernel's indirect call, a parallel section, a layer that does next
to nothing, from C++ and from Python. Prints a table; builds bench/dispatch.cpp first.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch

from kt_core import runtime
from kt_core.experts import Experts
from kt_core.names import PROJECTIONS

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests"))
import native_build  # noqa: E402 - the release build that tests use too

LINES = {
    "kernel_call": "indirect call through struct Kernel",
    "parallel_1": "parallel section, 1 thread",
    "parallel_2": "parallel section, 2 threads, both awake",
    "parallel_2_asleep": "parallel section, 2 threads, one asleep for 5 ms",
    "layer_1": "moe_forward, 1 token, 8 experts of 64 x 64, 1 thread",
    "layer_2": "the same, 2 threads",
    "python_1": "Experts.forward of the same layer from Python, 1 thread",
    "python_2": "the same, 2 threads",
    "torch_2": "the same, 2 threads, on torch's OpenMP threads",
}


def least(call: Callable[[], object], rounds: int = 30, calls: int = 300) -> float:
    """Seconds per call, the least of the rounds."""
    best = float("inf")
    for _ in range(rounds):
        start = time.perf_counter()
        for _ in range(calls):
            call()
        best = min(best, (time.perf_counter() - start) / calls)
    return best


def layer() -> Callable[[], object]:
    """A forward of bench/dispatch.cpp's layer."""
    experts = Experts(8, 64, 64, format="int8", group=64)
    for e in range(8):
        for p in PROJECTIONS:
            experts.put(e, p, torch.ones(64, 64))
    x, weights = torch.ones(1, 64, dtype=torch.bfloat16), torch.tensor([[0.5, 0.5]])
    index = torch.tensor([[1, 5]])
    return lambda: experts.forward(x, index, weights)


def measure() -> dict[str, float]:
    """Seconds by key of LINES."""
    program = native_build.build("dispatch") / "dispatch"
    printed = subprocess.check_output([str(program)], text=True).split()
    found = {name: float(value) for name, value in zip(printed[::2], printed[1::2], strict=True)}
    forward = layer()
    for threads in range(1, min(2, runtime.allowed_cpus()) + 1):
        runtime.set_threads(threads)
        torch.set_num_threads(3)  # another number than ours: our own workers
        found[f"python_{threads}"] = least(forward)
    torch.set_num_threads(2)
    found["torch_2"] = least(forward)
    return found


def main() -> None:
    found = measure()
    print(f"{runtime.isa()}, {runtime.allowed_cpus()} CPUs")
    for key, what in LINES.items():
        if key in found:
            seconds = found[key]
            value = f"{seconds * 1e9:8.1f} ns" if seconds < 1e-6 else f"{seconds * 1e6:8.2f} us"
            print(f"{value}  {what}")


if __name__ == "__main__":
    main()
