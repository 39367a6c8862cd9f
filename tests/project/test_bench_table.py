"""README's speed table: what bench/table.py makes of the published result, losses included."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
PUBLISHED = ROOT / "bench" / "results" / "published.json"
MACHINE: dict[str, Any] = {
    "cpu": "Some CPU",
    "threads": 2,
    "load": [0.1, 0.2, 0.3],
    "load_end": [1.5, 1.0, 0.5],
    "roofs": {"bf16_gflops": 429.4, "int8_gops": 938.2, "dram_gbps": 29.64},
    "commit": "0123456789ab",
    "csrc": "0123456789abcdef",
}


@pytest.fixture
def table(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """The module; what it would write goes to tmp_path."""
    monkeypatch.syspath_prepend(str(ROOT / "bench"))
    import table as module

    monkeypatch.setattr(module, "README", tmp_path / "README.md")
    monkeypatch.setattr(module, "RESULTS", tmp_path)
    return module


def row(ms: float, impl: str = "ours", **more: Any) -> dict[str, Any]:
    """Decode of one token in bf16, unless `more` says otherwise; of the default group."""
    groups = {"bf16": 0, "int8": 128, "int4": 32}
    base = {
        "workload": "W1",
        "shape": "Q",
        "tokens": 1,
        "routing": "uniform",
        "isa": "avx512_bf16" if impl == "ours" else "",
        "format": "bf16",
        "group": groups[more.get("format", "bf16")],
        "domain": "bf16",
        "rank": 0,
        "impl": impl,
        "best_ms": ms,
        "roof_pct": 82.6,
    }
    return base | more


def write(folder: Path, rows: list[dict[str, Any]], name: str = "published.json") -> None:
    (folder / name).write_text(json.dumps({"machine": MACHINE, "rows": rows}))


def published() -> dict[str, Any]:
    assert PUBLISHED.is_file(), "bench/table.py --publish makes it; it is to be committed"
    return dict(json.loads(PUBLISHED.read_text()))


def test_readme_shows_the_published_result(table: Any) -> None:
    text = (ROOT / "README.md").read_text()
    content = table.block(published(), PUBLISHED.with_suffix(".png").is_file())
    assert text == table.replaced(text, content)


def test_published_result_can_be_traced() -> None:
    data = published()
    machine, rows = data["machine"], data["rows"]
    assert re.fullmatch(r"[0-9a-f]{12}", machine["commit"]), "measured with uncommitted changes"
    assert re.fullmatch(r"[0-9a-f]{16}", machine["csrc"])
    assert machine["load"] and machine["load_end"] and rows
    for r in rows:
        assert r["load"] >= 0.0
        assert r["best_ms"] == min(r["samples_ms"])


def test_best_rival_is_shown_with_its_name(table: Any) -> None:
    rows = [
        row(2.5),
        row(8.0, "kt_kernel"),
        row(6.5, "transformers_grouped_mm"),
        row(7.0, "transformers_eager"),
        row(1.0, "kt_kernel", format="int8"),  # fewer bits than ours: no match
    ]
    want = ("decode, 1 token", "bf16", "2.50 ms", "83 %", "transformers grouped_mm", "6.50 ms")
    assert table.lines(rows) == [(*want, "2.60x")]


def test_a_rival_may_keep_more_bits(table: Any) -> None:
    case: dict[str, Any] = {"workload": "W2", "tokens": 1024}
    rows = [
        row(200, format="int8", domain="int8", **case),
        row(453, "kt_kernel", format="int8", **case),
        row(300, "kt_kernel", **case),
    ]
    assert table.lines(rows)[0][4:] == ("kt-kernel (bf16)", "300 ms", "1.50x")


def test_losses_are_shown_and_never_round_to_a_tie(table: Any) -> None:
    for theirs, ratio in ((5.0, "0.50x"), (9.99, "0.99x"), (10.0, "1.00x"), (129.0, "12.90x")):
        assert table.lines([row(10.0), row(theirs, "kt_kernel")])[0][-1] == ratio


def test_without_rivals_there_is_a_dash(table: Any) -> None:
    others = [row(1.0, "kt_kernel", tokens=8), row(1.0, "kt_kernel", shape="S")]
    others += [row(1.0, "kt_kernel", routing="zipf"), row(1.0, "kt_kernel", rank=8)]
    assert table.lines([row(2.5), *others])[0][4:] == ("-", "-", "-")


def test_our_row_is_of_the_best_tier_and_the_right_domain(table: Any) -> None:
    step: dict[str, Any] = {"workload": "W4", "tokens": 512, "rank": 8}
    rows = [
        row(9.0, isa="avx2"),
        row(2.0),
        row(4.0, format="int8", domain="bf16"),
        row(3.0, format="int8", domain="int8"),
        row(700.0, format="int4", **step),
    ]
    assert [(r[1], r[2]) for r in table.lines(rows)] == [
        ("bf16", "2.00 ms"),
        ("int8", "3.00 ms"),
        ("int4", "700 ms"),
    ]
    only_avx2 = [row(9.0, isa="avx2")]
    assert table.lines(only_avx2)[0][2] == "9.00 ms"


def test_of_several_groups_the_default_is_shown(table: Any) -> None:
    kind: dict[str, Any] = {"format": "int4", "domain": "int8"}
    rows = [row(1.0, group=128, **kind), row(1.2, **kind)]
    assert [r[2] for r in table.lines(rows)] == ["1.20 ms"]


def test_what_was_not_measured_is_left_out(table: Any) -> None:
    rows = [row(2.5), row(0.9, format="int4", domain="int8")]
    assert [r[1] for r in table.lines(rows)] == ["bf16", "int4"]
    with pytest.raises(SystemExit, match="no row of ours"):
        table.lines([row(2.5, shape="S"), row(2.5, "kt_kernel")])


def test_the_sentence_names_machine_commit_and_load(table: Any) -> None:
    text = table.block({"machine": MACHINE, "rows": [row(2.5)]}, picture=True)
    flat = " ".join(text.split())
    for part in (
        "Some CPU with 2 threads",
        "bf16 429 GFLOP/s, int8 938 GOP/s, DRAM 29.6 GB/s",
        "commit `0123456789ab`, csrc `0123456789abcdef`",
        "load average 0.10 before the run and 1.50 after it",
    ):
        assert part in flat
    assert "(bench/results/published.png)" in text
    assert "published.png" not in table.block({"machine": MACHINE, "rows": [row(2.5)]}, False)


@pytest.mark.parametrize("text", ["", "{BEGIN}", "{END}\n{BEGIN}", "{BEGIN}\n{BEGIN}\n{END}"])
def test_missing_or_misplaced_markers_are_an_error(table: Any, text: str) -> None:
    with pytest.raises(SystemExit, match="each once"):
        table.replaced(text.format(BEGIN=table.BEGIN, END=table.END), "x")


def test_check_fails_when_either_side_is_edited(table: Any, tmp_path: Path) -> None:
    readme = tmp_path / "README.md"
    readme.write_text(f"# Top\n\n{table.BEGIN}\n{table.END}\n\nEnd.\n")
    write(tmp_path, [row(2.5)])
    with pytest.raises(SystemExit, match="differs"):
        table.main(["--check"])
    table.main([])
    table.main(["--check"])
    text = readme.read_text()
    assert text.startswith("# Top\n\n") and text.endswith("\n\nEnd.\n") and "2.50 ms" in text
    readme.write_text(text.replace("2.50 ms", "2.40 ms"))
    with pytest.raises(SystemExit, match="differs"):
        table.main(["--check"])
    readme.write_text(text)
    write(tmp_path, [row(2.6)])
    with pytest.raises(SystemExit, match="differs"):
        table.main(["--check"])


def test_publish_takes_result_and_plot_of_the_latest_run(table: Any, tmp_path: Path) -> None:
    (tmp_path / "README.md").write_text(f"{table.BEGIN}\n{table.END}\n")
    with pytest.raises(SystemExit, match="published.json is missing"):
        table.main([])
    write(tmp_path, [row(2.5)], "latest.json")
    with pytest.raises(SystemExit, match="roofline.png missing"):
        table.main(["--publish"])
    assert not (tmp_path / "published.json").exists()
    (tmp_path / "roofline.png").write_bytes(b"plot")
    table.main(["--publish"])
    table.main(["--check"])
    assert (tmp_path / "published.png").read_bytes() == b"plot"
    assert "published.png" in (tmp_path / "README.md").read_text()
