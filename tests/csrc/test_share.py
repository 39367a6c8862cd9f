"""Experts.forward and backward of a share: some of the experts, for several processes' tokens."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from kernel_cases import BATCH_INVARIANT, choose_tier, make_case, relative

from kt_core.experts import Lora, Share
from kt_core.names import PROJECTIONS

E, TOKENS, K, SEEDS = 6, (9, 0, 14), 3, (11, 7, 2**62 + 5)


@pytest.fixture(params=[0.0, 0.3])
def case(request):
    return make_case(E=E, T=sum(TOKENS), K=K, H=96, I=136, dropout=request.param)


def run(case, share=None, lora=None, rows=slice(None)):
    """out, dx, dw, and LoRA gradients, for some of the tokens."""
    args = case.x[rows].float(), case.index[rows], case.weights[rows], lora or case.lora
    grad = torch.randn(case.x.shape, generator=torch.Generator().manual_seed(5))[rows]
    out, saved = case.layer.forward(*args, save=True, share=share)
    mine = torch.ones(E, dtype=torch.bool) if share is None else share.mine
    assert len(saved) == mine[args[1]].sum()
    got = case.layer.backward(grad, *args, saved, share=share)
    again = case.layer.backward(grad, *args, None, share=share)
    assert torch.equal(got.dx, again.dx)
    return [out, got.dx, got.dw], [*(got.a[p] for p in PROJECTIONS), *(got.b.values())]


def shared(*mine):
    wanted = torch.tensor([e in mine for e in range(E)])
    return Share(wanted, list(zip(TOKENS, SEEDS, strict=True)))


@pytest.fixture(params=BATCH_INVARIANT)
def batch_invariant(request):
    choose_tier(request.param)
    yield request.param
    choose_tier()


def test_rows_keep_the_dropout_masks_of_their_own_batch(batch_invariant, case):
    """All experts for the tokens of three processes: the bits of each process's own call."""
    rows, factors = run(case, shared(*range(E)))
    begin, sums = 0, [torch.zeros_like(f) for f in factors]
    for tokens, seed in zip(TOKENS, SEEDS, strict=True):
        part = slice(begin, begin + tokens)
        begin += tokens
        lora = dataclasses.replace(case.lora, seed=seed)
        own, gradients = run(case, None, lora, part)
        assert all(torch.equal(whole[part], t) for whole, t in zip(rows, own, strict=True))
        sums = [s + g for s, g in zip(sums, gradients, strict=True)]
    assert all(relative(f, s) < 1e-5 for f, s in zip(factors, sums, strict=True))


def test_shares_add_up(case):
    """Experts on three processes, one of them without any."""
    rows, factors = run(case, shared(*range(E)))
    shares = [(0, 2, 5), (), (1, 3, 4)]
    parts = [run(case, shared(*mine)) for mine in shares]
    for i, whole in enumerate(rows):
        assert relative(sum(part[0][i] for part in parts), whole) < 1e-6
    for mine, (part, gradients) in zip(shares, parts, strict=True):
        other = ~shared(*mine).mine
        assert (part[2][other[case.index]] == 0).all()
        for got, whole in zip(gradients, factors, strict=True):
            assert torch.equal(got[~other], whole[~other]) and (got[other] == 0).all()


def test_a_share_without_rows_is_zero(case):
    case.index[:] = torch.tensor([0, 2, 5])
    used = torch.full_like(case.x, 3.0, dtype=torch.float32)  # memory that torch gives out again
    del used
    rows, factors = run(case, shared(1, 3))
    assert not any(t.any() for t in (*rows, *factors))


def test_what_does_not_fit_is_refused(case):
    args = case.x, case.index, case.weights
    good = shared(0, 1)
    for mine in (good.mine[:3], good.mine.int()):
        with pytest.raises(ValueError, match=r"share.mine is .*; experts needs bool \[6\]"):
            case.layer.forward(*args, share=Share(mine, good.parts))
    with pytest.raises(ValueError, match="do not add up to 23 tokens"):
        case.layer.forward(*args, share=Share(good.mine, [(22, 0)]))


def test_bf16_rows_come_back_unrounded(case):
    """Partial sums are fp32 whatever x is."""
    out, _ = case.layer.forward(
        case.x, case.index, case.weights, Lora({}, {}, 1.0), share=shared(*range(E))
    )
    assert case.x.dtype == torch.bfloat16 and out.dtype == torch.float32
