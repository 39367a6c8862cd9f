"""What is logged per step, where it arrives, and the heat map of the experts' load."""

from __future__ import annotations

import importlib
import json
import sys
import types
from pathlib import Path
from typing import ClassVar

import lf_cases
import pytest
import torch
from transformers import TrainerCallback
from transformers.integrations import integration_utils

from kt_core import experts as core
from kt_core.module import KTExpertsLinear
from kt_sft.op import row_counts
from kt_sft.report import step_log
from kt_sft.report.trainer_log import KEYS

REPORTERS = ("tensorboard", "wandb", "swanlab", "trackio")
STEPS, ACCUMULATION = 4, 2


class Reporter(TrainerCallback):
    """Stands where transformers' callback of a reporter stands; keeps what it is given."""

    seen: ClassVar[dict[str, list[dict[str, float]]]] = {}

    def on_log(self, args, state, control, logs=None, **kw):
        self.seen.setdefault(type(self).__name__, []).append(dict(logs))


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """One LLaMA-Factory run that reports to all four; also the rows its experts were given."""
    root = lf_cases.workspace(tmp_path_factory.mktemp("lf"))
    forwards = []
    original = core.Experts.forward

    def forward(self, x, top_k_index, *args, **kw):
        if kw.get("save"):
            forwards.append((self, top_k_index.clone()))
        return original(self, x, top_k_index, *args, **kw)

    args = lf_cases.arguments(
        root,
        "out",
        report_to=list(REPORTERS),
        plot_loss=True,
        max_steps=STEPS,
        gradient_accumulation_steps=ACCUMULATION,
        eval_dataset="sft",
        eval_strategy="steps",
        eval_steps=2,
    )
    with pytest.MonkeyPatch.context() as patch:
        for name in REPORTERS:
            patch.setitem(
                integration_utils.INTEGRATION_TO_CALLBACK, name, type(name, (Reporter,), {})
            )
        importlib.import_module("llamafactory.train.tuner")  # trl looks for wandb on import
        for name in ("wandb", "trackio"):  # LLaMA-Factory hands them its arguments
            config = types.SimpleNamespace(update=lambda values: None)
            patch.setitem(sys.modules, name, types.SimpleNamespace(config=config))
        patch.setattr(core.Experts, "forward", forward)
        lf_cases.run(args)
    return Path(args["output_dir"]), forwards


def _entries(out):
    state = json.loads((out / "trainer_state.json").read_text())
    return [entry for entry in state["log_history"] if "loss" in entry]


def test_every_step_has_every_number(run):
    out, _ = run
    entries = _entries(out)
    assert len(entries) == STEPS
    for entry in entries:
        assert {"loss", "learning_rate", "grad_norm", *KEYS} <= set(entry)
        assert all(type(entry[key]) is float for key in KEYS)
        assert entry["tokens_per_second"] > 0 and entry["rest_s"] > 0
        assert entry["experts_forward_s"] > 0 and entry["experts_backward_s"] > 0
        assert 0.1 < entry["rss_gib"] < 8


def test_every_reporter_gets_them(run):
    out, _ = run
    entries = _entries(out)
    for name in REPORTERS:
        seen = [logs for logs in Reporter.seen[name] if "loss" in logs]
        assert [{**logs, "step": i + 1} for i, logs in enumerate(seen)] == entries
        assert any("eval_loss" in logs for logs in Reporter.seen[name])


def test_trainer_log_jsonl_has_them(run):
    out, _ = run
    lines = [json.loads(line) for line in (out / "trainer_log.jsonl").read_text().splitlines()]
    trained = [line for line in lines if "loss" in line]
    entries = _entries(out)
    assert [line["current_steps"] for line in trained] == [1, 2, 3, 4]
    for line, entry in zip(trained, entries, strict=True):
        assert line["loss"] == entry["loss"] and line["lr"] == entry["learning_rate"]
        assert {k: line[k] for k in ("grad_norm", *KEYS)} == {
            k: entry[k] for k in ("grad_norm", *KEYS)
        }
    evaluated = [line for line in lines if "eval_loss" in line]
    assert len(evaluated) == 2 and not any(set(KEYS) & set(line) for line in evaluated)


def test_tokens_per_expert_are_the_routed_ones(run):
    """Against the indices that the experts' forward was given, step by step."""
    out, forwards = run
    layers = 2
    per_step = len(forwards) // STEPS
    assert per_step == layers * ACCUMULATION  # evaluation saves nothing and is not among them
    for step, entry in enumerate(_entries(out)):
        rows: dict[int, torch.Tensor] = {}
        for experts, index in forwards[step * per_step : (step + 1) * per_step]:
            counted = torch.bincount(index.view(-1), minlength=8)
            rows[id(experts)] = rows.get(id(experts), 0) + counted
        load = torch.stack(list(rows.values())).double()
        assert entry["expert_tokens_min"] == load.min()
        assert entry["expert_tokens_max"] == load.max()
        assert entry["expert_tokens_median"] == load.view(-1).sort().values[7:9].mean()
        assert entry["expert_rows_per_pass"] == pytest.approx(float(load.mean()) / ACCUMULATION)
        assert entry["expert_imbalance"] == pytest.approx(
            max(float(x.max() / x.mean()) for x in load)
        )


def test_pictures_are_written(run):
    out, _ = run
    for name in ("training_loss.png", step_log.HEAT_MAP):
        picture = (out / name).read_bytes()
        assert picture[:8] == b"\x89PNG\r\n\x1a\n" and len(picture) > 2000


