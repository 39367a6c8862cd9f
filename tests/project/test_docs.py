"""The pages under docs/ say what the code does."""

from __future__ import annotations

import ast
import dataclasses
import importlib.util
import re
import sys
from pathlib import Path

import lf_cases  # noqa: F401 - installs the hooks
import pytest
import yaml

from kt_core import formats
from kt_sft.config import KTConfig
from kt_sft.report import step_log
from kt_sft.report.stats import STATS_FILE
from kt_sft.report.trainer_log import KEYS

ROOT = Path(__file__).resolve().parents[2]


def _rows(page):
    """The cells of every row of the first table of a page, without its head."""
    lines = [x for x in (ROOT / "docs" / page).read_text().splitlines() if x.startswith("| ")]
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines[2:]]


def _word(cell):
    found = re.fullmatch(r"`([^`]+)`", cell)
    assert found, f"{cell!r} is not one `word`"
    return found[1]


SETTINGS = {_word(key): cells for key, *cells in _rows("settings.md")}


def test_every_setting_is_listed_with_its_default():
    from llamafactory.hparams import ModelArguments

    defaults = {f.name: f.default for f in dataclasses.fields(ModelArguments)}
    stock = {f.name for f in dataclasses.fields(ModelArguments.__base__)}
    expected = {key: defaults[key] for key in ("use_kt", *defaults.keys() - stock)}
    expected |= {f"kt_config.{f.name}": f.default for f in dataclasses.fields(KTConfig)}
    listed = {key: yaml.safe_load(_word(cells[0])) for key, cells in SETTINGS.items()}
    assert listed == expected


def test_the_settings_list_the_formats_that_there_are():
    """Their names, the groups and the defaults of each, as the kernels say."""
    _, format, _ = SETTINGS["kt_config.format"]
    assert tuple(re.findall(r"`(\w+)`", format)) == formats.names()
    _, group, _ = SETTINGS["kt_config.group"]
    scaled = [formats.of(name) for name in formats.scaled()]
    assert {int(g) for g in re.findall(r"`(\d+)`", group)} == {g for f in scaled for g in f.groups}
    defaults = ", ".join(f"{f.default_group} with {f.name}" for f in scaled)
    others = " or ".join(sorted(set(formats.names()) - set(formats.scaled())))
    assert group.endswith(f"`null`: {defaults}; not with {others}")


@pytest.mark.parametrize("key", SETTINGS)
def test_f14_every_setting_names_a_test_that_uses_it(key):
    _, meaning, test = SETTINGS[key]
    assert len(meaning) > 20
    file, name = _word(test).split("::")
    path = next((ROOT / "tests").rglob(file))
    tree = ast.parse(path.read_text())
    found = [n for n in tree.body if isinstance(n, ast.FunctionDef) and n.name == name]
    assert found, f"{file} has no {name}"
    # the test itself, a helper of its file or lf_cases.arguments gives the key
    used = path.read_text() + (ROOT / "tests" / "lf_cases.py").read_text()
    assert re.search(rf"\b{key.removeprefix('kt_config.')}\b", used)


def test_every_number_of_a_log_line_is_explained():
    assert {_word(key): meaning for key, meaning in _rows("logs.md")} == KEYS
    text = (ROOT / "docs" / "logs.md").read_text()
    assert step_log.HEAT_MAP in text and STATS_FILE in text


def test_the_readme_points_to_the_pages():
    readme = (ROOT / "README.md").read_text()
    pages = sorted(path.name for path in (ROOT / "docs").glob("*.md"))
    assert pages and all(f"docs/{name}" in readme for name in pages)


def test_the_page_of_versions_is_that_of_its_script():
    """Every environment has its row, its oldest versions are those that pyproject.toml allows, and
    its tests exist.
    """
    source = ROOT / "scripts" / "test_versions.py"
    spec = importlib.util.spec_from_file_location("scripts_test_versions", source)
    script = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = script  # where dataclasses looks
    spec.loader.exec_module(script)
    assert [row[0].split(":")[0] for row in _rows("versions.md")] == [
        e.name for e in script.ENVIRONMENTS
    ]
    for name in (*script.TESTS, *script.WITH_LLAMAFACTORY):
        assert list((ROOT / "tests").rglob(name))
    text = (ROOT / "pyproject.toml").read_text()
    oldest = dict(package.split("==") for package in script.ENVIRONMENTS[0].packages)
    assert set(oldest) == {"transformers", "peft", "accelerate"}
    for name, version in oldest.items():
        (bound,) = re.findall(rf'"{name}>=([0-9.]+)', text)
        assert version in (bound, f"{bound}.0")
