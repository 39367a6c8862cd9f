"""The rows of a host's ranks in one pass of the experts, against each rank computing its own."""

from __future__ import annotations

import json
import re
import signal
from pathlib import Path

import lf_cases
import models
import pytest
import safetensors.torch
import stage_cases
import torch
from rank_gather_cases import E
from rank_group import PATIENCE, RankGroup

from kt_core.adapters.peft_format import WEIGHTS_FILE
from kt_sft.op.exchange import owners
from kt_sft.op.row_counts import FEW_ROWS

GROUPS = {2: "two_ranks", 3: "three_ranks"}
BARS = {"reference": 3e-6, "kernels": 3e-6}  # only the order of fp32 sums differs
ALL = list(range(E))


def error(got, want):
    return float((got.float() - want.float()).norm() / want.float().norm().clamp_min(1e-30))


def compare(answers, bar):
    """Every rank's results, gathered and own, and that no expert was computed twice."""
    for together, own, _ in answers:
        assert together.keys() == own.keys()
        for name, want in own.items():
            if name == "kept" or want is None:
                continue
            assert together[name].dtype == want.dtype and together[name].shape == want.shape
            assert not want.numel() or error(together[name], want) <= bar, name
    by_rank = [set(computed[0]) for *_, computed in answers]
    assert sum(map(len, by_rank)) == len(set().union(*by_rank))
    assert set().union(*by_rank) == set().union(*(set(computed[-1]) for *_, computed in answers))


@pytest.mark.parametrize("engine", BARS)
@pytest.mark.parametrize("ranks", GROUPS)
@pytest.mark.parametrize("retain", [True, False])
def test_together_is_what_each_alone_computes(retain, ranks, engine, request):
    """Unequal numbers of tokens; expert 6 has no rows anywhere."""
    group = request.getfixturevalue(GROUPS[ranks])
    only = [ALL[:6], [0, 3, 4], [5, 4]][:ranks]
    answers = group.run(
        "gathered_and_own", tokens=[11, 5, 20][:ranks], only=only, engine=engine, retain=retain
    )
    compare(answers, BARS[engine])
    if engine == "kernels":  # every row is kept once, somewhere
        rows = 2 * sum([11, 5, 20][:ranks]) if retain else 0
        assert sum(together["kept"] for together, *_ in answers) == rows


@pytest.mark.parametrize("ranks", GROUPS)
def test_ranks_without_tokens_take_part(ranks, request):
    group = request.getfixturevalue(GROUPS[ranks])
    tokens = [0, 8, 0][:ranks]
    answers = group.run("gathered_and_own", tokens=tokens, only=[ALL] * ranks)
    compare(answers, BARS["kernels"])
    assert all(len(computed[0]) for *_, computed in answers)  # they compute for the one that has
    none = group.run("gathered_and_own", tokens=[0] * ranks, only=[ALL] * ranks)
    assert not any(t["lora0"].any() for t, *_ in none)


@pytest.mark.parametrize("ranks", GROUPS)
def test_dropout_masks_are_each_ranks_own(ranks, request):
    """Every rank draws another seed; who computes a row changes nothing in its mask."""
    group = request.getfixturevalue(GROUPS[ranks])
    sizes = {"tokens": [11, 5, 20][:ranks], "only": [ALL] * ranks}
    dropped = group.run("gathered_and_own", dropout=0.5, **sizes)
    compare(dropped, BARS["kernels"])
    plain = group.run("gathered_and_own", **sizes)
    assert all(error(a[0]["out"], b[0]["out"]) > 1e-2 for a, b in zip(dropped, plain, strict=True))


@pytest.mark.parametrize("frozen", [("x",), ("weights",), ("lora",), ("x", "weights")])
def test_only_what_needs_a_gradient_travels(frozen, two_ranks):
    answers = two_ranks.run("gathered_and_own", tokens=[4, 6], only=[ALL, ALL], frozen=frozen)
    compare(answers, BARS["kernels"])
    for together, *_ in answers:
        named = {"x": "x0", "weights": "weights0", "lora": "lora5"}
        assert all((together[key] is None) == (k in frozen) for k, key in named.items())


def test_tensors_of_a_device_are_gathered_on_the_cpu(two_ranks):
    sizes = {"tokens": [4, 6], "only": [ALL, ALL]}
    answers = two_ranks.run("gathered_and_own", staged=True, **sizes)
    compare(answers, BARS["kernels"])
    plain = two_ranks.run("gathered_and_own", **sizes)
    for (a, *_), (b, *_) in zip(answers, plain, strict=True):
        assert all(torch.equal(a[name], b[name]) for name in ("out", "x0", "weights0", "lora0"))


