"""The table of tiers in docs/kernels.md is what the registry says, and the markers guard it."""

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
    assert text == table.replaced(text, table.block()), "run scripts/support_table.py"


def test_every_kernel_has_a_cell(table: Any) -> None:
    head, _, *rows = [line.strip("| ").split(" | ") for line in table.block().splitlines()]
    cells = {(row[0].split("`")[1], f): c for row in rows for f, c in zip(head, row, strict=True)}
    for k in kernels():
        does = cells[k["isa"], k["format"]]
        assert does.startswith("forward, backward")
        assert ("int8 domain" in does) == k["int8_domain"]
        assert all(f"`{f}`" in cells[k["isa"], "CPU features"] for f in k["needs"].split())
    assert set(table.FIRST_CPUS) >= {k["isa"] for k in kernels()}


def test_check_fails_when_the_table_was_edited(
    table: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = tmp_path / "kernels.md"
    monkeypatch.setattr(table, "PAGE", page)
    page.write_text(f"# Top\n\n{table.BEGIN}\n{table.END}\n\nEnd.\n")
    with pytest.raises(SystemExit, match="differs"):
        table.main(["--check"])
    table.main([])
    table.main(["--check"])
    text = page.read_text()
    assert text.startswith("# Top\n\n") and text.endswith("\n\nEnd.\n")
    page.write_text(text.replace("backward", "forward", 1))
    with pytest.raises(SystemExit, match="differs"):
        table.main(["--check"])
    page.write_text("no markers")
    with pytest.raises(SystemExit, match="each once"):
        table.main([])
