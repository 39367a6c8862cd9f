"""Writes docs/families.md: the round trip of every mixture-of-experts family of the installed
transformers (tests/round_trip.py), in about two minutes.

    .venv/bin/python scripts/round_trip_table.py
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests"))

import families  # noqa: E402
import pytest  # noqa: E402
import round_trip  # noqa: E402
import slow_experts  # noqa: E402


def main() -> None:
    """Runs every family and writes the page."""
    rows = []
    with pytest.MonkeyPatch.context() as patch:
        slow_experts.patch(patch)
        for family in families.families():
            with tempfile.TemporaryDirectory() as directory:
                rows.append(_row(family, Path(directory)))
            print(rows[-1])
    (ROOT / "docs" / "families.md").write_text(round_trip.page(rows))


def _row(family: families.Family, root: Path) -> str:
    if reason := round_trip.refusal(family):
        return round_trip.refused_row(family, reason)
    trained = round_trip.train(family, root / "base")
    for layout in round_trip.LAYOUTS:
        saved = root / layout
        trained.save(layout, saved)
        served = round_trip.ours(trained, saved)
        merged = round_trip.merged(trained, saved, root / f"merged {layout}")
        if not max(served, merged) < round_trip.SAME:
            raise SystemExit(f"{family.class_name}, {layout}: served {served}, merged {merged}")
    return round_trip.supported_row(trained)


if __name__ == "__main__":
    main()
