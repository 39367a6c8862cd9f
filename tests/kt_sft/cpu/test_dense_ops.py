"""Norms and LoRA linears in fewer operators: same numbers, and stock code
wherever a module is not the plain case.
"""

from __future__ import annotations

import copy

import models
import peft
import pytest
import torch
import transformers
from torch import nn

from kt_sft.cpu import dense_ops


@pytest.fixture
def plain():
    def model(family="mixtral", **lora):
        torch.manual_seed(0)
        base = transformers.AutoModelForCausalLM.from_config(
            models.config(family, attn_implementation="sdpa"),
            dtype=torch.float32,
            experts_implementation="eager",
        )
        targets = ["q_proj", "k_proj", "v_proj", "o_proj"]
        if family.startswith("deepseek"):
            targets = ["kv_a_proj_with_mqa", "kv_b_proj", "o_proj"]
        settings = {"r": 4, "lora_alpha": 12, "target_modules": targets} | lora
        found = peft.get_peft_model(base, peft.LoraConfig(**settings))
        for name, p in found.named_parameters():
            if "lora_" in name:
                nn.init.normal_(p, std=0.2)
            elif "norm" in name:
                nn.init.normal_(p, mean=1, std=0.2)
        return found.train()

    return model


@pytest.fixture
def calls(monkeypatch):
    """How often each of the functions was used."""
    found = {}
    for name in ("_Norm", "_Lora"):
        function = getattr(dense_ops, name)

        def counted(ctx, *args, original=function.forward, name=name):
            found[name] = found.get(name, 0) + 1
            return original(ctx, *args)

        monkeypatch.setattr(function, "forward", staticmethod(counted))
    return found


def results(model, ids):
    model.zero_grad()
    out = model(input_ids=ids, labels=ids)
    out.loss.backward()
    return [out.logits.detach(), *(p.grad.clone() for p in model.parameters() if p.requires_grad)]


def tokens(model):
    return torch.randint(
        3, model.config.vocab_size, (2, 19), generator=torch.Generator().manual_seed(1)
    )


@pytest.mark.parametrize("family", models.FAMILIES)
def test_outputs_and_gradients_are_those_of_stock(plain, calls, family):
    """To the rounding of fp32, measured from what double precision gives."""
    model = plain(family)
    ids = tokens(model)
    exact = results(copy.deepcopy(model).double(), ids)
    stock = results(model, ids)
    dense_ops.use(model)
    assert type(model.get_base_model().model.norm).__name__.endswith("RMSNorm")
    dense_ops.use(model)  # again is harmless
    calls.clear()
    got = results(model, ids)
    assert calls["_Norm"] >= 5 and calls["_Lora"] >= 6
    assert any(not torch.equal(a, b) for a, b in zip(got, stock, strict=True))
    for a, b, e in zip(got, stock, exact, strict=True):
        ours, theirs = (float((x - e).norm() / e.norm()) for x in (a, b))
        assert ours < 5 * theirs + 1e-6  # sums in another order: 0.8 to 3 times is found


@pytest.mark.parametrize(
    "case", ["disabled", "merged", "two", "dropout", "dora", "autocast", "half", "trained", "hook"]
)
def test_stock_code_runs_where_it_does_more(plain, calls, case):
    lora = {"dropout": {"lora_dropout": 0.5}, "dora": {"use_dora": True}}.get(case, {})
    model = plain(**lora)
    ids = tokens(model)
    if case == "two":
        model.add_adapter("second", peft.LoraConfig(target_modules=["q_proj", "o_proj"]))
        model.base_model.set_adapter(["default", "second"])
    if case == "merged":
        model.merge_adapter()
    if case == "half":
        model = model.bfloat16()
    if case == "trained":
        for name, p in model.named_parameters():
            p.requires_grad_(p.requires_grad or "norm" in name or "q_proj.base" in name)
    if case == "hook":
        for module in model.modules():
            if isinstance(module, peft.tuners.lora.layer.Linear):
                module.lora_A["default"].register_forward_hook(lambda *_: None)

    def outputs():
        torch.manual_seed(5)
        autocast = torch.autocast("cpu", torch.bfloat16, enabled=case == "autocast")
        with torch.no_grad(), autocast:
            if case == "disabled":
                with model.disable_adapter():
                    return model(input_ids=ids).logits
            return model(input_ids=ids).logits

    want = outputs()
    dense_ops.use(model)
    calls.clear()
    got = outputs()
    linears = sum(isinstance(m, peft.tuners.lora.layer.Linear) for m in model.modules())
    left = linears * 3 // 4 if case == "trained" else 0  # those it is not about
    assert calls.get("_Lora", 0) == left
    if case in ("autocast", "half"):
        assert not calls and torch.equal(got, want)
    elif case == "trained":
        assert "_Norm" not in calls
    assert float((got.float() - want.float()).norm() / want.float().norm()) < 1e-5


def test_other_models_of_the_process_keep_their_code(plain, calls):
    ours, other = plain(), plain()
    ids = tokens(other)
    want = other(input_ids=ids).logits
    dense_ops.use(ours)
    calls.clear()
    assert torch.equal(other(input_ids=ids).logits, want) and not calls
    ours(input_ids=ids)
    assert set(calls) == {"_Norm", "_Lora"}


def test_a_copy_is_independent(plain):
    """The reference model of preference training is one."""
    model = plain()
    dense_ops.use(model)
    twin = copy.deepcopy(model)
    ids = tokens(model)
    want = model(input_ids=ids).logits
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(1.5)
    assert torch.equal(twin(input_ids=ids).logits, want)
    assert not torch.equal(model(input_ids=ids).logits, want)


class OtherRMSNorm(nn.Module):
    """As Gemma's: the weight is what is added to one."""

    def __init__(self):
        super().__init__()
        self.weight, self.variance_epsilon = nn.Parameter(torch.full((8,), 0.5)), 1e-6

    def forward(self, x):
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * (1 + self.weight)


def test_other_formulas_are_left_alone():
    model = nn.ModuleList([OtherRMSNorm()])
    dense_ops.use(model)
    assert type(model[0]) is OtherRMSNorm


def test_gradients_are_the_derivatives():
    torch.manual_seed(0)

    def rand(*shape):
        return torch.randn(*shape, dtype=torch.double, requires_grad=True)

    frozen = torch.randn(8, dtype=torch.double)
    assert torch.autograd.gradcheck(
        lambda x: dense_ops._Norm.apply(x, frozen, 1e-6), (rand(2, 3, 8),)
    )
    w, bias = torch.randn(5, 8, dtype=torch.double), torch.randn(5, dtype=torch.double)
    for b in (None, bias):
        assert torch.autograd.gradcheck(
            lambda x, a, up, b=b: dense_ops._Lora.apply(x, w, b, a, up, 0.7),
            (rand(2, 3, 8), rand(4, 8), rand(5, 4)),
        )
