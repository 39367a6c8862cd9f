"""Fields of LoraConfig and operations of peft on a model with CPU experts: as in stock peft, or one
sentence before anything is changed.
"""

from __future__ import annotations

import json

import fresh_process
import peft
import pytest
import sft_cases as cases
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from peft.helpers import rescale_adapter_scale
from peft.tuners.tuners_utils import check_target_module_exists
from peft.utils.hotswap import hotswap_adapter
from transformers import AutoModelForCausalLM

from kt_core.adapters.peft_format import expert_names
from kt_sft.lora.layer import KTExpertsLoraLinear

FAMILIES = ("qwen3_moe", "mixtral")


@pytest.fixture(scope="module")
def paths(tmp_path_factory):
    root = tmp_path_factory.mktemp("configs")
    return {family: cases.checkpoint(root, family) for family in FAMILIES}


@pytest.fixture(autouse=True)
def _reference(monkeypatch):
    cases.use("reference", monkeypatch)


def _layers(model) -> list[KTExpertsLoraLinear]:
    return [m for m in model.modules() if isinstance(m, KTExpertsLoraLinear)]


def _projections(model) -> set[str]:
    """The projections that carry LoRA, the same in every layer."""
    found = [set(layer.lora_A["default"].by_projection()) for layer in _layers(model)]
    assert all(f == found[0] for f in found)
    return found[0] if found else set()


# -------------------------------------------------------------------------------- which projections


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    ("target", "exclude"),
    [
        (["gate", "up", "down", "q_proj"], ["gate"]),
        (["gate", "up", "down", "q_proj"], ["up", "down"]),
        (["gate", "up", "down", "q_proj"], ["gate", "up", "down"]),
        (["gate", "up", "down", "q_proj"], ["k_proj"]),
        (["gate", "up", "q_proj"], r".*\.experts\.\d+\.(gate|down)"),
        (["gate", "up", "down", "q_proj"], r".*experts.*"),
        (r".*\.(gate|up|q_proj)", ["up"]),
        (r".*\.experts\.\d+\.(up|down)|.*q_proj", r".*\.down"),
    ],
)
def test_excluded_projections_are_those_of_peft_on_a_module_per_expert(
    family, target, exclude, paths
):
    """The published names, which peft matched while every expert had modules of its own."""
    names = expert_names(family)

    def named(value):
        if isinstance(value, list):
            return [names.get(v, v) for v in value]
        for p, name in names.items():
            value = value.replace(f"({p}", f"({name}").replace(f"|{p}", f"|{name}")
            value = value.replace(rf"\.{p}", rf"\.{name}")
        return value

    config = {"target_modules": named(target), "exclude_modules": named(exclude)}
    per_expert = LoraConfig(**config)
    want = {
        p
        for p, name in names.items()
        if check_target_module_exists(per_expert, f"model.layers.0.mlp.experts.5.{name}")
    }
    tuned = cases.adapted(cases.load(paths[family]), config.pop("target_modules"), **config)
    assert _projections(tuned) == want
    assert any("q_proj" in n for n in cases.trained(tuned))


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"exclude_modules": ["experts.3.up_proj"]}, "exclude_modules picks .*experts.3.up_proj"),
        ({"exclude_modules": r".*experts\.[0-3]\..*"}, "exclude_modules picks .*0.gate_proj but"),
        ({"target_modules": r".*experts\.[1-7]\.up_proj"}, "target_modules picks .*1.up_proj but"),
        ({"rank_pattern": {"experts.0.down_proj": 2}}, "rank_pattern 'experts.0.down_proj' picks"),
        ({"rank_pattern": {"experts.gateup_proj": 2}}, "'experts.gateup_proj' fits no expert"),
        ({"alpha_pattern": {r".*\.experts\.w1": 2}}, "alpha_pattern .* fits no expert projection"),
        (
            {"target_modules": ["q_proj"], "rank_pattern": {"experts": 2}},
            r"rank_pattern 'experts' fits no expert projection that is adapted \(none is\)",
        ),
        (
            {"layers_to_transform": [0], "layers_pattern": "layers"},
            "expert LoRA differs between layers .1 of 2",
        ),
    ],
)  # fmt: skip
def test_what_cannot_be_honoured_is_refused_by_name(config, message, paths):
    config = {"target_modules": ["experts", "q_proj"]} | config
    with pytest.raises(ValueError, match=message):
        cases.adapted(cases.load(paths["qwen3_moe"]), config.pop("target_modules"), **config)


def test_patterns_of_dense_modules_that_fit_nothing_are_ignored_as_in_peft(paths):
    patterns = {"shared_experts.up_proj": 2, "nothing": 3, "k_proj": 5}
    tuned = cases.adapted(
        cases.load(paths["qwen3_moe"]), ["experts", "k_proj"], rank_pattern=patterns
    )
    assert {p.shape[0] for n, p in cases.trained(tuned).items() if "k_proj.lora_A" in n} == {5}
    assert {t.shape[1] for t in _layers(tuned)[0].lora_A["default"].parameters()} == {4}


