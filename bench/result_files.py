"""The files of bench/results that hold rows of bench/run.py: one per kind of CPU.

A file holds the newest published run with rivals and the newest one of ours alone:

    {"runs": {"rivals": {"machine": {...}, "keys": [...], "rows": [[...], ...]}, "alone": ...}}

Rows have their values in the order of "keys", each row on a line of its own. Times are the best and
the median of `samples` measurements; the measurements themselves are not kept.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

Row = dict[str, Any]
Run = dict[str, Any]  # "machine": see machine.describe; "rows": list[Row]

RIVALS, ALONE = "rivals", "alone"


def name_of(run: Run) -> str:
    """What this run is called in a file."""
    return ALONE if all(row["impl"] == "ours" for row in run["rows"]) else RIVALS


def read(path: Path) -> dict[str, Run]:
    """The runs of a file by name, the one with rivals first."""
    runs = json.loads(path.read_text())["runs"]
    return {
        name: {
            "machine": runs[name]["machine"],
            "rows": [dict(zip(runs[name]["keys"], row, strict=True)) for row in runs[name]["rows"]],
        }
        for name in (RIVALS, ALONE)
        if name in runs
    }


def write(path: Path, runs: dict[str, Run]) -> None:
    """Writes what `read` returns. All rows of a run have the same keys in the same order."""
    texts = []
    for name, run in runs.items():
        keys = list(run["rows"][0])
        if any(list(row) != keys for row in run["rows"]):
            raise ValueError(f"{path}: rows of {name} with different keys")
        rows = ",\n".join(json.dumps(list(row.values())) for row in run["rows"])
        head = f'"machine": {json.dumps(run["machine"], indent=1)},\n"keys": {json.dumps(keys)},'
        texts.append(f'"{name}": {{\n{head}\n"rows": [\n{rows}\n]}}')
    path.write_text('{"runs": {\n' + ",\n".join(texts) + "\n}}\n")
