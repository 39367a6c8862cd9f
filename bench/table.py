"""README's speed table and docs/speed.md, written from the committed results and checked.

    python bench/table.py [--check | --publish]

README shows six cases of one kind of CPU between its markers, docs/speed.md every case of every
file of bench/results that bench/run.py has written. --check writes nothing and fails when a page
differs from the results; --publish first puts the latest run into the file of its kind of CPU.
"""

from __future__ import annotations

import argparse
import math
import shutil
import textwrap
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import result_files
from result_files import ALONE, RIVALS, Row, Run

from kt_core.formats import all_formats

# Weights per scale of every format, most bits first
DEFAULT_GROUP = {f.name: f.default_group for f in all_formats().values()}

ROOT = Path(__file__).resolve().parent.parent
README = ROOT / "README.md"
PAGE = ROOT / "docs" / "speed.md"
RESULTS = ROOT / "bench" / "results"
SHOWN = "intel-avx512_vnni"  # in README: the kind of CPU that was measured with rivals
BEGIN, END = "<!-- bench:begin -->", "<!-- bench:end -->"

CASES = (  # of README: workload, tokens, rank, format
    ("W1", 1, 0, "int8"),
    ("W1", 1, 0, "int4"),
    ("W2", 1024, 0, "int8"),
    ("W2", 1024, 0, "bf16"),
    ("W4", 2048, 8, "int8"),
    ("W4", 2048, 8, "bf16"),
)
LABELS = {
    "W1": "decode, {tokens:,} token{s}",
    "W2": "prefill, {tokens:,} tokens",
    "W3": "forward and backward, {tokens:,} tokens",
    "W4": "forward and backward, LoRA r={rank}, {tokens:,} tokens",
}
SHORT = {
    "W1": "decode, 1 token",
    "W2": "prefill, 1,024 tokens",
    "W4": "training step, 2,048 tokens",
}
SHAPES = {
    "Q": "Shape Q: 128 experts, 8 per token, H = 2048, I = 768 (Qwen3-30B-A3B)",
    "S": "Shape S: 32 experts, 4 per token, H = 1024, I = 512",
}
NAMES = {
    "kt_kernel": "kt-kernel",
    "kt_kernel_g32": "kt-kernel, group 32",
    "transformers_eager": "transformers eager",
    "transformers_grouped_mm": "transformers grouped_mm",
    "peft_grouped_mm": "PEFT grouped_mm",
    "torch_onednn_int8": "torch oneDNN",
}
ROOFS = {
    "bf16_gflops": "bf16 {} GFLOP/s",
    "fp32_gflops": "fp32 {} GFLOP/s",
    "fp32_avx2_gflops": "fp32 with AVX2 {} GFLOP/s",
    "int8_gops": "int8 {} GOP/s",
    "dram_gbps": "DRAM {} GB/s",
}
INTRO = """\
# Speed, every case

Written by `bench/table.py`; do not edit. One expert layer, all files of `bench/results` that
`bench/run.py` wrote, one section per kind of CPU (vendor and tier). What bounds the cases is in
[performance.md](performance.md).

- *activations*: what rows are multiplied as. Inference takes bf16 unless an argument of the kernels
  selects int8. Training takes int16 with int8 and int4 experts where the CPU multiplies such rows
  faster, otherwise bf16; runs of older kernels have no rows with int16.
- *best*, *median*: of all calls of one run in which the contestants take turns.
- *of the roof*: the time that the machine's measured arithmetic and memory speed allow, divided by
  *best*. It takes all weights to come from DRAM. Shape S can exceed 100 %, as its layer (100 MB in
  bf16) may stay in a cache.
- *best rival*: the fastest that keeps at least as many bits per weight, whatever its activations.
  *speedup*: its best time divided by ours; below 1x it beats us.
- Experts have the format's default group unless a group is given.
"""


def of(rows: list[Row], **want: Any) -> list[Row]:
    """The rows with these values."""
    return [r for r in rows if all(r[key] == value for key, value in want.items())]


def best_tier(rows: list[Row]) -> list[Row]:
    """The rows without those of our tier avx2, unless it is the best of this CPU."""
    if {r["isa"] for r in of(rows, impl="ours")} == {"avx2"}:
        return rows
    return [r for r in rows if r["isa"] != "avx2"]


