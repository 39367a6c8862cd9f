"""Random layers and the comparison with the reference, shared by the kernel tests."""

from __future__ import annotations

import os
from dataclasses import dataclass

import pytest
import torch
from reference import experts as reference
from reference import round_bf16

from kt_core import _kt, formats, kernels, runtime
from kt_core.experts import Experts, Lora
from kt_core.names import PROJECTIONS

FORWARD_BAR = 4e-3  # docs/kernels.md, bf16 domain
INT8_BAR = 2e-2  # the same, int8 domain
ELEMENT_BAR = 0.05  # of the row's RMS, bf16 domain
INT8_ELEMENT_BAR = 0.08  # 4 standard deviations at INT8_BAR; 0.05 would be 2.5 (docs/kernels.md)
GRAD_BAR = 6e-3

_NEEDS = {str(k["isa"]): str(k["needs"]).split() for k in kernels()}
TIERS = sorted({str(k["isa"]) for k in kernels() if k["usable"]})
FORMATS = formats.names()
INT8_FORMATS = tuple(f for f in FORMATS if "int8" in formats.of(f).domains)
GROUPS = [(f, g) for f in FORMATS for g in formats.of(f).groups]
"""Every format with every group that it takes."""
EVERY_SHAPE = ("bf16", "int8", "int4")
"""Formats that are tested in all shapes: one of each size of codes. The others take the same paths,
and are tested in fewer shapes on every tier."""
TOKENS = [(f, t) for f in FORMATS for t in (1, 2, 3, 8, 33) if f in EVERY_SHAPE or t in (2, 33)]
ODD_SIZES = [
    (f, h, i)
    for f in FORMATS
    for h in (64, 96, 100)
    for i in (40, 72, 96)
    if f in EVERY_SHAPE or (h, i) == (100, 72)
]
INT8_GROUPS = [
    (f, g) for f, g in GROUPS if f in INT8_FORMATS and g in (formats.of(f).default_group, 128, 0)
]


def small_group(format: str) -> int:
    """The smallest group of a format, 0 for one without scales: it divides sizes most often."""
    return min((g for g in formats.of(format).groups if g), default=0)


def on_tiles(isa: str) -> bool:
    """Whether a tier multiplies many rows on matrix tiles. These add up in another order than the
    vectors that few rows take, so a row's bits depend on how many there are (docs/kernels.md),
    and round once per 32 values, where a slice may end.
    """
    return "amx_tile" in _NEEDS[isa]


BATCH_INVARIANT = [isa for isa in TIERS if not on_tiles(isa)]
"""The tiers of this machine on which a row's bits do not depend on the rows beside it."""


def choose_tier(isa: str | None = None) -> None:
    """One tier; without a name, the one that this run of the tests was started with."""
    runtime.force_isa(isa or os.environ.get("KT_ISA"))


@dataclass
class Case:
    """One layer, one batch, and fp32 leaves of what the kernels see."""

    layer: Experts
    x: torch.Tensor
    index: torch.Tensor
    weights: torch.Tensor
    lora: Lora | None
    dense: dict[str, torch.Tensor]
    activation: str

    def leaves(self):
        x = round_bf16(self.x.float()).requires_grad_()
        w = self.weights.clone().requires_grad_()
        a, b = {}, {}
        if self.lora:
            a = {p: round_bf16(t).requires_grad_() for p, t in self.lora.a.items()}
            b = {p: round_bf16(t).requires_grad_() for p, t in self.lora.b.items()}
        return x, w, a, b

    def run_reference(self, dy=None, masks=None):
        x, w, a, b = self.leaves()
        scaling = self.lora.scaling if self.lora else 0.0
        out = reference(
            x,
            self.index,
            w,
            self.dense["gate"],
            self.dense["up"],
            self.dense["down"],
            a=a,
            b=b,
            scaling=scaling,
            activation=self.activation,
            masks=masks,
        )
        grads = {}
        if dy is not None:
            out.backward(round_bf16(dy.float()))
            grads = {"dx": x.grad, "dw": w.grad}
            grads |= {f"a.{p}": t.grad for p, t in a.items()} | {
                f"b.{p}": t.grad for p, t in b.items()
            }
        return out.detach(), grads


def make_case(
    *,
    E=4,
    H=64,
    I=96,
    T=17,
    K=2,
    format="int8",
    group=None,
    r=8,
    lora=PROJECTIONS,
    scaling=0.7,
    activation="silu",
    seed=0,
    dtype=torch.bfloat16,
    dropout=0.0,
    slices=1,
) -> Case:
    g = torch.Generator().manual_seed(seed)
    randn = lambda *s: torch.randn(*s, generator=g)  # noqa: E731
    layer = Experts(E, H, I, format=format, group=group, activation=activation, slices=slices)
    shapes = {"gate": (I, H), "up": (I, H), "down": (H, I)}
    dense = {p: torch.empty(E, *s) for p, s in shapes.items()}
    for e in range(E):
        for p, s in shapes.items():
            layer.put(e, p, randn(*s) / s[1] ** 0.5)
            dense[p][e] = layer.get(e, p)
    factors = None
    if lora:
        a = {p: randn(E, r, shapes[p][1]) / shapes[p][1] ** 0.5 for p in lora}
        b = {p: randn(E, shapes[p][0], r) / r**0.5 for p in lora}
        factors = Lora(a, b, scaling, dropout=dropout, seed=1234567)
    index = (
        torch.stack([torch.randperm(E, generator=g)[:K] for _ in range(T)])
        if T
        else torch.zeros(0, K).long()
    )
    weights = torch.rand(T, K, generator=g) + 0.1
    return Case(layer, randn(T, H).to(dtype), index, weights, factors, dense, activation)


