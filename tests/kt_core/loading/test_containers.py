"""Containers of quantized weights: values, logits, training, merging, serving, what is named."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import containers
import pytest
import sft_cases
import torch
import transformers
from safetensors.torch import load_file

from kt_core import adapters, hf
from kt_core.loading import container, prequantized
from kt_core.loading.files import CheckpointFiles
from kt_core.loading.parts import Quantized
from kt_core.module import KTExpertsLinear
from kt_core.serve import loading
from kt_core.settings import ExpertSettings

IDS = sft_cases.token_ids()


def weights_of(path):
    return {w.name: w for w in CheckpointFiles([path / "model.safetensors"]).weights}


def equal(case, ours, reference):
    if case.error:
        assert (ours - reference).norm() <= case.error * reference.norm()
    else:
        assert torch.equal(ours, reference)


@pytest.mark.parametrize("name", containers.CASES)
def test_values_and_logits_are_those_of_the_reference(name, tmp_path, caplog):
    """Of every weight; then of a model, and of the same one dequantized by the reference."""
    case = containers.CASES[name]
    published, plain = containers.write(case, tmp_path)
    expected = load_file(plain / "model.safetensors")
    quantized = {k: w for k, w in weights_of(published).items() if isinstance(w, Quantized)}
    assert len(quantized) == (4 if case.stacked else 56)
    for key, weight in quantized.items():
        if not case.stacked:
            assert weight.shape == expected[key].shape
            equal(case, weight[...], expected[key])
            assert torch.equal(weight[0, slice(8, 40)], weight[...][8:40])
    with caplog.at_level(logging.INFO, "kt"):
        model = hf.load_model(published, format="bf16", dtype=torch.float32)
    assert ("beside the experts are stored as" in caplog.text) == (not case.stacked)
    assert "were re-encoded as bf16, with a relative error of" in caplog.text
    assert not hasattr(model.config, "quantization_config")
    other = hf.load_model(plain, format="bf16", dtype=torch.float32)
    for ours, reference in zip(layers(model), layers(other), strict=True):
        for projection in ("gate", "up", "down"):
            equal(case, ours.get(3, projection), reference.get(3, projection))
    if not case.error:
        assert torch.equal(sft_cases.logits(model, IDS), sft_cases.logits(other, IDS))


def layers(model):
    return [m.experts for m in model.modules() if isinstance(m, KTExpertsLinear)]


@pytest.mark.parametrize("name", ["fp8 blocks", "gptq act", "mxfp4"])
def test_trains_merges_and_serves(name, tmp_path):
    """An adapter on a quantized base; merged into bf16 weights that stock transformers loads."""
    case = containers.CASES[name]
    published, _ = containers.write(case, tmp_path, tokenizer=True)
    base = sft_cases.load(published)
    model = sft_cases.adapted(base)
    grads = sft_cases.gradients(model, IDS)
    assert any(".experts." in n for n in grads) and all(g.abs().max() > 0 for g in grads.values())
    model.save_pretrained(tmp_path / "adapter")
    adapters.merge(published, tmp_path / "adapter", tmp_path / "merged")
    assert "quantization_config" not in json.loads((tmp_path / "merged/config.json").read_text())
    stored = load_file(tmp_path / "merged/model.safetensors")
    assert {t.dtype for n, t in stored.items() if "_proj" in n and ".experts." in n} == {
        torch.bfloat16
    }
    merged = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "merged", dtype=torch.float32
    )
    ours, theirs = sft_cases.logits(model, IDS), sft_cases.logits(merged, IDS)
    assert (ours - theirs).norm(dim=-1).median() <= 2e-2 * theirs.norm(dim=-1).median()
    plan = loading.check(str(published), None, [str(tmp_path / "adapter")], ExpertSettings())
    plan.load().engine.close()  # it has seen that the adapter acts


def test_files_of_before_config_json(tmp_path):
    """AutoGPTQ's quantize_config.json, where config.json is silent."""
    case = containers.CASES["gptq zeros"]
    published, plain = containers.write(case, tmp_path)
    settings = {k: v for k, v in case.settings.items() if k != "quant_method"}
    (published / "quantize_config.json").write_text(json.dumps(settings))
    config = json.loads((published / "config.json").read_text())
    del config["quantization_config"]
    (published / "config.json").write_text(json.dumps(config))
    expected = load_file(plain / "model.safetensors")
    name = "model.layers.1.mlp.experts.3.up_proj.weight"
    assert torch.equal(weights_of(published)[name][...], expected[name])
    prequantized.refuse_directory(published)


