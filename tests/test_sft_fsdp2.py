"""accelerate's FSDP2 on two CPU ranks (gloo): DTensors, gradients, clipping, saving; see
fsdp_worker.py.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
import sft_cases as cases
import torch
from peft import PeftModel


@pytest.mark.parametrize("engine", cases.ENGINES)
def test_two_ranks_against_one_process(engine, tmp_path, monkeypatch):
    cases.use(engine, monkeypatch)
    path = cases.checkpoint(tmp_path)
    cases.adapted(cases.load(path)).save_pretrained(tmp_path / "adapter")
    program = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    program += ["--master-port", "0", "--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0"]
    worker = str(cases.TESTS / "fsdp_worker.py")
    args = [engine, str(path), str(tmp_path / "adapter"), str(tmp_path)]
    environment = os.environ | {
        "OMP_NUM_THREADS": "1",
        "KT_THREADS": "1",
        "PYTHONPATH": str(cases.TESTS),
    }
    done = subprocess.run(
        [*program, worker, *args], env=environment, capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stderr[-4000:]
    found = json.loads((tmp_path / "found.json").read_text())
    # the mean over two ranks and the mean of two losses round differently; both are fp32 sums
    assert found.pop("gradient error") <= (1e-5 if engine == "reference" else 1e-3)
    assert found == {
        "fsdp2": True,
        "dtensors": True,
        "trained": True,
        "counts": True,
        "optimizer": True,
        "base experts in tree": 0,
        "expert modules": 2,
        "disabled": 0.0,
        "same batch": 0.0,
    }
    full, tuned = torch.load(tmp_path / "full.pt")
    for saved in ("gathered", "by_all"):
        again = PeftModel.from_pretrained(cases.load(path), tmp_path / saved)
        got = dict(again.named_parameters())
        assert full and all(torch.equal(got[n], t) for n, t in full.items())
        assert torch.equal(cases.logits(again, cases.token_ids(2, 24)), tuned)
