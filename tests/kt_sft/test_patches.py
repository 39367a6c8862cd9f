"""All that stands in the place of other libraries' names was put there by kt_core/patches.py, is in
DESIGN.md's table with its reason, and goes with uninstall().
"""

from __future__ import annotations

import inspect
import json
import re
import sys
from collections.abc import Iterator
from functools import partial
from itertools import groupby
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

import lf_cases
import pytest
import torch
from fresh_process import run_python

from kt_core import patches

ROOT = Path(__file__).resolve().parents[2]
LIBRARIES = {"accelerate", "datasets", "llamafactory", "peft", "torch", "transformers", "trl"}
PACKAGES = ("kt_core", "kt_sft")


def is_ours(value: Any) -> bool:
    """Whether calling it runs code of this project first."""
    if isinstance(value, classmethod | staticmethod):
        return is_ours(value.__func__)
    if isinstance(value, partial):
        return is_ours(value.func)
    if isinstance(value, FunctionType):
        return any(str(ROOT / package) in value.__code__.co_filename for package in PACKAGES)
    return type(value).__module__.startswith(PACKAGES)


def of_ours() -> Iterator[tuple[Any, str, Any]]:
    """(module or class, name, value) of other libraries where code of ours stands."""
    for top, module in [(name.partition(".")[0], m) for name, m in sys.modules.items()]:
        if top in LIBRARIES and isinstance(module, ModuleType):
            for name, value in list(vars(module).items()):
                of_library = isinstance(value, type) and value.__module__.startswith(top)
                inside = list(vars(value).items()) if of_library else []
                yield from ((value, n, v) for n, v in inside if is_ours(v))
                if is_ours(value):
                    yield module, name, value


def elsewhere() -> list[str]:
    """What of ours Python itself would call."""
    finders = [type(f).__name__ for f in sys.meta_path if is_ours(f)]
    return finders + ["excepthook"] * is_ours(sys.excepthook)


def accounted_for(owner: Any, name: str, value: Any) -> bool:
    """Whether it was put there, or in a class that was, or is a copy of that."""
    return any(
        p.ours in (value, owner) or (p.owner is owner and p.name == name)
        for p in patches.replaced()
    )


def run(args: dict[str, Any]) -> dict[str, Any]:
    """A run and what uninstall() leaves of it."""
    from kt_sft import bootstrap, hooks, session  # noqa: F401

    lf_cases.run(args)
    there = list(of_ours())
    stood = [p for p in patches.replaced() if isinstance(p.owner, type | ModuleType)]
    result = {
        "found": len(there),
        "unknown": [f"{o.__name__}.{n}" for o, n, v in there if not accounted_for(o, n, v)],
        "listing": patches.listing(),
        "elsewhere": elsewhere(),
    }
    hooks.uninstall()
    before = [(p, vars(p.owner).get(p.name, patches._MISSING)) for p in stood]
    result |= {
        "wrong": [p.what for p, value in before if value is not p.stood],
        "left": [f"{o.__name__}.{n}" for o, n, _ in of_ours()] + elsewhere(),
        "replaced": len(patches.replaced()),
    }
    bootstrap.autoload()
    hooks.install()
    return result | {"again": sorted({p.what for p in patches.replaced()})}


@pytest.fixture(scope="module")
def result(tmp_path_factory):
    """Of a run with held-out losses, a checkpoint, kept activations and fp32 on the CPU."""
    root = lf_cases.workspace(tmp_path_factory.mktemp("patches"), dtype=torch.float32)
    evaluated = {"val_size": 4, "eval_strategy": "steps", "eval_steps": 2}
    saved = {"max_steps": 2, "save_strategy": "steps", "save_steps": 2}
    settings = {"format": "bf16", "dense_dtype": "fp32"}
    args = lf_cases.arguments(root, kt_config=settings, bf16=True, **evaluated, **saved)
    printed = run_python(
        f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r})\n"
        "import json, test_patches\n"
        f"print('RESULT', json.dumps(test_patches.run(json.loads({json.dumps(args)!r}))))"
    )
    (line,) = [line for line in printed.splitlines() if line.startswith("RESULT ")]
    return json.loads(line.removeprefix("RESULT "))


def test_everything_is_in_the_registry(result):
    assert result["found"] > 40
    assert result["unknown"] == []
    assert result["elsewhere"] == ["_Finder", "excepthook"]


def test_uninstall_restores_everything(result):
    assert result["wrong"] == []
    assert result["left"] == []
    assert result["replaced"] == 0


def test_installing_again_replaces_the_same(result):
    modules = ("kt_core.hf", "kt_sft.bootstrap", "kt_sft.hooks", "kt_sft.llamafactory.seam")
    names = {what for by, what, _ in result["listing"] if by in modules and " of " not in what}
    assert set(result["again"]) == names


def table(listing: list[tuple[str, str, str]]) -> str:
    """The rows of DESIGN.md: a module, what it replaces, why."""
    rows = []
    key = lambda entry: (entry[0], entry[2])  # noqa: E731
    for (by, why), entries in groupby(sorted(listing, key=key), key):
        where = by.partition(".")[2].replace(".", "/")
        names: list[str] = []
        last = library = ""  # said once where several names follow that share them
        for _, what, _ in entries:
            owner, _, name = what.rpartition(".") if " of " not in what else ("", "", what)
            said = owner.removeprefix(f"{library} ") if library else owner
            names.append(name if owner == last or not owner else f"{said}.{name}")
            last, library = owner, owner.partition(" ")[0] if " " in owner else ""
        what = ", ".join(names)
        what = re.sub(r"__\w+__", r"`\g<0>`", what)  # as Markdown would make it bold
        rows.append(f"| {where} | {what} | {why} |")
    return "\n".join(rows)


def test_design_has_the_table(result):
    page = (ROOT / "DESIGN.md").read_text()
    section = page.split("## What we replace in other libraries, and why\n")[1].split("\n## ")[0]
    assert table(result["listing"]) in section, table(result["listing"])


def test_a_name_is_put_back_where_it_stood():
    class Base:
        def inherited(self):
            return "base"

    class Owner(Base):
        @classmethod
        def own(cls):
            return "own"

    before = dict(vars(Owner))
    patches.replace(Owner, "own", classmethod(lambda cls: "ours"), by=__name__, why="a test")
    patches.replace(Owner, "own", classmethod(lambda cls: "again"), by=__name__, why="a test")
    patches.replace(Owner, "inherited", lambda self: "ours", by=__name__, why="a test")
    assert (Owner.own(), Owner().inherited(), Base().inherited()) == ("again", "ours", "base")
    assert (__name__, f"{__name__} Owner.own", "a test") in patches.listing()
    patches.restore(__name__)
    assert {n: v for n, v in vars(Owner).items() if n in before} == before
    assert "inherited" not in vars(Owner) and not patches.replaced(__name__)
    assert inspect.getattr_static(Owner, "own") is before["own"]
