#!/usr/bin/env python3
"""Run a fixed part of the tests with other versions of the libraries: `make test-versions`.

Each environment is a thin one below build/versions: the packages named here, installed without what
they require, in front of everything that .venv has. The outcome goes to docs/versions.md, failures
with their reason. Not part of `make test`: it downloads, and takes about ten minutes an environment
on two cores.

    scripts/test_versions.py                     all environments; writes the page
    scripts/test_versions.py --llamafactory DIR  the same; LLaMA-Factory of "development" is the
                                                 checkout in DIR, which is no package to download
    scripts/test_versions.py newest              one of them; the page keeps the others' outcomes
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "build" / "versions"
PAGE = ROOT / "docs" / "versions.md"
INTRO = """\
# Versions

Written by `make test-versions`. All tests pass with the versions of
[constraints.txt](../constraints.txt). Here those that touch other libraries were run with
other versions. `newest` has no LLaMA-Factory that runs with it, so its tests are left out.

The tests are:
"""
SHOWN = ("transformers", "peft", "accelerate", "trl", "datasets", "llamafactory")
# What touches the libraries; kernels and machine are the same everywhere.
TESTS = (
    *(
        "test_signatures.py",
        "test_load.py",
        "test_lora.py",
        "test_adapter_io.py",
    ),
    *("test_adapter.py", "test_serve_model.py"),
)
WITH_LLAMAFACTORY = (
    *(
        "test_activation.py",
        "test_stages.py",
        "test_refusals.py",
        "test_runs.py",
    ),
    "test_seam.py",
)


@dataclass(frozen=True)
class Environment:
    """`packages` in front of .venv's; `what` says why somebody would have them."""

    name: str
    what: str
    packages: tuple[str, ...]
    # Whether it has a LLaMA-Factory that runs: 0.9.5 refuses a transformers newer than 5.6.0.
    llamafactory: bool = True
    checkout: bool = False  # a checkout of LLaMA-Factory goes in front too


ENVIRONMENTS = (
    Environment(
        "oldest",
        "the oldest that pyproject.toml allows",
        ("transformers==5.2.0", "peft==0.18.0", "accelerate==1.11.0"),
    ),
    Environment(
        "pip",
        "what pip chooses for llamafactory 0.9.5",
        ("transformers==5.6.0", "peft==0.18.1", "accelerate==1.11.0"),
    ),
    Environment(
        "newest",
        "the newest of each",
        (
            *("transformers==5.24.0", "tokenizers>=0.23.1,<0.24", "peft==0.21.2"),
            *("accelerate", "trl==0.25.1", "datasets==5.2.0"),
        ),
        llamafactory=False,
    ),
    Environment(
        "development",
        "LLaMA-Factory's development version beside the tested set",
        (),
        checkout=True,
    ),
)


def make(environment: Environment, source: Path | None) -> Path:
    """The environment's Python. `source`: a checkout of LLaMA-Factory, put in front."""
    folder = FOLDER / environment.name
    shutil.rmtree(folder, ignore_errors=True)
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
    packages = folder / "packages"
    packages.mkdir()
    if environment.packages:
        install = [sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "--quiet"]
        target = ["--no-deps", "--target", str(packages)]
        subprocess.run([*install, *target, *environment.packages], check=True)
    python = folder / "bin" / "python"
    code = "import sysconfig; print(sysconfig.get_path('purelib'))"
    site = Path(subprocess.check_output([python, "-c", code], text=True).strip())
    front = [] if source is None else [str(source / "src")]
    own = [p for p in sys.path if p.endswith("site-packages")]
    # The last line is what .venv's own .pth of the editable install says.
    lines = [str(ROOT), *front, str(packages), *own, *map(editable, map(Path, own))]
    (site / "versions.pth").write_text("\n".join(lines) + "\n")
    for command in ("llamafactory-cli", "accelerate"):
        text = (Path(sys.executable).parent / command).read_text()
        script = folder / "bin" / command
        script.write_text(re.sub(r"^#!.*", f"#!{python}", text, count=1))
        script.chmod(0o755)
    return python


def editable(site: Path) -> str:
    """The line that makes kt_core._kt of the editable install importable; "" beside a built one."""
    if any((ROOT / "kt_core").glob("_kt.*.so")):
        return ""
    found = list(site.glob("_editable*kt_sft.pth"))
    return found[0].read_text().strip() if found else ""


