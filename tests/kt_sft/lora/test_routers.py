"""Routers of every family of the installed transformers: what they are, that `lora_target: all`
leaves them alone, and that `router` trains them as stock peft does or is refused before training.
"""

from __future__ import annotations

import families
import llamafactory.extras.packages  # noqa: F401 - before llamafactory.model: mends trl
import pytest
import sft_cases as cases
import torch
import transformers
from llamafactory.model.model_utils.misc import find_all_linear_modules
from peft import LoraConfig, PeftModel, get_peft_model

from kt_core import adapters, hf
from kt_core.loading import experts_contract
from kt_core.module import is_linear
from kt_sft.lora import model_parts, targets


def _supported() -> dict[str, families.Family]:
    """The families whose text model has experts that we take over, by model type."""
    found = {}
    for family in families.families():
        if family.mapping != families.MAPPINGS[0]:
            continue
        try:
            with torch.device("meta"):
                model = family.cls(families.tiny(family))
            experts = experts_contract.find_experts(model)
        except Exception:
            continue  # not ours: refused on load, see kt_core/loading/test_load.py
        if experts:
            found[family.model_type] = family
    return found


SUPPORTED = _supported()


@pytest.fixture(scope="module")
def paths(tmp_path_factory):
    """A checkpoint of every family, by model type."""
    root, out = tmp_path_factory.mktemp("routers"), {}
    for name, family in SUPPORTED.items():
        torch.manual_seed(0)
        model = family.cls(families.tiny(family)).float()
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.dim() > 1:
                    parameter.normal_(0, 0.1)
        model.save_pretrained(root / name)
        out[name] = root / name
    return out


@pytest.fixture(autouse=True)
def _reference(monkeypatch):
    cases.use("reference", monkeypatch)


def _stock(path):
    return transformers.AutoModelForCausalLM.from_pretrained(
        path, dtype=torch.float32, experts_implementation="eager"
    )


def _on_routers(model, routers) -> list[str]:
    return [n for n in cases.trained(model) if any(f".{path}." in n for path in routers)]


def _loss(model):
    ids = cases.token_ids()
    torch.manual_seed(4)  # PhiMoE's router samples while it trains
    return model(input_ids=ids, labels=ids, use_cache=False).loss


def test_many_families_are_found():
    assert len(SUPPORTED) >= 20 and {"hunyuan_v1_moe", "phimoe", "jamba"} <= set(SUPPORTED)


def _decisive(stock, experts: str) -> set[str]:
    """Matrices beside the experts module, outside attention, that its routing weights depend on."""
    seen = []
    hook = stock.get_submodule(experts).register_forward_pre_hook(lambda _, args: seen.extend(args))
    stock(input_ids=cases.token_ids(), use_cache=False)
    hook.remove()
    weights = next(t for t in seen[1:] if t.is_floating_point())
    block = experts.rpartition(".")[0]
    names = [n for n, p in stock.named_parameters() if n.startswith(block + ".") and p.dim() == 2]
    leaves = [stock.get_parameter(n) for n in names]
    got = torch.autograd.grad((weights * weights).sum(), leaves, allow_unused=True)
    return {n for n, g in zip(names, got, strict=True) if g is not None and "attn" not in n}


@pytest.mark.parametrize("name", SUPPORTED)
def test_all_leaves_alone_what_the_choice_of_experts_depends_on(name, paths):
    """LLaMA-Factory's `all`: every Linear by leaf name; what decides is found by gradient."""
    model, stock = cases.load(paths[name]), _stock(paths[name])
    routers = model_parts.routers_of(model)
    layers = list(targets.experts_of(model))
    assert {f"{r}.weight" for r in routers} == set().union(*(_decisive(stock, e) for e in layers))
    found = find_all_linear_modules(model, False)
    with model_parts.rules(model_parts.NewAdapters(router=False)):
        tuned = cases.adapted(model, found)
    assert not _on_routers(tuned, routers)
    assert any(".experts." in n for n in cases.trained(tuned))
    assert not _on_routers(cases.adapted(cases.load(paths[name]), ["all"]), routers)


