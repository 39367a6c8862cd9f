#!/usr/bin/env python3
"""Run transformers' own model tests with our experts in the place of theirs.

    make test-transformers TRANSFORMERS=DIR [FAMILIES="qwen3_moe mixtral"]

DIR is a checkout of transformers of the installed version: the tests are in its repository only,
neither in the wheel nor in the source distribution. Every family runs twice, as it is and with
scripts/model_tests_plugin.py acting. What passes as it is and fails with our experts must be one of
EXPECTED; the outcome goes to docs/model_tests.md. Not part of `make test`: a family takes about ten
minutes.
"""

from __future__ import annotations

import argparse
import fnmatch
import importlib.metadata
import importlib.util
import json
import os
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "build" / "model-tests"
PAGE = ROOT / "docs" / "model_tests.md"
INTRO = """\
# transformers' own model tests

Written by `make test-transformers`. These are the model tests of transformers {version},
as they are, and with our experts in the place of the family's
(`scripts/model_tests_plugin.py`), on the CPU. Tests that transformers itself skips are not
counted: they are slow, or need a GPU, a download or another package.
"""
FAMILIES = ("qwen3_moe", "mixtral", "olmoe")
# Name of a test (a pattern) -> why it must fail with our experts.
EXPECTED = {
    "test_eager_matches_batched_and_grouped_inference*": "it asks for transformers' own ways to "
    "compute experts (eager, batched_mm, grouped_mm) and counts their calls; ours is none of them",
    "test_generate_compile_model_forward_fullgraph": "our kernels are no part of a graph that "
    "torch.compile makes: with fullgraph=True it refuses them, without it compiles around them",
}


@dataclass(frozen=True)
class Outcome:
    """What became of one family: tests by how they ended, and what the plugin counted."""

    ended: dict[str, str]
    calls: int
    left: dict[str, str]

    def passed(self) -> set[str]:
        """Names of the tests that passed."""
        return {name for name, how in self.ended.items() if how == "passed"}


def outcome_of(report: str, counted: str) -> Outcome:
    """From pytest's JUnit XML and from the plugin's file, both as text."""
    ended: dict[str, str] = {}
    for case in ElementTree.fromstring(report).iter("testcase"):
        name = f"{case.get('classname', '').rpartition('.')[2]}::{case.get('name')}"
        kinds = {child.tag for child in case} & {"failure", "error", "skipped"}
        how = "passed" if not kinds else "skipped" if kinds == {"skipped"} else "failed"
        ended[name] = "failed" if "failed" in (how, ended.get(name)) else how
    found = json.loads(counted)
    return Outcome(ended, found["calls"], found["left"])


def expected(name: str) -> str | None:
    """The reason for a failure that is expected; None for one that is not."""
    leaf = name.partition("::")[2]
    return next((why for pattern, why in EXPECTED.items() if fnmatch.fnmatch(leaf, pattern)), None)


def unexpected(stock: Outcome, ours: Outcome) -> list[str]:
    """Sentences about what must not be: tests that our experts fail or skip, and no experts."""
    lost = sorted(stock.passed() - ours.passed())
    wrong = [f"{name} passes as it is, not with our experts" for name in lost if not expected(name)]
    if not stock.passed():
        wrong.append("no test passes as it is")
    if not ours.calls:
        wrong.append(f"our experts never ran: {ours.left or 'the tests have none'}")
    return wrong


