"""kt_config.layer_major: micro-batches of a step as one batch, against the accumulation loop."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace

import lf_cases
import pytest
import safetensors.torch
import sft_cases as cases
import torch

from kt_core import experts as core
from kt_core import memory
from kt_core.adapter_format import WEIGHTS_FILE
from kt_sft import layer_major

ACCUMULATION, STEPS, LAYERS = 4, 5, 2


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return lf_cases.workspace(tmp_path_factory.mktemp("lf"), dtype=torch.float32)


def _train(root, name, layer_major, monkeypatch, **changes):
    """Losses of a run, its adapter, and how often the experts' forward and backward ran."""
    calls = []
    for method in ("forward", "backward"):
        original = getattr(core.Experts, method)

        def counted(self, *args, f=original, m=method, **kw):
            calls.append(m)
            return f(self, *args, **kw)

        monkeypatch.setattr(core.Experts, method, counted)
    config = {"format": "bf16", "layer_major": layer_major}
    # 32 samples, 2 per micro-batch: the fifth step is the first of the second epoch
    options = {"max_steps": STEPS, "gradient_accumulation_steps": ACCUMULATION} | changes
    args = lf_cases.arguments(root, name, kt_config=config, **options)
    lf_cases.run(args)
    adapter = safetensors.torch.load_file(Path(args["output_dir"]) / WEIGHTS_FILE)
    return lf_cases.losses(args["output_dir"]), adapter, calls


@pytest.mark.parametrize(("engine", "bar"), [("reference", 1e-5), ("kernels", 1e-3)])
def test_the_same_losses_with_one_weight_read_per_step(engine, bar, root, monkeypatch):
    cases.use(engine, monkeypatch)
    with monkeypatch.context() as patch:
        loop, tuned, looped = _train(root, f"loop-{engine}", False, patch)
    with monkeypatch.context() as patch:
        major, same, together = _train(root, f"major-{engine}", True, patch)
    assert loop[-1] < 0.9 * loop[0]
    assert major == pytest.approx(loop, rel=bar)
    for name, tensor in tuned.items():
        assert (same[name] - tensor).norm() <= 50 * bar * tensor.norm(), name
    for method in ("forward", "backward"):
        assert looped.count(method) == STEPS * LAYERS * ACCUMULATION
        assert together.count(method) == STEPS * LAYERS


def test_a_last_step_of_fewer_micro_batches(root, monkeypatch):
    """32 samples in micro-batches of 2, 5 to a step: the fourth step has one micro-batch."""
    cases.use("reference", monkeypatch)
    changes = {"gradient_accumulation_steps": 5, "max_steps": 5}
    loop, *_ = _train(root, "loop5", False, monkeypatch, **changes)
    major, *_ = _train(root, "major5", True, monkeypatch, **changes)
    assert major == pytest.approx(loop, rel=1e-5)


@pytest.mark.parametrize("stage", ["dpo", "rm"])
def test_preference_pairs(stage, root, monkeypatch):
    cases.use("reference", monkeypatch)
    # trl's reward head drops a tenth, drawn once per batch
    monkeypatch.setattr(torch.nn.Dropout, "forward", lambda self, x: x)
    changes = {"stage": stage, "dataset": "dpo"}
    loop, *_ = _train(root, f"loop-{stage}", False, monkeypatch, **changes)
    major, *_ = _train(root, f"major-{stage}", True, monkeypatch, **changes)
    assert loop[-1] < loop[0]
    assert major == pytest.approx(loop, rel=1e-5)


def test_the_other_name(root, capsys):
    """Memory is planned for 2 micro-batches of 2 rows at once, for two or four at a time."""
    at_once = []
    for together in (False, True):
        lf_cases.run(lf_cases.arguments(root, "alias", kt_layer_major=together, max_steps=1))
        printed = capsys.readouterr().out
        at_once.append(int(re.search(r"at most (\d+) tokens at once", printed)[1]))
    assert at_once[1] == 2 * at_once[0]


def test_resuming_continues_where_it_stopped(root):
    """Four steps against two and two more; dropout on."""
    changes = {"lora_dropout": 0.1, "save_steps": 2, "save_strategy": "steps"}
    whole = lf_cases.arguments(root, "whole", kt_layer_major=True, **changes)
    lf_cases.run(whole)
    changes["resume_from_checkpoint"] = str(Path(whole["output_dir"]) / "checkpoint-2")
    rest = lf_cases.arguments(root, "rest", kt_layer_major=True, **changes)
    lf_cases.run(rest)
    losses = lf_cases.losses(whole["output_dir"])
    assert len(losses) == 4 and lf_cases.losses(rest["output_dir"])[2:] == losses[2:]


REFUSED = {
    "nothing to gather": (
        {"gradient_accumulation_steps": 1},
        "has no effect with gradient_accumulation_steps=1; raise",
    ),
    "kto": ({"stage": "kto", "dataset": "dpo"}, "would change the loss of stage=kto"),
    "asft": ({"use_asft_loss": True}, "would change the loss of use_asft_loss=True"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused_by_name(name, root):
    changes, message = REFUSED[name]
    with pytest.raises(ValueError, match=f"layer_major=true .*{message}"):
        lf_cases.run(lf_cases.arguments(root, "refused", kt_layer_major=True, **changes))


def test_deepspeed_is_refused():
    training = SimpleNamespace(gradient_accumulation_steps=2, deepspeed="ds.json")
    finetuning = SimpleNamespace(stage="sft", use_asft_loss=False)
    with pytest.raises(ValueError, match="after DeepSpeed has read it; remove"):
        layer_major.check(training, finetuning)
    training.deepspeed = None
    layer_major.check(training, finetuning)


def test_a_batch_that_does_not_fit_is_refused_before_the_first_step(root, monkeypatch):
    limit = memory.Limit("the test's limit", 100_000)
    monkeypatch.setattr(memory, "limits", lambda: [limit])
    with pytest.raises(MemoryError, match=r"needs [\d,]+ bytes .* the test's limit leaves 100,000"):
        _train(root, "unfit", True, monkeypatch)