def versions(environment: Environment, python: Path) -> dict[str, str]:
    names = SHOWN if environment.llamafactory else SHOWN[:-1]
    code = f"import importlib.metadata as m\nfor name in {names!r}: print(name, m.version(name))\n"
    if environment.checkout:  # beside the installed one, whose metadata would be found
        code += "import llamafactory.extras.env as e\nprint('llamafactory', e.VERSION)"
    printed = subprocess.check_output([python, "-c", code], text=True, cwd="/")
    return dict(line.split(" ", 1) for line in printed.splitlines() if line.count(" ") == 1)


@dataclass(frozen=True)
class Outcome:
    """What ran with which versions: counts by word (passed, failed, ...), the failures (test, first
    line of the reason) and the reasons for which tests were skipped.
    """

    versions: dict[str, str]
    counts: dict[str, int]
    failures: list[tuple[str, str]]
    skipped: list[str]


def run(environment: Environment, python: Path, log: Path) -> Outcome:
    chosen = (*TESTS, *(WITH_LLAMAFACTORY if environment.llamafactory else ()))
    tests = [str(next((ROOT / "tests").rglob(name))) for name in chosen]
    command = [str(python), "-m", "pytest", "-q", "-m", "not slow", "-p", "no:cacheprovider"]
    command += [] if environment.llamafactory else ["-k", "not llamafactory"]
    variables = {**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "200"}
    with open(log, "w") as out:
        subprocess.run([*command, *tests], cwd=ROOT, env=variables, stdout=out, check=False)
    text = log.read_text()
    found = re.findall(r"(\d+) (passed|failed|skipped|error)s?\b", text.splitlines()[-1])
    if not found:
        sys.exit(f"test_versions: {environment.name}: pytest did not finish; see {log}")
    failures = re.findall(
        r"^(?:FAILED|ERROR) (?:tests/(?:\w+/)*)?(\S+)(?: - (.*))?$", text, re.MULTILINE
    )
    skipped = re.findall(r"^SKIPPED \[\d+\] [^:]*:\d+: (.*)$", text, re.MULTILINE)
    return Outcome(
        versions(environment, python),
        {word: int(n) for n, word in found},
        [(test, reason.strip()) for test, reason in failures],
        sorted(set(skipped)),
    )


def read(name: str) -> Outcome | None:
    """The last outcome of an environment."""
    file = FOLDER / f"{name}.json"
    return Outcome(**json.loads(file.read_text())) if file.is_file() else None


def page() -> str:
    """docs/versions.md, from the last outcome of every environment."""
    head = ["environment", *SHOWN, "passed", "skipped", "failed"]
    lines = [
        INTRO,
        *(f"- `{name}`" for name in (*TESTS, *WITH_LLAMAFACTORY)),
        "",
        "| " + " | ".join(head) + " |",
        "| " + " | ".join("---" for _ in head) + " |",
    ]
    notes = []
    for environment in ENVIRONMENTS:
        outcome = read(environment.name)
        row = [f"{environment.name}: {environment.what}"]
        if outcome is None:
            row += ["-" for _ in SHOWN] + ["not run"] * 3
        else:
            count = outcome.counts.get
            failed = count("failed", 0) + count("error", 0)
            row += [outcome.versions.get(name, "-") for name in SHOWN]
            row += [str(count("passed", 0)), str(count("skipped", 0)), str(failed)]
            notes += [f"- {environment.name}, skipped: {reason}" for reason in outcome.skipped]
            notes += [
                f"- {environment.name}, failed: `{test}`: {reason or 'see its log'}"
                for test, reason in outcome.failures
            ]
        lines.append("| " + " | ".join(row) + " |")
    return "\n".join([*lines, *([""] if notes else []), *notes]) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("names", nargs="*", help="environments; default: all")
    parser.add_argument("--llamafactory", metavar="DIR", type=Path, help="a checkout of it")
    options = parser.parse_args()
    known = {e.name: e for e in ENVIRONMENTS}
    if unknown := [n for n in options.names if n not in known]:
        sys.exit(f"test_versions: {unknown[0]} is no environment; there are {', '.join(known)}")
    failed = False
    for name in options.names or known:
        environment = known[name]
        if environment.checkout and options.llamafactory is None:
            print(f"test-versions: {name}: left out, needs --llamafactory DIR", flush=True)
            continue
        source = options.llamafactory.resolve() if environment.checkout else None
        print(f"test-versions: {name}: installing", flush=True)
        python = make(environment, source)
        log = FOLDER / f"{name}.log"
        print(f"test-versions: {name}: testing, output in {log}", flush=True)
        outcome = run(environment, python, log)
        (FOLDER / f"{name}.json").write_text(json.dumps(asdict(outcome)))
        print(f"test-versions: {name}: {outcome.counts}", flush=True)
        failed |= bool(outcome.failures)
    PAGE.write_text(page())
    if failed:
        sys.exit(1)


if __name__ == "__main__":
    main()
