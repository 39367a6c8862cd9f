"""Runs a script or module with the LLaMA-Factory hooks installed, where torch's autoload of
extensions is off.

python -m kt_sft.launch llamafactory.cli train examples/kt_lora.yaml
torchrun --nproc-per-node 2 -m kt_sft.launch src/train.py examples/kt_lora.yaml
"""

from __future__ import annotations

import runpy
import sys

from kt_sft import bootstrap


def main() -> None:
    """`kt_sft.launch <script.py|module> [arguments]`; the target sees itself as __main__."""
    if len(sys.argv) < 2 or sys.argv[1].startswith("-"):
        raise SystemExit("usage: python -m kt_sft.launch <script.py|module> [arguments ...]")
    target = sys.argv[1]
    sys.argv = sys.argv[1:]
    bootstrap.autoload()
    if target.endswith(".py"):
        runpy.run_path(target, run_name="__main__")
    else:
        runpy.run_module(target, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