def test_bf16_rows_are_added_up_unrounded(two_ranks):
    """One rounding of the sum, as alone: at most a few last bits differ, by the order of sums."""
    answers = two_ranks.run(
        "gathered_and_own", tokens=[30, 40], only=[ALL, ALL], dtype=torch.bfloat16
    )
    for together, own, _ in answers:
        assert together["out"].dtype == torch.bfloat16
        for name in ("out", "x0"):
            assert (together[name] != own[name]).float().mean() < 2e-3


def test_the_gradient_of_a_factor_comes_from_the_rank_that_computed_it(three_ranks):
    answers = three_ranks.run("lora_is_in_one_place", tokens=[9, 2, 7])
    assert sum(mine.int() for mine, _ in answers).tolist() == [1] * E
    for mine, gradient in answers:
        assert torch.equal(gradient.flatten(1).any(1), mine)


@pytest.mark.parametrize(
    ("rows", "ranks", "who"),
    [
        ([5, 5, 5, 5], 2, [0, 1, 0, 1]),
        ([90, 10, 10, 0, 10], 2, [0, 1, 1, 0, 1]),
        ([0, 0, 7], 3, [0, 0, 0]),
        ([1] * 6, 1, [0] * 6),
        ([], 2, []),
    ],
)
def test_experts_are_dealt_by_work(rows, ranks, who):
    assert owners(rows, ranks) == who


def test_many_unequal_experts_are_dealt_evenly():
    g = torch.Generator().manual_seed(0)
    rows = (torch.rand(128, generator=g) ** 4 * 100).int().tolist()
    who = owners(rows, 3)
    work = [sum(n + 20 for n, w in zip(rows, who, strict=True) if n and w == r) for r in range(3)]
    assert max(work) < 1.02 * sum(work) / 3


# ---------------------------------------------------------------------------------- when it gathers


