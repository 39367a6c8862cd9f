"""The experts as a differentiable torch operator.

`kt::experts_forward` and `kt::experts_backward` are ordinary `torch.library` custom operators, so
that dispatch modes see them: selective checkpointing keeps the *outputs* of an operator, which is
why the saved gate and up pre-activations are an output and not a context attribute. `Experts`
objects are named by an integer handle; the registry holds weak references only. Nothing else
survives a call, so forwards and backwards may come in any order.

Shapes, with I = `intermediate`: x [T, H]; top_k_index, top_k_weights [T, K]; lora A tensors [E, r,
in] then B tensors [E, out, r] in the order of `projections`, of any floating dtype; scaling has one
value per projection, used or not (torch takes an empty list for a list of tensors); out [T, H];
saved [T*K, 2, I], or [0] when nothing is saved. With `together` the rows of the host's ranks are
computed in one pass (exchange.py), every rank calls the operator at the same point, and `saved` has
as many rows as fall to this one.
"""

from __future__ import annotations

import functools
import itertools
import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from kt_core.experts import Experts, Lora, in_one_dtype
from kt_core.module import Runner
from kt_core.names import PROJECTIONS
from kt_sft.op import exchange, position, row_counts, staging

_next_handle = itertools.count(1)
_by_handle: weakref.WeakValueDictionary[int, Experts] = weakref.WeakValueDictionary()
_handles: weakref.WeakKeyDictionary[Experts, int] = weakref.WeakKeyDictionary()


def handle_of(experts: Experts) -> int:
    """The number by which the operators know `experts`; valid while somebody holds the object."""
    handle = _handles.get(experts)
    if handle is None:
        handle = _handles[experts] = next(_next_handle)
        _by_handle[handle] = experts
    return handle


def _lookup(handle: int) -> Experts:
    experts = _by_handle.get(handle)
    if experts is None:
        raise RuntimeError(
            f"expert handle {handle} belongs to a model that is gone; keep the model until "
            "backward has run"
        )
    return experts


def runner(activation: str) -> Runner:
    """The `Runner` that trains through the operators; activation "retain" or "recompute" (see
    KTConfig).
    """
    return {"retain": _retain, "recompute": _recompute}[activation]


def _retain(
    experts: Experts, x: Tensor, top_k_index: Tensor, top_k_weights: Tensor, lora: Lora | None
) -> Tensor:
    together = exchange.together()
    return run(experts, x, top_k_index, top_k_weights, lora, retain=True, together=together)


def _recompute(
    experts: Experts, x: Tensor, top_k_index: Tensor, top_k_weights: Tensor, lora: Lora | None
) -> Tensor:
    together = exchange.together()
    return run(experts, x, top_k_index, top_k_weights, lora, retain=False, together=together)


def run(
    experts: Experts,
    x: Tensor,
    top_k_index: Tensor,
    top_k_weights: Tensor,
    lora: Lora | None,
    *,
    retain: bool,
    together: bool = False,
) -> Tensor:
    """What a runner does; `retain` and `together` as the module text and KTConfig say."""
    names = [] if lora is None else [p for p in PROJECTIONS if p in lora.a]
    factors = [] if lora is None else [*(lora.a[p] for p in names), *(lora.b[p] for p in names)]
    needs_grad = torch.is_grad_enabled() and any(
        t.requires_grad for t in (x, top_k_weights, *factors)
    )
    out, _ = torch.ops.kt.experts_forward(
        x,
        top_k_index,
        top_k_weights,
        factors,
        handle_of(experts),
        experts.intermediate,
        ",".join(names),
        [lora.scaling_of(p) if lora and p in names else 1.0 for p in PROJECTIONS],
        0.0 if lora is None else lora.dropout,
        0 if lora is None else lora.seed,
        together,
        retain and needs_grad,
    )
    return out


@torch.library.custom_op("kt::experts_forward", mutates_args=())
def experts_forward(
    x: Tensor,
    top_k_index: Tensor,
    top_k_weights: Tensor,
    lora: Sequence[Tensor],
    handle: int,
    intermediate: int,
    projections: str,
    scaling: Sequence[float],
    dropout: float,
    seed: int,
    together: bool,
    save: bool,
) -> tuple[Tensor, Tensor]:
    """Forward of one layer's experts; see the module text for shapes. Any device; computed on the
    CPU.
    """
    experts = _lookup(handle)
    position.enter(experts.name, "forward")
    hx, hi, hw, *factors = staging.to_host(
        [_computable(x), top_k_index, top_k_weights, *in_one_dtype(lora)]
    )
    adapter = _lora(factors, projections, scaling, dropout, seed)
    if together:
        out, saved = exchange.ranks().forward(experts, hx, hi, hw, adapter, save=save)
    else:
        compute = experts.training_compute
        out, saved = experts.forward(hx, hi, hw, adapter, save=save, compute=compute)
    position.leave(experts.name, "forward")
    kept = torch.empty(0) if saved is None else saved
    # Saved activations stay in CPU memory: they are read there again, and GPU memory is what we are
    # short of.
    return staging.to_device(out, x), kept


