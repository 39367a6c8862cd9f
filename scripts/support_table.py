"""The table of tiers in docs/kernels.md, written from the registry of compiled kernels.

    python scripts/support_table.py [--check]

Rewrites the block between the markers in docs/kernels.md; --check writes nothing and fails when the
two differ.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from kt_core import kernels

PAGE = Path(__file__).resolve().parent.parent / "docs" / "kernels.md"
BEGIN, END = "<!-- tiers:begin -->", "<!-- tiers:end -->"
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


def block() -> str:
    """What belongs between the markers: a row per tier, the preferred one last."""
    rows: dict[str, dict[str, str]] = {}
    needs: dict[str, str] = {}
    slow: dict[str, str] = {}
    for k in kernels():
        isa = str(k["isa"])
        does = "forward, backward" + (", int8 domain" if k["int8_domain"] else "")
        rows.setdefault(isa, {})[str(k["format"])] = does
        slow[isa] = str(k["slow_on"]).removeprefix("Genuine").removeprefix("Authentic")
        needs[isa] = ", ".join(f"`{f}`" for f in str(k["needs"]).split()) or "-"
    formats = list(next(iter(rows.values())))
    lines = [("tier", "first CPUs", "CPU features", *formats), ("---",) * (3 + len(formats))]
    for isa, does in rows.items():
        notes = ["not tuned"] if isa in NOT_TUNED else []
        notes += [f"not preferred on {slow[isa]}"] if slow[isa] else []
        name = f"`{isa}`" + (f" ({', '.join(notes)})" if notes else "")
        lines.append((name, FIRST_CPUS.get(isa, ""), needs[isa], *(does[f] for f in formats)))
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def replaced(text: str, content: str) -> str:
    """`text` with `content` between the markers."""
    if text.count(BEGIN) != 1 or text.count(END) != 1 or text.index(END) < text.index(BEGIN):
        raise SystemExit(f"docs/kernels.md needs {BEGIN} and then {END}, each once.")
    return f"{text.split(BEGIN)[0]}{BEGIN}\n{content}\n{END}{text.split(END)[1]}"


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--check", action="store_true")
    check = parser.parse_args(arguments).check
    old = PAGE.read_text()
    new = replaced(old, block())
    if check and new != old:
        raise SystemExit("docs/kernels.md differs from the kernels: run scripts/support_table.py.")
    if new != old:
        PAGE.write_text(new)


if __name__ == "__main__":
    main()
