"""LoRA on a model with CPU experts: what LLAMAFACTORY.md calls the proofs of the prototype, in both
engines.
"""

from __future__ import annotations

import copy

import pytest
import sft_cases as cases
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM

from kt_core.module import KTExpertsLinear
from kt_sft.lora.layer import KTExpertsLoraLinear

SUBSETS = [
    ("gate_proj",),
    ("up_proj",),
    ("down_proj",),
    ("gate_proj", "up_proj"),
    ("gate_proj", "down_proj"),
    ("up_proj", "down_proj"),
    ("gate_proj", "up_proj", "down_proj"),
]


@pytest.fixture(params=cases.ENGINES)
def engine(request, monkeypatch):
    cases.use(request.param, monkeypatch)
    return request.param


@pytest.fixture
def reference(monkeypatch):
    cases.use("reference", monkeypatch)


def _stock(path):
    return AutoModelForCausalLM.from_pretrained(
        path, dtype=torch.float32, experts_implementation="eager"
    )


def _layers(model):
    return [m for m in model.modules() if isinstance(m, KTExpertsLoraLinear)]


@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral", "deepseek_v3", "olmoe"])
def test_base_logits_are_stock_and_the_disabled_adapter_is_the_base(family, engine, tmp_path):
    path, ids = cases.checkpoint(tmp_path, family), cases.token_ids()
    model = cases.load(path)
    base, want = cases.logits(model, ids), cases.logits(_stock(path), ids)
    if engine == "reference":
        assert torch.equal(base, want)
    else:
        assert (base - want).norm() / want.norm() < 2e-2
    tuned = cases.adapted(model)
    assert not torch.equal(cases.logits(tuned, ids), base)
    with tuned.disable_adapter():
        assert torch.equal(cases.logits(tuned, ids), base)


def test_no_expert_weight_is_in_the_tree(engine, tmp_path):
    model = cases.adapted(cases.load(cases.checkpoint(tmp_path)))
    names = [n for n, _ in model.named_parameters()] + list(model.state_dict())
    expert = [n for n in names if ".experts." in n]
    assert expert and all(".lora_" in n for n in expert)
    assert all("lora_" in n for n in cases.trained(model))


def test_gradients_against_a_dense_reference(engine, tmp_path):
    """W + s B A built differentiably for each expert and put into the stock model."""
    path, ids = cases.checkpoint(tmp_path), cases.token_ids()
    if engine == "kernels":  # the kernels hold bf16 weights, so the stock model gets those too
        path = cases.models.build("qwen3_moe", tmp_path / "rounded", dtype=torch.bfloat16)
    stock = _stock(path)
    state = {k: v.clone() for k, v in stock.state_dict().items()}
    model = cases.adapted(cases.load(path), ["q_proj", "experts"])
    got = cases.gradients(model, ids)
    leaves = {n: p.detach().clone().requires_grad_() for n, p in cases.trained(model).items()}
    weights = {}
    for i in range(2):
        q, e = f"model.layers.{i}.self_attn.q_proj", f"model.layers.{i}.mlp.experts"
        a, b = (leaves[f"base_model.model.{q}.lora_{x}.default.weight"] for x in "AB")
        weights[f"{q}.weight"] = state[f"{q}.weight"] + 2 * b @ a

        def delta(p, e=e):
            a, b = (leaves[f"base_model.model.{e}.lora_{x}.default.{p}"] for x in "AB")
            return 2 * b @ a

        both = torch.cat([delta("gate_proj"), delta("up_proj")], 1)
        weights[f"{e}.gate_up_proj"] = state[f"{e}.gate_up_proj"] + both
        weights[f"{e}.down_proj"] = state[f"{e}.down_proj"] + delta("down_proj")
    out = torch.func.functional_call(stock, weights, kwargs={"input_ids": ids, "labels": ids})
    out.loss.backward()
    bar = 1e-5 if engine == "reference" else 5e-2  # two layers of bf16 rounding in the kernels
    for name, leaf in leaves.items():
        assert (got[name] - leaf.grad).norm() <= bar * leaf.grad.norm(), name


