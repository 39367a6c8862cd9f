"""Interrupting and continuing runs: signals, full disks, kill -9, and what a checkpoint holds."""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
from pathlib import Path

import lf_cases
import pytest
import safetensors.torch
import torch
from transformers import TrainerCallback

from kt_core.adapters.peft_format import WEIGHTS_FILE
from kt_sft.op import position
from kt_sft.run import interruption

STEPS = {"save_steps": 1, "save_strategy": "steps", "lora_dropout": 0.1}


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return lf_cases.workspace(tmp_path_factory.mktemp("resume"))


@pytest.fixture(scope="module")
def whole(root):
    """Arguments of an uninterrupted run of four steps with dropout, done."""
    args = lf_cases.arguments(root, "whole", save_strategy="no", lora_dropout=0.1)
    lf_cases.run(args)
    return args


def checkpoints(args):
    return sorted(p.name for p in Path(args["output_dir"]).glob("checkpoint-*"))


def same_as_whole(args, whole, since):
    """Whether the losses of the later steps and the adapter are those of the whole run, exactly."""
    assert (
        lf_cases.losses(args["output_dir"])[since:] == lf_cases.losses(whole["output_dir"])[since:]
    )
    a, b = (
        safetensors.torch.load_file(Path(r["output_dir"]) / WEIGHTS_FILE) for r in (args, whole)
    )
    assert a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)


class Act(TrainerCallback):
    """Calls `what` at an event when `step` steps are done, once."""

    def __init__(self, event, step, what):
        self.step, self.what = step, what
        setattr(self, event, self._act)

    def _act(self, args, state, control, **kw):
        if state.global_step == self.step:
            self.step = -1
            self.what()


def go_on(args, **changes):
    """Runs again in the same output_dir, from its last checkpoint."""
    last = Path(args["output_dir"]) / checkpoints(args)[-1]
    rest = args | {"resume_from_checkpoint": str(last)} | changes
    lf_cases.run(rest)
    return rest


@pytest.mark.parametrize(
    ("event", "number"),
    [
        ("on_step_begin", signal.SIGTERM),
        ("on_substep_end", signal.SIGINT),
        ("on_pre_optimizer_step", signal.SIGTERM),
    ],
)
def test_a_signal_saves_and_the_run_goes_on_to_the_same_bits(event, number, root, whole):
    """Wherever in step 3 it comes: what was done after step 2 is done again, dropout included."""
    args = lf_cases.arguments(root, f"{event}-{number}", save_strategy="no", lora_dropout=0.1)
    before = [signal.getsignal(s) for s in (signal.SIGTERM, signal.SIGINT)]
    with pytest.raises(SystemExit) as ended:
        lf_cases.run(args, Act(event, 2, lambda: os.kill(os.getpid(), number)))
    assert ended.value.code == 128 + number
    assert [signal.getsignal(s) for s in (signal.SIGTERM, signal.SIGINT)] == before
    done = {"on_step_begin": 2, "on_substep_end": 2, "on_pre_optimizer_step": 3}[event]
    assert checkpoints(args) == [f"checkpoint-{done}"]
    assert not (Path(args["output_dir"]) / WEIGHTS_FILE).exists()  # nothing that looks finished
    same_as_whole(go_on(args), whole, done)


def test_a_process_alone_stops_between_two_layers(root, monkeypatch):
    """Not only at the end of a micro-batch, which may take minutes."""
    args = lf_cases.arguments(root, "layer", save_strategy="no")
    passes = []

    def enter(layer, direction, original=position.enter):
        original(layer, direction)
        passes.append(f"{direction} {layer}")
        if (
            len(passes) == 4 * 2 * 2 + 1
        ):  # the first of step 3: 2 layers forward and backward, twice
            os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(position, "enter", enter)
    with pytest.raises(SystemExit):
        lf_cases.run(args)
    assert len(passes) == 17 and checkpoints(args) == ["checkpoint-2"]


def test_before_the_first_step_there_is_nothing_to_save(root, capsys):
    args = lf_cases.arguments(root, "early", save_strategy="no")
    with pytest.raises(SystemExit) as ended:
        lf_cases.run(args, Act("on_step_begin", 0, lambda: os.kill(os.getpid(), signal.SIGTERM)))
    assert ended.value.code == 143 and checkpoints(args) == []
    assert "no step was finished, so there is nothing to save" in capsys.readouterr().out


def test_a_checkpoint_of_an_earlier_run_is_not_taken_for_this_ones(root, whole):
    """An overwritten output_dir holds a checkpoint of the same name: it is replaced. A run that was
    resumed and did no step leaves what it started from as it is."""
    args = lf_cases.arguments(root, "stale", save_strategy="no", lora_dropout=0.1)
    lf_cases.run(args | {"max_steps": 2, "save_strategy": "steps", "save_steps": 2, "seed": 6})
    with pytest.raises(SystemExit):
        lf_cases.run(args, Act("on_step_begin", 2, lambda: os.kill(os.getpid(), signal.SIGTERM)))
    checkpoint = Path(args["output_dir"]) / "checkpoint-2"
    before = {p.name: p.read_bytes() for p in checkpoint.iterdir()}
    with pytest.raises(SystemExit):
        lf_cases.run(
            args | {"resume_from_checkpoint": str(checkpoint)},
            Act("on_step_begin", 2, lambda: os.kill(os.getpid(), signal.SIGTERM)),
        )
    assert {p.name: p.read_bytes() for p in checkpoint.iterdir()} == before
    same_as_whole(go_on(args), whole, 2)


