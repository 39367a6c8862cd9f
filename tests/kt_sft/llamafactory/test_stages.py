"""Every stage and training option of LLaMA-Factory that works with experts on the CPU acts."""

from __future__ import annotations

import json
from pathlib import Path

import lf_cases
import pytest
import sft_cases as cases
import stage_cases
import torch
from safetensors.torch import load_file
from transformers import AutoTokenizer

from kt_core import adapters, hf
from kt_core.adapters.peft_format import WEIGHTS_FILE, read_adapter

LOG2 = 0.6931471805599453


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return stage_cases.workspace(tmp_path_factory.mktemp("stages"))


def _run(root, name, **changes):
    args = lf_cases.arguments(root, name, **changes)
    lf_cases.run(args)
    return Path(args["output_dir"])


def _log(out: Path) -> list[dict]:
    return json.loads((out / "trainer_state.json").read_text())["log_history"]


@pytest.fixture(scope="module")
def tuned(root):
    """An adapter with B != 0 in every module, from four steps of SFT."""
    return _run(root, "tuned")


def _experts_changed(root, out: Path) -> None:
    """The adapter has expert factors that change the model's answers."""
    data = read_adapter(out)
    assert data.projections == ["gate", "up", "down"]
    assert all(f.b.any() for m in data.experts.values() for f in m.values())
    model, ids = hf.load_model(root / "model", format="bf16"), cases.token_ids()
    base = cases.logits(model, ids)
    adapters.load_adapter(model, out, "a")
    with adapters.adapter(model, "a"):
        assert not torch.equal(cases.logits(model, ids), base)


# ------------------------------------------------------------------------------------------ stages

STAGES = {
    "pt": {"stage": "pt", "dataset": "pt"},
    "orpo": {"stage": "dpo", "dataset": "dpo", "pref_loss": "orpo"},
    "simpo": {"stage": "dpo", "dataset": "dpo", "pref_loss": "simpo"},
    "kto": {"stage": "kto", "dataset": "kto"},
}


@pytest.mark.parametrize("name", STAGES)
def test_a_stage_trains_the_experts(name, root):
    out = _run(root, name, gradient_accumulation_steps=1, **STAGES[name])
    losses = lf_cases.losses(out)
    assert len(losses) == 4 and min(losses[2:]) < losses[0]
    _experts_changed(root, out)


def _margins(out: Path) -> dict[str, float]:
    return {k: v for k, v in _log(out)[0].items() if k.startswith("rewards/")}


def test_f15_dpo_starts_without_preference(root):
    """The reference is the model with its adapter off, inside the kernels too."""
    out = _run(root, "dpo", stage="dpo", dataset="dpo", gradient_accumulation_steps=1)
    losses, first = lf_cases.losses(out), _margins(out)
    assert abs(losses[0] - LOG2) < 1e-6 and losses[-1] < losses[0]
    assert first["rewards/chosen"] == first["rewards/rejected"] == first["rewards/margins"] == 0.0
    assert _log(out)[3]["rewards/margins"] > 0.0


def test_f15_kto_starts_without_preference(root):
    out = _run(root, "kto15", stage="kto", dataset="kto", gradient_accumulation_steps=1)
    first = _margins(out)
    assert first and all(value == 0.0 for value in first.values())
    assert abs(lf_cases.losses(out)[0] - 0.5) < 1e-6


def test_f15_dpo_from_a_tuned_adapter_with_a_frozen_copy_as_reference(root, tuned):
    """Step 0 has margin exactly 0 although the adapter is far from zero; against the base, not."""
    changes = {"stage": "dpo", "dataset": "dpo", "gradient_accumulation_steps": 1, "max_steps": 1}
    frozen = {"ref_model": str(root / "model"), "ref_model_adapters": str(tuned)}
    for name, extra in (("frozen", frozen), ("base", {})):
        out = _run(root, name, adapter_name_or_path=str(tuned), **changes, **extra)
        first = _margins(out)
        if extra:
            assert first["rewards/margins"] == first["rewards/chosen"] == 0.0
            assert abs(lf_cases.losses(out)[0] - LOG2) < 1e-6
        else:
            assert first["rewards/chosen"] != 0.0


# ------------------------------------------------------------------------------------ reward models