def best_rival(rows: list[Row], mine: Row) -> Row | None:
    """The fastest in the same case whose weights have at least as many bits: who may use int8 may
    use bf16."""
    case = {k: mine[k] for k in ("workload", "shape", "tokens", "routing", "rank")}
    wide = list(DEFAULT_GROUP)[: list(DEFAULT_GROUP).index(mine["format"]) + 1]
    rivals = [r for r in of(rows, **case) if r["impl"] != "ours" and r["format"] in wide]
    return min(rivals, key=lambda r: float(r["best_ms"]), default=None)


def digits(value: float) -> str:
    """About three digits, the whole ones always."""
    return f"{value:,.{2 if value < 10 else 1 if value < 100 else 0}f}"


def speedup(rival_ms: float, ours_ms: float) -> str:
    """Rounded down, so that no loss reads as a tie."""
    return f"{math.floor(100 * rival_ms / ours_ms + 1e-9) / 100:.2f}x"


def against(mine: Row, rival: Row | None) -> tuple[str, str, str]:
    """Best rival, its time, our speedup."""
    if rival is None:
        return "-", "-", "-"
    name = NAMES.get(rival["impl"], str(rival["impl"]))
    if rival["format"] != mine["format"]:
        name += f" ({rival['format']})"
    ms = rival["best_ms"]
    return name, f"{digits(ms)} ms", speedup(ms, mine["best_ms"])


def chosen(rows: list[Row], workload: str, tokens: int, rank: int, format: str) -> Row | None:
    """Our row of one of README's cases, None where it was not measured."""
    ours = of(
        best_tier(rows),
        workload=workload,
        tokens=tokens,
        rank=rank,
        shape="Q",
        routing="uniform",
        impl="ours",
        format=format,
        group=DEFAULT_GROUP[format],
    )
    # training rounds activations to bf16 in every format, and multiplies them so or as 16-bit codes
    # (Experts.training_compute)
    for domain in ("int16", "bf16") if workload == "W4" else ("int8", "bf16"):
        if found := of(ours, domain=domain):
            return found[0]
    return None


