"""kt_config.activation through LLaMA-Factory: how often the experts run, what is kept, what is
predicted.
"""

from __future__ import annotations

import logging
import re
import subprocess
import sys
from types import SimpleNamespace

import lf_cases
import pytest
import sft_cases as cases
import torch
from datasets import Dataset
from transformers import PretrainedConfig

from kt_core import experts as core
from kt_core.loading import memory
from kt_sft.config import KTConfig
from kt_sft.run import budget

STEPS, ACCUMULATION, LAYERS = 2, 2, 2


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return lf_cases.workspace(tmp_path_factory.mktemp("lf"))


@pytest.fixture
def calls(monkeypatch):
    """("forward" or "backward", tokens, bytes kept) of every call of the experts."""
    made = []
    forward, backward = core.Experts.forward, core.Experts.backward

    def counted_forward(self, x, *args, **kw):
        out, saved = forward(self, x, *args, **kw)
        made.append(("forward", len(x), 0 if saved is None else saved.nbytes))
        return out, saved

    def counted_backward(self, grad, x, *args, **kw):
        made.append(("backward", len(x), 0))
        return backward(self, grad, x, *args, **kw)

    monkeypatch.setattr(core.Experts, "forward", counted_forward)
    monkeypatch.setattr(core.Experts, "backward", counted_backward)
    return made


def _run(root, **changes):
    lf_cases.run(
        lf_cases.arguments(
            root, "activation", max_steps=STEPS, gradient_accumulation_steps=ACCUMULATION, **changes
        )
    )


@pytest.mark.parametrize("stage", ["sft", "dpo"])
@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_retain_never_runs_the_experts_twice(stage, dropout, root, calls, caplog):
    """Checkpointing is on, and reentrant by LLaMA-Factory's default."""
    log = logging.getLogger("kt")
    with caplog.at_level(logging.INFO, "kt"):
        log.addHandler(caplog.handler)
        try:
            _run(root, stage=stage, dataset=stage, lora_dropout=dropout)
        finally:
            log.removeHandler(caplog.handler)
    passes = STEPS * ACCUMULATION * LAYERS
    kinds = [kind for kind, *_ in calls]
    assert kinds.count("backward") == passes
    # preference pairs: the reference's forward, without gradients, runs the experts once more
    assert kinds.count("forward") == (passes if stage == "sft" else 2 * passes)
    assert sum(kept > 0 for *_, kept in calls) == passes
    switched = {id(r) for r in caplog.records if "set to non-reentrant" in r.getMessage()}
    assert len(switched) == 1


@pytest.mark.parametrize("reentrant", [True, False])
def test_recompute_keeps_nothing_and_runs_them_twice(reentrant, root, calls):
    config = {"format": "bf16", "activation": "recompute"}
    _run(root, kt_config=config, use_reentrant_gc=reentrant)
    kinds = [kind for kind, *_ in calls]
    assert kinds.count("forward") == 2 * kinds.count("backward")
    assert kinds.count("backward") == STEPS * ACCUMULATION * LAYERS
    assert not any(kept for *_, kept in calls)


def test_reentrant_checkpointing_that_is_asked_for_is_refused_under_retain(root):
    with pytest.raises(ValueError, match="use_reentrant_gc=True cannot keep .*: recompute"):
        _run(root, use_reentrant_gc=True)
    with pytest.raises(ValueError, match="use_reentrant_gc=True cannot keep"):
        _run(root, use_reentrant_gc=True, kt_cpu_activation="retain")
    _run(root, use_reentrant_gc=True, disable_gradient_checkpointing=True)
    _run(root, use_reentrant_gc=False)


def test_what_is_kept_is_what_was_predicted(root, calls, capsys):
    """4 * K * I bytes per token and layer: K = 2 experts per token, I = 40, 2 layers."""
    per_token = 4 * 2 * 40 * LAYERS
    _run(root)
    printed = capsys.readouterr().out
    assert "kt: memory: experts 0." in printed
    assert "LoRA 0.1 MiB + gradients 0.1 MiB + optimizer 0.2 MiB" in printed
    assert f"kept for backward ({per_token} bytes per token)" in printed
    most = int(re.search(r"for at most (\d+) tokens at once", printed)[1])
    assert max(tokens for _, tokens, _ in calls) <= most < 2 * 64  # 2 rows, cutoff_len is 64
    for kind, tokens, kept in calls:
        if kind == "forward":
            assert kept * LAYERS == tokens * per_token


