"""kt_config.layer_major: micro-batches of a step as one batch, against the accumulation loop."""

from __future__ import annotations

import json
import logging
import re
import shutil
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import lf_cases
import pytest
import safetensors.torch
import sft_cases as cases
import torch
import transformers

from kt_core import experts as core
from kt_core.adapters.peft_format import WEIGHTS_FILE
from kt_core.loading import memory
from kt_sft.run import layer_major

ACCUMULATION, STEPS, LAYERS = 4, 5, 2
TOGETHER = {"format": "bf16", "layer_major": True}


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    folder = lf_cases.workspace(tmp_path_factory.mktemp("lf"), dtype=torch.float32)
    texts = [{"text": f"{i} and {i + 1} make {2 * i + 1}."} for i in range(32)]
    (folder / "texts.json").write_text(json.dumps(texts))
    info = json.loads((folder / "dataset_info.json").read_text())
    info["texts"] = {"file_name": "texts.json", "columns": {"prompt": "text"}}
    (folder / "dataset_info.json").write_text(json.dumps(info))
    return folder


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


EPOCHS = {
    "drop_last": {"dataloader_drop_last": True},
    "keep_last": {},
    "by_length": {"train_sampling_strategy": "group_by_length"},
    "in_order": {"disable_shuffling": True, "dataloader_drop_last": True},
    "workers": {"dataloader_num_workers": 1, "dataloader_drop_last": True},
}
# 27 samples in micro-batches of 2, 5 to a step: 13 of them without the last half one, so 3 steps
UNEVEN = {"max_samples": 27, "gradient_accumulation_steps": 5, "num_train_epochs": 2.0}


@pytest.mark.parametrize("name", EPOCHS)
def test_epochs_have_the_steps_of_the_loop(name, root, monkeypatch):
    cases.use("reference", monkeypatch)
    changes = UNEVEN | {"max_steps": None} | EPOCHS[name]
    loop, *_ = _train(root, f"loop-{name}", False, monkeypatch, **changes)
    major, *_ = _train(root, f"major-{name}", True, monkeypatch, **changes)
    assert len(loop) == 6
    assert major == pytest.approx(loop, rel=1e-5)


@pytest.mark.parametrize("drop_last", [True, False])
def test_ranks_have_the_samples_of_the_loop(drop_last, root, two_ranks):
    """7 micro-batches for each of both ranks, 3 to a step (6 without what is dropped)."""
    found = []
    for together in (False, True):
        config = {"format": "bf16", "layer_major": together}
        changes = UNEVEN | {"gradient_accumulation_steps": 3, "dataloader_drop_last": drop_last}
        args = lf_cases.arguments(
            root, f"ranks-{together}", kt_config=config, max_steps=None, **changes
        )
        found.append(two_ranks.run("train", args=args, engine="reference")[0]["losses"])
    loop, major = found
    assert len(loop) == (4 if drop_last else 6)
    assert major == pytest.approx(loop, rel=1e-5)


def test_resuming_in_the_middle_of_an_epoch(root, monkeypatch):
    cases.use("reference", monkeypatch)
    changes = UNEVEN | {"max_steps": 5, "save_steps": 2, "save_strategy": "steps"}
    changes |= {"dataloader_drop_last": True}
    whole, *_ = _train(root, "whole-uneven", True, monkeypatch, **changes)
    checkpoint = root / "whole-uneven" / "checkpoint-2"
    changes["resume_from_checkpoint"] = str(checkpoint)
    rest, *_ = _train(root, "rest-uneven", True, monkeypatch, **changes)
    assert rest[2:] == whole[2:]


def test_a_smaller_micro_batch_of_pairs_is_told(root, monkeypatch, caplog):
    """Its pairs count as the others in the mean; the loop counts micro-batches."""
    cases.use("reference", monkeypatch)
    monkeypatch.setattr(logging.getLogger("kt"), "propagate", True)
    changes = {"stage": "dpo", "dataset": "dpo", "max_steps": 1, "max_samples": 9}
    _train(root, "pairs", True, monkeypatch, **changes)
    assert "the last step of an epoch has a micro-batch of 1 pairs beside those of 2" in caplog.text
    caplog.clear()
    _train(root, "pairs", True, monkeypatch, **changes, dataloader_drop_last=True)
    assert "micro-batch of 1 pairs" not in caplog.text


_PAIRS = {"stage": "dpo", "dataset": "dpo"}
LOSSES = {
    "packing": {"packing": True, "neat_packing": True, "cutoff_len": 128},
    "prompts": {"train_on_prompt": True},
    "texts": {"stage": "pt", "dataset": "texts"},
    "dft": {"use_dft_loss": True},
    "eaft": {"use_eaft_loss": True},
    "hinge": _PAIRS | {"pref_loss": "hinge"},
    "ipo": _PAIRS | {"pref_loss": "ipo"},
    "orpo": _PAIRS | {"pref_loss": "orpo"},
    "simpo": _PAIRS | {"pref_loss": "simpo"},
    "ftx": _PAIRS | {"pref_ftx": 0.5},
    "smoothed": _PAIRS | {"dpo_label_smoothing": 0.1},
    "ld": _PAIRS | {"ld_alpha": 0.5},
}


@pytest.mark.parametrize("name", LOSSES)
def test_losses_that_do_not_depend_on_the_micro_batch(name, root, monkeypatch):
    cases.use("reference", monkeypatch)
    changes = {"max_steps": 2, "gradient_accumulation_steps": 2} | LOSSES[name]
    loop, *_ = _train(root, f"loop-{name}", False, monkeypatch, **changes)
    major, *_ = _train(root, f"major-{name}", True, monkeypatch, **changes)
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


