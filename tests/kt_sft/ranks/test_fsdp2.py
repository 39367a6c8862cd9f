"""accelerate's FSDP2 on CPU ranks (gloo): DTensors, gradients, clipping, saving, resuming, and its
settings; see rank_train_cases.py.
"""

from __future__ import annotations

import json
from pathlib import Path

import lf_cases
import pytest
import safetensors.torch
import sft_cases as cases
import torch
from peft import PeftModel
from torch.distributed.checkpoint import FileSystemReader

from kt_core.adapters.peft_format import WEIGHTS_FILE, read_adapter
from kt_sft.report.step_log import HEAT_MAP
from kt_sft.report.trainer_log import KEYS


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return lf_cases.workspace(tmp_path_factory.mktemp("lf"))


@pytest.mark.parametrize("engine", cases.ENGINES)
def test_f1_f5_two_ranks_against_one_process(engine, tmp_path, monkeypatch, two_ranks):
    """F1: rank-specific values come back from the saved adapter, every tensor by name. F5: the
    gradients of both ranks together are those of one process."""
    cases.use(engine, monkeypatch)
    path = cases.checkpoint(tmp_path)
    cases.adapted(cases.load(path)).save_pretrained(tmp_path / "adapter")
    answers = two_ranks.run(
        "fsdp_against_one_process",
        engine=engine,
        path=path,
        adapter=tmp_path / "adapter",
        out=tmp_path,
    )
    found, full, tuned = answers[0]
    # the mean over two ranks and the mean of two losses round differently; both are fp32 sums
    assert found.pop("gradient error") <= (1e-5 if engine == "reference" else 1e-3)
    assert found == {
        "fsdp2": True,
        "dtensors": True,
        "trained": True,
        "counts": True,
        "optimizer": True,
        "base experts in tree": 0,
        "expert modules": 2,
        "disabled": 0.0,
        "same batch": 0.0,
    }
    for saved in ("gathered", "by_all"):
        again = PeftModel.from_pretrained(cases.load(path), tmp_path / saved)
        got = dict(again.named_parameters())
        assert full and all(torch.equal(got[n], t) for n, t in full.items())
        assert torch.equal(cases.logits(again, cases.token_ids(2, 24)), tuned)


def losses(group, args, **kw):
    """The losses of a run under FSDP2, and the dtypes of the parameters by whether they train."""
    answer = group.run("train", args=args, fsdp=kw.pop("fsdp", {}), **kw)[0]
    return answer["losses"], dict(sorted((t, d) for d, t in answer["dtypes"]))


def test_every_rank_reads_the_weights_or_only_the_first(root, two_ranks):
    """fsdp_cpu_ram_efficient_loading off and on: the same run; its adapter is complete."""
    on = lf_cases.arguments(root, "on")
    off = lf_cases.arguments(root, "off")
    first, dtypes = losses(two_ranks, on)
    second, _ = losses(two_ranks, off, fsdp={"FSDP_CPU_RAM_EFFICIENT_LOADING": "false"})
    assert first == second and first[-1] < first[0]
    assert dtypes == {False: "torch.bfloat16", True: "torch.float32"}
    data = read_adapter(on["output_dir"])
    assert data.projections == ["gate", "up", "down"] and len(data.dense) == 8
    state = json.loads((Path(on["output_dir"]) / "trainer_state.json").read_text())
    assert all(set(KEYS) <= set(entry) for entry in state["log_history"] if "loss" in entry)
    assert (Path(on["output_dir"]) / HEAT_MAP).exists()


def test_bf16_mixed_precision_keeps_lora_in_fp32(root, two_ranks):
    plain, _ = losses(two_ranks, lf_cases.arguments(root, "plain"))
    mixed, dtypes = losses(two_ranks, lf_cases.arguments(root, "mixed", bf16=True))
    assert dtypes[True] == "torch.float32"
    assert mixed == pytest.approx(plain, rel=5e-3) and mixed != plain


