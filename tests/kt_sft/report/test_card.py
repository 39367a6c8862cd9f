"""README.md of an adapter directory, and the held-out loss on both bases in it."""

from __future__ import annotations

import json
import re
from pathlib import Path

import lf_cases
import pytest
from huggingface_hub import ModelCard

from kt_sft.report.stats import STATS_FILE


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return lf_cases.workspace(tmp_path_factory.mktemp("card"))


@pytest.fixture(scope="module")
def out(root):
    """int4 experts, so that the two bases differ; trained far enough for the adapter to matter."""
    args = lf_cases.arguments(
        root,
        "out",
        kt_config={"format": "int4", "merged_eval": 2, "lora_rank": {"experts": 2}},
        eval_dataset="sft",
        per_device_eval_batch_size=8,
        max_steps=12,
        eval_strategy="steps",
        eval_steps=12,
    )
    lf_cases.run(args)
    return Path(args["output_dir"])


def _rows(card: ModelCard) -> dict[str, str]:
    return dict(re.findall(r"^\| ([^|]+?) \| ([^|]+?) \|$", card.text, re.M))


def test_the_card_says_what_was_trained_and_how(root, out):
    card = ModelCard.load(out / "README.md")
    stats, rows = json.loads((out / STATS_FILE).read_text()), _rows(card)
    assert card.data.base_model == str(root / "model") and card.data.library_name == "peft"
    assert "kt-sft" in card.data.tags and "kt-kernel" not in card.data.tags
    assert rows["base model"] == f"`{root / 'model'}`" and rows["data"] == "`sft`"
    assert rows["expert weights in training"] == "int4, one scale per 32 weights"
    assert rows["LoRA"] == "rank 4, alpha 8, dropout 0.0; ranks by group {'experts': 2}"
    total = sum(stats["trainable"].values())
    assert rows["trained parameters"].startswith(f"{total:,} (attention 3,584, experts 9,984")
    assert "learning rate 0.005 (linear" in rows["optimizer"]
    assert rows["batch"] == "2 records x 2 accumulated x 1 processes"
    assert rows["length"].startswith("12 steps") and rows["compute"] == "fp32"
    assert rows["training loss"] == (
        f"{stats['first_loss']:.4f} at the first logged step, {stats['last_loss']:.4f} at the last"
    )
    assert rows["speed"].startswith(f"{stats['tokens_per_s']:.1f} tokens/s")
    assert rows["peak memory"].startswith(f"{stats['peak_rss_bytes'] / 2**30:.2f} GiB")


def test_held_out_loss_on_both_bases(root, out):
    """As trained: as the run's own evaluation on those records. Merged: as stock LLaMA-Factory
    evaluates the exported checkpoint."""
    from llamafactory.train.tuner import export_model

    rows = _rows(ModelCard.load(out / "README.md"))
    pattern = r"([\d.]+) \(16 records\)"
    key = "held-out loss, as trained (int4, one scale per 32 weights)"
    as_trained, merged = (
        float(re.fullmatch(pattern, rows[k])[1]) for k in (key, "held-out loss, merged into bf16")
    )
    assert as_trained != merged and abs(as_trained - merged) < 0.2
    export_model(
        {
            "model_name_or_path": str(root / "model"),
            "adapter_name_or_path": str(out),
            "template": "chatml",
            "use_kt": True,
            "export_dir": str(root / "merged"),
        }
    )
    common = {
        "stage": "sft", "do_train": None, "do_eval": True, "dataset": None, "eval_dataset": "sft",
        "max_samples": 16, "per_device_eval_batch_size": 8,
    }  # fmt: skip
    plain = {"use_kt": None, "kt_config": None, "model_name_or_path": str(root / "merged")}
    for name, changes, want in (
        ("again", {"adapter_name_or_path": str(out), "kt_config": {"format": "int4"}}, as_trained),
        ("stock", plain, merged),
    ):
        args = lf_cases.arguments(root, name, **common, **changes)
        lf_cases.run(args)
        results = json.loads((Path(args["output_dir"]) / "eval_results.json").read_text())
        assert results["eval_loss"] == pytest.approx(want, rel=4e-3), name


@pytest.mark.parametrize(
    ("changes", "held"),
    [
        ({"max_steps": 1}, False),
        ({"max_steps": 1, "eval_dataset": "sft", "kt_config": {"merged_eval": 0}}, False),
        ({"max_steps": 1, "eval_dataset": "dpo", "dataset": "dpo", "stage": "dpo"}, True),
        ({"max_steps": 1, "eval_dataset": "dpo", "dataset": "dpo", "stage": "rm"}, True),
    ],
    ids=["no evaluation set", "switched off", "dpo", "rm"],
)
def test_cards_of_other_runs(changes, held, root):
    changes = {"kt_config": {"format": "bf16", "merged_eval": 1}} | changes
    args = lf_cases.arguments(root, "other", **changes)
    lf_cases.run(args)
    rows = _rows(ModelCard.load(Path(args["output_dir"]) / "README.md"))
    if held:
        losses = [float(v.split()[0]) for k, v in rows.items() if k.startswith("held-out")]
        assert len(losses) == 2 and losses[0] == pytest.approx(losses[1], rel=0.05)
    else:
        assert rows["held-out loss"].startswith("not measured")