def test_memory_is_predicted_for_all_micro_batches(root, capsys):
    """For 2 micro-batches of 2 rows at once, for two or four at a time."""
    at_once = []
    for kt_config in (TOGETHER | {"layer_major": False}, TOGETHER):
        lf_cases.run(lf_cases.arguments(root, "memory", kt_config=kt_config, max_steps=1))
        printed = capsys.readouterr().out
        at_once.append(int(re.search(r"at most (\d+) tokens at once", printed)[1]))
    assert at_once[1] == 2 * at_once[0]


def test_resuming_continues_where_it_stopped(root):
    """Four steps against two and two more; dropout on."""
    changes = {"lora_dropout": 0.1, "save_steps": 2, "save_strategy": "steps"}
    whole = lf_cases.arguments(root, "whole", kt_config=TOGETHER, **changes)
    lf_cases.run(whole)
    changes["resume_from_checkpoint"] = str(Path(whole["output_dir"]) / "checkpoint-2")
    rest = lf_cases.arguments(root, "rest", kt_config=TOGETHER, **changes)
    lf_cases.run(rest)
    losses = lf_cases.losses(whole["output_dir"])
    assert len(losses) == 4 and lf_cases.losses(rest["output_dir"])[2:] == losses[2:]


REFUSED = {
    "nothing to gather": (
        {"gradient_accumulation_steps": 1},
        "has no effect with gradient_accumulation_steps=1; raise",
    ),
    "kto": ({"stage": "kto", "dataset": "dpo"}, "would change the loss of stage=kto"),
    "asft": (
        {"use_asft_loss": True, "ref_model": "a model"},
        "would change the loss of use_asft_loss=True",
    ),
    "smoothing": (
        {"label_smoothing_factor": 0.1},
        "would change the loss of label_smoothing_factor=0.1, which is a mean per micro-batch",
    ),
    "kto_pair": (
        {"stage": "dpo", "dataset": "dpo", "pref_loss": "kto_pair"},
        "would change the loss of pref_loss=kto_pair",
    ),
    "bco": (
        {"stage": "dpo", "dataset": "dpo", "pref_bco_weight": 0.5},
        "would change the loss of pref_bco_weight=0.5",
    ),
    "router loss": (
        {"moe_aux_loss_coef": 1.0},
        "would change the loss of a model with a router loss .*moe_aux_loss_coef",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused_by_name(name, root):
    changes, message = REFUSED[name]
    with pytest.raises(ValueError, match=f"layer_major=true .*{message}"):
        lf_cases.run(lf_cases.arguments(root, "refused", kt_config=TOGETHER, **changes))


@pytest.mark.parametrize("stage", ["pt", "sft", "dpo"])
def test_the_router_loss_of_a_config(stage, root):
    """Refused where the loss is the model's own; preference losses have no router loss."""
    config = json.loads((root / "model" / "config.json").read_text())
    folder = root / "with-router-loss"
    shutil.copytree(root / "model", folder, dirs_exist_ok=True)
    config |= {"output_router_logits": True, "router_aux_loss_coef": 1.0}
    (folder / "config.json").write_text(json.dumps(config))
    dataset = {"pt": "texts", "sft": "sft", "dpo": "dpo"}[stage]
    args = lf_cases.arguments(
        root,
        f"router-{stage}",
        stage=stage,
        dataset=dataset,
        model_name_or_path=str(folder),
        max_steps=1,
    )
    if stage == "dpo":
        lf_cases.run(args | {"kt_config": TOGETHER})
        together = lf_cases.losses(args["output_dir"])
        lf_cases.run(args)
        assert together == pytest.approx(lf_cases.losses(args["output_dir"]), rel=1e-3)
        return
    with pytest.raises(ValueError, match="layer_major=true would change .* a router loss"):
        lf_cases.run(args | {"kt_config": TOGETHER})
    assert not list((root / f"router-{stage}").glob("adapter_model*"))


class _Composite(transformers.PreTrainedModel):
    """A multimodal model's outside."""

    def __init__(self, config):
        super().__init__(config)


@pytest.mark.parametrize("stage", ["pt", "sft", "dpo", "rm"])
def test_losses_that_show_with_the_model_only(stage):
    """A trainer that takes means of micro-batches, as LLaMA-Factory's do of a model with a
    processor, and a router loss that the text part of a config asks for."""
    config = transformers.Qwen3VLMoeConfig()
    model = _Composite(config)
    trainer = SimpleNamespace(
        model=model,
        accelerator=SimpleNamespace(unwrap_model=lambda m: m),
        compute_loss_func=None,
        model_accepts_loss_kwargs=False,
    )
    own = stage in ("pt", "sft")
    expected = pytest.raises(ValueError, match="a _Composite, which .* the mean of every")
    with expected if own else nullcontext():
        layer_major._check_loss(trainer, stage)
    trainer.model_accepts_loss_kwargs = True
    layer_major._check_loss(trainer, stage)
    config.text_config.output_router_logits = True
    expected = pytest.raises(ValueError, match="router loss")
    with expected if own else nullcontext():
        layer_major._check_loss(trainer, stage)
    trainer.compute_loss_func = len  # computed from logits
    layer_major._check_loss(trainer, stage)


def test_deepspeed_is_refused():
    training = SimpleNamespace(
        gradient_accumulation_steps=2, deepspeed="ds.json", label_smoothing_factor=0.0
    )
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