@pytest.fixture(scope="module")
def reward(root):
    """A reward model trained long enough to tell the pairs apart, with checkpoints."""
    return _run(root, "rm", stage="rm", dataset="dpo", max_steps=24, save_strategy="steps",
                save_steps=12, learning_rate=1e-2)  # fmt: skip


def _scores(root, reward: Path, name: str) -> tuple[dict, list]:
    """LLaMA-Factory's own evaluation and prediction with the reward model, loaded again."""
    out = _run(root, name, stage="rm", do_train=None, do_eval=True, do_predict=True,
               eval_dataset="dpo", dataset=None, adapter_name_or_path=str(reward),
               per_device_eval_batch_size=4)  # fmt: skip
    lines = (out / "generated_predictions.jsonl").read_text().splitlines()
    return json.loads((out / "eval_results.json").read_text()), [json.loads(x) for x in lines]


def test_a_reward_model_trains_saves_and_loads_again(root, reward):
    losses = lf_cases.losses(reward)
    assert abs(losses[0] - LOG2) < 0.5 and losses[-1] < 0.2
    head = load_file(reward / "value_head.safetensors")
    assert {tuple(t.shape) for t in head.values()} == {(1, 64), (1,)}
    assert not (reward / "model.safetensors").exists()
    _experts_changed(root, reward)
    results, scores = _scores(root, reward, "rm-eval")
    assert results["eval_accuracy"] > 0.9 and results["eval_loss"] < 0.3
    # The same by hand: kt_core's model with the adapter, its last hidden state, the head
    model = hf.load_model(root / "model", format="bf16")
    adapters.load_adapter(model, reward, "reward")
    tokenizer = AutoTokenizer.from_pretrained(reward)
    record = json.loads((root / "dpo.json").read_text())[0]
    for answer in ("chosen", "rejected"):
        text = (
            f"<|im_start|>user\n{record['instruction']}<|im_end|>\n<|im_start|>assistant\n"
            f"{record[answer]}<|im_end|>\n"
        )
        ids = tokenizer(text, return_tensors="pt", add_special_tokens=False).input_ids
        with torch.no_grad(), adapters.adapter(model, "reward"):
            last = model(input_ids=ids, output_hidden_states=True).hidden_states[-1][0, -1]
        got = float(head["v_head.summary.weight"][0] @ last.float() + head["v_head.summary.bias"])
        assert abs(got - scores[0][answer]) < 0.02 * max(1.0, abs(got))


def test_a_checkpoint_of_a_reward_model_has_its_own_head(reward):
    head = load_file(reward / "checkpoint-12" / "value_head.safetensors")
    last = load_file(reward / "value_head.safetensors")
    assert head.keys() == last.keys() and any(not torch.equal(head[k], last[k]) for k in head)
    assert read_adapter(reward / "checkpoint-12").projections == ["gate", "up", "down"]


def test_a_reward_model_resumes_where_it_stopped(root):
    """4 steps against 2, then 2 more from the checkpoint; dropout on."""
    changes = {"stage": "rm", "dataset": "dpo", "save_strategy": "steps", "save_steps": 2,
               "lora_dropout": 0.1}  # fmt: skip
    whole = _run(root, "rm-whole", **changes)
    rest = _run(root, "rm-rest", resume_from_checkpoint=str(whole / "checkpoint-2"), **changes)
    assert lf_cases.losses(rest)[2:] == lf_cases.losses(whole)[2:]
    for name in ("value_head.safetensors", WEIGHTS_FILE):
        a, b = load_file(whole / name), load_file(rest / name)
        assert a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)


# ----------------------------------------------------------------------------------------- options


def test_packing_and_neat_packing(root):
    """Four short records in one sequence: neat packing keeps them apart, packing does not, and
    neither changes how many tokens count."""
    few = {"max_samples": 4, "max_steps": 1, "cutoff_len": 256, "disable_shuffling": True,
           "preprocessing_batch_size": 4}  # fmt: skip
    apart = _run(root, "apart", per_device_train_batch_size=4, gradient_accumulation_steps=1, **few)
    packed = {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 1} | few
    together = _run(root, "packed", packing=True, **packed)
    neat = _run(root, "neat", neat_packing=True, **packed)
    want, mixed, got = (lf_cases.losses(out)[0] for out in (apart, together, neat))
    assert abs(got - want) <= 1e-3 * want
    assert abs(mixed - want) > 1e-3 * want
    _experts_changed(root, neat)


