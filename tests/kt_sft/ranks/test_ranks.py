"""Training on several ranks is training on one: the same losses from the same tokens, whatever the
routing, and an end for all when one ends.
"""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from pathlib import Path

import lf_cases
import models
import pytest
import sft_cases as cases
import torch
from rank_group import PATIENCE, RankGroup

from kt_core.adapters.peft_format import read_adapter

BATCH = 6  # sequences per optimizer step, divided among 1, 2 or 3 ranks
GROUPS = {2: "two_ranks", 3: "three_ranks"}
BARS = {"reference": 1e-5, "kernels": 1e-3}


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """A workspace whose model is in fp32."""
    folder = lf_cases.workspace(tmp_path_factory.mktemp("ranks"))
    models.build("qwen3_moe", folder / "model", tokenizer=True, vocab_size=300, dtype=torch.float32)
    return folder


def arguments(root, name, ranks, **changes):
    changes = {"gradient_accumulation_steps": 1, "lora_dropout": 0.0} | changes
    return lf_cases.arguments(root, name, per_device_train_batch_size=BATCH // ranks, **changes)


@pytest.fixture(scope="module")
def alone(root):
    """Losses of one process, by engine."""
    found = {}
    for engine in cases.ENGINES:
        with pytest.MonkeyPatch.context() as patch:
            cases.use(engine, patch)
            args = arguments(root, f"one-{engine}", 1)
            lf_cases.run(args)
        found[engine] = lf_cases.losses(args["output_dir"])
        assert found[engine][-1] < found[engine][0]
    return found


@pytest.mark.parametrize("engine", cases.ENGINES)
@pytest.mark.parametrize("way", ["ddp", "fsdp2"])
@pytest.mark.parametrize("ranks", GROUPS)
def test_f5_one_two_and_three_ranks_train_alike(ranks, way, engine, root, alone, request):
    """Four steps; 8 experts do not divide by three ranks, and FSDP2 reshards after forward."""
    group = request.getfixturevalue(GROUPS[ranks])
    args = arguments(root, f"{ranks}-{way}-{engine}", ranks)
    answer = group.run("train", args=args, engine=engine, fsdp=None if way == "ddp" else {})[0]
    assert len(answer["losses"]) == 4
    assert answer["losses"] == pytest.approx(alone[engine], rel=BARS[engine], abs=0)
    assert read_adapter(args["output_dir"]).projections == ["gate", "up", "down"]


@pytest.mark.parametrize("way", ["ddp", "fsdp2"])
@pytest.mark.parametrize("ranks", GROUPS)
def test_f12_unlike_routing_does_not_hang(ranks, way, tmp_path, request):
    """Ranks that use disjoint experts, and a rank without any token: two optimizer steps end within
    10 s, with the same loss and gradient norm on every rank."""
    group = request.getfixturevalue(GROUPS[ranks])
    path = cases.checkpoint(tmp_path)
    cases.adapted(cases.load(path)).save_pretrained(tmp_path / "adapter")
    for empty in (False, True):
        answers = group.run(
            "unlike_routing", path=path, adapter=tmp_path / "adapter", wrapper=way, empty=empty
        )
        numbers = [answer[1] for answer in answers]
        assert all(n == numbers[0] for n in numbers) and numbers[0][1] < numbers[0][0]
        used = [set(answer[2]) for answer in answers]
        assert not set.intersection(*used) and [bool(u) for u in used] == [not empty] + [True] * (
            ranks - 1
        )
        assert max(answer[0] for answer in answers) < 10


def test_f17_a_signal_to_one_rank_stops_all_at_the_same_step(root, two_ranks):
    """Only rank 0 gets it, between two micro-batches of step 3; what was saved goes on to the same
    bits. The other half of F17 is in kt_sft/run/test_interruption.py."""
    two = {"gradient_accumulation_steps": 2, "lora_dropout": 0.1, "save_strategy": "no"}
    before = two_ranks.run("train", args=arguments(root, "uncut", 6, **two))[0]["losses"]
    args = arguments(root, "cut", 6, **two)
    answers = two_ranks.run("train", args=args, act=(0, "on_substep_end", 2, signal.SIGTERM))
    assert [answer["code"] for answer in answers] == [143, 143]
    checkpoint = Path(args["output_dir"]) / "checkpoint-2"
    assert {"rng_state_0.pth", "rng_state_1.pth"} <= {p.name for p in checkpoint.iterdir()}
    rest = args | {"resume_from_checkpoint": str(checkpoint)}
    assert two_ranks.run("train", args=rest)[0]["losses"][2:] == before[2:]


def test_machines_with_a_common_disk_finish_a_checkpoint_once(root, two_ranks):
    args = arguments(root, "common", 2, max_steps=2, save_steps=1, save_strategy="steps")
    answers = two_ranks.run("train", args=args, common_disk=True)
    assert [answer["code"] for answer in answers] == [0, 0]
    for step in (1, 2):
        names = {p.name for p in Path(args["output_dir"], f"checkpoint-{step}").iterdir()}
        assert {"adapter_model.safetensors", "rng_state_0.pth", "rng_state_1.pth"} <= names
    assert not Path(args["output_dir"], ".kt-saving").exists()


def test_f12_a_killed_rank_ends_the_others_with_its_name_and_the_layer(root):
    """kill -9 of rank 1 in the middle of step 2: rank 0 says so and ends."""
    args = arguments(root, "killed", 6, gradient_accumulation_steps=2)
    with RankGroup(2) as group:
        group.start("train", args=args, act=(1, "on_substep_end", 1, signal.SIGKILL))
        survivor, other = group.processes
        assert other.wait(PATIENCE) == -signal.SIGKILL
        assert survivor.wait(60) == 1
        said = group.log(0)
    lost = rf"error: rank 1 \(process {other.pid} on .*\) ended while rank 0 was (in|after) the"
    assert re.search(lost + r" (forward|backward) of model\.layers\.[01]\.mlp\.experts", said), said
    assert "1 optimizer steps done; this run cannot go on without it" in said


def test_f12_a_rank_that_waits_for_ever_is_ended_too(tmp_path):
    """As under NCCL, whose collectives do not break when a rank dies."""
    script = (
        "import dataclasses, subprocess, sys, time, types\n"
        "from kt_sft.op import position\n"
        "from kt_sft.ranks import host, peer_watch\n"
        "peer_watch.GRACE_SECONDS = 0.5\n"
        "peer = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
        "me = host.this_rank()\n"
        "other = dataclasses.replace(me, number=1, pid=peer.pid)\n"
        "peer_watch._Watcher(me, [other], types.SimpleNamespace(global_step=7)).start()\n"
        "position.enter('model.layers.3.mlp.experts', 'forward')\n"
        "time.sleep(0.5); peer.kill(); time.sleep(600)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 1
    assert "ended while rank 0 was in the forward of model.layers.3.mlp.experts, 7" in done.stderr


@pytest.mark.parametrize("stage", [1, 2])
def test_deepspeed_zero_trains_like_one_process(stage, root, alone, two_ranks):
    """On a CPU it needs ddp_backend, and no use_cpu, with which accelerate would leave it out."""
    args = arguments(root, f"zero{stage}", 2, use_cpu=None, ddp_backend="gloo")
    answer = two_ranks.run("train", args=args, engine="reference", zero=stage)[0]
    assert answer["losses"] == pytest.approx(alone["reference"], rel=1e-5, abs=0)
    assert read_adapter(args["output_dir"]).projections == ["gate", "up", "down"]


def test_deepspeed_zero3_is_refused(root, two_ranks):
    args = arguments(root, "zero3", 2, use_cpu=None, ddp_backend="gloo")
    with pytest.raises(AssertionError, match="cannot run under DeepSpeed ZeRO-3.*use ZeRO-2, or F"):
        two_ranks.run("train", args=args, zero=3)


def test_deepspeed_zero2_resumes_to_the_same_bits(root, two_ranks):
    """4 steps against 2 and 2 more; the checkpoint holds nothing of the frozen base."""
    steps = {"save_steps": 2, "save_strategy": "steps", "lora_dropout": 0.1}
    steps |= {"use_cpu": None, "ddp_backend": "gloo"}
    whole = arguments(root, "zero-whole", 6, **steps)
    before = two_ranks.run("train", args=whole, zero=2)[0]["losses"]
    checkpoint = Path(whole["output_dir"]) / "checkpoint-2"
    rest = arguments(root, "zero-rest", 6, resume_from_checkpoint=str(checkpoint), **steps)
    assert two_ranks.run("train", args=rest, zero=2)[0]["losses"][2:] == before[2:]
    size = sum(p.stat().st_size for p in checkpoint.rglob("*") if p.is_file())
    # the adapter for PEFT and for DeepSpeed, its fp32 masters and two moments; scripts and logs
    assert size < 6 * 4 * 23552 + 400_000, size


@pytest.mark.parametrize("way", ["ddp", "fsdp2"])
def test_the_held_out_losses_of_the_card_on_two_ranks(way, root, two_ranks):
    """Every rank evaluates its records, with sharded factors too; the first writes the card."""
    kt_config = {"format": "int4", "merged_eval": 1}
    found = []
    for ranks in (1, 2):
        args = arguments(root, f"card-{way}-{ranks}", ranks, max_steps=2, kt_config=kt_config,
                         eval_dataset="sft", per_device_eval_batch_size=8 // ranks)  # fmt: skip
        if ranks == 1:
            lf_cases.run(args)
        else:
            two_ranks.run("train", args=args, fsdp=None if way == "ddp" else {})
        card = (Path(args["output_dir"]) / "README.md").read_text()
        found.append([float(x) for x in re.findall(r"^\| held-out .* \| ([\d.]+) ", card, re.M)])
    assert len(found[0]) == 2 and found[0][0] != found[0][1]
    assert found[1] == pytest.approx(found[0], rel=1e-3)
