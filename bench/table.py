"""README's speed table, written from the committed result and checked against it.

    python bench/table.py [--check | --publish]

Rewrites the block between the markers in README.md from bench/results/published.json. --check
writes nothing and fails when the two differ; --publish first makes the latest run the published
one.
"""

from __future__ import annotations

import argparse
import json
import math
import shutil
import textwrap
from pathlib import Path
from typing import Any

from kt_core.formats import all_formats

# Weights per scale of every format, most bits first
DEFAULT_GROUP = {f.name: f.default_group for f in all_formats().values()}

ROOT = Path(__file__).resolve().parent.parent
README = ROOT / "README.md"
RESULTS = ROOT / "bench" / "results"
BEGIN, END = "<!-- bench:begin -->", "<!-- bench:end -->"
Row = dict[str, Any]

CASES = (  # label, workload, tokens, rank, formats; int8, the default, at every size
    ("decode, 1 token", "W1", 1, 0, DEFAULT_GROUP),
    ("decode, 8 tokens", "W1", 8, 0, ("int8",)),
    ("prefill, 64 tokens", "W2", 64, 0, ("int8",)),
    ("prefill, 1,024 tokens", "W2", 1024, 0, DEFAULT_GROUP),
    ("LoRA step r=8, 512 tokens", "W4", 512, 8, DEFAULT_GROUP),
    ("LoRA step r=8, 2,048 tokens", "W4", 2048, 8, DEFAULT_GROUP),
)
NAMES = {
    "kt_kernel": "kt-kernel",
    "kt_kernel_g32": "kt-kernel, group 32",
    "transformers_eager": "transformers eager",
    "transformers_grouped_mm": "transformers grouped_mm",
    "peft_grouped_mm": "PEFT grouped_mm",
    "torch_onednn_int8": "torch oneDNN",
}
HEAD = ("workload", "experts", "ours", "of the roof", "best rival", "its time", "speedup")
ROOFS = {
    "bf16_gflops": "bf16 {} GFLOP/s",
    "fp32_gflops": "fp32 {} GFLOP/s",
    "fp32_avx2_gflops": "fp32 with AVX2 {} GFLOP/s",
    "int8_gops": "int8 {} GOP/s",
    "dram_gbps": "DRAM {} GB/s",
}


def of(rows: list[Row], **want: Any) -> list[Row]:
    """The rows with these values."""
    return [r for r in rows if all(r[key] == value for key, value in want.items())]


def best_rival(rows: list[Row], format: str) -> Row | None:
    """The fastest whose weights have at least as many bits: who may use int8 may use bf16."""
    wide = list(DEFAULT_GROUP)[: list(DEFAULT_GROUP).index(format) + 1]
    rivals = [r for r in rows if r["impl"] != "ours" and r["format"] in wide]
    return min(rivals, key=lambda r: float(r["best_ms"]), default=None)


def digits(value: float) -> str:
    """About three digits, the whole ones always."""
    return f"{value:,.{2 if value < 10 else 1 if value < 100 else 0}f}"


def speedup(rival_ms: float, ours_ms: float) -> str:
    """Rounded down, so that no loss reads as a tie."""
    return f"{math.floor(100 * rival_ms / ours_ms + 1e-9) / 100:.2f}x"


def line(label: str, mine: Row, rival: Row | None) -> tuple[str, ...]:
    """The cells of one table row."""
    ms, format = mine["best_ms"], mine["format"]
    cells = (label, format, f"{digits(ms)} ms", f"{mine['roof_pct']:.0f} %")
    if rival is None:
        return (*cells, "-", "-", "-")
    name = NAMES.get(rival["impl"], str(rival["impl"]))
    if rival["format"] != format:
        name += f" ({rival['format']})"
    return (*cells, name, f"{digits(rival['best_ms'])} ms", speedup(rival["best_ms"], ms))


def lines(rows: list[Row]) -> list[tuple[str, ...]]:
    """The table's rows, of our best tier; a case that was not measured has none."""
    out = []
    if {r["isa"] for r in of(rows, impl="ours")} != {"avx2"}:  # else AVX2 is the best
        rows = [r for r in rows if r["isa"] != "avx2"]
    for label, workload, tokens, rank, formats in CASES:
        here = of(rows, workload=workload, tokens=tokens, rank=rank, shape="Q", routing="uniform")
        for format in formats:
            ours = of(here, impl="ours", format=format, group=DEFAULT_GROUP[format])
            # training rounds activations to bf16 in every format, and multiplies them so or as
            # 16-bit codes (Experts.training_compute)
            domains = ("int16", "bf16") if workload == "W4" else ("int8", "bf16")
            domain = next((d for d in domains if of(ours, domain=d)), None)
            out += [line(label, r, best_rival(here, format)) for r in of(ours, domain=domain)]
    if not out:
        raise SystemExit("The result has no row of ours on shape Q that the table could show.")
    return out


def conditions(machine: Row) -> str:
    """The sentence below the table: what it was measured on."""
    peaks = machine["roofs"]  # of what the CPU has
    roofs = [text.format(digits(peaks[kind])) for kind, text in ROOFS.items() if kind in peaks]
    text = (
        f"Measured on {machine['cpu']} with {machine['threads']} threads (roofs: "
        f"{', '.join(roofs)}), commit `{machine['commit']}`, csrc `{machine['csrc']}`, load "
        f"average {machine['load'][0]:.2f} before the run and {machine['load_end'][0]:.2f} after "
        "it; every row and sample is in [published.json](bench/results/published.json)."
    )
    return textwrap.fill(text, 100, break_on_hyphens=False, break_long_words=False)


def block(data: dict[str, Any], picture: bool) -> str:
    """What belongs between the markers."""
    cells = [HEAD, ("---", "---", "---:", "---:", "---", "---:", "---:"), *lines(data["rows"])]
    parts = ["\n".join(f"| {' | '.join(c)} |" for c in cells), conditions(data["machine"])]
    if picture:
        parts.append("![Measured speed against the roofs](bench/results/published.png)")
    return "\n\n".join(parts)


def replaced(text: str, content: str) -> str:
    """`text` with `content` between the markers."""
    if text.count(BEGIN) != 1 or text.count(END) != 1 or text.index(END) < text.index(BEGIN):
        raise SystemExit(f"README.md needs {BEGIN} and then {END}, each once.")
    return f"{text.split(BEGIN)[0]}{BEGIN}\n{content}\n{END}{text.split(END)[1]}"


def publish() -> None:
    """Copies result and plot of the latest run, both or none."""
    pairs = (("latest.json", "published.json"), ("roofline.png", "published.png"))
    if missing := [a for a, _ in pairs if not (RESULTS / a).is_file()]:
        raise SystemExit(f"{' and '.join(missing)} missing in {RESULTS}: run bench/run.py first.")
    for latest, published in pairs:
        shutil.copyfile(RESULTS / latest, RESULTS / published)


def main(arguments: list[str] | None = None) -> None:
    raw = argparse.RawTextHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    option = parser.add_mutually_exclusive_group()
    option.add_argument("--check", action="store_true")
    option.add_argument("--publish", action="store_true")
    options = parser.parse_args(arguments)
    if options.publish:
        publish()
    source = RESULTS / "published.json"
    if not source.is_file():
        raise SystemExit(f"{source} is missing: bench/table.py --publish makes it.")
    content = block(json.loads(source.read_text()), (RESULTS / "published.png").is_file())
    old = README.read_text()
    new = replaced(old, content)
    if options.check and new != old:
        raise SystemExit("README.md differs from published.json: run bench/table.py.")
    if new != old:
        README.write_text(new)


if __name__ == "__main__":
    main()