@torch.library.custom_op("kt::experts_backward", mutates_args=())
def experts_backward(
    grad_out: Tensor,
    x: Tensor,
    top_k_index: Tensor,
    top_k_weights: Tensor,
    lora: Sequence[Tensor],
    saved: Tensor,
    handle: int,
    intermediate: int,
    projections: str,
    scaling: Sequence[float],
    dropout: float,
    seed: int,
    together: bool,
    need_x: bool,
    need_weights: bool,
    need_lora: bool,
) -> list[Tensor]:
    """Gradients of x, top_k_weights and every LoRA tensor, in the dtypes and on the devices of
    their inputs.

    One that is not needed is an empty tensor.
    """
    experts = _lookup(handle)
    position.enter(experts.name, "backward")
    hg, hx, hi, hw, *factors = staging.to_host(
        [_computable(grad_out), _computable(x), top_k_index, top_k_weights, *in_one_dtype(lora)]
    )
    ranks = exchange.ranks() if together else None
    if ranks is None:
        backward = functools.partial(experts.backward, compute=experts.training_compute)
    else:
        backward = functools.partial(ranks.backward, experts)
    grads = backward(
        hg,
        hx,
        hi,
        hw,
        _lora(factors, projections, scaling, dropout, seed),
        saved if saved.numel() else None,
        need_dx=need_x,
        need_dw=need_weights,
        need_lora=need_lora,
    )
    row_counts.count_rows(experts, hi, 1 if ranks is None else ranks.size)
    position.leave(experts.name, "backward")
    names = _names(projections)
    results = [
        grads.dx,
        grads.dw,
        *(grads.a.get(p) for p in names),
        *(grads.b.get(p) for p in names),
    ]
    return [
        like.new_empty(0) if g is None else staging.to_device(g, like)
        for g, like in zip(results, [x, top_k_weights, *lora], strict=True)
    ]


def _names(projections: str) -> list[str]:
    return projections.split(",") if projections else []


def _lora(
    factors: list[Tensor], projections: str, scaling: Sequence[float], dropout: float, seed: int
) -> Lora | None:
    names = _names(projections)
    if not names:
        return None
    a, b = factors[: len(names)], factors[len(names) :]
    return Lora(
        dict(zip(names, a, strict=True)),
        dict(zip(names, b, strict=True)),
        {p: s for p, s in zip(PROJECTIONS, scaling, strict=True) if p in names},
        dropout,
        seed,
    )


def _computable(x: Tensor) -> Tensor:
    return x if x.dtype in (torch.bfloat16, torch.float32) else x.to(torch.float32)


@experts_forward.register_fake
def _(
    x: Tensor,
    top_k_index: Tensor,
    top_k_weights: Tensor,
    lora: Sequence[Tensor],
    handle: int,
    intermediate: int,
    projections: str,
    scaling: Sequence[float],
    dropout: float,
    seed: int,
    together: bool,
    save: bool,
) -> tuple[Tensor, Tensor]:
    shape: tuple[Any, ...] = (0,)
    if save:
        rows = torch.library.get_ctx().new_dynamic_size() if together else top_k_index.numel()
        shape = (rows, 2, intermediate)  # a compiled graph knows no handle
    return torch.empty_like(x), torch.empty(
        shape, dtype=torch.bfloat16 if save else torch.float32, device="cpu"
    )


@experts_backward.register_fake
def _(
    grad_out: Tensor,
    x: Tensor,
    top_k_index: Tensor,
    top_k_weights: Tensor,
    lora: Sequence[Tensor],
    saved: Tensor,
    handle: int,
    intermediate: int,
    projections: str,
    scaling: Sequence[float],
    dropout: float,
    seed: int,
    together: bool,
    need_x: bool,
    need_weights: bool,
    need_lora: bool,
) -> list[Tensor]:
    needed = (need_x, need_weights, *(need_lora for _ in lora))
    inputs = (x, top_k_weights, *lora)
    return [
        torch.empty_like(t) if need else t.new_empty(0)
        for t, need in zip(inputs, needed, strict=True)
    ]


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    x, top_k_index, top_k_weights, lora, *constants = inputs
    ctx.constants = constants[:-1]
    ctx.save_for_backward(x, top_k_index, top_k_weights, output[1], *lora)
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, grad_out: Tensor | None, _grad_saved: Tensor | None) -> tuple[Any, ...]:
    x, top_k_index, top_k_weights, saved, *lora = ctx.saved_tensors
    unused = (None,) * 8
    if grad_out is None:
        if not ctx.constants[-1]:
            return None, None, None, [None] * len(lora), *unused
        grad_out = torch.zeros_like(x)  # the other ranks wait for this one
    need_x, _, need_w, need_lora = ctx.needs_input_grad[:4]
    dx, dw, *dlora = torch.ops.kt.experts_backward(
        grad_out,
        x,
        top_k_index,
        top_k_weights,
        lora,
        saved,
        *ctx.constants,
        need_x,
        need_w,
        any(need_lora),
    )
    return (
        dx if need_x else None,
        None,
        dw if need_w else None,
        [g if need else None for g, need in zip(dlora, need_lora, strict=True)],
        *unused,
    )


torch.library.register_autograd("kt::experts_forward", _backward, setup_context=_setup_context)
