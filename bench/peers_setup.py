#!/usr/bin/env python3
"""Creates build/peers-venv with kt-kernel 0.7.2, the rival that needs an environment of its own.

    python bench/peers_setup.py [--torch-index URL]

kt-kernel pins torch 2.9.1 and brings GPU packages, so it goes in with --no-deps beside a CPU torch
and what its Python sources import; its compiled part is plain pybind11 and works with any torch.
Nothing is done when the stamp in the environment matches this list. About 1.2 GB.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

VENV = Path(__file__).resolve().parent.parent / "build" / "peers-venv"
PYTHON = VENV / "bin" / "python"
STAMP = VENV / "peers.stamp"
TORCH = "2.13.0"
KT_KERNEL = "kt-kernel==0.7.2"
IMPORTED = ("numpy", "safetensors", "gguf")  # by `import kt_kernel`
PROBE = "import kt_kernel as k; print(k.__version__, k.__cpu_variant__, k.__int8_kernel__)"


def pip(*args: str) -> subprocess.CompletedProcess[str]:
    """The environment's pip; output is kept for the error message."""
    command = [str(PYTHON), "-m", "pip", "--disable-pip-version-check", "install", "-q", *args]
    return subprocess.run(command, text=True, capture_output=True, check=False)


def install(*args: str) -> None:
    """Installs or ends with pip's last lines."""
    done = pip(*args)
    if done.returncode:
        tail = "\n".join((done.stdout + done.stderr).strip().splitlines()[-20:])
        raise SystemExit(f"{tail}\npeers: pip install {' '.join(args)} failed (see above).")


def probe() -> str | None:
    """Version, CPU variant and int8 kernel of the installed kt-kernel; None if it does not load."""
    done = subprocess.run([PYTHON, "-c", PROBE], text=True, capture_output=True, check=False)
    if done.returncode:
        print(done.stderr, file=sys.stderr)
        return None
    return done.stdout.strip()


def setup(torch_index: str | None) -> None:
    """Idempotent: the stamp is written last."""
    wanted = "\n".join((TORCH, KT_KERNEL, *IMPORTED, sys.version))
    if STAMP.is_file() and STAMP.read_text() == wanted:
        print(f"peers: {VENV} is current")
        return
    print(f"peers: creating {VENV} (torch {TORCH} for CPUs, {KT_KERNEL})", flush=True)
    subprocess.run([sys.executable, "-m", "venv", "--clear", str(VENV)], check=True)
    source = ["--index-url", torch_index] if torch_index else []
    if pip(*source, f"torch=={TORCH}+cpu").returncode:
        print("peers: the index has no CPU build of torch; taking its default build", flush=True)
        install(f"torch=={TORCH}")
    install(*IMPORTED)
    install("--no-deps", KT_KERNEL)
    found = probe()
    if found is None:
        raise SystemExit(f"peers: {KT_KERNEL} does not import in {VENV}; its error is above.")
    STAMP.write_text(wanted)
    print(f"peers: kt-kernel {found}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--torch-index", help="pip index that has CPU builds of torch")
    setup(parser.parse_args().torch_index)


if __name__ == "__main__":
    main()
