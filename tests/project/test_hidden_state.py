"""DESIGN.md lists all state that travels outside arguments: what is found in the source, and in the
objects of the C++ part, is what stands in its table.
"""

from __future__ import annotations

import ast
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import native_build

ROOT = Path(__file__).resolve().parents[2]
MAKERS = re.compile(r"(\w+\.)*(ContextVar|Weak\w+|local)")
CHANGES = {"add", "append", "clear", "extend", "pop", "remove", "setdefault", "update"}
# What a name in lower case may be at module level, being neither a constant nor state.
STATELESS = re.compile(r"logging\.getLogger\(.*|functools\.partial\(.*")


def listed() -> dict[frozenset[str], set[str]]:
    """Names by the modules of their row."""
    page = (ROOT / "DESIGN.md").read_text()
    section = page.split("## State that travels outside arguments")[1].split("\n## ")[0]
    rows = [[cell.strip() for cell in line.split("|")[1:4]] for line in section.splitlines()]
    return {
        frozenset(where.split(", ")): set(re.findall(r"`(\w+)`", names))
        for where, names, why in (row for row in rows if len(row) == 3)
        if names.startswith("`") and why
    }


def state(source: str) -> set[str]:
    """Names of what a file keeps between calls: module-level names in lower case, those that are
    changed in any case, ContextVars, weak collections, and attributes kt_* of foreign objects.
    """
    tree = ast.parse(source)
    held: dict[str, str] = {}  # module-level names and what they are bound to
    for node in tree.body:
        if isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            held |= {n.id: ast.unparse(node.value) for t in targets for n in names_in(t)}
    found = {n for n, v in held.items() if n.islower() and not STATELESS.fullmatch(v)}
    found = {n for n in found if not n.startswith("__")}
    for node in ast.walk(tree):
        if isinstance(node, ast.Global):
            found |= set(node.names)
        elif isinstance(node, ast.Subscript | ast.Attribute) and not isinstance(node.ctx, ast.Load):
            owner = ast.unparse(node.value)
            if owner in held:
                found.add(owner)
            elif isinstance(node, ast.Attribute) and owner != "model_args":  # has them as options
                found |= {node.attr} if node.attr.startswith("kt_") else set()
        elif isinstance(node, ast.Call):
            called = ast.unparse(node.func)
            owner, _, method = called.rpartition(".")
            if owner in held and method in CHANGES:
                found.add(owner)
            if MAKERS.fullmatch(called) and ast.unparse(node) not in held.values():
                found.add(str(ast.literal_eval(node.args[0])) if node.args else ast.unparse(node))
    return found


def names_in(target: ast.AST) -> Iterator[ast.Name]:
    return (n for n in ast.walk(target) if isinstance(n, ast.Name))


def test_the_table_has_all_state_of_the_packages():
    found = {}
    for package in ("kt_core", "kt_sft"):
        for path in (ROOT / package).rglob("*.py"):
            if names := state(path.read_text()):
                where = str(path.relative_to(ROOT / package).with_suffix(""))
                assert where not in found
                found[where] = names
    table = {where: names for where, names in listed().items() if where != {"csrc"}}
    assert set(found) == {module for where in table for module in where}
    for where, names in table.items():
        assert set().union(*(found[module] for module in where)) == names, where


def test_the_table_has_all_state_of_the_native_part():
    """Variables in writable sections; the tables of kernels are written once, by the loader."""
    found = set()
    for name, path in native_build.generic_objects().items():
        symbols = subprocess.check_output(["nm", "-C", str(path)], text=True)
        if re.search(r"(?m)^[0-9a-f]+ [bBdD] kt::", symbols):
            found.add(name.removesuffix(".cpp"))
    assert found == listed()[frozenset({"csrc"})]


def test_the_search_sees_what_it_should():
    for source, names in {
        "_last = 0\ndef f():\n    global _last": {"_last"},
        "def f():\n    global _new\n    _new = 1": {"_new"},
        "_a: dict[int, int] = {}\nB = {}\nC = {}\nX = B[1]\nC[2] = 3": {"_a", "C"},
        "import weakref\n_w = weakref.WeakKeyDictionary()": {"_w"},
        "def f():\n    v = ContextVar('kt_v', default=None)": {"kt_v"},
        "def f(self):\n    self.seen = WeakSet()": {"WeakSet()"},
        "D = []\ndef f():\n    D.append(1)\n    e = []\n    e.append(2)": {"D"},
        "def f(args):\n    args.kt_n = 1": {"kt_n"},
        "def f(model_args):\n    model_args.kt_config = 1\n    model_args.kt_config": set(),
        "log = logging.getLogger('kt')\n__all__ = ['a']\nA, B = 1, 2\nclass C:\n    a = 1": set(),
        "Shape = tuple[int, int]\nN = [1]\ndef f():\n    n = []\n    n[0] = N[0]": set(),
    }.items():
        assert state(source) == names, source
