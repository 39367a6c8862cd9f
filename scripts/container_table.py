"""docs/containers.md, written from what the containers say of themselves.

    python scripts/container_table.py [--check]

--check writes nothing and fails when the page is not what they say.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from types import ModuleType

from kt_core.loading import container, prequantized

PAGE = Path(__file__).resolve().parent.parent / "docs" / "containers.md"

HEAD = """# Quantized checkpoints

Which quantized checkpoints are read, from safetensors, one weight at a time. Written by
`scripts/container_table.py` from `kt_core/loading/container/`; `test_containers.py` runs it and
loads one small checkpoint of every kind.

The package that wrote a checkpoint is not needed. Experts are re-encoded in `kt_config.format` as
they are packed, and a line says with what error. The layers beside them are dequantized to bf16.
Activations are never quantized: scales for them are left out.

| container (`quant_method`) | stored | read as | why |
| --- | --- | --- | --- |
"""
TAIL = """
Refused by name: every other `quant_method`, such as {methods};
and weights whose config.json does not say how they are quantized.
"""


def page() -> str:
    """The whole page."""
    rows = [row for module in container.modules() for row in _rows(module)]
    names = ", ".join(sorted(prequantized._METHODS.values(), key=str.lower))
    return HEAD + "".join(f"{row}\n" for row in rows) + TAIL.format(methods=names)


def _rows(module: ModuleType) -> list[str]:
    methods = ", ".join(f"`{method}`" for method in module.METHODS)
    return [f"| {methods} | {v.what} | {_read(v)} | {v.why} |" for v in module.VARIANTS]


def _read(variant: container.Variant) -> str:
    if variant.refused:
        return "refused"
    return f"codes of {variant.codes}" if variant.codes else "values"


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--check", action="store_true")
    if not parser.parse_args(arguments).check:
        PAGE.write_text(page())
    elif not PAGE.is_file() or PAGE.read_text() != page():
        raise SystemExit(
            "docs/containers.md is not what the containers say: run it without --check."
        )


if __name__ == "__main__":
    main()