def run(family: str, checkout: Path, which: str) -> Outcome:
    """Runs one family's tests in a process of their own."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    stem = FOLDER / f"{family}-{which}"
    report, counted = stem.with_suffix(".xml"), stem.with_suffix(".json")
    for file in (report, counted):
        file.unlink(missing_ok=True)
    test = f"tests/models/{family}/test_modeling_{family}.py"
    variables = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(FOLDER / "packages"), str(ROOT / "scripts")]),
        "KT_MODEL_TESTS": which,
        "KT_MODEL_TESTS_COUNT": str(counted),
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
    }
    options = ["-c", os.devnull, "--rootdir", ".", "--noconftest", "-p", "model_tests_plugin"]
    options += ["-p", "no:cacheprovider", "--tb=short", "-q", f"--junitxml={report}"]
    with open(stem.with_suffix(".log"), "w") as log:
        subprocess.run(
            [sys.executable, "-m", "pytest", test, *options],
            cwd=checkout,
            env=variables,
            stdout=log,
            stderr=subprocess.STDOUT,
            check=False,
        )
    if not report.is_file() or not counted.is_file():
        sys.exit(f"model_tests: {family}: pytest did not finish; see {log.name}")
    return outcome_of(report.read_text(), counted.read_text())


def page(results: dict[str, tuple[Outcome, Outcome]], version: str) -> str:
    """docs/model_tests.md."""
    lines = [
        INTRO.format(version=version),
        "| family | tests | pass as they are | pass with our experts | calls of our experts |",
        "| --- | --- | --- | --- | --- |",
    ]
    reasons: dict[str, dict[str, list[str]]] = {}  # why -> test -> families
    for family, (stock, ours) in results.items():
        ran = [how for how in stock.ended.values() if how != "skipped"]
        counts = (len(ran), len(stock.passed()), len(ours.passed()), f"{ours.calls:,}")
        lines.append(f"| {family} | {' | '.join(map(str, counts))} |")
        for name in sorted(stock.passed() - ours.passed()):
            why = expected(name) or "not expected"
            tests = reasons.setdefault(why, {})
            tests.setdefault(name.partition("::")[2], []).append(family)
    if reasons:
        lines += ["", "What fails with our experts alone:", ""]
    for why, tests in reasons.items():
        lines += [f"- {why}:"]
        lines += [f"  - `{name}` ({', '.join(where)})" for name, where in tests.items()]
    return "\n".join(lines) + "\n"


def missing(checkout: Path | None, families: Sequence[str], version: str) -> str | None:
    """What is not at hand, as a sentence."""
    if checkout is None or not (checkout / "src" / "transformers").is_dir():
        return (
            "transformers' own model tests are not at hand: they are in its repository only; run "
            f"git clone --depth 1 --branch v{version} https://github.com/huggingface/transformers "
            "and give the directory as TRANSFORMERS=DIR"
        )
    for family in families:
        test = checkout / "tests" / "models" / family / f"test_modeling_{family}.py"
        if not test.is_file():
            return f"{test} does not exist; correct FAMILIES"
    return None


def install_parameterized() -> None:
    """The one package that the tests import and we do not have, for them alone."""
    target = FOLDER / "packages"
    if importlib.util.find_spec("parameterized") or (target / "parameterized").is_dir():
        return
    install = [sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "--quiet"]
    subprocess.run([*install, "--no-deps", "--target", str(target), "parameterized"], check=True)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("families", nargs="*", default=FAMILIES)
    parser.add_argument("--transformers", metavar="DIR", type=Path, help="a checkout of it")
    options = parser.parse_args(arguments)
    version = importlib.metadata.version("transformers")
    checkout = options.transformers.resolve() if options.transformers else None
    if sentence := missing(checkout, options.families, version):
        print(f"test-transformers: skipped: {sentence}")
        return
    assert checkout is not None
    install_parameterized()
    results, wrong = {}, []
    for family in options.families:
        stock, ours = run(family, checkout, "stock"), run(family, checkout, "ours")
        results[family] = (stock, ours)
        wrong += [f"{family}: {sentence}" for sentence in unexpected(stock, ours)]
        counts = f"{len(stock.passed())} pass as they are, {len(ours.passed())} with our experts"
        print(f"test-transformers: {family}: {counts}", flush=True)
    PAGE.write_text(page(results, version))
    if wrong:
        sys.exit("\n".join(wrong))


if __name__ == "__main__":
    main()
