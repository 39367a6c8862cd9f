"""The tables in docs/kernels.md are what the registry says, and the markers guard them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kt_core import kernels

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def table(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    import support_table as module

    return module


def test_the_page_shows_the_compiled_kernels(table: Any) -> None:
    text = (ROOT / "docs" / "kernels.md").read_text()
    assert text == table.replaced(text), "run scripts/support_table.py"


def cells(block: str) -> dict[tuple[str, str], str]:
    """By name of the row and of the column."""
    head, _, *rows = [line.strip("| ").split(" | ") for line in block.splitlines()]
    return {(row[0].split("`")[1], f): c for row in rows for f, c in zip(head, row, strict=True)}


def test_every_kernel_has_its_cells(table: Any) -> None:
    tiers, formats = cells(table.tiers()), cells(table.format_table())
    for k in kernels():
        assert tiers[k["isa"], "formats"] == "all"
        assert all(f"`{f}`" in tiers[k["isa"], "CPU features"] for f in k["needs"].split())
        assert ("int8" in formats[k["format"], "domains"]) == k["int8_domain"]
        assert f"**{k['default_group']}**" in formats[k["format"], "groups"] or not k["scale_bits"]
    assert set(table.FIRST_CPUS) >= {k["isa"] for k in kernels()}


def test_check_fails_when_the_table_was_edited(
    table: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = tmp_path / "kernels.md"
    monkeypatch.setattr(table, "PAGE", page)
    blocks = "".join(f"<!-- {n}:begin -->\n<!-- {n}:end -->\n" for n in table.NAMES)
    page.write_text(f"# Top\n\n{blocks}\nEnd.\n")
    with pytest.raises(SystemExit, match="differs"):
        table.main(["--check"])
    table.main([])
    table.main(["--check"])
    text = page.read_text()
    assert text.startswith("# Top\n\n") and text.endswith("\n\nEnd.\n")
    page.write_text(text.replace("scalar", "vector", 1))
    with pytest.raises(SystemExit, match="differs"):
        table.main(["--check"])
    page.write_text("no markers")
    with pytest.raises(SystemExit, match="each once"):
        table.main([])