def markdown(head: Iterable[str], rows: list[tuple[str, ...]]) -> str:
    """A table; columns of numbers (those whose head ends with ">") to the right."""
    names = list(head)
    rule = ["---:" if n.endswith(">") else "---" for n in names]
    lines = [[n.rstrip(">") for n in names], rule, *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def summary(rows: list[Row]) -> list[tuple[str, ...]]:
    """README's rows; a case that was not measured has none."""
    out = []
    for workload, tokens, rank, format in CASES:
        if mine := chosen(rows, workload, tokens, rank, format):
            cells = SHORT[workload], format, f"{digits(mine['best_ms'])} ms"
            rival = against(mine, best_rival(rows, mine))
            out.append((*cells, f"{mine['roof_pct']:.0f} %", *rival))
    if not out:
        raise SystemExit("The result has no row of ours on shape Q that the table could show.")
    return out


def by_kind(kinds: dict[str, dict[str, Run]]) -> str:
    """Our times of README's cases, a row for every published run."""
    rows = []
    for runs in kinds.values():
        for name, run in runs.items():
            mine = [chosen(run["rows"], *case) for case in CASES]
            times = [digits(row["best_ms"]) if row else "-" for row in mine]
            about = run["machine"]
            label = f"{about['cpu']}, {about['threads']} threads, commit `{about['commit']}`"
            rows.append((label + ("" if name == RIVALS else ", without rivals"), *times))
    head = [f"{SHORT[w].split(',')[0]}, {format}>" for w, _, _, format in CASES]
    return markdown(("ours in ms", *head), rows)


def conditions(run: Run, picture: str | None) -> str:
    """What a table was measured on, and its plot."""
    machine = run["machine"]
    peaks = machine["roofs"]  # of what the CPU has
    roofs = [text.format(digits(peaks[kind])) for kind, text in ROOFS.items() if kind in peaks]
    text = (
        f"Measured on {machine['cpu']} with {machine['threads']} threads (roofs: "
        f"{', '.join(roofs)}), commit `{machine['commit']}`, csrc `{machine['csrc']}`, load "
        f"average {machine['load'][0]:.2f} before the run and {machine['load_end'][0]:.2f} after "
        "it."
    )
    text = textwrap.fill(text, 100, break_on_hyphens=False, break_long_words=False)
    return text + (f"\n\n![Measured speed against the roofs]({picture})" if picture else "")


def block(kinds: dict[str, dict[str, Run]]) -> str:
    """What belongs between README's markers."""
    if SHOWN not in kinds:
        raise SystemExit(f"{RESULTS / SHOWN}.json is missing: bench/table.py --publish makes it.")
    run = next(iter(kinds[SHOWN].values()))
    head = ("workload", "experts", "ours>", "of the roof>", "best rival", "its time>", "speedup>")
    parts = [markdown(head, summary(run["rows"])), conditions(run, None), by_kind(kinds)]
    return "\n\n".join(parts)


def every_case(rows: list[Row], shape: str) -> str:
    """All rows of our best tier on one shape."""
    out = []
    rows = best_tier(rows)
    for mine in of(rows, impl="ours", shape=shape):
        tokens = mine["tokens"]
        label = LABELS[mine["workload"]].format(
            tokens=tokens, s="" if tokens == 1 else "s", rank=mine["rank"]
        )
        if mine["routing"] != "uniform":
            label += f", {mine['routing']} routing"
        experts = mine["format"]
        if mine["group"] != DEFAULT_GROUP[experts]:
            experts += f", group {mine['group']}"
        times = f"{digits(mine['best_ms'])} ms", f"{digits(mine['ms'])} ms"
        rival = against(mine, best_rival(rows, mine))
        cells = label, experts, mine["domain"], *times, f"{mine['roof_pct']:.0f} %", *rival
        out.append(cells)
    head = ["workload", "experts", "activations", "best>", "median>", "of the roof>", "best rival"]
    return markdown([*head, "its time>", "speedup>"], out)


def page(kinds: dict[str, dict[str, Run]]) -> str:
    """docs/speed.md."""
    parts = [INTRO.rstrip()]
    for kind, runs in kinds.items():
        for name, run in runs.items():
            title = f"## {kind}, " + ("beside rivals" if name == RIVALS else "ours alone")
            shown = name == RIVALS and (RESULTS / f"{kind}.png").is_file()
            picture = f"../bench/results/{kind}.png" if shown else None
            parts += [title, conditions(run, picture)]
            for shape, words in SHAPES.items():
                if of(run["rows"], shape=shape):
                    parts += [f"### {words}", every_case(run["rows"], shape)]
    return "\n\n".join(parts) + "\n"


def replaced(text: str, content: str) -> str:
    """`text` with `content` between the markers."""
    if text.count(BEGIN) != 1 or text.count(END) != 1 or text.index(END) < text.index(BEGIN):
        raise SystemExit(f"README.md needs {BEGIN} and then {END}, each once.")
    return f"{text.split(BEGIN)[0]}{BEGIN}\n{content}\n{END}{text.split(END)[1]}"


def published() -> dict[str, dict[str, Run]]:
    """Kind of CPU -> its runs, from the files that `publish` writes."""
    files = sorted(RESULTS.glob("*-*.json"))  # vendor-tier; no other name has a dash
    return {path.stem: result_files.read(path) for path in files}


def publish() -> None:
    """Puts the latest run into the file of its kind of CPU; the plot is that of the run with
    rivals. Both or none."""
    latest, plot = RESULTS / "latest.json", RESULTS / "roofline.png"
    if missing := [path.name for path in (latest, plot) if not path.is_file()]:
        raise SystemExit(f"{' and '.join(missing)} missing in {RESULTS}: run bench/run.py first.")
    new = result_files.read(latest)
    (run,) = new.values()
    target = RESULTS / f"{run['machine']['kind']}.json"
    old = result_files.read(target) if target.is_file() else {}
    both = old | new
    result_files.write(target, {name: both[name] for name in (RIVALS, ALONE) if name in both})
    if RIVALS in new:
        shutil.copyfile(plot, target.with_suffix(".png"))


def main(arguments: list[str] | None = None) -> None:
    raw = argparse.RawTextHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    option = parser.add_mutually_exclusive_group()
    option.add_argument("--check", action="store_true")
    option.add_argument("--publish", action="store_true")
    options = parser.parse_args(arguments)
    if options.publish:
        publish()
    kinds = published()
    texts = {README: replaced(README.read_text(), block(kinds)), PAGE: page(kinds)}
    for path, new in texts.items():
        old = path.read_text() if path.is_file() else ""
        if options.check and new != old:
            raise SystemExit(f"{path.name} differs from bench/results: run bench/table.py.")
        if new != old:
            path.write_text(new)


if __name__ == "__main__":
    main()
