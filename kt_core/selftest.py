"""`python -m kt_core.selftest`: does every kernel that this CPU can run compute the right thing?

Each tier and weight format runs one small layer forward and backward, with an adapter on all three
projections, and in the int8 domain where it has one; errors are relative to plain fp32 torch on the
dequantized weights. One line per tier; the exit status is 1 when any error is above its bar.
"""

from __future__ import annotations

import sys
import time

import torch
import torch.nn.functional as F
from torch import Tensor

from kt_core import runtime
from kt_core.experts import Experts, Lora
from kt_core.names import PROJECTIONS

FORWARD_BAR, GRAD_BAR, INT8_BAR = 4e-3, 6e-3, 2e-2  # docs/kernels.md, "Numerics"
E, K = 3, 2  # experts, and experts per token
# H, I and the rank divide neither a panel nor a block; few and many rows take different bodies.
# Two tokens: a gradient of one alone is a product with A x, which may nearly cancel in some format.
SIZES = ((2, 136, 72, 3), (50, 136, 72, 3))  # tokens, H, I, rank


def reference(
    x: Tensor, index: Tensor, weights: Tensor, dense: dict[str, Tensor], lora: Lora | None
) -> Tensor:
    """Output ``[T, H]`` in fp32; ``dense[p] [E, out, in]``. Autograd gives the gradients."""
    out = torch.zeros_like(x)
    for e in range(E):
        token, slot = torch.nonzero(index == e, as_tuple=True)

        def project(p: str, rows: Tensor, e: int = e) -> Tensor:
            y = rows @ dense[p][e].T
            if lora is not None:
                y = y + lora.scaling_of(p) * (rows @ lora.a[p][e].T) @ lora.b[p][e].T
            return y

        h = F.silu(project("gate", x[token])) * project("up", x[token])
        out = out.index_add(0, token, project("down", h) * weights[token, slot, None])
    return out


def relative(out: Tensor, want: Tensor) -> float:
    """Distance over length; infinite when ``out`` is not finite."""
    if not bool(torch.isfinite(out).all()):
        return float("inf")
    return float((out.float() - want).norm() / want.norm())


def errors(format: str, tokens: int, H: int, I: int, rank: int, int8: bool) -> dict[str, float]:
    """Errors of the current tier, each divided by its bar: above 1 is a failure."""
    generator = torch.Generator().manual_seed(tokens)

    def rounded(*shape: int) -> Tensor:
        """N(0, 1) / sqrt(last), in values that bf16 holds."""
        values = torch.randn(*shape, generator=generator) / shape[-1] ** 0.5
        return values.to(torch.bfloat16).float()

    layer = Experts(E, H, I, format=format)
    shapes = {"gate": (I, H), "up": (I, H), "down": (H, I)}
    for e in range(E):
        for p in PROJECTIONS:
            layer.put(e, p, rounded(*shapes[p]))
    dense = {p: torch.stack([layer.get(e, p) for e in range(E)]) for p in PROJECTIONS}
    a = {p: rounded(E, rank, shapes[p][1]).requires_grad_() for p in PROJECTIONS}
    b = {p: rounded(E, shapes[p][0], rank).requires_grad_() for p in PROJECTIONS}
    lora = Lora(a, b, 0.5)
    x = (rounded(tokens, H) * H**0.5).to(torch.bfloat16).float().requires_grad_()
    index = torch.stack([torch.randperm(E, generator=generator)[:K] for _ in range(tokens)])
    weights = (torch.rand(tokens, K, generator=generator) + 0.1).requires_grad_()

    want = reference(x, index, weights, dense, lora)
    # a loss's gradient has a component along the output; pure noise would nearly cancel in dw
    along = (want / want.pow(2).mean().sqrt()).detach()
    dy = (rounded(tokens, H) * H**0.5 + along).to(torch.bfloat16).float()
    want.backward(dy)
    got, saved = layer.forward(x, index, weights, lora, save=True)
    grads = layer.backward(dy, x, index, weights, lora, saved)
    assert grads.dx is not None and grads.dw is not None

    pairs = {"dx": (grads.dx, x.grad), "dw": (grads.dw, weights.grad)}
    pairs |= {f"a.{p}": (grads.a[p], a[p].grad) for p in PROJECTIONS}
    pairs |= {f"b.{p}": (grads.b[p], b[p].grad) for p in PROJECTIONS}
    found = {"forward": relative(got, want.detach()) / FORWARD_BAR}
    for name, (ours, theirs) in pairs.items():
        assert theirs is not None
        found[name] = relative(ours, theirs) / GRAD_BAR
    if int8:
        with torch.no_grad():
            plain = reference(x, index, weights, dense, None)
            got, _ = layer.forward(x, index, weights, compute="int8")
        found["int8 domain"] = relative(got, plain) / INT8_BAR
    return found


def check_tier(isa: str, formats: dict[str, bool]) -> tuple[bool, str]:
    """Whether all of a tier's errors are below their bars, and what to say about it."""
    runtime.force_isa(isa)
    start = time.perf_counter()
    good, parts = True, []
    for format, int8 in formats.items():
        found: dict[str, float] = {}
        for size in SIZES:
            for name, error in errors(format, *size, int8).items():
                found[name] = max(error, found.get(name, 0.0))
        worst = max(found, key=lambda name: found[name])
        good &= found[worst] <= 1.0
        parts.append(f"{format} {100 * found[worst]:.0f} % of its bar ({worst})")
    state = "ok" if good else "FAILED"
    return good, f"{state}: {', '.join(parts)}; {time.perf_counter() - start:.1f} s"


def main() -> int:
    """Prints one line per tier; 1 when one failed."""
    tiers: dict[str, dict[str, bool]] = {}
    missing: dict[str, str] = {}
    for k in runtime.kernels():
        isa = str(k["isa"])
        tiers.setdefault(isa, {})[str(k["format"])] = bool(k["int8_domain"])
        missing[isa] = str(k["missing"])
    chosen = runtime.isa()
    good = True
    for isa, formats in tiers.items():
        if missing[isa]:
            text = f"not on this machine, which lacks {missing[isa]}"
        else:
            right, text = check_tier(isa, formats)
            good &= right
        print(f"{isa:12} {text}{' (in use)' if isa == chosen else ''}", flush=True)
    runtime.force_isa(chosen)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