# -------------------------------------------------------------------------------- ranks and alphas


@pytest.mark.parametrize(
    "patterns",
    [
        {"experts.gate_up_proj": 2},
        {"mlp.experts.down_proj": 6},
        {r".*\.gate_up_proj": 3, "experts.down_proj": 5},
        {"gate_up_proj": 2, r"layers\.\d+\.mlp\.experts\.gate_up_proj": 7},
    ],
    ids=str,
)
@pytest.mark.parametrize("rslora", [False, True])
def test_patterns_under_fused_names_mean_what_peft_means_by_target_parameters(
    patterns, rslora, paths
):
    """Rank and scale of the fused parameter are those of each projection in it."""
    parameters = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    kw = {
        "r": 4, "lora_alpha": 8, "rank_pattern": patterns, "use_rslora": rslora,
        "alpha_pattern": {k: 10 + v for k, v in patterns.items()},
    }  # fmt: skip
    stock = AutoModelForCausalLM.from_pretrained(
        paths["qwen3_moe"], dtype=torch.float32, experts_implementation="eager"
    )
    stock = get_peft_model(stock, LoraConfig(target_modules=[], target_parameters=parameters, **kw))
    want = {
        m.parameter_name: (m.r["default"], m.scaling["default"])
        for m in stock.modules()
        if isinstance(m, peft.tuners.lora.layer.ParamWrapper)
    }
    for targeted in ({"target_parameters": parameters}, {"target_modules": ["experts"]}):
        config = LoraConfig(**({"target_modules": []} | targeted), **kw)
        layer = _layers(get_peft_model(cases.load(paths["qwen3_moe"]), config))[0]
        scales = layer.projection_scaling("default")
        factors = layer.lora_A["default"].by_projection()
        got = {p: (a.shape[1], scales[p]) for p, a in factors.items()}
        fused = {"gate": "gate_up_proj", "up": "gate_up_proj", "down": "down_proj"}
        assert got == {p: want[name] for p, name in fused.items()}


def test_lora_alpha_zero_trains_nothing_saves_and_loads(paths, tmp_path):
    ids = cases.token_ids()
    model = cases.load(paths["qwen3_moe"])
    base = cases.logits(model, ids)
    tuned = cases.adapted(model, ["experts", "q_proj"], lora_alpha=0)
    assert torch.allclose(cases.logits(tuned, ids), base, atol=1e-6)
    assert all(g.abs().max() == 0 for g in cases.gradients(tuned, ids).values())
    tuned.save_pretrained(tmp_path / "adapter")
    again = PeftModel.from_pretrained(cases.load(paths["qwen3_moe"]), tmp_path / "adapter")
    assert torch.equal(cases.logits(again, ids), cases.logits(tuned, ids))


def test_scales_of_projections_keep_their_ratios(paths):
    """set_scale and scale_layer of peft know one number per adapter; here up and gate have 0."""
    patterns = {"experts.gate_up_proj": 0, "experts.down_proj": 16}
    tuned = cases.adapted(
        cases.load(paths["qwen3_moe"]), ["experts"], alpha_pattern=patterns,
        rank_pattern={"experts.down_proj": 2},
    )  # fmt: skip
    layer = _layers(tuned)[0]
    assert layer.projection_scaling("default") == {"gate": 0.0, "up": 0.0, "down": 8.0}
    layer.set_scale("default", 2.0)
    assert layer.projection_scaling("default") == {"gate": 0.0, "up": 0.0, "down": 16.0}
    layer.unscale_layer()
    layer.scale_layer(0.5)
    assert layer.projection_scaling("default") == {"gate": 0.0, "up": 0.0, "down": 4.0}


# ------------------------------------------------------------------------------ several adapters


@pytest.fixture
def two(paths):
    """Adapters default and b, of other ranks and targets."""
    tuned = cases.adapted(cases.load(paths["qwen3_moe"]), ["experts", "q_proj"])
    tuned.add_adapter("b", LoraConfig(r=2, lora_alpha=6, target_modules=["experts", "k_proj"]))
    cases.randomise(tuned)
    tuned.eval()
    return tuned


def _single(model, name, row):
    if name == "__base__":
        with model.disable_adapter():
            return cases.logits(model, row)
    model.set_adapter(name)
    return cases.logits(model, row)


def test_a_batch_may_mix_adapters(two):
    names, ids = ["b", "default", "__base__", "default"], cases.token_ids(4)
    with torch.no_grad():
        mixed = two(input_ids=ids, adapter_names=names).logits
    for i, name in enumerate(names):
        assert torch.allclose(mixed[i], _single(two, name, ids[i : i + 1])[0], atol=1e-5), i
    assert not torch.allclose(mixed[0], _single(two, "default", ids[:1])[0], atol=1e-3)
    kw = {"input_ids": ids, "max_new_tokens": 4, "do_sample": False, "num_beams": 2}
    together = two.generate(**kw, adapter_names=names)
    two.set_adapter("b")
    alone = two.generate(**(kw | {"input_ids": ids[:1]}))
    assert torch.equal(together[0, : alone.shape[1]], alone[0])


