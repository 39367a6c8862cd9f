"""Data of every stage for lf_cases.workspace: texts, preferences, single judgements."""

from __future__ import annotations

import json
from pathlib import Path

import lf_cases


def workspace(root: Path, family: str = "qwen3_moe") -> Path:
    """lf_cases.workspace with the datasets pt and kto beside sft and dpo."""
    lf_cases.workspace(root, family)
    texts = [{"text": f"Number {i} comes after number {i - 1}. " * 3} for i in range(32)]
    judged = [
        {"instruction": f"Say number {i}.", "output": f"It is {i}.", "label": i % 2 == 0}
        for i in range(32)
    ]
    columns = {"prompt": "instruction", "response": "output", "kto_tag": "label"}
    info = json.loads((root / "dataset_info.json").read_text()) | {
        "pt": {"file_name": "pt.json", "columns": {"prompt": "text"}},
        "kto": {"file_name": "kto.json", "columns": columns},
    }
    for name, content in (("pt.json", texts), ("kto.json", judged), ("dataset_info.json", info)):
        (root / name).write_text(json.dumps(content))
    return root