def test_a_second_signal_ends_at_once(monkeypatch):
    stop, sent = interruption.SafeStop(), []
    stop._process = os.getpid()
    times = iter([10.0, 10.5, 10.5, 20.0])
    monkeypatch.setattr(interruption.time, "monotonic", lambda: next(times))
    monkeypatch.setattr(interruption.os, "kill", lambda pid, number: sent.append((pid, number)))
    monkeypatch.setattr(interruption.signal, "signal", lambda number, what: sent.append(what))
    stop._receive(signal.SIGINT, None)
    stop._receive(signal.SIGINT, None)  # the same Ctrl-C, passed on by a launcher
    assert sent == []
    monkeypatch.setattr(interruption.time, "monotonic", lambda: 20.0)
    stop._receive(signal.SIGTERM, None)
    assert sent == [signal.SIG_DFL, (os.getpid(), signal.SIGTERM)]
    position.stop_here(False)


def test_f17_train_4_is_train_2_kill_9_and_resume_2(root, whole):
    """The process is killed in step 3 and half-written files lie about: the rest is bit-identical,
    and what a checkpoint holds is bounded by what was trained."""
    args = lf_cases.arguments(root, "killed", **STEPS)
    script = (
        "import os, signal, sys, json, lf_cases\n"
        "from transformers import TrainerCallback\n"
        "from llamafactory.train.tuner import run_exp\n"
        "class Kill(TrainerCallback):\n"
        "    def on_substep_end(self, args, state, control, **kw):\n"
        "        if state.global_step == 2: os.kill(os.getpid(), signal.SIGKILL)\n"
        "run_exp(json.loads(sys.argv[1]), [Kill()])\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, json.dumps(args)],
        cwd=Path(__file__).resolve().parents[2],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == -signal.SIGKILL, done.stderr[-3000:]
    assert checkpoints(args) == ["checkpoint-1", "checkpoint-2"]
    folder = Path(args["output_dir"])
    half = folder / interruption.STAGING / "checkpoint-3"
    half.mkdir(parents=True)
    (half / "optimizer.pt").write_bytes(b"half of it")
    same_as_whole(go_on(args), whole, 2)
    assert not half.parent.exists() and checkpoints(args)[-1] == "checkpoint-4"
    sizes = {p.name: p.stat().st_size for p in (folder / "checkpoint-2").iterdir()}
    assert sizes["optimizer.pt"] < 2.5 * sizes[WEIGHTS_FILE] < 2.5 * 4 * 23552 * 1.5
    rest = sum(sizes.values()) - sizes["optimizer.pt"] - sizes[WEIGHTS_FILE]
    assert rest < 200_000 and not any(name.startswith("model") for name in sizes)


@pytest.mark.parametrize("what", ["optimizer", "adapter"])
def test_a_full_disk_loses_only_the_step_in_flight(what, root, whole):
    """Writing fails within the third checkpoint: the second is whole, nothing half is left."""
    args = lf_cases.arguments(root, f"full-{what}", **STEPS)
    # Of the files of a checkpoint only optimizer.pt is larger than 150 kB; the adapter has 94 kB.
    limit = {"optimizer": 150_000, "adapter": 50_000}[what]
    unlimited = resource.getrlimit(resource.RLIMIT_FSIZE)

    def fill():
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, unlimited[1]))

    try:
        with pytest.raises(OSError, match="checkpoint-3 could not be written") as told:
            lf_cases.run(args, Act("on_step_begin", 2, fill))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, unlimited)
        position.stop_here(False)
    folder = Path(args["output_dir"])
    assert f"resume_from_checkpoint: {folder / 'checkpoint-2'}" in str(told.value)
    assert checkpoints(args) == ["checkpoint-1", "checkpoint-2"]
    assert not (folder / interruption.STAGING).exists()
    same_as_whole(go_on(args), whole, 2)


def test_old_checkpoints_go_when_the_new_one_is_there_and_the_best_stays(root):
    args = lf_cases.arguments(
        root,
        "rotate",
        **STEPS | {"save_total_limit": 2},
        eval_dataset="sft",
        eval_strategy="steps",
        eval_steps=1,
        load_best_model_at_end=True,
        metric_for_best_model="eval_loss",
        greater_is_better=True,  # so that the first is the best
    )
    lf_cases.run(args)
    folder = Path(args["output_dir"])
    assert checkpoints(args) == ["checkpoint-1", "checkpoint-4"]
    for name in ("checkpoint-1", "checkpoint-4"):
        state = json.loads((folder / name / "trainer_state.json").read_text())
        assert state["best_model_checkpoint"] == str(folder / "checkpoint-1")


def test_a_checkpoint_of_another_number_of_processes_is_refused(root, tmp_path):
    folder = tmp_path / "checkpoint-2"
    folder.mkdir()
    with pytest.raises(ValueError, match="holds no optimizer and random state.*adapter_name_or"):
        interruption.check_resumable(folder, 1)
    for rank in range(2):
        (folder / f"rng_state_{rank}.pth").touch()
    interruption.check_resumable(folder, 2)
    with pytest.raises(ValueError, match="saved by 2 processes, but this run has 3.*run 2 proc"):
        interruption.check_resumable(folder, 3)
    args = lf_cases.arguments(root, "other", resume_from_checkpoint=str(folder))
    with pytest.raises(ValueError, match="saved by 2 processes, but this run has 1"):
        lf_cases.run(args)
    with pytest.raises(ValueError, match="is no directory; give a checkpoint-N folder"):
        lf_cases.run(args | {"resume_from_checkpoint": str(tmp_path / "nowhere")})
