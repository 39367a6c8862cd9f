"""lora_target by name: groups, single projections, the router, ranks by group; F4: counts agree."""

from __future__ import annotations

import re
from pathlib import Path

import lf_cases
import pytest
import sft_cases as cases
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from kt_core import adapters, hf
from kt_core.adapters.peft_format import WEIGHTS_FILE, read_adapter
from kt_sft.lora import model_parts


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return lf_cases.workspace(tmp_path_factory.mktemp("lf"))


@pytest.fixture(scope="module")
def deepseek(tmp_path_factory):
    """A family with shared experts and a dense first layer."""
    return cases.checkpoint(tmp_path_factory.mktemp("targets"), "deepseek_v3")


def _adapt(path, targets, **lora):
    return cases.adapted(cases.load(path), targets, **lora)


def _groups(model) -> dict[str, set[str]]:
    found: dict[str, set[str]] = {}
    for name in cases.trained(model):
        short = name.removeprefix("base_model.model.model.layers.").partition(".lora_")[0]
        found.setdefault(model_parts.group_of(name), set()).add(short)
    return found


ATTENTION = {"q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"}
SHARED = {f"1.mlp.shared_experts.{p}_proj" for p in ("gate", "up", "down")}


@pytest.mark.parametrize(
    ("targets", "want"),
    [
        (["attention"], {"attention"}),
        (["shared_experts"], {"shared_experts"}),
        (["experts"], {"experts"}),
        (["all"], {"attention", "shared_experts", "experts"}),
        (["experts", "attention"], {"attention", "experts"}),
    ],
    ids=lambda value: "+".join(sorted(value)),
)
def test_groups(targets, want, deepseek):
    tuned = _adapt(deepseek, targets)
    found = _groups(tuned)
    assert set(found) == want
    if "attention" in want:
        assert {n.rpartition(".")[2] for n in found["attention"]} == ATTENTION
    if "shared_experts" in want:  # the dense MLP of layer 0 too
        assert found["shared_experts"] >= SHARED | {"0.mlp.gate_proj"}
    gradients = cases.gradients(tuned, cases.token_ids())
    assert all(g.abs().max() > 0 for g in gradients.values())


def test_the_router_beside_all(tmp_path):
    found = _groups(_adapt(cases.checkpoint(tmp_path), ["all", "router"]))
    assert set(found) == {"attention", "experts", "router"}
    assert found["router"] == {"0.mlp.gate", "1.mlp.gate"}


@pytest.mark.parametrize(("family", "read"), [
    ("deepseek_v2", "weight"), ("deepseek_v3", "e_score_correction_bias"),
])  # fmt: skip
def test_a_router_that_is_not_called_cannot_be_adapted(family, read, tmp_path):
    path = cases.checkpoint(tmp_path, family)
    with pytest.raises(ValueError, match=f"gate cannot carry LoRA, because .* reads its {read}"):
        _adapt(path, ["experts", "router"])


def test_a_group_that_the_model_does_not_have(tmp_path):
    with pytest.raises(ValueError, match="lora_target shared_experts: Qwen3Moe.* has no such part"):
        _adapt(cases.checkpoint(tmp_path), ["attention", "shared_experts"])


@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral", "olmoe"])
def test_the_router_trains_saves_loads_serves_and_merges(family, tmp_path, monkeypatch):
    cases.use("reference", monkeypatch)
    path, ids = cases.checkpoint(tmp_path, family), cases.token_ids()
    tuned = _adapt(path, ["router", "experts", "q_proj"])
    want = cases.logits(tuned, ids)
    with tuned.disable_adapter():
        base = cases.logits(tuned, ids)
    assert not torch.equal(want, base)
    tuned.save_pretrained(tmp_path / "adapter")
    again = PeftModel.from_pretrained(cases.load(path), tmp_path / "adapter", is_trainable=True)
    assert set(cases.trained(again)) == set(cases.trained(tuned))
    assert torch.equal(cases.logits(again, ids), want)
    model = hf.load_model(path, format="bf16", dtype=torch.float32)
    adapters.load_adapter(model, tmp_path / "adapter", "a")
    assert torch.equal(cases.logits(model, ids), base)
    with adapters.adapter(model, "a"):
        assert torch.allclose(cases.logits(model, ids), want, atol=2e-5)
    assert torch.equal(cases.logits(model, ids), base)
    adapters.merge(path, tmp_path / "adapter", tmp_path / "merged")
    merged = AutoModelForCausalLM.from_pretrained(
        tmp_path / "merged", dtype=torch.float32, experts_implementation="eager"
    )
    assert torch.allclose(cases.logits(merged, ids), want, atol=5e-5)


def test_a_router_takes_no_dropout(tmp_path):
    path = cases.checkpoint(tmp_path)
    with pytest.raises(ValueError, match=r"lora_dropout=0.1 is not possible on .*mlp.gate.weight"):
        _adapt(path, ["router", "q_proj"], lora_dropout=0.1)


def test_all_leaves_the_router_alone_where_it_is_a_linear(tmp_path_factory):
    """DeepSeek-V2's router is a Linear named gate, which LLaMA-Factory's `all` would pick."""
    root = lf_cases.workspace(tmp_path_factory.mktemp("v2"), "deepseek_v2")
    args = lf_cases.arguments(root, "all", max_steps=1)
    lf_cases.run(args)
    trained = load_file(Path(args["output_dir"]) / WEIGHTS_FILE)
    assert not [k for k in trained if ".mlp.gate." in k]
    assert any("shared_experts" in k for k in trained) and any(".experts." in k for k in trained)
    with pytest.raises(ValueError, match=r"take router \(or gate\) out of lora_target"):
        lf_cases.run(lf_cases.arguments(root, "gate", max_steps=1, lora_target="gate,experts"))


