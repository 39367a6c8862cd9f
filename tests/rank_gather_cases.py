"""Rows of several ranks in one pass of the experts: what the ranks of a RankGroup run.

First argument: a pytest.MonkeyPatch that is undone after the case.
"""

from __future__ import annotations

import os
import signal
from types import SimpleNamespace

import sft_cases as cases
import torch
from rank_train_cases import train
from torch import distributed

from kt_core import experts as core
from kt_core.experts import Lora
from kt_core.module import KTExpertsLinear
from kt_core.names import PROJECTIONS
from kt_sft.config import KTConfig
from kt_sft.op import autograd, exchange, staging
from kt_sft.ranks import host, row_gather

E, H, I, K, R = 7, 64, 40, 2, 3


def layer(name="layer"):
    """The same bf16 experts on every rank, whoever computes them."""
    g = torch.Generator().manual_seed(0)
    made = core.Experts(E, H, I, format="bf16", name=name)
    for p, shape in (("gate", (I, H)), ("up", (I, H)), ("down", (H, I))):
        for e in range(E):
            made.put(e, p, (torch.randn(shape, generator=g) * 0.1).bfloat16().float())
    return made


def batch(rank, tokens, only, dtype=torch.float32):
    """x, index, weights and the gradient of a rank; `only`: the experts that it uses."""
    g = torch.Generator().manual_seed(100 + rank)
    x = torch.randn(tokens, H, generator=g).bfloat16().to(dtype)
    weights = torch.rand(tokens, K, generator=g)
    chosen = torch.tensor(only)
    index = torch.stack(
        [chosen[torch.randperm(len(only), generator=g)[:K]] for _ in range(tokens)]
        or [torch.empty(0, dtype=torch.int64)]
    ).view(tokens, K)
    grad = torch.randn(tokens, H, generator=g).bfloat16().to(dtype)
    return x, index, weights, grad


def adapter(seed, dropout):
    """LoRA factors, equal on every rank, with a rank's own dropout seed."""
    g = torch.Generator().manual_seed(9)
    sizes = {"gate": (H, I), "up": (H, I), "down": (I, H)}
    make = lambda *s: (torch.randn(s, generator=g) * 0.1).bfloat16().float()  # noqa: E731
    a = {p: make(E, R, i).requires_grad_() for p, (i, _) in sizes.items()}
    b = {p: make(E, o, R).requires_grad_() for p, (_, o) in sizes.items()}
    return Lora(a, b, 2.0, dropout=dropout, seed=seed)


def gathered_and_own(
    patch,
    tokens,
    only,
    engine="kernels",
    staged=False,
    dropout=0.0,
    dtype=torch.float32,
    retain=True,
    frozen=(),
):
    """out and gradients of this rank's tokens computed together and alone, which experts each of
    both computed here, and how many rows were kept.

    tokens, only: of every rank. frozen: of x, weights, lora, what needs no gradient.
    """
    cases.use(engine, patch)
    if staged:  # as if tensors came from a GPU
        patch.setattr(staging, "_foreign", lambda device: True)
    rank = distributed.get_rank()
    exchange.use(exchange.HostRanks(distributed.group.WORLD))
    experts, computed = layer(), []
    forward = experts.forward

    def watched(x, index, *args, share=None, **kw):
        here = torch.ones(E, dtype=torch.bool) if share is None else share.mine
        computed.append(sorted(set(index[here[index]].tolist())))
        return forward(x, index, *args, share=share, **kw)

    experts.forward = watched
    results = []
    for together in (True, False):
        x, index, weights, grad = batch(rank, tokens[rank], only[rank], dtype)
        lora = adapter(1000 + rank, dropout)
        factors = [*(lora.a[p] for p in PROJECTIONS), *(lora.b[p] for p in PROJECTIONS)]
        leaves = {"x": [x], "weights": [weights], "lora": factors}
        for name, tensors in leaves.items():
            for t in tensors:
                t.requires_grad_(name not in frozen)
        out = autograd.run(experts, x, index, weights, lora, retain=retain, together=together)
        kept = [t for t in out.grad_fn.saved_tensors if t.dim() == 3 and t.shape[1:] == (2, I)]
        out.backward(grad)
        got = {f"{name}{i}": t.grad for name, ts in leaves.items() for i, t in enumerate(ts)}
        for i in range(len(factors)):  # what DDP makes of them
            if got[f"lora{i}"] is not None:
                distributed.all_reduce(got[f"lora{i}"])
        results.append(got | {"out": out.detach(), "kept": sum(map(len, kept))})
    exchange.use(None)
    return *results, computed