def test_recomputation_counts_a_row_once(tmp_path):
    """Under `recompute` with checkpointing the experts' forward runs twice, backward once."""
    root = lf_cases.workspace(tmp_path)
    medians = []
    for activation in ("retain", "recompute"):
        config = {"format": "bf16", "activation": activation}
        args = lf_cases.arguments(root, activation, kt_config=config, max_steps=2)
        lf_cases.run(args)
        entries = _entries(Path(args["output_dir"]))
        medians.append([(e["expert_tokens_median"], e["expert_tokens_max"]) for e in entries])
    assert medians[0] == medians[1]


def test_ranks_are_added_up(monkeypatch):
    """Two ranks that did the same: twice the tokens and rows, the same seconds and memory."""
    told = []
    monkeypatch.setattr(step_log.logger, "info", lambda text, *args: told.append(text % args))
    layer = core.Experts(2, 16, 8, format="bf16")
    module = KTExpertsLinear(layer, layer_index=0)
    reported = {}
    for ranks in (1, 2):
        monkeypatch.setattr(step_log, "joined", lambda n=ranks: n > 1)
        monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
        monkeypatch.setattr(
            step_log, "over_ranks", lambda v, how, n=ranks: v * n if how == "sum" else v
        )
        monkeypatch.setattr(step_log.time, "perf_counter", iter([10.0, 14.0]).__next__)
        spent = iter([{"forward": 0.0, "backward": 0.0}, {"forward": 1.0, "backward": 2.0}])
        monkeypatch.setattr(step_log.runtime, "seconds", spent.__next__)
        callback = step_log.StepLog()
        args = types.SimpleNamespace(gradient_accumulation_steps=4)
        state = types.SimpleNamespace(is_world_process_zero=ranks == 1)
        callback.on_train_begin(args, state, None, model=module)
        callback._tokens.tokens += 40
        row_counts.count_rows(layer, torch.tensor([[0, 1], [1, 1]]))
        reported[ranks] = callback.measure()
        assert reported[ranks].keys() == KEYS.keys()
        del reported[ranks]["rss_gib"]
    assert reported[1] == {
        "tokens_per_second": 10.0,
        "experts_forward_s": 1.0,
        "experts_backward_s": 2.0,
        "rest_s": 1.0,
        "expert_tokens_min": 1.0,
        "expert_tokens_median": 2.0,
        "expert_tokens_max": 3.0,
        "expert_imbalance": 1.5,
        "expert_rows_per_pass": 2.0,
        "experts_gathered": 0.0,
    }
    assert len(told) == 1 and "an expert gets 2.0 rows" in told[0] and "of 4 times" in told[0]
    assert reported[2] == reported[1] | {
        "tokens_per_second": 20.0,
        "expert_tokens_min": 2.0,
        "expert_tokens_median": 4.0,
        "expert_tokens_max": 6.0,
    }


def test_three_ranks_log_the_same_numbers(three_ranks):
    """Two machines; two ranks have no tokens for a layer. Layer 0: 1 and 3 rows, layer 1: 3, 3."""
    answers = three_ranks.run("log_line", hosts=["a", "b", "a"])
    numbers = [line for line, _ in answers]
    assert numbers[0] == numbers[1] == numbers[2]
    assert [ranks for _, ranks in answers] == [2, 1, 2]
    load = [numbers[0][f"expert_tokens_{k}"] for k in ("min", "median", "max")]
    assert (load, numbers[0]["expert_imbalance"]) == ([1, 3, 3], 1.5)
    assert numbers[0]["expert_rows_per_pass"] == 10 / 2 / 4  # 2 experts, 4 passes on three ranks
    wall = sum(numbers[0][k] for k in ("experts_forward_s", "experts_backward_s", "rest_s"))
    assert numbers[0]["tokens_per_second"] == pytest.approx(60 / wall)


def test_the_numbers_of_a_load():
    load = torch.tensor([[4, 0, 2, 2], [1, 1, 1, 5], [0, 0, 0, 0]])
    assert step_log.load_numbers(load) == {
        "expert_tokens_min": 0.0,
        "expert_tokens_median": 1.0,
        "expert_tokens_max": 5.0,
        "expert_imbalance": 2.5,
    }


def test_the_heat_map_shows_the_load(tmp_path):
    """A dark and a bright picture differ where the load does; one layer of one expert is drawn."""
    from matplotlib.image import imread

    even = torch.full((3, 40), 7)
    odd = even.clone()
    odd[1, :20] = 0
    for name, load in (("even", even), ("odd", odd)):
        step_log.draw_load(load, [0, 1, 2], tmp_path / f"{name}.png")
    a, b = (imread(tmp_path / f"{name}.png") for name in ("even", "odd"))
    assert a.shape == b.shape and (a != b).any()
    step_log.draw_load(torch.tensor([[3]]), [5], tmp_path / "one.png")
    assert (tmp_path / "one.png").exists()


def test_rows_of_experts_that_are_gone_are_forgotten():
    layer = core.Experts(4, 16, 8, format="bf16")
    row_counts.count_rows(layer, torch.tensor([[0, 1], [1, 3]]))
    row_counts.count_rows(layer, torch.tensor([[3, 3]]))
    assert row_counts.rows(layer).tolist() == [1, 2, 0, 3]
    held = len(row_counts._rows)
    del layer
    assert len(row_counts._rows) == held - 1