@pytest.mark.parametrize("activation", ["retain", "recompute"])
@pytest.mark.parametrize("reentrant", [True, False])
def test_gradient_checkpointing_changes_nothing(
    engine, activation, reentrant, tmp_path, monkeypatch
):
    path, ids = cases.checkpoint(tmp_path), cases.token_ids()
    model = cases.adapted(cases.load(path, activation=activation))
    model.train()
    want = cases.gradients(model, ids)
    model.enable_input_require_grads()
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    calls = []
    for layer in _layers(model):
        experts = layer.get_base_layer().experts
        original = experts.forward
        monkeypatch.setattr(
            experts, "forward", lambda *a, f=original, **k: calls.append(1) or f(*a, **k)
        )
    got = cases.gradients(model, ids)
    assert all(torch.equal(got[n], want[n]) for n in want)
    # retain keeps the outputs of the two layers; recompute runs each layer's experts again
    assert len(calls) == (2 if activation == "retain" else 4)


def test_checkpointing_repeats_dropout(tmp_path):
    model = cases.adapted(cases.load(cases.checkpoint(tmp_path)), lora_dropout=0.3)
    ids = cases.token_ids()
    model.train()
    torch.manual_seed(5)
    want = cases.gradients(model, ids)
    torch.manual_seed(6)
    other = cases.gradients(model, ids)
    assert any(not torch.equal(other[n], want[n]) for n in want if "experts" in n)
    for activation in ("retain", "recompute"):
        twin = cases.adapted(
            cases.load(cases.checkpoint(tmp_path / activation), activation=activation),
            lora_dropout=0.3,
        )
        twin.train()
        twin.enable_input_require_grads()
        twin.gradient_checkpointing_enable({"use_reentrant": False})
        torch.manual_seed(5)
        got = cases.gradients(twin, ids)
        assert all(torch.equal(got[n], want[n]) for n in want)
    model.eval()
    assert torch.equal(cases.logits(model, ids), cases.logits(model, ids))


@pytest.mark.parametrize("subset", SUBSETS, ids="+".join)
def test_f2_every_subset_of_the_projections(subset, reference, tmp_path):
    ids, model = cases.token_ids(), cases.load(cases.checkpoint(tmp_path))
    base = cases.logits(model, ids)
    tuned = cases.adapted(model, list(subset))
    names = {n.rsplit(".", 1)[-1] for n in cases.trained(tuned)}
    assert names == set(subset)
    assert not torch.equal(cases.logits(tuned, ids), base)
    gradients = cases.gradients(tuned, ids)
    assert all(g.abs().max() > 0 for g in gradients.values())


def test_attention_only_leaves_the_experts_alone(engine, tmp_path):
    tuned = cases.adapted(cases.load(cases.checkpoint(tmp_path)), ["q_proj", "v_proj"])
    assert not _layers(tuned)
    gradients = cases.gradients(tuned, cases.token_ids())
    assert gradients and all(g.abs().max() > 0 for g in gradients.values())


@pytest.mark.parametrize(
    "targets",
    [
        "all-linear",
        r".*\.(q_proj|gate_proj|down_proj)",
        ["w1", "w2", "q_proj"],
        ["mlp.experts.up_proj"],
    ],
)
def test_ways_to_name_targets(targets, reference, tmp_path):
    tuned = cases.adapted(cases.load(cases.checkpoint(tmp_path, "mixtral")), targets)
    names = {n.rsplit(".", 1)[-1] for n in cases.trained(tuned) if "experts" in n}
    attention = any("q_proj" in n for n in cases.trained(tuned))
    want = {
        "all-linear": ({"gate_proj", "up_proj", "down_proj"}, True),
        r".*\.(q_proj|gate_proj|down_proj)": ({"gate_proj", "down_proj"}, True),
        "['w1', 'w2', 'q_proj']": ({"gate_proj", "down_proj"}, True),
        "['mlp.experts.up_proj']": ({"up_proj"}, False),
    }[str(targets)]
    assert (names, attention) == want
    assert not any(".gate." in n or "router" in n for n in cases.trained(tuned))