def test_evaluation_during_training_and_compute_accuracy(root):
    """The numbers in the log are those of the model as it is at that step, adapter on."""
    out = _run(root, "accuracy", eval_dataset="sft", compute_accuracy=True, eval_strategy="steps",
               eval_steps=12, max_steps=24, learning_rate=1e-2,
               per_device_eval_batch_size=8)  # fmt: skip
    evals = [entry for entry in _log(out) if "eval_loss" in entry]
    assert [entry["step"] for entry in evals] == [12, 24]
    assert evals[1]["eval_loss"] < evals[0]["eval_loss"] < 5.5
    assert evals[1]["eval_accuracy"] > 0.5
    again = _run(root, "accuracy-again", do_train=None, do_eval=True, dataset=None,
                 eval_dataset="sft", compute_accuracy=True, adapter_name_or_path=str(out),
                 per_device_eval_batch_size=8)  # fmt: skip
    results = json.loads((again / "eval_results.json").read_text())
    for key in ("eval_loss", "eval_accuracy"):
        assert results[key] == pytest.approx(evals[1][key], rel=2e-2)


class _Counted:
    """In the place of LLaMA-Factory's BLEU and ROUGE, whose packages are large: answers that are
    exactly the reference's."""

    def __init__(self, tokenizer):
        self.tokenizer = tokenizer

    def __call__(self, predictions, compute_result=True):
        answers, labels = predictions.predictions, predictions.label_ids
        texts = [
            self.tokenizer.batch_decode(
                [[t for t in row if t >= 0] for row in rows], skip_special_tokens=True
            )
            for rows in (answers, labels)
        ]
        same = [a.strip() == b.strip() for a, b in zip(*texts, strict=True)]
        return {"same": sum(same) / len(same)}


def test_predict_with_generate(root, monkeypatch):
    """Generation inside the Trainer gives what the adapter gives in kt_core."""
    from llamafactory.hparams import parser
    from llamafactory.train.sft import workflow

    check = parser.check_version
    optional = ("jieba", "nltk", "rouge_chinese")
    monkeypatch.setattr(
        parser, "check_version", lambda p, **kw: None if p in optional else check(p, **kw)
    )
    monkeypatch.setattr(workflow, "ComputeSimilarity", _Counted)
    greedy = {"predict_with_generate": True, "eval_dataset": "sft", "do_sample": False,
              "max_new_tokens": 24, "per_device_eval_batch_size": 8}  # fmt: skip
    out = _run(root, "learnt", eval_strategy="steps", eval_steps=60, max_steps=60, max_samples=1,
               learning_rate=1e-2, gradient_accumulation_steps=1, **greedy)  # fmt: skip
    assert [e["eval_same"] for e in _log(out) if "eval_same" in e] == [1.0]
    predicted = _run(root, "predicted", do_train=None, do_predict=True, dataset=None,
                     adapter_name_or_path=str(out), max_samples=1, **greedy)  # fmt: skip
    lines = (predicted / "generated_predictions.jsonl").read_text().splitlines()
    for line in map(json.loads, lines):
        assert line["predict"].strip() == line["label"].strip() != ""
    base = _run(root, "base", do_train=None, do_predict=True, dataset=None, max_samples=1,
                **greedy)  # fmt: skip
    results = [json.loads((o / "predict_results.json").read_text()) for o in (predicted, base)]
    assert [r["predict_same"] for r in results] == [1.0, 0.0]


def test_rslora_scales_the_experts(root):
    for name, changes, scale in (("rslora", {"use_rslora": True}, 8 / 2), ("plain", {}, 8 / 4)):
        data = read_adapter(_run(root, name, max_steps=1, lora_alpha=8, **changes))
        assert {f.scaling for m in data.experts.values() for f in m.values()} == {scale}
    losses = [lf_cases.losses(_run(root, n, lora_alpha=8, **c)) for n, c in (
        ("rs4", {"use_rslora": True}), ("pl4", {}))]  # fmt: skip
    assert losses[0][0] == losses[1][0] and losses[0][2] != losses[1][2]


