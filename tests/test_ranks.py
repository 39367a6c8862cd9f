"""Training on several ranks is training on one: the same losses from the same tokens, whatever the
routing, and an end for all when one ends.
"""

from __future__ import annotations

import lf_cases
import models
import pytest
import sft_cases as cases
import torch

from kt_core.adapter_format import read_adapter

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
