"""docs/options.md, written from the list that the tests hold against stock.

    python scripts/option_table.py [--check]

--check writes nothing and fails when the page is not what the list says.
"""

from __future__ import annotations

import argparse
import sys
from importlib.metadata import version
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "options.md"
sys.path.insert(0, str(ROOT / "tests"))

import options  # noqa: E402 - from tests/

HEAD = """# Options

What a `use_kt: true` run makes of every option of LLaMA-Factory {llamafactory}, of transformers'
Trainer and of `peft.LoraConfig` ({peft}). Written by `scripts/option_table.py` from
`tests/options.py`; `test_options.py` runs it. An option that is in none of these tables fails
a test until somebody has looked at it.

- *supported*: as in stock. Where stages are given, runs of that stage with the option have the
  losses of stock LLaMA-Factory on the same model, to {same:g} relative after three steps; "acts"
  means that the test also saw the option change them. Where a test is given, it shows the option.
  Where neither is, the option never meets the model.
- *refused*: ends the run with one sentence before a model is loaded.
- *no effect*: in stock as with `use_kt`, for the reason given.
"""


def page() -> str:
    """The whole page."""
    versions = {name: f"{name} {version(name)}" for name in ("peft",)}
    parts = [HEAD.format(llamafactory=version("llamafactory"), same=2e-5, **versions)]
    for of in dict.fromkeys(option.of for option in options.OPTIONS):
        rows = [row(option) for option in options.OPTIONS if option.of == of]
        head = ["| option | verdict | shown by | remarks |", "| --- | --- | --- | --- |"]
        parts.append("\n".join([f"## {of}", "", *head, *rows]) + "\n")
    return "\n".join(parts)


def row(option: options.Option) -> str:
    """A line of a table."""
    shown = []
    for stage in options.STAGES:
        cases = [case for case in option.cases if case.stage == stage and not case.fails]
        if cases:
            shown.append(f"{stage} (acts)" if any(case.acts for case in cases) else stage)
    if option.test:
        shown.append(f"`{option.test}`")
    if option.message or any(case.fails for case in option.cases):
        shown.append("its sentence" if option.message else "its error")
    cells = (f"`{option.name}`", option.verdict, ", ".join(shown), option.note)
    return f"| {' | '.join(cells)} |"


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--check", action="store_true")
    if not parser.parse_args(arguments).check:
        PAGE.write_text(page())
    elif not PAGE.is_file() or PAGE.read_text() != page():
        raise SystemExit("docs/options.md differs from tests/options.py: run it without --check.")


if __name__ == "__main__":
    main()
