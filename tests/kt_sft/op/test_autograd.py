"""The operators: gradients against plain autograd, what is saved, order of backward, staging,
dropout.
"""

from __future__ import annotations

import gc

import pytest
import reference
import slow_experts
import torch

from kt_core import experts as core
from kt_core import runtime
from kt_core.experts import Lora
from kt_sft.op import autograd, staging

E, H, I, T, K, R = 5, 64, 40, 21, 2, 3
BARS = {"reference": (2e-6, 2e-6), "kernels": (4e-3, 6e-3)}  # forward, gradients


@pytest.fixture(params=list(BARS))
def case(request, monkeypatch):
    if request.param == "reference":
        slow_experts.patch(monkeypatch)
    torch.manual_seed(0)
    layer = core.Experts(E, H, I, format="bf16", name="layer")
    weights = {
        "gate": torch.randn(E, I, H),
        "up": torch.randn(E, I, H),
        "down": torch.randn(E, H, I),
    }
    for p, w in weights.items():
        weights[p] = w = reference.round_bf16(w * 0.1)
        for e in range(E):
            layer.put(e, p, w[e])
    return Case(layer, weights, *BARS[request.param])


class Case:
    def __init__(self, layer, weights, forward_bar, gradient_bar):
        self.layer, self.weights = layer, weights
        self.forward_bar, self.gradient_bar = forward_bar, gradient_bar

    def inputs(self, seed=1, *, grad=True):
        g = torch.Generator().manual_seed(seed)
        x = reference.round_bf16(torch.randn(T, H, generator=g))
        w = torch.rand(T, K, generator=g)
        index = torch.stack([torch.randperm(E, generator=g)[:K] for _ in range(T)])
        return x.requires_grad_(grad), index, w.requires_grad_(grad)

    def lora(self, projections=("gate", "up", "down"), *, grad=True, **kw):
        g = torch.Generator().manual_seed(9)
        a, b = {}, {}
        for p in projections:
            i, o = (I, H) if p == "down" else (H, I)
            a[p] = reference.round_bf16(torch.randn(E, R, i, generator=g) * 0.1).requires_grad_(
                grad
            )
            b[p] = reference.round_bf16(torch.randn(E, o, R, generator=g) * 0.1).requires_grad_(
                grad
            )
        return Lora(a, b, **({"scaling": 2.0} | kw))

    def run(self, activation, x, index, w, lora=None):
        return autograd.runner(activation)(self.layer, x, index, w, lora)


def _error(got, want):
    return float((got.detach() - want.detach()).norm() / want.detach().norm())


@pytest.mark.parametrize("activation", ["retain", "recompute"])
@pytest.mark.parametrize("projections", [(), ("gate",), ("up", "down"), ("gate", "up", "down")])
def test_gradients_against_plain_autograd(case, activation, projections):
    x, index, w = case.inputs()
    lora = case.lora(projections) if projections else None
    grad = torch.randn(T, H, generator=torch.Generator().manual_seed(5))
    grad = reference.round_bf16(grad)
    leaves = [x, w] + ([*lora.a.values(), *lora.b.values()] if lora else [])
    out = case.run(activation, x, index, w, lora)
    got = torch.autograd.grad(out, leaves, grad)
    twin = [t.detach().clone().requires_grad_() for t in leaves]
    n = len(projections)
    a, b = dict(zip(projections, twin[2 : 2 + n])), dict(zip(projections, twin[2 + n :]))  # noqa: B905
    want = reference.experts(twin[0], index, twin[1], **case.weights, a=a, b=b, scaling=2.0)
    assert _error(out, want) <= case.forward_bar
    for g, t in zip(got, torch.autograd.grad(want, twin, grad), strict=True):
        assert _error(g, t) <= case.gradient_bar


def test_retain_and_recompute_agree_and_only_retain_saves(case):
    x, index, w = case.inputs()
    lora = case.lora()
    results = []
    for activation in ("retain", "recompute"):
        out = case.run(activation, x, index, w, lora)
        sizes = [tuple(t.shape) for t in out.grad_fn.saved_tensors]
        assert ((T * K, 2, I) in sizes) == (activation == "retain")
        results.append(
            torch.autograd.grad(out.square().sum(), [x, w, lora.a["up"], lora.b["down"]])
        )
    exact = isinstance(case.layer, core.Experts) and core.Experts is not slow_experts.SlowExperts
    for kept, again in zip(*results, strict=True):
        # the kernels recompute the same bits; torch's matmul differs with the strides of its input
        assert torch.equal(kept, again) if exact else _error(kept, again) < 1e-6


