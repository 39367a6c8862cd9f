"""accelerate's FSDP2 on two CPU ranks (gloo): DTensors, gradients, clipping, saving; see
fsdp_worker.py.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import lf_cases
import pytest
import sft_cases as cases
import torch
import yaml
from peft import PeftModel

from kt_core.adapter_format import read_adapter
from kt_sft.step_log import HEAT_MAP
from kt_sft.trainer_log import KEYS


def _two_ranks(worker, *args, **environment):
    program = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    program += ["--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0"]
    environment |= {"OMP_NUM_THREADS": "1", "KT_THREADS": "1", "PYTHONPATH": str(cases.TESTS)}
    done = subprocess.run(
        [*program, str(cases.TESTS / worker), *map(str, args)],
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout + done.stderr


@pytest.mark.parametrize("engine", cases.ENGINES)
def test_two_ranks_against_one_process(engine, tmp_path, monkeypatch):
    cases.use(engine, monkeypatch)
    path = cases.checkpoint(tmp_path)
    cases.adapted(cases.load(path)).save_pretrained(tmp_path / "adapter")
    _two_ranks("fsdp_worker.py", engine, path, tmp_path / "adapter", tmp_path)
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


# What `accelerate launch --config_file accelerate_configs/fsdp2.yaml` puts into the environment.
LAUNCHED = {
    "ACCELERATE_USE_FSDP": "true",
    "FSDP_VERSION": "2",
    "FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP",
    "FSDP_CPU_RAM_EFFICIENT_LOADING": "true",
    "FSDP_STATE_DICT_TYPE": "FULL_STATE_DICT",
    "FSDP_RESHARD_AFTER_FORWARD": "true",
    "FSDP_OFFLOAD_PARAMS": "false",
}


def _launch(args):
    path = Path(args["output_dir"]).with_suffix(".yaml")
    path.write_text(yaml.safe_dump(args))
    _two_ranks("lf_fsdp_worker.py", path, **LAUNCHED)
    return lf_cases.losses(args["output_dir"])


def test_llamafactory_under_fsdp2_trains_like_one_process(tmp_path):
    root = lf_cases.workspace(tmp_path)
    one = lf_cases.arguments(root, "one", per_device_train_batch_size=4)
    lf_cases.run(one)
    two = lf_cases.arguments(root, "two", per_device_train_batch_size=2)
    losses = lf_cases.losses(one["output_dir"])
    assert _launch(two) == pytest.approx(losses, rel=5e-3) and losses[-1] < losses[0]
    a, b = (read_adapter(r["output_dir"]) for r in (one, two))
    assert a.projections == b.projections == ["gate", "up", "down"]
    assert a.dense.keys() == b.dense.keys() and len(a.dense) == 8
    state = json.loads((Path(two["output_dir"]) / "trainer_state.json").read_text())
    assert all(set(KEYS) <= set(entry) for entry in state["log_history"] if "loss" in entry)
    assert (Path(two["output_dir"]) / HEAT_MAP).exists()


@pytest.mark.slow
def test_resume_and_dpo_under_fsdp2(tmp_path):
    root = lf_cases.workspace(tmp_path)
    changes = {"save_steps": 2, "save_strategy": "steps"}
    whole = _launch(lf_cases.arguments(root, "whole", **changes))
    checkpoint = str(root / "whole" / "checkpoint-2")
    rest = _launch(lf_cases.arguments(root, "rest", resume_from_checkpoint=checkpoint, **changes))
    assert rest[2:] == whole[2:]
    dpo = {"stage": "dpo", "dataset": "dpo", "gradient_accumulation_steps": 1}
    losses = _launch(lf_cases.arguments(root, "dpo", **dpo))
    assert abs(losses[0] - 0.693147) < 1e-6 and losses[-1] < losses[0]