@pytest.mark.parametrize("name", SUPPORTED)
def test_router_trains_as_in_stock_peft_or_is_refused(name, paths):
    model = cases.load(paths[name])
    routers = model_parts.routers_of(model)
    linear = all(map(is_linear, routers.values()))
    try:
        tuned = cases.adapted(model, ["router"])
    except ValueError as error:
        assert "cannot carry LoRA, because" in str(error)
        assert next(iter(routers)) in str(error)
        return
    tuned.train()
    loss = _loss(tuned)
    loss.backward()
    kw = {"target_modules": list(routers)} if linear else {
        "target_modules": [], "target_parameters": [f"{r}.weight" for r in routers]
    }  # fmt: skip
    stock = get_peft_model(_stock(paths[name]), LoraConfig(r=4, lora_alpha=8, **kw))
    theirs = dict(stock.named_parameters())
    with torch.no_grad():
        for n, p in cases.trained(tuned).items():
            theirs[n].copy_(p)
    stock.train()
    want = _loss(stock)
    want.backward()
    assert torch.equal(loss, want)
    assert len(cases.trained(tuned)) == 2 * len(routers)
    for n, p in cases.trained(tuned).items():
        assert p.grad.abs().max() > 0
        assert (p.grad - theirs[n].grad).norm() <= 1e-5 * theirs[n].grad.norm(), n


@pytest.mark.parametrize("name", SUPPORTED)
def test_all_linear_takes_the_routers_that_peft_can_adapt_as_linears(name, paths):
    """Stock would put LoRA around DeepSeek-V2's router, which nothing calls, and around PhiMoE's,
    which returns a tuple."""
    model = cases.load(paths[name])
    routers = model_parts.routers_of(model)
    tuned = cases.adapted(model, "all-linear")
    _loss(tuned).backward()
    trained = cases.trained(tuned)
    assert all(trained[n].grad.abs().max() > 0 for n in _on_routers(tuned, routers))
    expected = {"afmoe", "gemma4", "gemma4_text", "hunyuan_v1_moe", "jamba", "lfm2_moe"}
    assert bool(_on_routers(tuned, routers)) == (name in expected)


def test_phimoe_with_its_router_saves_loads_serves_and_merges(paths, tmp_path):
    """A router that is a Linear by class and returns a tuple."""
    path, ids = paths["phimoe"], cases.token_ids()
    tuned = cases.adapted(cases.load(path, export_layout="fused"), ["router", "experts", "q_proj"])
    tuned.eval()
    want = cases.logits(tuned, ids)
    tuned.save_pretrained(tmp_path / "adapter")
    again = PeftModel.from_pretrained(cases.load(path), tmp_path / "adapter")
    assert torch.equal(cases.logits(again, ids), want)
    model = hf.load_model(path, format="bf16", dtype=torch.float32)
    adapters.load_adapter(model, tmp_path / "adapter", "a")
    with adapters.adapter(model, "a"):
        assert torch.allclose(cases.logits(model, ids), want, atol=2e-5)
    stock = PeftModel.from_pretrained(_stock(path), tmp_path / "adapter")
    assert torch.allclose(cases.logits(stock, ids), want, atol=2e-5)
    adapters.merge(path, tmp_path / "adapter", tmp_path / "merged")
    assert torch.allclose(cases.logits(_stock(tmp_path / "merged"), ids), want, atol=5e-5)


@pytest.mark.parametrize(("name", "target"), [
    ("qwen3_moe", "gate"), ("phimoe", "router_"), ("mixtral", "mlp.gate"),
    ("olmoe", r".*(q_proj|mlp\.gate)"),
])  # fmt: skip
def test_the_name_of_a_router_that_is_no_linear(name, target, paths):
    """peft's own message prints a class; ours says what to write."""
    target = target.replace("router_", "mlp.router")
    targets = target if target.startswith(".*") else ["q_proj", target]
    with pytest.raises(ValueError, match="whose weight is adapted as a whole; write router in its"):
        cases.adapted(cases.load(paths[name]), targets)


def test_a_pattern_of_excluded_modules_keeps_the_router_out_of_all_too(paths):
    """exclude_modules as a pattern: the router used to be trained beside it."""
    model = cases.load(paths["hunyuan_v1_moe"])
    routers = model_parts.routers_of(model)
    with model_parts.rules(model_parts.NewAdapters(router=False)):
        tuned = cases.adapted(model, ["q_proj", "k_proj", "wg"], exclude_modules=r".*k_proj")
    assert not _on_routers(tuned, routers)
    assert {n.split(".")[-4] for n in cases.trained(tuned)} == {"q_proj"}
