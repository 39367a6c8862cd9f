"""DESIGN.md shows the tree as it is: every file of the packages by its name, and no other."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("csrc", "kt_core", "kt_sft")
SUFFIXES = {".py", ".pyi", ".h", ".cpp"}


def drawn() -> dict[str, set[str]]:
    """Names of files without suffix, by folder, as the page's tree has them."""
    page = (ROOT / "DESIGN.md").read_text()
    block = page.split("## The tree")[1].split("\n## ")[0]
    found: dict[str, set[str]] = {}
    folder = package = ""
    for line in re.findall(r"^    (.*)$", block, re.M):
        line = re.sub(r"\([^)]*\)", "", line)
        if head := re.match(r"(\w+)/ ", line):
            folder = package = head[1]
            continue
        if head := re.match(r"  (\w+)/ +(.*)", line):
            folder, line = f"{package}/{head[1]}", head[2]
            line = line.split(":")[-1]
        elif line.startswith("  ") and not line.startswith("   "):
            folder = package
        for name in re.findall(r"[\w./{},]+", line):
            found.setdefault(folder, set()).add(name)
    return found


def files() -> dict[str, set[str]]:
    found: dict[str, set[str]] = {}
    for package in PACKAGES:
        for path in (ROOT / package).rglob("*"):
            if path.suffix in SUFFIXES and path.name != "__init__.py":
                folder = str(path.parent.relative_to(ROOT))
                found.setdefault(folder, set()).add(path.stem)
    return found


def test_the_tree_names_every_file():
    shown = drawn()
    for folder, names in files().items():
        listed = folder.rpartition("/")[2]
        if listed in ("container", "dialect"):
            (entry,) = [n for n in shown["kt_core/loading"] if n.startswith(f"{listed}/")]
            assert set(re.findall(r"\w+", entry)) - {listed} == names
            continue
        there = {n.split(".")[0] for n in shown.get(folder, set())}
        assert names <= there, (folder, names - there)


def test_the_tree_names_nothing_else():
    found = files()
    folders = set(found) | set(PACKAGES)
    for folder in drawn():
        assert folder in folders, folder
    for folder in found:
        if folder in PACKAGES or folder.endswith(("/container", "/dialect")):
            continue  # these have words of explanation between the names
        there = {n for n in drawn()[folder] if not n.startswith(("container/", "dialect/"))}
        assert there <= found[folder], (folder, there - found[folder])


def test_tests_mirror_the_packages():
    """A folder of tests has the name of a folder of the packages, and files' names are unique, as
    the pages name them without their folder.
    """
    tests = sorted((ROOT / "tests").rglob("test_*.py"))
    folders = {str(path.parent.relative_to(ROOT / "tests")) for path in tests}
    assert folders - {"project"} <= {*files(), *PACKAGES}
    assert len({path.name for path in tests}) == len(tests)


def test_the_page_is_read_in_ten_minutes():
    assert len((ROOT / "DESIGN.md").read_bytes()) <= 12_000