def test_the_plan_is_the_sum_of_the_tensors(tmp_path):
    path = cases.checkpoint(tmp_path)
    model = cases.adapted(cases.load(path))
    ids = cases.token_ids()
    prediction = budget.predict(
        model, ids.numel(), activation="retain", optimizer="adamw_torch_fused"
    )
    trained = list(cases.trained(model).values())
    optimizer = torch.optim.AdamW(trained, lr=1e-3)
    model(input_ids=ids, labels=ids).loss.backward()
    optimizer.step()
    assert prediction.trained == sum(p.nbytes for p in trained)
    assert prediction.gradients == sum(p.grad.nbytes for p in trained)
    state = [t for s in optimizer.state.values() for k, t in s.items() if k != "step"]
    assert prediction.optimizer == sum(t.nbytes for t in state)
    layers = [m.experts for m in model.modules() if isinstance(m, budget.KTExpertsLinear)]
    assert prediction.packed == sum(x.nbytes for x in layers)
    again = budget.predict(model, 48, activation="recompute", optimizer="sgd")
    assert (again.saved, again.optimizer) == (0, 0)
    assert "nothing kept for backward" in str(again)


MEASURE = """
import ctypes, sys, torch, models, sft_cases as cases
from kt_core.loading import memory
from kt_sft.run import budget
activation, path, tokens = sys.argv[1], sys.argv[2], int(sys.argv[3])
model = cases.adapted(cases.load(path, activation=activation))
ctypes.CDLL(None).mallopt(-3, 256 << 10)  # M_MMAP_THRESHOLD: freed tensors are gone at once
prediction = budget.predict(model, tokens, activation=activation, optimizer="adamw")
ids = torch.randint(3, 100, (1, tokens))
model(input_ids=ids[:, :64]).logits.sum()  # first use of everything
before = memory.resident_bytes()
inner = model.base_model.model.model
out = inner(input_ids=ids).last_hidden_state
print(memory.resident_bytes() - before, prediction.saved)
"""


def test_the_prediction_against_measured_memory(tmp_path):
    """Resident memory after a forward: `retain` holds more than `recompute`, by what is predicted.

    2,048 tokens, 4 experts each, I = 512, 2 layers: 33.5 MB.
    """
    sizes = {"num_experts_per_tok": 4, "moe_intermediate_size": 512}
    sizes["max_position_embeddings"] = 2048
    path = cases.models.build("qwen3_moe", tmp_path / "model", dtype=torch.float32, **sizes)
    found = {}
    for activation in ("retain", "recompute"):
        command = [sys.executable, "-c", MEASURE, activation, str(path), "2048"]
        done = subprocess.run(
            command, capture_output=True, text=True, check=True, cwd=cases.TESTS, timeout=300
        )
        found[activation] = [int(x) for x in done.stdout.split()]
    (more, predicted), (less, nothing) = found["retain"], found["recompute"]
    assert predicted == 2048 * 4 * 4 * 512 * 2 and nothing == 0
    assert more - less == (pytest.approx(predicted, rel=0.1))


