"""No import runs up or in a circle: every one, also inside a function, goes to what DESIGN.md has
on the same floor or to the left of it.
"""

from __future__ import annotations

import ast
import graphlib
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("kt_core", "kt_sft")  # the first knows nothing of the second


def modules() -> dict[str, Path]:
    """The files of the packages by module name; a package is its `__init__`."""
    found = {}
    for package in PACKAGES:
        for path in (ROOT / package).rglob("*.py*"):
            if path.suffix in (".py", ".pyi"):
                parts = path.relative_to(ROOT).with_suffix("").parts
                found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def imported(source: str, known: Mapping[str, object]) -> set[str]:
    """The modules in `known` that a file imports, wherever in it the import stands."""
    names = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute here"
            for alias in node.names:
                whole = f"{node.module}.{alias.name}"
                names.add(whole if whole in known else str(node.module))
        elif isinstance(node, ast.Call) and ast.unparse(node.func) == "importlib.import_module":
            names |= {a.value for a in node.args if isinstance(a, ast.Constant)}
    return names & set(known)


def graph() -> dict[str, set[str]]:
    """Module -> modules of ours that it imports."""
    known = modules()
    return {name: imported(path.read_text(), known) for name, path in known.items()}


def floors() -> dict[str, int]:
    """Number of the floor by file or folder, from the lines of DESIGN.md that draw them."""
    page = (ROOT / "DESIGN.md").read_text()
    found: dict[str, int] = {}
    ground = 0
    for package in PACKAGES:
        (line,) = re.findall(rf"(?m)^    {package} +(\S.*\|.*)$", page)
        found[package] = ground
        for floor in line.split("|"):
            found |= {f"{package}.{name}": ground for name in floor.split()}
            ground += 1
    return found


def floor_of(module: str, drawn: Mapping[str, int]) -> int:
    """A module's own floor, or that of the folder it lies in."""
    name = module if module in drawn else ".".join(module.split(".")[:2])
    assert name in drawn, f"DESIGN.md draws no floor for {name}"
    return drawn[name]


def upwards(edges: Mapping[str, set[str]], drawn: Mapping[str, int]) -> Iterator[str]:
    for module, others in edges.items():
        for other in others:
            if floor_of(other, drawn) > floor_of(module, drawn):
                yield f"{module} -> {other}"


def test_no_import_runs_in_a_circle():
    edges = graph()
    assert len(edges) > 80
    list(graphlib.TopologicalSorter(edges).static_order())


def test_no_import_runs_up():
    assert sorted(upwards(graph(), floors())) == []


def test_every_floor_that_is_drawn_exists():
    known = modules()
    for name in floors():
        assert name in known, name


def test_the_gate_sees_what_it_should():
    known = {"kt_core": 0, "kt_core.hf": 0, "kt_core.loading.parts": 0, "kt_sft.session": 0}
    source = (
        "from kt_core import hf, kernels\n"
        "def f():\n    import kt_sft.session\n"
        "if TYPE_CHECKING:\n    from kt_core.loading.parts import Shape\n"
        "import torch\n"
    )
    assert imported(source, known) == set(known)
    assert imported('importlib.import_module("kt_sft.session")', known) == {"kt_sft.session"}
    drawn = {"kt_core.loading": 0, "kt_core.hf": 1}
    assert list(upwards({"kt_core.loading.parts": {"kt_core.hf"}}, drawn))
    assert not list(upwards({"kt_core.hf": {"kt_core.loading.parts"}}, drawn))
    with pytest.raises(graphlib.CycleError):
        list(graphlib.TopologicalSorter({"a": {"b"}, "b": {"a"}}).static_order())