@pytest.mark.parametrize("kind", ["FULL_STATE_DICT", "SHARDED_STATE_DICT"])
def test_resume(kind, root, two_ranks):
    """4 steps against 2 and 2 more from the checkpoint, dropout on; what the checkpoint holds."""
    fsdp = {"FSDP_STATE_DICT_TYPE": kind}
    changes = {"save_steps": 2, "save_strategy": "steps", "lora_dropout": 0.1}
    whole = lf_cases.arguments(root, f"whole-{kind}", **changes)
    before, _ = losses(two_ranks, whole, fsdp=fsdp)
    checkpoint = Path(whole["output_dir"]) / "checkpoint-2"
    rest = lf_cases.arguments(
        root, f"rest-{kind}", resume_from_checkpoint=str(checkpoint), **changes
    )
    after, _ = losses(two_ranks, rest, fsdp=fsdp)
    assert after[2:] == before[2:]
    a, b = (
        safetensors.torch.load_file(Path(r["output_dir"]) / WEIGHTS_FILE) for r in (whole, rest)
    )
    assert a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)
    if kind == "FULL_STATE_DICT":
        names = torch.load(checkpoint / "pytorch_model_fsdp.bin").keys()
    else:
        names = FileSystemReader(checkpoint / "pytorch_model_fsdp_0").read_metadata()
        names = names.state_dict_metadata.keys()
    assert len(names) == 28 and all("lora_" in name for name in names)
    # The adapter twice (for PEFT and for FSDP), two moments of every parameter; torch's sharded
    # format adds half a kilobyte per tensor and rank.
    size = sum(p.stat().st_size for p in checkpoint.rglob("*") if p.is_file())
    assert size < 4 * 4 * 23552 + (150_000 if kind == "FULL_STATE_DICT" else 500_000), size
    with pytest.raises(ValueError, match="was saved by 2 processes, but this run has 1"):
        lf_cases.run(rest)


def test_persistent_buffers_of_every_kind(tmp_path, two_ranks):
    """As the first rank has them: values, dtypes, whole, and in the state dict as before."""
    path = cases.checkpoint(tmp_path)
    for answer in two_ranks.run("buffers_of_every_kind", path=path):
        assert answer.pop("loss") == pytest.approx(0, abs=1e-6)
        assert answer == {
            "wrong": [],
            "buffers": 18,
            "in the state dict": 15,
            "not persistent": 0,
        }


def test_a_router_with_a_buffer_trains_saves_and_resumes(tmp_path, two_ranks):
    """DeepSeek-V3's e_score_correction_bias, with the settings of fsdp2_cpu.yaml: the losses of one
    process, and 4 steps against 2 and 2 more."""
    root = lf_cases.workspace(tmp_path, "deepseek_v3", dtype=torch.float32)
    tensors = safetensors.torch.load_file(root / "model" / "model.safetensors")
    biases = [name for name in tensors if name.endswith("e_score_correction_bias")]
    assert len(biases) == 2  # large enough to decide which experts are chosen
    for number, name in enumerate(biases):
        generator = torch.Generator().manual_seed(number)
        tensors[name] = torch.randn(tensors[name].shape, generator=generator)
    safetensors.torch.save_file(tensors, root / "model" / "model.safetensors", {"format": "pt"})
    alone = lf_cases.arguments(root, "alone", gradient_accumulation_steps=4)
    lf_cases.run(alone)
    whole = lf_cases.arguments(root, "whole", save_steps=2, save_strategy="steps")
    before, _ = losses(two_ranks, whole)
    assert before == pytest.approx(lf_cases.losses(alone["output_dir"]), rel=1e-3)
    checkpoint = Path(whole["output_dir"]) / "checkpoint-2"
    rest = lf_cases.arguments(root, "rest", resume_from_checkpoint=str(checkpoint))
    after, _ = losses(two_ranks, rest)
    assert after[2:] == before[2:]
    a, b = (
        safetensors.torch.load_file(Path(r["output_dir"]) / WEIGHTS_FILE) for r in (whole, rest)
    )
    assert a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)


@pytest.mark.slow
def test_dpo_under_fsdp2(root, two_ranks):
    dpo = {"stage": "dpo", "dataset": "dpo", "gradient_accumulation_steps": 1}
    found, _ = losses(two_ranks, lf_cases.arguments(root, "dpo", **dpo))
    assert abs(found[0] - 0.693147) < 1e-6 and found[-1] < found[0]