@pytest.mark.parametrize("option", ["fp16_full_eval", "bf16_full_eval"])
def test_evaluation_in_16_bits(option, root, tuned):
    """The whole model, LoRA factors too, is cast for it."""
    found = []
    for changes in ({}, {option: True}):
        out = _run(root, "eval16", do_train=None, do_eval=True, eval_dataset="sft", dataset=None,
                   adapter_name_or_path=str(tuned), **changes)  # fmt: skip
        found.append(json.loads((out / "all_results.json").read_text())["eval_loss"])
    assert found[1] == pytest.approx(found[0], rel=1e-2)


@pytest.mark.parametrize("option", ["use_muon", "use_adam_mini"])
def test_optimizers_with_a_rule_for_matrices(option, root, monkeypatch):
    """The experts' factors are stacks of matrices, which LLaMA-Factory's Muon would leave to AdamW:
    refused. Attention alone trains."""
    import llamafactory.hparams.parser as parser

    monkeypatch.setattr(parser, "check_version", lambda *args, **kw: None)  # adam_mini is not here
    with pytest.raises(ValueError, match=rf"{option}=True .*mlp\.experts are .*; remove {option}"):
        _run(root, "matrices", max_steps=1, **{option: True})
    if option == "use_muon":
        out = _run(root, "matrices", max_steps=1, use_muon=True, lora_target="q_proj,v_proj")
        tensors = load_file(out / WEIGHTS_FILE)
        # Muon's update is close to orthogonal: of B, every column gets one of the same length
        b = tensors["base_model.model.model.layers.0.self_attn.q_proj.lora_B.weight"]
        lengths = b.norm(dim=0)
        assert lengths.min() > 0.4 * lengths.max() > 0


def test_loraplus_steps_b_of_the_experts_further(root):
    """Adam's first step moves every element by its learning rate, and B starts at 0."""
    moved = {}
    for ratio in (None, 16.0):
        out = _run(root, "plus", loraplus_lr_ratio=ratio, max_steps=1, learning_rate=1e-4,
                   lr_scheduler_type="constant")  # fmt: skip
        data = read_adapter(out)
        tensors = [f.b for m in data.experts.values() for f in m.values()]
        moved[ratio] = max(float(b.abs().max()) for b in tensors)
    assert moved[None] == pytest.approx(1e-4, rel=0.01)
    assert moved[16.0] == pytest.approx(16e-4, rel=0.01)


def test_resize_vocab_and_additional_target(root):
    """New tokens: embeddings and head are trained and saved whole beside the LoRA, and load."""
    words = {"add_special_tokens": "<|new1|>,<|new2|>", "resize_vocab": True, "bf16": True}
    plain = _run(root, "few", bf16=True, max_steps=2)
    out = _run(root, "words", max_steps=2, **words)
    tensors = load_file(out / WEIGHTS_FILE)
    whole = {k.removeprefix("base_model.model."): t for k, t in tensors.items() if "lora_" not in k}
    assert set(whole) == {"model.embed_tokens.weight", "lm_head.weight"}
    assert not any("lora_" not in k for k in load_file(plain / WEIGHTS_FILE))
    base = load_file(root / "model" / "model.safetensors")
    rows = len(base["lm_head.weight"])
    assert not torch.equal(whole["lm_head.weight"][:rows].bfloat16(), base["lm_head.weight"])
    more = _run(root, "words2", max_steps=1, adapter_name_or_path=str(out), **words)
    assert lf_cases.losses(more)[0] < lf_cases.losses(out)[0]
    _experts_of(out)
    head = _run(root, "head", max_steps=2, bf16=True, additional_target="lm_head")
    assert [k for k in load_file(head / WEIGHTS_FILE) if "lora_" not in k] == [
        "base_model.model.lm_head.weight"
    ]


def _experts_of(out: Path) -> None:
    data = read_adapter(out)
    assert all(f.b.any() for m in data.experts.values() for f in m.values())


def test_evaluation_does_not_touch_the_factors(root, tuned, monkeypatch):
    """Dropout is off in evaluation: twice the same loss, whatever the generator's state."""
    results = []
    for name in ("e1", "e2"):
        torch.manual_seed(len(results))
        out = _run(root, name, do_train=None, do_eval=True, dataset=None, eval_dataset="sft",
                   adapter_name_or_path=str(tuned), lora_dropout=0.5)  # fmt: skip
        results.append(json.loads((out / "eval_results.json").read_text())["eval_loss"])
    assert results[0] == results[1]
