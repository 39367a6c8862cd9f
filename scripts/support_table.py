"""The tables of tiers and of weight formats in docs/kernels.md, written from the registry of
compiled kernels and from what packing does to a normal distribution.

    python scripts/support_table.py [--check]

Rewrites the blocks between the markers in docs/kernels.md; --check writes nothing and fails when
they differ.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch

from kt_core import formats, kernels
from kt_core.experts import Experts

PAGE = Path(__file__).resolve().parent.parent / "docs" / "kernels.md"
NAMES = ("tiers", "formats")  # of the blocks
# What the registry cannot know; a tier without an entry has an empty cell.
FIRST_CPUS = {
    "scalar": "any x86-64",
    "avx2": "Haswell, Zen",
    "avx_vnni": "Alder Lake",
    "avx512": "Skylake-X",
    "avx512_vnni": "Cascade Lake, Ice Lake",
    "avx512_bf16": "Sapphire Rapids, Zen 4",
    "amx": "Sapphire Rapids",
}
NOT_TUNED = {"amx"}  # right on silicon, and slow


def tiers() -> str:
    """A row per tier, the preferred one last."""
    rows: dict[str, set[str]] = {}
    needs: dict[str, str] = {}
    slow: dict[str, str] = {}
    for k in kernels():
        isa = str(k["isa"])
        rows.setdefault(isa, set()).add(str(k["format"]))
        slow[isa] = str(k["slow_on"]).removeprefix("Genuine").removeprefix("Authentic")
        needs[isa] = ", ".join(f"`{f}`" for f in str(k["needs"]).split()) or "-"
    lines = [("tier", "first CPUs", "CPU features", "formats"), ("---",) * 4]
    for isa, found in rows.items():
        notes = ["not tuned"] if isa in NOT_TUNED else []
        notes += [f"not preferred on {slow[isa]}"] if slow[isa] else []
        name = f"`{isa}`" + (f" ({', '.join(notes)})" if notes else "")
        does = "all" if found == set(formats.names()) else ", ".join(sorted(found))
        lines.append((name, FIRST_CPUS.get(isa, ""), needs[isa], does))
    return _table(lines)


def format_table() -> str:
    """A row per format, most bits first."""
    head = ("format", "groups", "beside codes", "bits", "error", "domains")
    lines: list[tuple[str, ...]] = [head, ("---", "---", "---", "---:", "---:", "---")]
    for f in formats.all_formats().values():
        scale = {0: "-", 16: "bf16 scales", 32: "fp32 scales"}[f.scale_bits]
        beside = [scale, *["zero points"] * f.zeros, *["fp32 factors of channels"] * f.factor]
        groups = [f"**{g}**" if g == f.default_group else str(g) for g in f.groups]
        bits = float(f.bits)
        if f.default_group:
            bits += (f.scale_bits + 8 * f.zeros) / f.default_group
        lines.append(
            (
                f"`{f.name}`",
                ", ".join(groups) if f.scaled else "-",
                ", ".join(beside),
                f"{bits:g}" if bits < 16 else "16",
                f"{100 * _error(f):.2g} %",
                ", ".join(f.domains),
            )
        )
    return _table(lines)


def _error(format: formats.WeightFormat) -> float:
    """Of weights drawn from N(0, 1), at the default group: distance over length."""
    weight = torch.randn(256, 1024, generator=torch.Generator().manual_seed(0))
    layer = Experts(1, 1024, 256, format=format.name)
    layer.put(0, "gate", weight)
    return float((layer.get(0, "gate") - weight).norm() / weight.norm())


def _table(lines: list[tuple[str, ...]]) -> str:
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def replaced(text: str) -> str:
    """`text` with the tables between their markers."""
    for name, content in zip(NAMES, (tiers(), format_table()), strict=True):
        begin, end = f"<!-- {name}:begin -->", f"<!-- {name}:end -->"
        if text.count(begin) != 1 or text.count(end) != 1 or text.index(end) < text.index(begin):
            raise SystemExit(f"docs/kernels.md needs {begin} and then {end}, each once.")
        text = f"{text.split(begin)[0]}{begin}\n{content}\n{end}{text.split(end)[1]}"
    return text


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--check", action="store_true")
    check = parser.parse_args(arguments).check
    old = PAGE.read_text()
    new = replaced(old)
    if check and new != old:
        raise SystemExit("docs/kernels.md differs from the kernels: run scripts/support_table.py.")
    if new != old:
        PAGE.write_text(new)


if __name__ == "__main__":
    main()