def test_what_is_gathered(two_ranks):
    """Rows per expert and rank: the mean of both ranks counts, and both do the same."""
    few, edge = int(FEW_ROWS * E / 2) - 1, -(-FEW_ROWS * E // 2)
    script = [
        ("train", [few, few]),
        ("again", [few, few]),  # checkpointing goes the way of its forward
        ("train", [edge, edge]),
        ("again", [edge, edge]),
        ("train", [2 * few, 0]),
        ("no_grad", [edge, edge]),  # a reference model's forward decides for itself ...
        ("again", [2 * few, 0]),  # ... and not for what the one before it recomputes
        ("eval", [few, few]),
        ("again", [2 * few, 0]),
        ("train", [2 * edge, 0]),
        ("no_grad", [few, 0]),
    ]
    seen = two_ranks.run("decisions", script=script)
    assert seen[0] == seen[1]
    wanted = [True, True, False, False, True, False, True, False, True, False, True]
    assert seen[0] == wanted


def test_runners_that_others_wrapped_stay(two_ranks):
    for answer in two_ranks.run("wrapped_runners"):
        during, wrapped, after, again, calls, kept = answer
        assert during == wrapped == again == [True, True] and after == [False, False]
        assert calls == (3, 2) and kept


# --------------------------------------------------------------------------- through LLaMA-Factory


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """A workspace whose model is in fp32."""
    folder = stage_cases.workspace(tmp_path_factory.mktemp("gather"))
    models.build("qwen3_moe", folder / "model", tokenizer=True, vocab_size=300, dtype=torch.float32)
    return folder


def arguments(root, name, gather=True, activation="retain", **changes):
    config = {"format": "bf16", "gather_rows": gather, "activation": activation}
    return lf_cases.arguments(root, name, kt_config=config, lora_dropout=0.1, **changes)


def entries(args):
    state = json.loads((Path(args["output_dir"]) / "trainer_state.json").read_text())
    return [entry for entry in state["log_history"] if "loss" in entry]


def evaluated(args):
    state = json.loads((Path(args["output_dir"]) / "trainer_state.json").read_text())
    return [entry["eval_loss"] for entry in state["log_history"] if "eval_loss" in entry]


@pytest.fixture(scope="module")
def gathered(root, two_ranks):
    """A run that gathers, with evaluation: arguments and what the ranks told."""
    args = arguments(root, "gathered", eval_dataset="sft", eval_strategy="steps", eval_steps=2)
    return args, two_ranks.run("trained", args=args)


def test_training_with_and_without_is_the_same(root, gathered, two_ranks):
    """Losses with dropout, which draws the same masks; what the log says; and that evaluation is
    never gathered."""
    args, answers = gathered
    passes = 4 * 2 * 2  # steps, micro-batches, layers
    for answer in answers:
        assert answer["calls"]["together"] == passes and answer["calls"]["own"] == 0
        assert answer["calls"]["eval"] > 0
    off = arguments(root, "own", False, eval_dataset="sft", eval_strategy="steps", eval_steps=2)
    own = two_ranks.run("trained", args=off)
    assert [answer["calls"]["together"] for answer in own] == [0, 0]
    assert answers[0]["losses"][-1] < answers[0]["losses"][0]
    assert answers[0]["losses"] == pytest.approx(own[0]["losses"], rel=1e-3)
    assert evaluated(args) == pytest.approx(evaluated(off), rel=1e-3)
    for a, b in zip(entries(args), entries(off), strict=True):
        assert (a["experts_gathered"], b["experts_gathered"]) == (1, 0)
        for key in ("min", "median", "max"):
            assert a[f"expert_tokens_{key}"] == pytest.approx(b[f"expert_tokens_{key}"], abs=4)
        # the weights were read for the rows of both
        assert a["expert_rows_per_pass"] == pytest.approx(2 * b["expert_rows_per_pass"])


@pytest.mark.parametrize("engine", ["reference", "kernels"])
@pytest.mark.parametrize("ranks", GROUPS)
def test_training_without_dropout_is_the_same(ranks, engine, root, request):
    """Also under FSDP2 on three ranks."""
    group = request.getfixturevalue(GROUPS[ranks])
    losses = []
    for gather in (True, False):
        args = arguments(root, f"{ranks}-{engine}-{gather}", gather) | {"lora_dropout": 0.0}
        answers = group.run("trained", args=args, engine=engine, fsdp={} if ranks == 3 else None)
        assert all((answer["calls"]["together"] > 0) == gather for answer in answers)
        losses.append(answers[0]["losses"])
    assert losses[0] == pytest.approx(losses[1], rel={"reference": 1e-5, "kernels": 1e-3}[engine])


def test_f5_recomputation_repeats_the_bits(root, two_ranks):
    """Losses and the adapter, with dropout, whatever is kept or computed again."""
    recompute = {"activation": "recompute"}
    runs = {
        "off": (1, {"disable_gradient_checkpointing": True}),
        "retain": (1, {}),
        "recompute": (2, recompute),
        "reentrant": (2, recompute | {"use_reentrant_gc": True}),
    }
    results = []
    for name, (forwards, changes) in runs.items():
        args = arguments(root, name, max_steps=3, **changes)
        answers = two_ranks.run("trained", args=args)
        assert [a["calls"]["together"] for a in answers] == [3 * 2 * 2 * forwards] * 2, name
        adapter = safetensors.torch.load_file(Path(args["output_dir"]) / WEIGHTS_FILE)
        results.append((answers[0]["losses"], adapter))
    losses, tensors = results[0]
    for other, adapter in results[1:]:
        assert other == losses
        assert all(torch.equal(adapter[key], tensors[key]) for key in tensors)


@pytest.mark.parametrize("stage", ["dpo", "kto"])
def test_preference_stages(stage, root, two_ranks):
    """The reference's forward is the same model with its adapters off, without gradients."""
    losses = []
    for gather in (True, False):
        changes = {"stage": stage, "dataset": stage, "per_device_train_batch_size": 1}
        args = arguments(root, f"{stage}-{gather}", gather, max_steps=2, **changes)
        answers = two_ranks.run("trained", args=args)
        calls = answers[0]["calls"]
        assert calls == answers[1]["calls"] and (calls["together"] > 0) == gather
        losses.append(answers[0]["losses"])
    assert losses[0] == pytest.approx(losses[1], rel=1e-3)


def test_many_rows_and_ranks_of_other_hosts_are_left_alone(root, two_ranks, three_ranks):
    args = arguments(root, "above", max_steps=1)
    assert [a["calls"]["together"] for a in two_ranks.run("trained", args=args, below=1)] == [0, 0]
    assert entries(args)[0]["experts_gathered"] == 0
    args = arguments(root, "apart", max_steps=1)
    answers = three_ranks.run("trained", args=args, hosts=["a", "b", "a"])
    assert [a["calls"]["together"] > 0 for a in answers] == [True, False, True]
    assert entries(args)[0]["experts_gathered"] == pytest.approx(2 / 3)


def test_f12_a_rank_that_is_killed_in_a_gathered_pass_is_named(root):
    """kill -9 of rank 1 at its first backward, for which rank 0 waits: it says so and ends."""
    args = arguments(root, "killed")
    with RankGroup(2) as group:
        group.start("trained", args=args, killed=1)
        survivor, other = group.processes
        assert other.wait(PATIENCE) == -signal.SIGKILL
        assert survivor.wait(60) == 1
        said = group.log(0)
    lost = (
        rf"error: rank 1 \(process {other.pid} on .*\) ended while rank 0 was in the backward of "
    )
    assert re.search(lost + r"model\.layers\.1\.mlp\.experts, 0 optimizer steps done", said), said