EXPERT = "model.layers.1.mlp.experts.3.up_proj"
# case, what is done to its tensors, what to its settings, what is said
WRONG = [
    ("fp8 blocks", {".weight_scale_inv": None}, {}, "is FP8, but neither .*weight_scale_inv nor"),
    ("fp8 blocks", {".weight_scale_inv": lambda t: t[:, :1]}, {}, r"scale_inv .* is F32 \[1, 1\]"),
    ("fp8 blocks", {}, {"weight_block_size": 128}, "weight_block_size of config.json is 128"),
    ("fp8 blocks", {".weight": lambda t: t[:, :9]}, {}, "one for each 128 x 128 of them"),
    ("fp8 blocks", {".weight_scale_inv": lambda t: t * torch.nan}, {}, "holds NaN or Inf"),
    ("gptq", {".scales": None}, {}, r"up_proj.qweight .* is quantized, but .*scales is missing"),
    ("gptq", {".qzeros": lambda t: t[:1]}, {}, r"qzeros .* is I32 \[1, 16\] where"),
    ("gptq", {}, {"bits": 5}, "bits of GPTQ is 5; 2, 3, 4, 8 are read"),
    ("gptq", {}, {"bits": 8}, r"qzeros .* is I32 \[1, 32\] where"),
    ("gptq", {}, {"group_size": 0}, "group_size of GPTQ is 0"),
    ("gptq", {}, {"sym": "yes"}, "sym of GPTQ is 'yes'; it is true or false"),
    ("gptq", {}, {"checkpoint_format": "marlin"}, "checkpoint_format of GPTQ is 'marlin'"),
    ("gptq", {".g_idx": lambda t: t.flip(0)}, {}, "g_idx permutes columns, but desc_act"),
    ("gptq act", {".g_idx": lambda t: t[:8]}, {}, r"g_idx .* is I32 \[8\] where .* \[256\]"),
    ("gptq act", {".g_idx": lambda t: t + 9}, {}, "columns are said to be of groups 9 to 12"),
    ("gptq act", {".g_idx": None}, {}, "up_proj.g_idx is missing"),
    ("gptq zeros", {}, {"sym": True}, "has zero points, but sym of config.json is true"),
    ("awq", {".qweight": lambda t: t.int()[:, :3]}, {}, r"is I32 \[4, 16\] where .* \[4, 3\]"),
    ("awq", {}, {"version": "gemv"}, "AWQ with version gemv"),
    ("awq", {}, {"bits": 3}, "bits of AWQ is 3"),
    ("nf4", {".weight.absmax": lambda t: t[1:]}, {}, r"absmax .* is F32 \[511\] where"),
    ("nf4", {".weight.quant_map": lambda t: t + 1}, {}, "quant_map is not the table of nf4"),
    ("nf4", {".weight.quant_state.bitsandbytes__nf4": lambda t: t[:9]}, {}, "is no JSON of a"),
    ("nf4", {".weight.quant_state.bitsandbytes__nf4": None}, {}, "bitsandbytes__nf4 is missing"),
    (
        "ct int4",
        {".weight_scale": lambda t: t[:, 1:]},
        {},
        "weight_scale .* one for each 32 of a row",
    ),
    ("ct int4", {".weight_shape": lambda t: t * 2}, {}, r"weight_shape says \(256, 512\)"),
    ("ct int4", {}, {"format": "marlin-24"}, "format marlin-24 of compressed-tensors is not read"),
    ("ct int4", {}, {"transform_config": {"a": 1}}, "rotates weights"),
    ("ct int4", {}, {"sparsity_config": {"format": "sparse-24"}}, "sparsity_config.format sparse"),
    ("ct nvfp4", {".weight_global_scale": lambda t: t * 0}, {}, "weight_global_scale is 0"),
    ("ct mxfp4", {".weight_scale": lambda t: t | 255}, {}, "a scale is 255, which is NaN"),
    ("modelopt nvfp4", {}, {"quant_algo": "W4A8"}, "quant_algo of ModelOpt is W4A8"),
]


@pytest.fixture(scope="module")
def once(tmp_path_factory):
    made = {}

    def get(name):
        if name not in made:
            root = tmp_path_factory.mktemp("case")
            made[name] = containers.write(containers.CASES[name], root)[0]
        return made[name]

    return get


@pytest.mark.parametrize(("name", "tensors", "settings", "said"), WRONG)
def test_wrong_and_damaged_checkpoints_are_named(name, tensors, settings, said, once, tmp_path):
    source = once(name)
    changed = load_file(source / "model.safetensors")
    for end, change in tensors.items():
        stored = changed.pop(EXPERT + end)
        if change is not None:
            changed[EXPERT + end] = change(stored)
    config = json.loads((source / "config.json").read_text())
    config["quantization_config"] |= settings
    (tmp_path / "config.json").write_text(json.dumps(config))
    containers.save(tmp_path, changed)
    with pytest.raises(ValueError, match=said) as caught:
        hf.load_model(tmp_path, format="int8")
    assert "\n" not in str(caught.value)


def test_the_page_says_what_the_containers_say(monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).resolve().parents[3] / "scripts"))
    import container_table

    assert container_table.PAGE.read_text() == container_table.page(), "run container_table.py"


def test_every_container_has_a_case():
    methods = {case.settings["quant_method"] for case in containers.CASES.values()}
    assert methods == {m for module in container.modules() for m in module.METHODS}
