"""The launch commands of the README on machines without GPU, as users type them. Slow: every
process imports everything.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import lf_cases
import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
PATIENCE = 600


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return lf_cases.workspace(tmp_path_factory.mktemp("launch"))


def launch(root, config, args, *options, prefix=(), log, **environment):
    """`accelerate launch` with one of our configurations, in a session of its own."""
    recipe = root / f"{Path(args['output_dir']).name}.yaml"
    recipe.write_text(yaml.safe_dump(args))
    program = [Path(sys.executable).with_name("accelerate"), "launch"]
    program += ["--config_file", ROOT / "accelerate_configs" / f"{config}.yaml"]
    program += ["--mixed_precision", "no", *options, ROOT / "src" / "train.py", recipe]
    with open(log, "w") as out:
        return subprocess.Popen(
            [*prefix, *map(str, program)],
            env=os.environ | {"OMP_NUM_THREADS": "1"} | environment,
            stdout=out,
            stderr=out,
            start_new_session=True,
        )


def own_processes():
    """A prefix that gives a command process ids of its own, where this user may have that: to
    `dist.host_identity` it is another host."""
    prefix = ["unshare", "--pid", "--fork", "--mount-proc", "--kill-child=SIGTERM"]
    allowed = subprocess.run([*prefix, "true"], capture_output=True).returncode == 0
    return prefix if allowed else []


def free_port():
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


@pytest.mark.slow
def test_two_machines_train_and_stop_by_a_signal(root):
    """Two launchers of two ranks each, which see different process ids, as two machines do: one
    copy of the experts on each. SIGTERM to the launchers saves a checkpoint and ends all."""
    args = lf_cases.arguments(
        root, "machines", max_steps=5000, num_train_epochs=None, save_strategy="no"
    )
    prefix, port = own_processes(), free_port()
    options = ["--num_machines", "2", "--num_processes", "4", "--main_process_ip", "127.0.0.1"]
    options += ["--main_process_port", str(port)]
    logs = [root / f"machine{rank}.log" for rank in range(2)]
    machines = [
        launch(
            root, "ddp_cpu", args, *options, "--machine_rank", str(r), prefix=prefix, log=logs[r]
        )
        for r in range(2)
    ]
    try:
        steps = Path(args["output_dir"]) / "trainer_log.jsonl"
        deadline = time.monotonic() + PATIENCE
        while not (steps.exists() and len(steps.read_text().splitlines()) >= 2):
            assert time.monotonic() < deadline, [log.read_text()[-2000:] for log in logs]
            assert all(m.poll() is None for m in machines), [
                log.read_text()[-4000:] for log in logs
            ]
            time.sleep(0.5)
        for machine in machines:
            os.killpg(machine.pid, signal.SIGTERM)
        for machine in machines:
            assert machine.wait(PATIENCE) != 0
    finally:
        for machine in machines:
            if machine.poll() is None:
                os.killpg(machine.pid, signal.SIGKILL)
    said = [log.read_text() for log in logs]
    if prefix:
        assert all("one copy for 2 processes" in text for text in said), said
    else:
        assert sum("one copy for 4 processes" in text for text in said) >= 1, said
    (checkpoint,) = Path(args["output_dir"]).glob("checkpoint-*")
    assert f"kt: ended by SIGTERM: saved {checkpoint}" in said[0] + said[1]
    state = json.loads((checkpoint / "trainer_state.json").read_text())
    assert state["global_step"] >= 2 and len(list(checkpoint.glob("rng_state_*.pth"))) == 4


@pytest.mark.slow
def test_deepspeed_zero2_by_its_launcher(root):
    args = lf_cases.arguments(root, "zero2", use_cpu=None, ddp_backend="gloo", max_steps=2)
    log = root / "zero2.log"
    run = launch(
        root, "deepspeed_zero2", args, "--num_processes", "2", log=log, DS_ACCELERATOR="cpu"
    )
    assert run.wait(PATIENCE) == 0, log.read_text()[-4000:]
    assert len(lf_cases.losses(args["output_dir"])) == 2
    assert "one copy for 2 processes" in log.read_text()


@pytest.mark.slow
def test_fsdp2_on_cpus_by_its_launcher(root):
    steps = {"max_steps": 2, "save_steps": 2, "save_strategy": "steps"}
    args = lf_cases.arguments(root, "fsdp2_cpu", **steps)
    log = root / "fsdp2_cpu.log"
    run = launch(root, "fsdp2_cpu", args, "--num_processes", "2", log=log)
    assert run.wait(PATIENCE) == 0, log.read_text()[-4000:]
    assert len(lf_cases.losses(args["output_dir"])) == 2
    assert "one copy for 2 processes" in log.read_text()
    checkpoint = Path(args["output_dir"]) / "checkpoint-2"
    assert (checkpoint / "pytorch_model_fsdp.bin").exists()  # the form in which FSDP saves
    assert (checkpoint / "adapter_model.safetensors").exists()
