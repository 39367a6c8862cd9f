"""Every tier x format against the reference: forward, backward, few and many rows, odd shapes."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch
from kernel_cases import (
    FORMATS,
    FORWARD_BAR,
    GROUPS,
    INT8_BAR,
    INT8_ELEMENT_BAR,
    INT8_FORMATS,
    INT8_GROUPS,
    ODD_SIZES,
    TIERS,
    TOKENS,
    check_case,
    check_close,
    choose_tier,
    computes,
    make_case,
    make_dy,
    on_tiles,
    relative,
    small_group,
)
from reference import round_bf16

from kt_core import formats, kernels
from kt_core.experts import Experts, Lora
from kt_core.names import PROJECTIONS


@pytest.fixture(params=TIERS)
def tier(request):
    choose_tier(request.param)
    yield request.param
    choose_tier()


def calls(isa, format):
    return next(k["calls"] for k in kernels() if k["isa"] == isa and k["format"] == format)


def test_registry_lists_every_tier_and_format():
    listed = {(k["isa"], k["format"]) for k in kernels()}
    want = {"scalar", "avx2", "avx_vnni", "avx512", "avx512_vnni", "avx512_bf16", "amx"}
    assert want <= {isa for isa, _ in listed}
    assert {f for _, f in listed} >= {"bf16", "int8", "int4"}
    assert len(listed) == len({i for i, _ in listed}) * len(FORMATS)
    assert all(k["usable"] == (k["missing"] == "") for k in kernels())


@pytest.mark.parametrize("format,tokens", TOKENS)
def test_matches_reference(tier, format, tokens):
    before = calls(tier, format)
    check_case(make_case(E=4, H=128, I=96, T=tokens, K=2, format=format, seed=tokens))
    assert calls(tier, format) > before


@pytest.mark.parametrize("format", FORMATS)
def test_long_row_lists_cross_row_blocks(tier, format):
    check_case(make_case(E=2, H=96, I=64, T=401, K=1, format=format))


def test_batches_of_several_waves(tier):
    """6,000 assignments: two waves of experts (kWaveRows) add up in y, dX and the LoRA gradients,
    also when one expert alone is more than a wave.
    """
    case = make_case(E=5, H=64, I=32, T=1500, K=4)
    check_case(case)
    check_case(make_case(E=2, H=64, I=32, T=4300, K=1, format="int4"))
    ref, _ = case.run_reference()
    out, _ = case.layer.forward(case.x.float(), case.index, case.weights, case.lora, compute="int8")
    check_close("int8 forward", out, ref, INT8_BAR, element=INT8_ELEMENT_BAR)


@pytest.mark.parametrize("format,group", GROUPS)
def test_groups(tier, format, group):
    check_case(make_case(H=192, I=160, T=9, format=format, group=group))


@pytest.mark.parametrize("format,hidden,intermediate", ODD_SIZES)
def test_sizes_that_divide_nothing(tier, format, hidden, intermediate):
    group = small_group(format)
    check_case(make_case(H=hidden, I=intermediate, T=25, format=format, group=group, r=3))


@pytest.mark.parametrize("rank", [1, 3, 4, 7, 8, 16, 64])
def test_ranks(tier, rank):
    check_case(make_case(T=9, r=rank))


@pytest.mark.parametrize("rank", [3, 8, 40])
def test_factors_in_bf16_are_their_values(tier, rank):
    """Same bits as from those values in fp32; gradients stay fp32."""
    case = make_case(T=21, r=rank, H=100, I=72)
    found = []
    for narrow in (True, False):
        a, b = (
            {p: t.bfloat16() if narrow else t.bfloat16().float() for p, t in side.items()}
            for side in (case.lora.a, case.lora.b)
        )
        lora = Lora(a, b, case.lora.scaling)
        out, saved = case.layer.forward(case.x, case.index, case.weights, lora, save=True)
        grads = case.layer.backward(case.x, case.x, case.index, case.weights, lora, saved)
        found.append([out, grads.dx, grads.dw, *grads.a.values(), *grads.b.values()])
    assert all(torch.equal(x, y) for x, y in zip(*found, strict=True))
    assert found[0][-1].dtype == torch.float32


@pytest.mark.parametrize(
    "lora", [(), ("gate",), ("up",), ("down",), ("gate", "down"), ("gate", "up")]
)
def test_every_subset_of_projections(tier, lora):
    check_case(make_case(T=21, lora=lora))


def test_rank_above_a_row_block(tier):
    check_case(make_case(E=2, H=64, I=64, T=5, r=200, scaling=0.1))


@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_tanh", "relu", "sigmoid"])
def test_activations(tier, activation):
    # no adapter on gate: its rounding would move relu's kink across a value near zero
    check_case(make_case(T=12, activation=activation, lora=("up", "down")))


@pytest.mark.parametrize("batch,seq", [(1, 1), (2, 17), (3, 17), (8, 17), (1, 1024)])
def test_batch_sizes(batch, seq):
    check_case(make_case(T=batch * seq, H=64, I=64, K=2))


def test_no_tokens():
    case = make_case(T=0)
    out, saved = case.layer.forward(case.x, case.index, case.weights, case.lora, save=True)
    grads = case.layer.backward(case.x, case.x, case.index, case.weights, case.lora, saved)
    assert out.shape == (0, 64) and grads.dx.shape == (0, 64)
    assert all(float(t.abs().sum()) == 0 for t in (*grads.a.values(), *grads.b.values()))


@pytest.mark.parametrize("format,group", INT8_GROUPS)
@pytest.mark.parametrize("tokens", [1, 3, 8, 40, 401])
def test_int8_domain_matches_reference(tier, format, group, tokens):
    case = make_case(E=3, H=300, I=200, T=tokens, K=2, format=format, group=group, lora=())
    ref, _ = case.run_reference()
    before = calls(tier, format)
    out, _ = case.layer.forward(case.x.float(), case.index, case.weights, compute="int8")
    check_close("int8 forward", out, ref, INT8_BAR, element=INT8_ELEMENT_BAR)
    assert calls(tier, format) > before
    plain, _ = case.layer.forward(case.x.float(), case.index, case.weights)
    assert not torch.equal(out, plain)  # it is another arithmetic
    for n in {1, 2, 5, tokens} & set(range(1, tokens + 1)):
        part, _ = case.layer.forward(
            case.x[:n].float(), case.index[:n], case.weights[:n], compute="int8"
        )
        assert torch.equal(part, out[:n]), n


def test_int8_domain_with_an_adapter(tier):
    case = make_case(E=3, H=160, I=96, T=30)
    ref, _ = case.run_reference()
    out, _ = case.layer.forward(case.x.float(), case.index, case.weights, case.lora, compute="int8")
    check_close("int8 forward", out, ref, INT8_BAR, element=INT8_ELEMENT_BAR)


@pytest.mark.parametrize("sign", [1, -1])
def test_int8_extremes_do_not_saturate(tier, sign):
    """All codes at +-127: every 16-bit intermediate of a saturating form would overflow."""
    H, I = 256, 32
    layer = Experts(1, H, I, format="int8", activation="relu")
    layer.put(0, "gate", torch.full((I, H), 1.0))
    layer.put(0, "up", torch.full((I, H), float(sign)))
    layer.put(0, "down", torch.eye(H, I))
    x = torch.full((9, H), 127.0)
    index, weights = torch.zeros(9, 1).long(), torch.ones(9, 1)
    out, _ = layer.forward(x, index, weights, compute="int8")
    dot = 127.0 * float(layer.get(0, "gate").sum(1)[0])
    want = round_bf16(torch.tensor(sign * dot * dot)) * float(layer.get(0, "down")[0, 0])
    torch.testing.assert_close(out[:, :I], want.expand(9, I), rtol=1e-6, atol=0)
    assert (out[:, I:] == 0).all()


@pytest.mark.parametrize("format", ["int8", "int4"])
def test_values_whose_inverse_scale_is_infinite(tier, format):
    """Zeros stay zeros beside values so small that 1 / scale overflows, in weights and rows."""
    tiny = torch.full((32, 64), 2.0**-133)
    tiny[:, ::3] = 0.0
    layer = Experts(1, 64, 32, format=format, group=32, activation="sigmoid")
    for p in PROJECTIONS:
        layer.put(0, p, tiny.reshape(64, 32) if p == "down" else tiny)
    kept = layer.get(0, "gate")
    assert (kept[:, ::3] == 0).all() and (kept.abs() < 2.0**-124).all()
    args = torch.zeros(3, 1).long(), torch.ones(3, 1)
    for p in PROJECTIONS:
        layer.put(0, p, torch.ones(64, 32) if p == "down" else torch.ones(32, 64))
    for compute in ("int8", "int16"):
        out, _ = layer.forward(tiny[:3], *args, compute=compute)
        assert (out.abs() < 2.0**-100).all()
    grads = layer.backward(tiny[:3], tiny[:3], *args, compute="int16")
    assert (grads.dx.abs() < 2.0**-100).all()


def test_int16_rows_are_another_arithmetic_of_the_same_error(tier):
    case = make_case(H=300, I=200, T=40, lora=())
    dy = make_dy(case)
    ref, want = case.run_reference(dy)
    args = case.x.float(), case.index, case.weights
    found, errors = {}, {}
    for c in ("bf16", "int16"):
        out, saved = case.layer.forward(*args, save=True, compute=c)
        dx = case.layer.backward(dy.float(), *args, saved=saved, compute=c).dx
        found[c] = out, dx
        errors[c] = relative(out, ref), relative(dx, want["dx"])
    for i in range(2):
        assert not torch.equal(found["bf16"][i], found["int16"][i])
        assert errors["int16"][i] < 1.05 * errors["bf16"][i]


def test_rows_of_one_size_lose_nothing_to_a_large_one(tier):
    """Every row has its own scales, forward and backward."""
    case = make_case(H=128, I=96, T=12, lora=())
    scale = 10.0 ** torch.linspace(-12, 6, 12)[:, None]
    args = case.x.float(), case.index, case.weights
    dy = make_dy(case).float()
    _, saved = case.layer.forward(*args, save=True, compute="int16")
    one = case.layer.backward(dy, *args, saved=saved, compute="int16")
    many = case.layer.backward((dy * scale).bfloat16().float(), *args, saved=saved, compute="int16")
    for i in range(12):
        assert relative(many.dx[i] / scale[i], one.dx[i]) < 1e-2


def test_training_takes_the_domain_that_is_fast_here(tier):
    """VNNI multiplies 16-bit rows at twice the rate of fp32; units for bf16 are as fast."""
    fast = tier in ("avx512_vnni", "avx_vnni")
    for format in FORMATS:
        want = "int16" if fast and format in INT8_FORMATS else "bf16"
        assert make_case(format=format).layer.training_compute == want


def test_int8_domain_refusals():
    case = make_case(format="bf16")
    args = case.x, case.index, case.weights
    with pytest.raises(ValueError, match="is not possible with weights in format bf16"):
        case.layer.forward(*args, compute="int8")
    with pytest.raises(ValueError, match="compute is 'int7'"):
        case.layer.forward(*args, compute="int7")
    with pytest.raises(ValueError, match="compute is 'int8' with save"):
        make_case().layer.forward(*args, save=True, compute="int8")
    with pytest.raises(ValueError, match="'int16' is not possible with weights in format bf16"):
        case.layer.forward(*args, compute="int16")
    with pytest.raises(ValueError, match="'int16' is not possible with weights in format bf16"):
        case.layer.backward(case.x, *args, compute="int16")
    with pytest.raises(ValueError, match="compute is 'int8'; give 'bf16' or 'int16'"):
        make_case().layer.backward(case.x, *args, compute="int8")


@pytest.mark.parametrize("format", FORMATS)
def test_few_and_many_rows_give_the_same_bits(tier, format):
    """Batch invariance: a row's bits do not depend on its neighbours, forward and backward. Matrix
    tiles add in another order than vectors, so there it holds within each of the two only.
    """
    same = (lambda a, b: relative(a, b) <= FORWARD_BAR) if on_tiles(tier) else torch.equal
    case = make_case(E=3, H=96, I=72, T=130, K=2, format=format, dtype=torch.float32)
    dy = torch.randn(case.x.shape, generator=torch.Generator().manual_seed(3))
    all_ = case.x, case.index, case.weights, case.lora
    for c in computes(case):
        full, saved = case.layer.forward(*all_, save=True, compute=c)
        grad = case.layer.backward(dy, *all_, saved, compute=c)
        for n in (1, 2, 3, 4, 5, 7, 12, 13, 25, 64, 129):
            cut = case.x[:n], case.index[:n], case.weights[:n], case.lora
            out, _ = case.layer.forward(*cut, compute=c)
            assert same(out, full[:n]), (c, n)
            part = case.layer.backward(dy[:n], *cut, compute=c)
            assert same(part.dx, grad.dx[:n]) and same(part.dw, grad.dw[:n]), (c, n)


@pytest.mark.parametrize("compute", ["bf16", "int16"])
def test_recomputed_equals_saved(tier, compute):
    case = make_case(T=19)
    all_ = case.x, case.index, case.weights, case.lora
    _, saved = case.layer.forward(*all_, save=True, compute=compute)
    kept = case.layer.backward(case.x, *all_, saved, compute=compute)
    again = case.layer.backward(case.x, *all_, None, compute=compute)
    assert torch.equal(kept.dx, again.dx) and torch.equal(kept.dw, again.dw)
    for p in PROJECTIONS:
        assert torch.equal(kept.a[p], again.a[p]) and torch.equal(kept.b[p], again.b[p])


@pytest.mark.parametrize("gate", [88.5, -88.5, 200.0, -200.0, 1e4, -1e4])
def test_extreme_gates(tier, gate):
    """silu is exact in its limits, nothing becomes NaN, forward and backward, odd tail lengths."""
    E, H, I = 1, 64, 40
    layer = Experts(E, H, I, format="bf16")
    eye = torch.zeros(I, H)
    eye[:, 0] = 1.0
    layer.put(0, "gate", eye)
    eye = torch.zeros(I, H)
    eye[:, 1] = 1.0
    layer.put(0, "up", eye)
    down = torch.zeros(H, I)
    down[torch.arange(I), torch.arange(I)] = 1.0
    layer.put(0, "down", down)
    x = torch.zeros(3, H)
    x[:, 0], x[:, 1] = gate, 1.0
    index, weights = torch.zeros(3, 1).long(), torch.ones(3, 1)
    out, saved = layer.forward(x, index, weights, save=True)
    g = x[:, :1].to(torch.bfloat16).double()
    silu = torch.nn.functional.silu(g)
    torch.testing.assert_close(out[:, :I].double(), silu.expand(3, I), rtol=2**-8, atol=1e-37)
    assert (out[:, I:] == 0).all()
    grads = layer.backward(torch.ones_like(x), x, index, weights, saved=saved)
    assert torch.isfinite(grads.dx).all()
    if abs(gate) >= 100:
        slope = 1.0 if gate > 0 else 0.0
        assert (grads.dx[:, 0] == slope * I).all()


def test_nan_stays_in_its_row(tier):
    case = make_case(T=9, lora=())
    clean, _ = case.layer.forward(case.x.float(), case.index, case.weights)
    bad = case.x.float().clone()
    bad[4, 3] = float("nan")
    out, _ = case.layer.forward(bad, case.index, case.weights)
    assert torch.isnan(out[4]).all()
    keep = torch.arange(9) != 4
    assert torch.equal(out[keep], clean[keep])
    args = case.x.float(), case.index, case.weights
    clean, saved = case.layer.forward(*args, save=True, compute="int16")
    out, _ = case.layer.forward(bad, *args[1:], compute="int16")
    assert torch.isnan(out[4]).all() and torch.equal(out[keep], clean[keep])
    want, got = (
        case.layer.backward(dy, *args, saved=saved, compute="int16").dx for dy in (args[0], bad)
    )
    assert torch.isnan(got[4]).all() and torch.equal(got[keep], want[keep])


def test_outputs_are_fully_written(tier, monkeypatch):
    """Whatever the output buffers hold before, the result is the same."""
    case = make_case(E=6, T=3, H=100, I=40)
    args = case.x.float(), case.index, case.weights, case.lora
    want, saved = case.layer.forward(*args, save=True)
    grads = case.layer.backward(args[0], *args, saved)
    empty = torch.empty
    poisoned = 0

    def poison(*a, **k):
        nonlocal poisoned
        poisoned += 1
        t = empty(*a, **k)
        return t.fill_(float("nan")) if t.is_floating_point() else t

    monkeypatch.setattr(torch, "empty", poison)
    out, again = case.layer.forward(*args, save=True)
    got = case.layer.backward(args[0], *args, again)
    assert poisoned >= 10
    assert torch.equal(out, want) and torch.equal(again, saved)
    assert torch.equal(got.dx, grads.dx) and torch.equal(got.dw, grads.dw)
    for p in PROJECTIONS:
        assert torch.equal(got.a[p], grads.a[p]) and torch.equal(got.b[p], grads.b[p])


@pytest.mark.parametrize("dropout", [0.1, 0.5])
def test_dropout_is_one_mask_for_forward_and_backward(tier, dropout):
    case = make_case(E=3, H=64, I=96, T=40, K=2, dropout=dropout)
    masks = {p: read_mask(case, p) for p in PROJECTIONS}
    for p, m in masks.items():
        kept = (m != 0).float().mean().item()
        assert abs(kept - (1 - dropout)) < 0.02, (p, kept)
    assert not torch.equal(masks["gate"], masks["up"])
    dy = make_dy(case)
    ref, grads = case.run_reference(dy, masks)
    out, saved = case.layer.forward(case.x.float(), case.index, case.weights, case.lora, save=True)
    check_close("forward", out, ref, FORWARD_BAR)
    got = case.layer.backward(
        dy.float(), case.x.float(), case.index, case.weights, case.lora, saved
    )
    for name, value in {"dx": got.dx, "dw": got.dw}.items():
        assert relative(value, grads[name]) < 6e-3, name
    for p in PROJECTIONS:
        assert relative(got.a[p], grads[f"a.{p}"]) < 6e-3, p
        assert relative(got.b[p], grads[f"b.{p}"]) < 6e-3, p


def read_mask(case, projection):
    """The multipliers of csrc/gemm/elementwise.h, written again from its definition."""
    lora = case.lora
    T, K = case.index.shape
    inner = lora.a[projection].shape[2]
    limit = int(lora.dropout * 2**24)
    assignment = torch.arange(T * K)
    keys = torch.tensor(
        [row_key(lora.seed, PROJECTIONS.index(projection), int(i)) for i in assignment]
    )
    element = torch.arange(inner)
    h = keys[:, None] ^ (element[None] * 0x9E3779B1 & 0xFFFFFFFF)
    h = ((h ^ h >> 16) * 0x85EBCA6B) & 0xFFFFFFFF
    h = ((h ^ h >> 13) * 0xC2B2AE35) & 0xFFFFFFFF
    keep = ((h ^ h >> 16) >> 8) >= limit
    return (keep / (1 - lora.dropout)).float().view(T, K, inner)


def row_key(seed, projection, assignment):
    m = 2**64 - 1
    z = (seed + assignment * 0x9E3779B97F4A7C15 + projection * 0xD1B54A32D192ED03) & m
    z = ((z ^ z >> 30) * 0xBF58476D1CE4E5B9) & m
    z = ((z ^ z >> 27) * 0x94D049BB133111EB) & m
    return (z ^ z >> 31) & 0xFFFFFFFF


QUANTIZER_BARS = {  # relative, at the default group: docs/kernels.md
    "bf16": 0.003,
    "int8": 0.008,
    "int8_fp32": 0.008,
    "fp8": 0.028,
    "mxfp8": 0.031,
    "int4": 0.10,
    "uint4": 0.105,
    "nf4": 0.095,
    "nvfp4": 0.10,
    "mxfp4": 0.12,
}


@pytest.mark.parametrize("format", FORMATS)
def test_quantizer_error_on_normal_weights(format):
    group, bar = formats.of(format).default_group, QUANTIZER_BARS[format]
    layer = Experts(1, 1024, 256, format=format, group=group)
    w = torch.randn(256, 1024, generator=torch.Generator().manual_seed(0))
    layer.put(0, "gate", w)
    assert relative(layer.get(0, "gate"), w) <= bar


def test_bf16_is_exact_and_codes_survive_repacking(tier):
    w = torch.randn(40, 100, generator=torch.Generator().manual_seed(1)).to(torch.bfloat16)
    layer = Experts(1, 100, 40, format="bf16")
    layer.put(0, "gate", w)
    assert torch.equal(layer.get(0, "gate"), w.float())


@pytest.mark.parametrize("format", FORMATS)
def test_packed_bytes_are_the_same_on_every_tier(format):
    """Packed files move between machines."""
    w = {
        p: torch.randn(
            (100, 72) if p == "down" else (72, 100), generator=torch.Generator().manual_seed(2)
        )
        for p in PROJECTIONS
    }
    seen = set()
    for isa in TIERS:
        choose_tier(isa)
        layer = Experts(2, 100, 72, format=format)
        for e in range(2):
            for p in PROJECTIONS:
                layer.put(e, p, w[p])
        seen.add(bytes(layer.packed()))
    choose_tier()
    assert len(seen) == 1


def test_packed_size_is_the_formats_bits():
    for format, group, bits in (("bf16", 0, 16), ("int8", 128, 8.125), ("int4", 32, 4.5)):
        n = Experts.packed_nbytes(4, 256, 512, format, group)
        assert n <= 1.02 * 4 * 3 * 256 * 512 * bits / 8, format


def test_kt_isa_forces_a_tier_and_refuses_by_name():
    code = "import kt_core.runtime as r; print(r.isa())"
    run = lambda isa: subprocess.run(  # noqa: E731
        [sys.executable, "-c", code],
        env={**os.environ, "KT_ISA": isa},
        capture_output=True,
        text=True,
    )
    for isa in TIERS:
        assert run(isa).stdout.strip() == isa
    bad = run("avx9000")
    assert bad.returncode != 0 and "KT_ISA is avx9000" in bad.stderr and "scalar" in bad.stderr
