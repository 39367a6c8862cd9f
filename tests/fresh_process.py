"""Python code in a process of its own, for tests of what ends or forks one."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

TESTS = Path(__file__).resolve().parent
# What run_kernels' code finds.
PRELUDE = """
import multiprocessing, os, signal, sys, threading, time
import torch
from kernel_cases import everything, forward, make_case, same
from kt_core import _kt, runtime

def start_calls(case):
    '''A daemon thread that is inside of one call after the other, each of a third of a second.'''
    _kt.testing.set_threads(2)
    _kt.testing.delay_tasks(10_000)
    started = threading.Event()
    def loop():
        while True:
            started.set()
            forward(case)
    threading.Thread(target=loop, daemon=True).start()
    started.wait()
    time.sleep(0.1)
"""


def run_python(code: str, exit_code: int = 0) -> str:
    """Runs `code` with this folder on the path; returns what was printed. The limit is one that
    only a hang can reach."""
    path = os.pathsep.join([str(TESTS), *filter(None, [os.environ.get("PYTHONPATH")])])
    # freed memory is overwritten: what a thread still uses of it shows
    env = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "MALLOC_PERTURB_": "165"}
    done = subprocess.run(
        [sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=240
    )
    assert done.returncode == exit_code, f"exit code {done.returncode}\n{done.stderr[-4000:]}"
    assert "Traceback" not in done.stderr, done.stderr  # of another thread
    return done.stdout


def run_kernels(code: str, exit_code: int = 0) -> str:
    """run_python with PRELUDE in front."""
    return run_python(PRELUDE + code, exit_code)
