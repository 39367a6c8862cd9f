"""Python code in a process of its own, for tests of what ends or forks one."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

TESTS = Path(__file__).resolve().parent


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