def lora_is_in_one_place(patch, tokens):
    """LoRA gradients of this rank, before anybody adds them up, and the experts it computed."""
    rank = distributed.get_rank()
    ranks = exchange.HostRanks(distributed.group.WORLD)
    x, index, weights, grad = batch(rank, tokens[rank], list(range(E)))
    share, _ = ranks._gather(layer(), [x, index, weights], 1, 0)
    needs = {"need_dx": False, "need_dw": False, "need_lora": True}
    got = ranks.backward(layer(), grad, x, index, weights, adapter(0, 0.0), None, **needs)
    assert got.dx is None and got.dw is None
    return share.mine, got.a["gate"]


def trained(patch, args, below=row_gather.FEW_ROWS, hosts=None, killed=None, **kw):
    """A run of LLaMA-Factory: rank_train_cases.train, and what was gathered.

    below: takes the place of FEW_ROWS. killed: this rank ends by kill -9 in a gathered call of
    backward.
    """
    rank = distributed.get_rank()
    if hosts is not None:
        patch.setattr(host, "host_identity", lambda: hosts[rank])
    patch.setattr(row_gather, "FEW_ROWS", below)
    calls = {"together": 0, "own": 0, "eval": 0}
    run, forward = autograd.run, exchange.HostRanks.forward
    backward = exchange.HostRanks.backward

    def watched(*a, together=False, **k):
        if not together:
            calls["own" if torch.is_grad_enabled() else "eval"] += 1
        return run(*a, together=together, **k)

    def counted(*a, **k):
        calls["together"] += 1
        return forward(*a, **k)

    def dying(self, *a, **k):
        if rank == killed:
            os.kill(os.getpid(), signal.SIGKILL)
        return backward(self, *a, **k)

    patch.setattr(autograd, "run", watched)
    patch.setattr(exchange.HostRanks, "forward", counted)
    patch.setattr(exchange.HostRanks, "backward", dying)
    return train(patch, args, **kw) | {"calls": calls}


class Caller(torch.nn.Module):
    """Calls the experts with the three tensors it is given."""

    def __init__(self, experts):
        super().__init__()
        self.experts = experts

    def forward(self, tensors):
        return self.experts(*tensors)


def decisions(patch, script, activation="retain"):
    """Which calls of an experts module were gathered. script: "train", "eval" or "no_grad" for a
    forward of the model in that mode with as many tokens as are given per rank, or "again" for what
    checkpointing computes in backward.
    """
    rank = distributed.get_rank()
    experts = layer()
    own = autograd.runner(activation)
    module = KTExpertsLinear(experts, runner=own, layer_index=0)
    model = Caller(module)
    callback = row_gather.RowGather(KTConfig(activation=activation))
    args = SimpleNamespace(ddp_timeout=60)
    callback.on_train_begin(args, None, None, model=model)
    seen = []
    patch.setattr(autograd, "run", lambda *a, together, **k: (seen.append(together), a[1])[1])
    for mode, tokens in script:
        x, index, weights, _ = batch(rank, tokens[rank], list(range(E)))
        model.train(mode != "eval")
        with torch.set_grad_enabled(mode in ("train", "again")):
            if mode == "again":
                module(x, index, weights)
            else:
                model((x, index, weights))
    callback.on_train_end(args, None, None)
    assert module.runner is own and exchange._ranks is None
    return seen


class Around:
    """A runner around that of a module, as kt_core.adapters puts one."""

    def __init__(self, module):
        self.inner, self.calls = module.runner, 0
        module.runner = self

    def __call__(self, *args):
        self.calls += 1
        return self.inner(*args)


def wrapped_runners(patch):
    """What becomes of runners that others wrapped: before training, in it, and of one that did not
    train through our operators; and which passes were gathered."""
    experts = layer()
    own = autograd.runner("recompute")
    module = KTExpertsLinear(experts, runner=own, layer_index=0)
    other = KTExpertsLinear(experts, runner=lambda *args: own(*args), layer_index=1)
    foreign = other.runner
    model = torch.nn.ModuleList([module, other])
    before = Around(module)
    seen = []
    patch.setattr(autograd, "run", lambda *a, together, **k: (seen.append(together), a[1])[1])
    callback = row_gather.RowGather(KTConfig())
    args = SimpleNamespace(ddp_timeout=60)
    x, index, weights, _ = batch(distributed.get_rank(), 4, list(range(E)))

    def both():
        seen.clear()
        for m in model:
            m(x, index, weights)
        return list(seen)

    model.train()
    callback.on_train_begin(args, None, None, model=model)
    during = both()
    within = Around(other)
    wrapped = both()
    callback.on_train_end(args, None, None)
    after = both()
    kept = module.runner is before and before.inner is own and other.runner is within
    calls = before.calls, within.calls
    callback.on_train_begin(args, None, None, model=model)
    again = both()
    callback.on_train_end(args, None, None)
    kept &= module.runner is before and other.runner is within
    other.runner = foreign
    return during, wrapped, after, again, calls, kept