def test_names_that_shared_experts_and_experts_have_in_common(reference, tmp_path):
    model = cases.load(cases.checkpoint(tmp_path, "deepseek_v3"))
    tuned = cases.adapted(model, ["gate_proj", "up_proj"])
    names = set(cases.trained(tuned))
    prefix = "base_model.model.model.layers"
    assert f"{prefix}.1.mlp.experts.lora_A.default.gate_proj" in names
    assert f"{prefix}.1.mlp.shared_experts.up_proj.lora_B.default.weight" in names
    assert f"{prefix}.0.mlp.gate_proj.lora_A.default.weight" in names
    only = cases.adapted(cases.load(tmp_path / "deepseek_v3"), ["shared_experts.gate_proj"])
    assert not _layers(only) and len(cases.trained(only)) == 4


@pytest.mark.parametrize(
    ("lora", "message"),
    [
        ({"target_modules": ["gate_prj"]}, "LoRA target gate_prj matches no module"),
        ({"target_modules": ["q_proj", "nothing"]}, "LoRA target nothing matches no module"),
        ({"use_dora": True}, "use_dora=True is not supported on experts"),
        ({"lora_bias": True}, "lora_bias=True is not supported"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights='pissa' is not supported"),
        ({"rank_pattern": {"gate_proj": 2}}, "gate_proj has rank 2 .* up_proj rank 4"),
        ({"rank_pattern": {r"layers\.0\.mlp\.experts": 2}}, "differs between layers"),
        ({"layers_to_transform": [0]}, "differs between layers .1 of 2"),
    ],
)
def test_what_cannot_be_done_is_refused_by_name(lora, message, reference, tmp_path):
    config = LoraConfig(**({"r": 4, "target_modules": ["q_proj", "experts"]} | lora))
    with pytest.raises(ValueError, match=message):
        get_peft_model(cases.load(cases.checkpoint(tmp_path)), config)


def test_initial_factors(reference, tmp_path):
    path = cases.checkpoint(tmp_path)
    for init, b_zero, deviation in (
        (True, True, (1 / 8) / 3**0.5),
        ("gaussian", True, 1 / 4),
        (False, False, None),
    ):
        config = LoraConfig(r=4, target_modules=["experts"], init_lora_weights=init)
        tuned = get_peft_model(cases.load(path), config)
        layer = _layers(tuned)[0]
        a, b = layer.lora_A["default"].gate_proj, layer.lora_B["default"].gate_proj
        assert a.shape == (8, 4, 64) and b.shape == (8, 40, 4) and a.dtype == torch.float32
        assert bool((b == 0).all()) == b_zero
        if deviation:
            assert abs(float(a.detach().std()) / deviation - 1) < 0.1


def test_rank_alpha_and_rslora_by_projection(reference, tmp_path):
    tuned = cases.adapted(
        cases.load(cases.checkpoint(tmp_path)),
        rank_pattern={"experts": 2, "experts.down_proj": 3} | {"q_proj": 5},
        alpha_pattern={"down_proj": 6},
        use_rslora=True,
    )
    layer = _layers(tuned)[0]
    # peft's rule: the first pattern that fits wins
    assert {k: v.shape[1] for k, v in layer.lora_A["default"].named_parameters()} == {
        "gate_proj": 2, "up_proj": 2, "down_proj": 2,
    }  # fmt: skip
    assert layer.projection_scaling("default") == {
        "gate": 8 / 2**0.5, "up": 8 / 2**0.5, "down": 6 / 2**0.5,
    }  # fmt: skip


def test_several_adapters(engine, tmp_path):
    path, ids = cases.checkpoint(tmp_path), cases.token_ids()
    model = cases.adapted(cases.load(path))
    first = cases.logits(model, ids)
    model.add_adapter("other", LoraConfig(r=2, lora_alpha=4, target_modules=["experts"]))
    with torch.no_grad():
        for n, p in model.named_parameters():
            if "lora_B.other" in n:
                p.normal_(0, 0.05)
    assert torch.equal(cases.logits(model, ids), first)
    model.set_adapter("other")
    second = cases.logits(model, ids)
    assert not torch.equal(first, second)
    assert all(".other." in n for n in cases.trained(model))
    model.base_model.set_adapter(["default", "other"])
    both = cases.logits(model, ids)
    assert not torch.equal(both, first) and not torch.equal(both, second)
    if engine == "reference":  # both together is the sum of the deltas
        twin = cases.adapted(cases.load(path), "all-linear", r=6, lora_alpha=12, b=0.0)
        _sum_into(twin, model)
        assert torch.allclose(cases.logits(twin, ids), both, atol=2e-5)
    model.delete_adapter("other")
    model.set_adapter("default")
    assert torch.equal(cases.logits(model, ids), first)


def _sum_into(twin, model):
    """twin (rank 6, scale 2) gets default (rank 4, scale 2) and other (rank 2, scale 2) side by
    side.
    """
    source = dict(model.named_parameters())
    with torch.no_grad():
        for name, p in twin.named_parameters():
            if "lora_" not in name:
                continue
            p.zero_()
            rank_dim = -2 if "lora_A" in name else -1
            p.narrow(rank_dim, 0, 4).copy_(source[name])
            if (other := name.replace("default", "other")) in source:
                p.narrow(rank_dim, 4, 2).copy_(source[other])


def test_stock_and_kt_models_in_one_process(reference, tmp_path):
    path, ids = cases.checkpoint(tmp_path), cases.token_ids()
    before = _stock(path)
    model = cases.adapted(cases.load(path))
    after = _stock(path)
    assert not any(isinstance(m, KTExpertsLinear) for m in after.modules())
    assert torch.equal(cases.logits(before, ids), cases.logits(after, ids))
    fused = ["gate_up_proj", "down_proj"]
    plain = get_peft_model(after, LoraConfig(r=4, target_modules=[], target_parameters=fused))
    assert sum("experts" in n for n in cases.trained(plain)) == 8
    assert not _layers(plain) and _layers(model)


def test_packed_weights_do_not_merge(reference, tmp_path):
    tuned = cases.adapted(cases.load(cases.checkpoint(tmp_path)))
    with pytest.raises(
        ValueError, match=r"merge it into the checkpoint with\s+kt_core.adapters.merge"
    ):
        tuned.merge_and_unload()


def test_router_auxiliary_loss_is_unchanged(reference, tmp_path):
    path, ids = cases.checkpoint(tmp_path, output_router_logits=True), cases.token_ids()
    kw = {"input_ids": ids, "labels": ids, "output_router_logits": True}
    got, want = cases.load(path)(**kw), _stock(path)(**kw)
    assert float(want.aux_loss.detach()) > 0
    assert torch.equal(got.aux_loss, want.aux_loss) and torch.equal(got.loss, want.loss)


@pytest.mark.parametrize(
    ("engine", "bar"), [("reference", 1e-5), ("kernels", 1e-3)], indirect=["engine"]
)
def test_micro_batches_add_up(engine, bar, tmp_path):
    """4 micro-batches against one batch of the same tokens."""
    tuned, ids = cases.adapted(cases.load(cases.checkpoint(tmp_path))), cases.token_ids(4)
    whole = cases.gradients(tuned, ids)
    tuned.zero_grad()
    for row in ids:
        (tuned(input_ids=row[None], labels=row[None]).loss / 4).backward()
    for name, p in cases.trained(tuned).items():
        assert (p.grad - whole[name]).norm() <= bar * whole[name].norm(), name


def test_a_copy_shares_the_packed_weights(reference, tmp_path):
    model, ids = cases.load(cases.checkpoint(tmp_path)), cases.token_ids()
    twin = copy.deepcopy(model)
    assert torch.equal(cases.logits(twin, ids), cases.logits(model, ids))