FACTOR_DTYPES = {
    "fp16": (torch.float16, torch.float16),
    "bf16": (torch.bfloat16, torch.bfloat16),
    "fp64": (torch.float64, torch.float64),
    "mixed": (torch.bfloat16, torch.float32),
}


@pytest.mark.parametrize("activation", ["retain", "recompute"])
@pytest.mark.parametrize("kind", FACTOR_DTYPES)
def test_factors_of_any_dtype(case, kind, activation):
    """Values that all of them hold: the results of fp32 factors, gradients in the factors' own
    dtypes, and in the activations' (a model in fp16 has both in it)."""
    of_a, of_b = FACTOR_DTYPES[kind]
    x, index, w = case.inputs()
    lora = case.lora()
    plain = Lora(  # bf16 values that fp16 holds as well
        {p: t.detach().half().bfloat16().float().requires_grad_() for p, t in lora.a.items()},
        {p: t.detach().half().bfloat16().float().requires_grad_() for p, t in lora.b.items()},
        lora.scaling,
    )
    cast = Lora(
        {p: t.detach().to(of_a).requires_grad_() for p, t in plain.a.items()},
        {p: t.detach().to(of_b).requires_grad_() for p, t in plain.b.items()},
        lora.scaling,
    )
    found = []
    for used in (plain, cast):
        half = kind == "fp16" and used is cast
        given = x.detach().to(torch.float16 if half else torch.float32).requires_grad_()
        leaves = [given, w, *used.a.values(), *used.b.values()]
        out = case.run(activation, given, index, w, used)
        grads = torch.autograd.grad(out.float().square().sum(), leaves)
        assert all(g.dtype == t.dtype for g, t in zip(grads, leaves, strict=True))
        with torch.no_grad():
            assert torch.equal(case.run(activation, given, index, w, used), out)
        found.append([out, *grads])
    bar = 1e-6 if kind == "fp64" else 4e-3  # the others round gradients, fp16 x and out too
    for want, got in zip(*found, strict=True):
        assert _error(got.float(), want) <= bar


def test_nothing_is_saved_without_gradients(case, monkeypatch):
    asked = []
    original = case.layer.forward
    monkeypatch.setattr(
        case.layer, "forward", lambda *a, **k: asked.append(k["save"]) or original(*a, **k)
    )
    with torch.no_grad():
        case.run("retain", *case.inputs())
    case.run("retain", *case.inputs(grad=False))
    case.run("retain", *case.inputs())
    assert asked == [False, False, True]


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_two_forwards_then_two_backwards_in_either_order(case, order):
    lora = case.lora()
    leaves = [*lora.a.values(), *lora.b.values()]

    def gradients(seed):
        x, index, w = case.inputs(seed)
        out = case.run("retain", x, index, w, lora)
        return out, [x, w, *leaves]

    alone = [torch.autograd.grad(o.square().sum(), i) for o, i in (gradients(1), gradients(2))]
    both = [gradients(1), gradients(2)]
    for k in order:
        out, inputs = both[k]
        for g, t in zip(torch.autograd.grad(out.square().sum(), inputs), alone[k], strict=True):
            assert torch.equal(g, t)


def test_only_what_needs_a_gradient_is_computed(case, monkeypatch):
    asked = []
    original = case.layer.backward

    def spy(*args, **kw):
        asked.append((kw["need_dx"], kw["need_dw"], kw["need_lora"]))
        return original(*args, **kw)

    monkeypatch.setattr(case.layer, "backward", spy)
    x, index, w = case.inputs()
    case.run("retain", x, index, w, case.lora(grad=False)).sum().backward()
    assert x.grad is not None and w.grad is not None
    x, index, w = case.inputs(grad=False)
    lora = case.lora()
    case.run("retain", x, index, w, lora).sum().backward()
    assert x.grad is None and all(t.grad is not None for t in (*lora.a.values(), *lora.b.values()))
    assert asked == [(True, True, False), (False, False, True)]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_other_dtypes_come_back_as_they_went_in(case, dtype):
    x, index, w = case.inputs()
    small = x.detach().to(dtype).requires_grad_()
    out = case.run("retain", small, index, w.detach().to(dtype), case.lora())
    assert out.dtype == dtype
    out.float().sum().backward()
    assert small.grad.dtype == dtype
    want = case.run("retain", x.detach(), index, w.detach(), case.lora(grad=False))
    assert _error(out.float(), want) < 2e-2