def relative(out: torch.Tensor, ref: torch.Tensor) -> float:
    return float((out.float() - ref).norm() / ref.norm().clamp_min(1e-30))


def check_close(
    name: str,
    out: torch.Tensor,
    ref: torch.Tensor,
    bar: float,
    rows: bool = True,
    element: float = ELEMENT_BAR,
) -> float:
    """The three conditions of docs/kernels.md; returns the relative error."""
    assert out.shape == ref.shape, name
    assert torch.isfinite(out).all(), name
    err = relative(out, ref)
    assert err <= bar, f"{name}: relative error {err:.2e} > {bar:.0e}"
    if not rows or ref.dim() < 2 or not ref.numel():
        return err
    o, t = out.float().reshape(-1, ref.shape[-1]), ref.reshape(-1, ref.shape[-1])
    rms = t.pow(2).mean(-1).sqrt()
    live = rms > 1e-3 * rms.max()
    row = ((o - t).norm(dim=-1) / t.norm(dim=-1).clamp_min(1e-30))[live]
    assert row.max() <= 3 * bar, f"{name}: row error {row.max():.2e} > {3 * bar:.1e}"
    worst = ((o - t).abs() / rms[:, None])[live].max()
    assert worst <= element, f"{name}: an element is off by {worst:.3f} of its row's RMS"
    return err


def make_dy(case: Case) -> torch.Tensor:
    """A gradient with a component along the output, as a loss has: with pure noise each router
    gradient is a dot product that nearly cancels, and its error measures the cancellation."""
    noise = torch.randn(case.x.shape, generator=torch.Generator().manual_seed(9))
    out, _ = case.run_reference()
    return (noise + out / out.pow(2).mean().sqrt().clamp_min(1e-30)).to(torch.bfloat16)


def computes(case: Case) -> tuple[str, ...]:
    """The domains in which a layer can be trained."""
    return tuple(d for d in formats.of(case.layer.format).domains if d != "int8")


def check_case(case: Case, saved: bool = True, masks=None) -> dict[str, float]:
    """Forward and backward against the reference, in every domain; returns the relative errors of
    bf16 by name.
    """
    dy = make_dy(case)
    reference = case.run_reference(dy, masks)
    found = [check_compute(case, c, dy, reference, saved) for c in computes(case)]
    return found[0]


def check_compute(case: Case, compute: str, dy, reference, saved: bool = True) -> dict[str, float]:
    ref, grads = reference
    args = case.x.float(), case.index, case.weights, case.lora
    out, kept = case.layer.forward(*args, save=saved, compute=compute)
    errors = {"forward": check_close(f"{compute} forward", out, ref, FORWARD_BAR)}
    got = case.layer.backward(dy.float(), *args, kept, compute=compute)
    errors["dx"] = check_close("dx", got.dx, grads["dx"], GRAD_BAR)
    errors["dw"] = check_close("dw", got.dw, grads["dw"], GRAD_BAR, rows=False)
    for p in got.a:
        for name, value in ((f"a.{p}", got.a[p]), (f"b.{p}", got.b[p])):
            errors[name] = check_close(name, value, grads[name], GRAD_BAR, rows=False)
    return errors


def forward(case: Case) -> torch.Tensor:
    return case.layer.forward(case.x, case.index, case.weights, case.lora)[0]


def everything(case: Case) -> list[torch.Tensor]:
    """Outputs of a forward and a backward, for comparing bits."""
    args = case.x.float(), case.index, case.weights, case.lora
    found = []
    for c in computes(case):
        out, saved = case.layer.forward(*args, save=True, compute=c)
        g = case.layer.backward(args[0], *args, saved, compute=c)
        found += [out, saved, g.dx, g.dw, *g.a.values(), *g.b.values()]
    return found


def same(a: list[torch.Tensor], b: list[torch.Tensor]) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def check_failing_task(case: Case, worker: int) -> None:
    """An exception of a task on `worker` (of those that are set) reaches the caller, each time, and
    leaves nothing behind.
    """
    want = everything(case)
    _kt.testing.delay_tasks(2000)  # so that every worker gets a task
    _kt.testing.fail_tasks(worker)
    for _ in range(2):
        with pytest.raises(RuntimeError, match=f"task failed on worker {worker}"):
            everything(case)
    _kt.testing.fail_tasks(-1)
    _kt.testing.delay_tasks(0)
    assert same(everything(case), want)