def test_target_parameters_of_fused_experts_are_projections(tmp_path):
    """Stock peft's way to name experts."""
    config = LoraConfig(r=4, target_modules=["q_proj"], target_parameters=["experts.gate_up_proj"])
    tuned = get_peft_model(cases.load(cases.checkpoint(tmp_path)), config)
    names = {n.rpartition(".")[2] for n in cases.trained(tuned) if "experts" in n}
    assert names == {"gate_proj", "up_proj"}
    for bad in ("experts.gate_op_proj", "mlp.gate.weigth"):
        config = LoraConfig(r=4, target_modules=["q_proj"], target_parameters=[bad])
        with pytest.raises(ValueError, match=f"LoRA target parameter {bad} matches no parameter"):
            get_peft_model(cases.load(tmp_path / "qwen3_moe"), config)


# ---------------------------------------------------------------------------- in LLaMA-Factory


def _printed(capfd) -> dict[str, int]:
    line = re.findall(r"kt: trainable parameters: ([\d,]+) \((.*)\)", capfd.readouterr().out)[-1]
    counts = {k: int(v.replace(",", "")) for k, v in re.findall(r"(\w+) ([\d,]+)", line[1])}
    return counts | {"total": int(line[0].replace(",", ""))}


def test_f4_what_is_printed_is_what_the_optimizer_holds_and_what_is_saved(root, capfd, monkeypatch):
    """Ranks by group change every count; four numbers agree: printed, optimizer, model, file."""
    from kt_sft.report import stats

    held = []
    original = stats._optimizer_parameters
    monkeypatch.setattr(
        stats, "_optimizer_parameters", lambda o: held.append(original(o)) or held[-1]
    )
    args = lf_cases.arguments(
        root,
        "ranks",
        lora_target="attention,experts,router",
        kt_config={"format": "bf16", "lora_rank": {"experts": 2, "router": 3}},
        max_steps=1,
    )
    lf_cases.run(args)
    printed = _printed(capfd)
    data = read_adapter(args["output_dir"])
    ranks = {p: f.rank for m in data.experts.values() for p, f in m.items()}
    assert set(ranks.values()) == {2}
    by_group = {
        group: {f.rank for p, f in data.dense.items() if model_parts.group_of(p) == group}
        for group in ("attention", "router")
    }
    assert by_group == {"attention": {4}, "router": {3}}
    factors = [*data.dense.values(), *(f for m in data.experts.values() for f in m.values())]
    assert {f.scaling for f in factors} == {2.0}  # alpha / rank as without lora_rank
    saved: dict[str, int] = {}
    for key, tensor in load_file(Path(args["output_dir"]) / WEIGHTS_FILE).items():
        group = model_parts.group_of(key)
        saved[group] = saved.get(group, 0) + tensor.numel()
    assert printed == {**saved, "shared_experts": 0, "total": sum(saved.values())}
    assert held == [printed["total"]]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"lora_target": "attention", "lora_rank": {"experts": 2}}, "lora_rank.experts=2 has no"),
        ({"lora_rank": {"expert": 2}}, "lora_rank.expert=2 names no group; the groups are"),
        ({"lora_rank": {"experts": 0}}, "lora_rank.experts=0 is not a whole number"),
        ({"lora_rank": 4}, "lora_rank=4 is not a mapping .* or set LLaMA-Factory's lora_rank"),
        (
            {"lora_rank": {"experts": 2}, "adapter_name_or_path": "old"},
            "lora_rank=.* has no effect on the adapter that adapter_name_or_path=old continues",
        ),
        ({"additional_target": "experts"}, "additional_target=experts asks for a trainable copy"),
        ({"additional_target": "lm_hed"}, "additional_target lm_hed matches no module"),
        ({"additional_target": "mlp"}, "additional_target mlp holds experts, which use_kt keeps"),
        ({"lora_target": "experts,hot"}, "LoRA target hot matches no module"),
    ],
)  # fmt: skip
def test_targets_that_are_refused_by_name(changes, message, root):
    kt_config = {"format": "bf16"}
    if "lora_rank" in changes:
        kt_config["lora_rank"] = changes.pop("lora_rank")
    with pytest.raises(ValueError, match=message):
        lf_cases.run(lf_cases.arguments(root, "refused", kt_config=kt_config, **changes))


def test_a_rank_above_64_trains_and_loads(root):
    """r = 128, twice the hidden size: kernels, saving and loading."""
    args = lf_cases.arguments(root, "r128", lora_rank=128, max_steps=6, learning_rate=1e-3)
    lf_cases.run(args)
    losses = lf_cases.losses(args["output_dir"])
    assert losses[-1] < losses[0]
    data = read_adapter(args["output_dir"])
    assert {f.rank for m in data.experts.values() for f in m.values()} == {128}
    model = hf.load_model(root / "model", format="bf16")
    ids = cases.token_ids()
    base = cases.logits(model, ids)
    adapters.load_adapter(model, args["output_dir"], "a")
    with adapters.adapter(model, "a"):
        assert not torch.equal(cases.logits(model, ids), base)