def test_staged_copies_give_the_same_bits_and_share_nothing(case, monkeypatch):
    x, index, w = case.inputs()
    lora = case.lora()
    leaves = [x, w, *lora.a.values(), *lora.b.values()]
    plain = case.run("retain", x, index, w, lora)
    want = torch.autograd.grad(plain.square().sum(), leaves)
    with monkeypatch.context() as patch:
        patch.setattr(staging, "_foreign", lambda device: True)
        staged = staging.to_host([x])[0]
        assert staged.data_ptr() != x.data_ptr() and torch.equal(staged, x)
        out = case.run("retain", x, index, w, lora)
        got = torch.autograd.grad(out.square().sum(), leaves)
    assert torch.equal(out, plain)
    assert all(torch.equal(g, t) for g, t in zip(got, want, strict=True))
    assert staging.to_host([x])[0].data_ptr() == x.data_ptr()


def test_a_model_that_is_gone_is_named(case):
    x, index, w = case.inputs()
    layer = core.Experts(E, H, I, format="bf16")
    handle = autograd.handle_of(layer)
    assert autograd.handle_of(layer) == handle != autograd.handle_of(case.layer)
    del layer
    gc.collect()
    with pytest.raises(
        RuntimeError, match=f"expert handle {handle} belongs to a model that is gone"
    ):
        torch.ops.kt.experts_forward(
            x, index, w, [], handle, 40, "", [1.0] * 3, 0.0, 0, False, False
        )


def test_schema_and_fake_tensors(case):
    x, index, w = case.inputs(grad=False)
    lora = case.lora(grad=False)
    factors = [*lora.a.values(), *lora.b.values()]
    names, handle = "gate,up,down", autograd.handle_of(case.layer)
    width = case.layer.intermediate
    args = (x, index, w, factors, handle, width, names, [2.0] * 3, 0.0, 0, False)
    torch.library.opcheck(
        torch.ops.kt.experts_forward.default, (*args, False), test_utils="test_schema"
    )
    out, saved = torch.ops.kt.experts_forward(*args, True)
    with torch._subclasses.FakeTensorMode(allow_non_fake_inputs=True):
        fake = torch.ops.kt.experts_forward(*args, True)
    assert [t.shape for t in fake] == [out.shape, saved.shape]


@pytest.mark.parametrize("case", ["kernels"], indirect=True)
def test_torch_compile_takes_every_layer(case):
    """Under torch_compile a layer's handle becomes a symbol, one graph for all layers."""
    x, index, w = case.inputs()
    layers = [
        case.layer,
        core.Experts.from_packed(E, H, I, format="bf16", buffer=case.layer._buffer),
    ]
    constants = case.layer.intermediate, "", [1.0] * 3, 0.0, 0, False, True

    def through(x, handle):
        return torch.ops.kt.experts_forward(x * 2, index, w, [], handle, *constants)[0].sin()

    compiled = torch.compile(through, backend="aot_eager", fullgraph=True)
    for handle in map(autograd.handle_of, layers):
        want = torch.autograd.grad(through(x, handle).sum(), x)[0]
        got = torch.autograd.grad(compiled(x, handle).sum(), x)[0]
        assert torch.equal(got, want)


@pytest.mark.parametrize("case", ["kernels"], indirect=True)
def test_dropout_is_repeated_for_a_seed_and_differs_between_seeds(case):
    x, index, w = case.inputs()
    outs = [case.run("retain", x, index, w, case.lora(dropout=0.3, seed=s)) for s in (11, 11, 12)]
    assert torch.equal(outs[0], outs[1])
    assert not torch.equal(outs[0], outs[2])
    assert not torch.equal(outs[0], case.run("retain", x, index, w, case.lora()))


@pytest.mark.parametrize("case", ["kernels"], indirect=True)
def test_the_kernels_ran(case):
    def calls():
        return sum(k["calls"] for k in runtime.kernels() if k["format"] == "bf16")

    before = calls()
    case.run("retain", *case.inputs()).sum().backward()
    assert calls() > before