def test_operations_that_experts_cannot_take_part_in_change_nothing(two, tmp_path):
    """Each used to fail somewhere inside, the merges after attention had been merged."""
    two.save_pretrained(tmp_path)
    base, ids = two.get_base_model(), cases.token_ids()
    want = cases.logits(two, ids)
    state = {n: t.clone() for n, t in two.state_dict().items()}
    for call, message in (
        (lambda: two.merge_adapter(), "with kt_core.adapters.merge"),
        (lambda: two.merge_and_unload(), "with kt_core.adapters.merge"),
        (lambda: two.add_weighted_adapter(["default", "b"], [1, 1], "c"), "'default', which has"),
        (lambda: hotswap_adapter(two, str(tmp_path / "b"), "default"), "model.load_adapter"),
        (lambda: base.add_adapter(LoraConfig(target_modules=["q_proj"])), "get_peft_model"),
        (lambda: base.load_adapter(str(tmp_path)), "PeftModel.from_pretrained"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=message):
            call()
        assert {n: torch.equal(t, state[n]) for n, t in two.state_dict().items()} == {
            n: True for n in state
        }
    assert list(two.peft_config) == ["default", "b"]
    assert torch.equal(cases.logits(two, ids), want)


def test_adapters_without_experts_combine_and_merge_as_in_stock(paths):
    ids = cases.token_ids()
    tuned = cases.adapted(cases.load(paths["qwen3_moe"]), ["q_proj", "v_proj"])
    tuned.add_adapter("b", LoraConfig(r=2, lora_alpha=6, target_modules=["q_proj", "v_proj"]))
    cases.randomise(tuned)
    tuned.add_weighted_adapter(["default", "b"], [1.0, 1.0], "c", "cat")
    tuned.base_model.set_adapter(["default", "b"])
    want = cases.logits(tuned, ids)
    tuned.set_adapter("c")
    assert torch.allclose(cases.logits(tuned, ids), want, atol=1e-5)
    tuned.merge_adapter()
    assert torch.allclose(cases.logits(tuned, ids), want, atol=1e-5)
    assert torch.allclose(cases.logits(tuned.merge_and_unload(), ids), want, atol=1e-5)


def test_what_peft_does_with_adapters_holds_for_experts(two, paths, tmp_path):
    """Scaling, status, deleting, unloading, empty weights while loading."""
    ids = cases.token_ids()
    want, base = _single(two, "default", ids), _single(two, "__base__", ids)
    with rescale_adapter_scale(two, 0.0):
        assert torch.allclose(cases.logits(two, ids), base, atol=1e-6)
    assert torch.equal(cases.logits(two, ids), want)
    status = two.get_model_status()
    assert status.available_adapters == ["b", "default"] and status.active_adapters == ["default"]
    two.set_requires_grad("b", requires_grad=True)
    assert all(p.requires_grad for p in _layers(two)[0].lora_A["b"].parameters())
    two.save_pretrained(tmp_path)
    loaded = PeftModel.from_pretrained(
        cases.load(paths["qwen3_moe"]), tmp_path, low_cpu_mem_usage=True
    )
    assert torch.equal(cases.logits(loaded, ids), want)
    two.delete_adapter("b")
    assert torch.equal(cases.logits(two, ids), want)
    assert torch.equal(cases.logits(two.unload(), ids), base)
    model = peft.prepare_model_for_kbit_training(cases.load(paths["qwen3_moe"]))
    assert torch.isfinite(
        cases.gradients(cases.adapted(model, ["experts"]), ids).popitem()[1]
    ).all()


FIRST = """
import json, sys
from peft import PeftModel
import slow_experts, pytest, sft_cases as cases, torch
from kt_sft import session
model, adapter, want = {arguments}
slow_experts.patch(pytest.MonkeyPatch())
tuned = PeftModel.from_pretrained(session.load_for_training(model, dtype=torch.float32), adapter)
assert torch.equal(cases.logits(tuned, cases.token_ids()), torch.load(want))
"""


def test_loading_a_model_and_its_adapter_in_one_expression(paths, tmp_path):
    """Python looks up PeftModel.from_pretrained before load_for_training, its argument, runs."""
    tuned = cases.adapted(cases.load(paths["qwen3_moe"]), ["up_proj", "q_proj"])
    tuned.eval()
    tuned.save_pretrained(tmp_path / "adapter")
    torch.save(cases.logits(tuned, cases.token_ids()), tmp_path / "want.pt")
    arguments = [str(p) for p in (paths["qwen3_moe"], tmp_path / "adapter", tmp_path / "want.pt")]
    fresh_process.run_python(FIRST.format(arguments=json.dumps(arguments)))
