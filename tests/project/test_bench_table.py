"""The tables of speed: what bench/table.py makes of the committed results, losses included."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "bench" / "results"
MACHINE: dict[str, Any] = {
    "cpu": "Some CPU",
    "kind": "some-tier",
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
    monkeypatch.setattr(module, "PAGE", tmp_path / "speed.md")
    monkeypatch.setattr(module, "RESULTS", tmp_path)
    monkeypatch.setattr(module, "SHOWN", "some-tier")
    return module


def row(ms: float, impl: str = "ours", **more: Any) -> dict[str, Any]:
    """Decode of one token in int8, unless `more` says otherwise; of the default group."""
    groups = {"bf16": 0, "int8": 128, "int4": 32}
    format = more.get("format", "int8")
    base = {
        "workload": "W1",
        "shape": "Q",
        "tokens": 1,
        "routing": "uniform",
        "isa": "avx512_bf16" if impl == "ours" else "",
        "format": format,
        "group": groups[format],
        "domain": "bf16" if format == "bf16" else "int8",
        "rank": 0,
        "impl": impl,
        "ms": 1.1 * ms,
        "best_ms": ms,
        "roof_pct": 82.6,
    }
    return base | more


def run(*rows: dict[str, Any], **machine: Any) -> dict[str, Any]:
    return {"machine": MACHINE | machine, "rows": list(rows)}


def test_the_pages_show_the_committed_results(table: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    table.main(["--check"])
    assert len(table.summary(table.published()[table.SHOWN]["rivals"]["rows"])) == 6


def test_committed_results_can_be_traced(table: Any) -> None:
    files = sorted(RESULTS.glob("*-*.json"))
    assert files
    for path in files:
        runs = table.result_files.read(path)
        assert runs
        for name, result in runs.items():
            machine, rows = result["machine"], result["rows"]
            assert table.result_files.name_of(result) == name
            assert machine["kind"] == path.stem
            assert re.fullmatch(r"[0-9a-f]{12}", machine["commit"]), "with uncommitted changes"
            assert re.fullmatch(r"[0-9a-f]{16}", machine["csrc"])
            assert machine["load"] and machine["load_end"]
            for r in rows:
                assert r["load"] >= 0.0 and r["samples"] >= 3
                assert 0 < r["best_ms"] <= r["ms"]


def test_results_name_their_cpu_and_hold_no_samples() -> None:
    for path in RESULTS.glob("*.json"):
        data = json.loads(path.read_text())
        machines = [r["machine"] for r in data["runs"].values()] if "-" in path.stem else None
        assert all(machine["cpu"] for machine in machines or [data["machine"]])
        assert path.stat().st_size < 100_000


def test_a_file_is_read_as_it_was_written(table: Any, tmp_path: Path) -> None:
    path, runs = tmp_path / "x.json", {"rivals": run(row(2.5), row(8.0, "kt_kernel"))}
    runs["alone"] = run(row(2.4), commit="ba9876543210")
    table.result_files.write(path, runs)
    assert table.result_files.read(path) == runs
    with pytest.raises(ValueError, match="different keys"):
        table.result_files.write(path, {"alone": run(row(2.4), row(1.0) | {"more": 1})})


def test_best_rival_is_shown_with_its_name(table: Any) -> None:
    rows = [
        row(2.5),
        row(8.0, "kt_kernel"),
        row(6.5, "torch_onednn_int8"),
        row(7.0, "transformers_eager", format="bf16"),
        row(1.0, "kt_kernel", format="int4"),  # fewer bits than ours: no match
    ]
    want = ("decode, 1 token", "int8", "2.50 ms", "83 %", "torch oneDNN", "6.50 ms")
    assert table.summary(rows) == [(*want, "2.60x")]


def test_a_rival_may_keep_more_bits(table: Any) -> None:
    case: dict[str, Any] = {"workload": "W2", "tokens": 1024}
    rows = [
        row(200, **case),
        row(453, "kt_kernel", **case),
        row(300, "kt_kernel", format="bf16", **case),
    ]
    assert table.summary(rows)[0][4:] == ("kt-kernel (bf16)", "300 ms", "1.50x")


def test_losses_are_shown_and_never_round_to_a_tie(table: Any) -> None:
    for theirs, ratio in ((5.0, "0.50x"), (9.99, "0.99x"), (10.0, "1.00x"), (129.0, "12.90x")):
        assert table.summary([row(10.0), row(theirs, "kt_kernel")])[0][-1] == ratio


def test_without_rivals_there_is_a_dash(table: Any) -> None:
    others = [row(1.0, "kt_kernel", tokens=8), row(1.0, "kt_kernel", shape="S")]
    others += [row(1.0, "kt_kernel", routing="zipf"), row(1.0, "kt_kernel", rank=8)]
    assert table.summary([row(2.5), *others])[0][4:] == ("-", "-", "-")


def test_our_row_is_of_the_best_tier_and_the_right_domain(table: Any) -> None:
    step: dict[str, Any] = {"workload": "W4", "tokens": 2048, "rank": 8}
    rows = [
        row(9.0, isa="avx2"),
        row(4.0, domain="bf16"),
        row(3.0),
        row(700.0, domain="bf16", **step),
        row(600.0, domain="int16", **step),
        row(800.0, format="bf16", **step),
    ]
    assert [(r[1], r[2]) for r in table.summary(rows)] == [
        ("int8", "3.00 ms"),
        ("int8", "600 ms"),
        ("bf16", "800 ms"),
    ]
    assert table.summary([row(9.0, isa="avx2")])[0][2] == "9.00 ms"


def test_of_several_groups_the_default_is_shown(table: Any) -> None:
    rows = [row(1.0, format="int4", group=128), row(1.2, format="int4")]
    assert [r[2] for r in table.summary(rows)] == ["1.20 ms"]


def test_what_was_not_measured_is_left_out(table: Any) -> None:
    assert [r[1] for r in table.summary([row(2.5), row(0.9, format="int4")])] == ["int8", "int4"]
    with pytest.raises(SystemExit, match="no row of ours"):
        table.summary([row(2.5, shape="S"), row(2.5, "kt_kernel")])


def test_the_page_has_every_case_of_ours_and_its_losses(table: Any) -> None:
    rows = [
        row(2.5, domain="bf16"),
        row(2.0, "kt_kernel"),
        row(1.5),
        row(0.9, format="int4", group=128, domain="bf16"),
        row(90.0, workload="W4", tokens=512, rank=64, domain="int16"),
        row(20.0, workload="W2", tokens=64, shape="S", routing="zipf"),
    ]
    text = table.page({"some-tier": {"rivals": run(*rows), "alone": run(row(1.4))}})
    assert [line for line in text.splitlines() if line.startswith(("## ", "### "))] == [
        "## some-tier, beside rivals",
        f"### {table.SHAPES['Q']}",
        f"### {table.SHAPES['S']}",
        "## some-tier, ours alone",
        f"### {table.SHAPES['Q']}",
    ]
    for cells in (
        "decode, 1 token | int8 | bf16 | 2.50 ms | 2.75 ms | 83 % | kt-kernel | 2.00 ms | 0.80x",
        "decode, 1 token | int8 | int8 | 1.50 ms | 1.65 ms | 83 % | kt-kernel | 2.00 ms | 1.33x",
        "decode, 1 token | int4, group 128 | bf16 | 0.90 ms | 0.99 ms | 83 % "
        "| kt-kernel (int8) | 2.00 ms | 2.22x",
        "forward and backward, LoRA r=64, 512 tokens | int8 | int16 | 90.0 ms | 99.0 ms | 83 % "
        "| - | - | -",
        "prefill, 64 tokens, zipf routing | int8 | int8 | 20.0 ms | 22.0 ms | 83 % | - | - | -",
    ):
        assert f"| {cells} |" in text.splitlines()


def test_the_block_names_machine_commit_and_load(table: Any) -> None:
    kinds = {
        "some-tier": {"rivals": run(row(2.5)), "alone": run(row(1.4), commit="ba9876543210")},
        "other-tier": {"alone": run(row(7.0, format="int4"), cpu="Another CPU", threads=8)},
    }
    text = table.block(kinds)
    flat = " ".join(text.split())
    for part in (
        "Some CPU with 2 threads",
        "bf16 429 GFLOP/s, int8 938 GOP/s, DRAM 29.6 GB/s",
        "commit `0123456789ab`, csrc `0123456789abcdef`",
        "load average 0.10 before the run and 1.50 after it",
        "| Some CPU, 2 threads, commit `0123456789ab` | 2.50 | - |",
        "| Some CPU, 2 threads, commit `ba9876543210`, without rivals | 1.40 | - |",
        "| Another CPU, 8 threads, commit `0123456789ab`, without rivals | - | 7.00 |",
    ):
        assert part in flat


@pytest.mark.parametrize("text", ["", "{BEGIN}", "{END}\n{BEGIN}", "{BEGIN}\n{BEGIN}\n{END}"])
def test_missing_or_misplaced_markers_are_an_error(table: Any, text: str) -> None:
    with pytest.raises(SystemExit, match="each once"):
        table.replaced(text.format(BEGIN=table.BEGIN, END=table.END), "x")


def test_check_fails_when_either_side_is_edited(table: Any, tmp_path: Path) -> None:
    readme, results = tmp_path / "README.md", tmp_path / "some-tier.json"
    readme.write_text(f"# Top\n\n{table.BEGIN}\n{table.END}\n\nEnd.\n")
    table.result_files.write(results, {"rivals": run(row(2.5))})
    with pytest.raises(SystemExit, match="README.md differs"):
        table.main(["--check"])
    table.main([])
    table.main(["--check"])
    text = readme.read_text()
    assert text.startswith("# Top\n\n") and text.endswith("\n\nEnd.\n") and "2.50 ms" in text
    for path in (readme, table.PAGE):
        whole = path.read_text()
        path.write_text(whole.replace("2.50 ms", "2.40 ms"))
        with pytest.raises(SystemExit, match=f"{path.name} differs"):
            table.main(["--check"])
        path.write_text(whole)
    table.result_files.write(results, {"rivals": run(row(2.6))})
    with pytest.raises(SystemExit, match="differs"):
        table.main(["--check"])


def test_publish_puts_the_latest_run_beside_the_others_of_its_kind(
    table: Any, tmp_path: Path
) -> None:
    (tmp_path / "README.md").write_text(f"{table.BEGIN}\n{table.END}\n")
    results, latest = tmp_path / "some-tier.json", tmp_path / "latest.json"
    with pytest.raises(SystemExit, match="some-tier.json is missing"):
        table.main([])
    rivals = run(row(2.5), row(8.0, "kt_kernel"))
    table.result_files.write(latest, {"rivals": rivals})
    with pytest.raises(SystemExit, match="roofline.png missing"):
        table.main(["--publish"])
    assert not results.exists()
    (tmp_path / "roofline.png").write_bytes(b"plot")
    table.main(["--publish"])
    table.main(["--check"])
    assert (tmp_path / "some-tier.png").read_bytes() == b"plot"
    assert "(../bench/results/some-tier.png)" in table.PAGE.read_text()

    alone = run(row(1.4))
    table.result_files.write(latest, {"alone": alone})
    (tmp_path / "roofline.png").write_bytes(b"fewer points")
    table.main(["--publish"])
    assert table.result_files.read(results) == {"rivals": rivals, "alone": alone}
    assert (tmp_path / "some-tier.png").read_bytes() == b"plot"
    elsewhere = run(row(9.0), kind="other-tier")
    table.result_files.write(latest, {"alone": elsewhere})
    table.main(["--publish"])
    assert table.result_files.read(results) == {"rivals": rivals, "alone": alone}
    assert table.result_files.read(tmp_path / "other-tier.json") == {"alone": elsewhere}
