"""One expert copy per host, shared by its ranks, and each rank's share of the CPUs.

The ranks are processes of their own that talk over gloo; a "host" is what `host.host_identity`
says, so that several can be had on one machine.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import pickle
import signal
import subprocess
import sys
from pathlib import Path

import lf_cases
import models
import pytest
import rank_cases
import sft_cases as cases
import torch
import transformers
from rank_group import RankGroup

from kt_core.loading import checkpoint, shared
from kt_sft import session
from kt_sft.config import KTConfig
from kt_sft.ranks import host


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return cases.checkpoint(tmp_path_factory.mktemp("dist"))


def column(answers, key):
    return [answer[key] for answer in answers]


def test_one_rank_packs_and_the_others_map(path, two_ranks):
    alone = cases.logits(cases.load(path), cases.token_ids())
    ranks = two_ranks.run("load", path=path)
    assert column(ranks, "packed") == [2, 0]
    assert column(ranks, "shared mappings") == [1, 1]
    assert all(column(ranks, "read only"))
    assert all(torch.equal(logits, alone) for logits in column(ranks, "logits"))


def test_two_hosts_have_two_copies(path, three_ranks):
    """Ranks 0 and 2 on one host, 1 on another: as under `accelerate launch --num_machines 2`."""
    ranks = three_ranks.run("load", path=path, hosts=["a", "b", "a"])
    assert column(ranks, "packed") == [2, 2, 0]
    assert column(ranks, "shared mappings") == [1, 0, 1]  # alone on its host: memory of its own
    logits = column(ranks, "logits")
    assert torch.equal(logits[0], logits[1]) and torch.equal(logits[0], logits[2])


def test_a_packed_file_is_made_by_one_rank(path, two_ranks, tmp_path):
    leftover = tmp_path / ".qwen3_moe-bf16-g0.kt.4242.tmp"
    leftover.write_bytes(b"half a layer of a run that was killed")
    ranks = two_ranks.run("load", path=path, packed_dir=str(tmp_path))
    assert column(ranks, "packed") == [2, 0] and all(column(ranks, "read only"))
    assert not leftover.exists()
    again = two_ranks.run("load", path=path, packed_dir=str(tmp_path))
    assert column(again, "packed") == [0, 0]
    assert torch.equal(ranks[0]["logits"], again[1]["logits"])
    file = tmp_path / "qwen3_moe-bf16-g0.kt"
    damaged = bytearray(file.read_bytes())
    damaged[-1000] ^= 1
    for content in (b"x" * 100, damaged):
        file.write_bytes(content)
        told = [s for s, _ in two_ranks.run("refused", path=path, packed_dir=str(tmp_path))]
        assert told[0] == told[1] and "delete it" in told[0]


def test_f11_the_plan_counts_a_hosts_experts_once_and_its_other_weights_per_rank(path, two_ranks):
    """Memory that is enough for one rank alone but not for both is refused on both, before a
    weight is read."""
    (_, need), _ = two_ranks.run("refused", path=path)
    assert need.copies == 2 and need.resident == need.experts + 2 * need.other + need.staging
    assert two_ranks.run("refused", path=path, available=need.resident)[1][0] is None
    told = [s for s, _ in two_ranks.run("refused", path=path, available=need.resident - 1)]
    assert told[0] == told[1]
    assert f"needs {need.resident:,} bytes ({need.experts:,} packed experts" in told[0]
    assert f"{need.other:,} other weights in each of 2 processes" in told[0]
    apart = two_ranks.run("refused", path=path, hosts=["a", "b"], available=need.resident - 1)
    assert [s for s, _ in apart] == [None, None]


def test_a_failure_on_one_host_is_raised_on_all(path, three_ranks):
    answers = three_ranks.run("refused", path=path, hosts=["a", "a", "b"], fails_on=2)
    damaged = "ValueError: model.layers.1.mlp.experts is damaged"
    assert [sentence for sentence, _ in answers] == [damaged] * 3
    answers = three_ranks.run("refused", path=path, fails_on=0)
    assert [sentence for sentence, _ in answers] == [damaged] * 3


def test_f12_a_rank_that_is_killed_while_it_packs_is_named(path):
    """The other rank does not wait for the rest: it names rank, process and layer."""
    with RankGroup(2) as group:
        group.start("refused", path=path, fails_on=0, killed=True)
        first = group.processes[0]
        sentence, _ = group.answer(1)
    assert sentence.startswith(f"LostRankError: rank 1 lost rank 0 (process {first.pid} on ")
    assert "while packing model.layers.1.mlp.experts" in sentence


def test_ranks_divide_the_cpus(path, two_ranks):
    cpus = len(os.sched_getaffinity(0))
    share = max(1, cpus // 2)
    assert column(two_ranks.run("load", path=path), "threads") == [share, share]
    assert column(two_ranks.run("load", path=path, threads=1), "threads") == [1, 1]
    told = [s for s, _ in two_ranks.run("refused", path=path, threads=share + 1)]
    assert told[0] == told[1] and told[0].startswith(
        f"ValueError: threads is {share + 1} for each of the 2 ranks on"
    )
    assert f"set threads to at most {share}" in told[0]


def _rank(number, cpus, allowed=None):
    return host.Rank(number, "a", "host", 1, frozenset(cpus), allowed or len(cpus))


@pytest.mark.parametrize(
    ("masks", "allowed", "shares"),
    [
        ([range(8), range(8)], None, [4, 4]),
        ([range(8), range(8), range(8)], None, [2, 2, 2]),
        ([range(4), range(4, 8)], None, [4, 4]),  # a launcher that binds ranks to CPUs
        ([range(4), range(2, 6)], None, [3, 3]),
        ([range(2)] * 3, None, [1, 1, 1]),
        ([range(8), range(8)], 3, [1, 1]),  # a quota of three CPUs
        ([range(64)] * 4, 32, [8, 8, 8, 8]),
    ],
)
def test_share_of_cpus(masks, allowed, shares):
    ranks = [_rank(i, cpus, allowed) for i, cpus in enumerate(masks)]
    assert [host.share_of_cpus(r, ranks) for r in ranks] == shares


def test_the_memory_of_two_ranks_is_that_of_one_copy(tmp_path, two_ranks):
    """Sum of PSS over both ranks, less that of a model without experts: the packed size."""
    size = {"hidden_size": 256, "vocab_size": 128, "num_hidden_layers": 5, "head_dim": 32}
    experts = {"num_experts": 32, "moe_intermediate_size": 256}
    full = models.build("qwen3_moe", tmp_path / "full", **size, **experts)
    dense = {"mlp_only_layers": list(range(5)), "intermediate_size": 16}
    without = models.build("qwen3_moe", tmp_path / "without", **size, **experts, **dense)
    found = two_ranks.run("memory", path=full, without=without, format="bf16")
    used = sum(w - wo for w, wo, _ in found)
    packed = found[0][2]
    assert packed == 5 * 32 * 3 * 256 * 256 * 2  # 60 MiB
    assert 0.95 * packed <= used <= 1.15 * packed, (used / packed, found)


def _again(path, **config):
    with session.loading(KTConfig(**config), again=True):
        return transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)


def test_a_second_model_of_a_run_shares_the_experts_of_the_first(tmp_path):
    path = cases.checkpoint(tmp_path)
    first = cases.load(path)
    own = rank_cases.experts_of(first)
    second = _again(path, format="bf16")
    assert all(a is b for a, b in zip(own, rank_cases.experts_of(second), strict=True))
    ids = cases.token_ids()
    assert torch.equal(cases.logits(first, ids), cases.logits(second, ids))
    for other in (cases.load(path), _again(path, format="int8")):  # not asked for, or not the same
        assert all(a is not b for a, b in zip(own, rank_cases.experts_of(other), strict=True))
    os.utime(path / "model.safetensors")  # a file that was written again
    other = _again(path, format="bf16")
    assert all(a is not b for a, b in zip(own, rank_cases.experts_of(other), strict=True))


def test_a_reference_model_brings_no_second_copy(tmp_path, monkeypatch):
    """DPO against a frozen model through LLaMA-Factory: two layers are packed, not four."""
    root, packed = lf_cases.workspace(tmp_path), []
    fill = checkpoint.fill
    monkeypatch.setattr(
        checkpoint, "fill", lambda layer, *rest: (packed.append(layer.name), fill(layer, *rest))
    )
    dpo = {"stage": "dpo", "dataset": "dpo", "max_steps": 1, "gradient_accumulation_steps": 1}
    args = lf_cases.arguments(root, "dpo", ref_model=str(root / "model"), **dpo)
    lf_cases.run(args)
    assert packed == [f"model.layers.{i}.mlp.experts" for i in range(2)]
    assert abs(lf_cases.losses(args["output_dir"])[0] - 0.693147) < 1e-6


# ------------------------------------------------------------------------- the shared memory itself


def test_sealed_memory_cannot_be_written_or_resized():
    layers = shared.SharedLayers([5000, 70])
    first = layers.writable(0)
    first[:3] = b"abc"
    with pytest.raises(OSError, match="busy"):
        layers.seal()  # somebody could still write
    del first
    layers.seal()
    views = shared.map_layers(layers.ticket)
    assert [v.nbytes for v in views] == [5000, 70] and bytes(views[0][:4]) == b"abc\0"
    fd = os.open(layers.ticket.path, os.O_RDWR)
    with pytest.raises(PermissionError):
        mmap.mmap(fd, 4096)
    with pytest.raises(PermissionError):
        os.ftruncate(fd, 10)
    assert fcntl.fcntl(fd, fcntl.F_GET_SEALS) & fcntl.F_SEAL_WRITE
    os.close(fd)
    layers.close()
    assert bytes(views[0][:3]) == b"abc"  # whoever has mapped it keeps it


def test_memory_that_cannot_be_reached_is_named():
    layers = shared.SharedLayers([100])
    ticket = layers.ticket
    layers.close()
    with pytest.raises(OSError, match="run all ranks as one user, or set kt_config.packed_dir"):
        shared.map_layers(ticket)


def test_a_killed_first_rank_leaves_nothing_behind():
    """kill -9 of the process that packed: the other keeps its mapping, and no file remains."""
    script = (
        "import os, pickle, sys, time\n"
        "from kt_core.loading import shared\n"
        "layers = shared.SharedLayers([1 << 20])\n"
        "layers.writable(0)[:5] = b'alive'\n"
        "layers.seal()\n"
        "sys.stdout.buffer.write(pickle.dumps(layers.ticket)); sys.stdout.flush()\n"
        "time.sleep(600)\n"
    )
    before = set(Path("/dev/shm").iterdir())
    first = subprocess.Popen(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, cwd=cases.TESTS.parent
    )
    ticket = pickle.load(first.stdout)
    (view,) = shared.map_layers(ticket)
    first.send_signal(signal.SIGKILL)
    first.wait()
    assert bytes(view[:5]) == b"alive"
    assert set(Path("/dev/shm").iterdir()) <= before
    with pytest.raises(OSError, match="cannot be mapped from"):
        shared.map_layers(ticket)