LOGITS = """
import ctypes, re, sys, torch
from torch.nn import functional as F
from transformers.loss.loss_utils import ForCausalLMLoss
from types import SimpleNamespace
from kt_core.loading import memory
from kt_sft.cpu import loss as ours
ctypes.CDLL(None).mallopt(-3, 256 << 10)  # M_MMAP_THRESHOLD: freed tensors are gone at once
blocks, tokens, vocabulary, dtype = sys.argv[2] == "1", 512, 40_000, getattr(torch, sys.argv[1])
hidden = torch.randn(2, tokens // 2, 8, dtype=dtype, requires_grad=True)
head = torch.randn(vocabulary, 8, dtype=dtype)
labels = torch.randint(0, vocabulary, hidden.shape[:2])
model = SimpleNamespace(loss_function=ForCausalLMLoss)
if blocks:
    ours.in_blocks(model)
def step(n):
    logits = F.linear(hidden[:, :n], head)
    loss = model.loss_function(logits, labels[:, :n], vocabulary)
    del logits
    loss.backward()
step(8)
open("/proc/self/clear_refs", "w").write("5")  # the peak starts anew
before = memory.resident_bytes()
step(tokens)
peak = int(re.search(r"VmHWM:\\s+(\\d+)", open("/proc/self/status").read())[1]) * 1024
print((peak - before) / (tokens * vocabulary))
"""


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("blocks", [0, 1])
def test_bytes_of_logits_against_measured_memory(blocks, dtype, tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", LOGITS, dtype, str(blocks)],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    model = cases.load(cases.checkpoint(tmp_path)).to(getattr(torch, dtype))
    prediction = budget.predict(
        model, 512, activation="retain", optimizer="sgd", loss_in_blocks=blocks
    )
    per_logit = prediction.logits / (512 * model.config.vocab_size)
    assert float(done.stdout) == pytest.approx(per_logit, rel=0.2)


def test_the_longest_row_of_the_data():
    rows = [[1] * n for n in (3, 17, 5)]
    pairs = Dataset.from_dict({"chosen_input_ids": rows, "rejected_input_ids": [[1] * 30] * 3})
    assert budget.longest_row(Dataset.from_dict({"input_ids": rows, "labels": rows})) == 24
    assert budget.longest_row(pairs) == 32
    assert budget.longest_row(pairs.to_iterable_dataset()) is None


@pytest.mark.parametrize(
    ("values", "k"),
    [
        ({"num_experts_per_tok": 6}, 6),
        ({"num_experts_per_tok": [1, 4]}, 4),
        ({"top_k_experts": 3}, 3),
    ],
)
def test_experts_per_token_by_family(values, k):
    config = PretrainedConfig()
    for key, value in values.items():
        setattr(config, key, value)
    assert budget.top_k(config) == k


def test_too_little_memory_is_warned_of(root, caplog, monkeypatch):
    """Rows are rarely as long as cutoff_len, so the run goes on."""
    callback = budget.Budget(KTConfig(format="bf16"), 64, SimpleNamespace(stage="sft"))
    model = cases.adapted(cases.load(root / "model"))
    monkeypatch.setattr(memory, "limits", lambda: [memory.Limit("the test's limit", 100_000)])

    class Arguments:
        per_device_train_batch_size, optim = 2, "adamw_torch"

    class State:
        is_world_process_zero = True

    with caplog.at_level(logging.WARNING, "kt"):
        loader = SimpleNamespace(dataset=[])
        callback.on_train_begin(Arguments, State, None, model=model, train_dataloader=loader)
    assert "but the test's limit leaves 100,000" in caplog.text


def test_memory_is_returned_before_the_logits_of_training_only(tmp_path, monkeypatch):
    returned, resident = [], [1 << 30]
    monkeypatch.setattr(memory, "return_freed_tensors", lambda: returned.append(True))
    monkeypatch.setattr(memory, "resident_bytes", lambda: resident[0])
    path = cases.checkpoint(tmp_path)
    model = cases.adapted(cases.load(path))
    ids = torch.randint(3, 100, (1, 8))
    model.eval()(input_ids=ids)
    assert not returned
    model.train()(input_ids=ids, labels=ids).loss.backward()
    assert len(returned) == 1
    for grown, times in ((255, 1), (256, 2), (256 + 255, 2), (512, 3)):  # MiB; little is kept
        resident[0] = (1 << 30) + (grown << 20)
        model(input_ids=ids)
        assert len(returned) == times
    monkeypatch.setenv("MALLOC_TRIM_THRESHOLD_", "1")  # a choice of the user's stands
    cases.adapted(cases.load(path)).train()(input_ids=ids)
    assert len(returned) == 3
