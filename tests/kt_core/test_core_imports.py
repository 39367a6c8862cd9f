"""kt_core is the inference side: it never imports kt_sft or peft, not even through a function."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path

import kt_core

FORBIDDEN = {"kt_sft", "peft", "llamafactory", "accelerate", "trl"}
ROOT = Path(kt_core.__file__).parent


def test_no_file_of_kt_core_imports_the_training_side():
    files = sorted(ROOT.rglob("*.py"))
    assert len(files) > 8
    for file in files:
        for node in ast.walk(ast.parse(file.read_text())):
            names = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                names = [node.module or ""]
            bad = [name for name in names if name.split(".")[0] in FORBIDDEN]
            assert not bad, f"{file}:{node.lineno} imports {bad}"


def test_loading_a_model_imports_neither_kt_sft_nor_peft(tmp_path):
    script = """
import sys
import models
from kt_core import hf
from kt_core import module, runtime
from kt_core.loading import checkpoint, dialect, memory, packed_file, packing
hf.load_model(models.build("mixtral", sys.argv[1]))
loaded = {name.split(".")[0] for name in sys.modules}
assert "transformers" in loaded
print(sorted(loaded & {"kt_sft", "peft", "llamafactory"}))
"""
    result = subprocess.run(
        [sys.executable, "-c", script, tmp_path],
        capture_output=True,
        text=True,
        cwd=Path(__file__).resolve().parents[1],
        # kt_sft is also torch's autoload entry point; that one door is closed here.
        env={**os.environ, "TORCH_DEVICE_BACKEND_AUTOLOAD": "0", "OMP_NUM_THREADS": "1"},
    )
    assert result.returncode == 0, result.stderr[-2000:]
    assert result.stdout.splitlines()[-1] == "[]"
