"""RMSNorm and LoRA linears of a run in fp32 on the CPU, in fewer operators.

There an operator of torch costs as much as what it does to a few hundred rows, and each passes over
memory again: docs/performance.md has what these take off a step. The functions here compute the
same formulas in fp32, their backward written out. A module keeps its type's name, parameters and
hooks, and takes its own code again wherever it is not the plain case: another dtype or device,
autocast, several adapters, dropout, a weight that is trained. Other models of the process are left
alone.
"""

from __future__ import annotations

from typing import Any

import torch
from peft.tuners.lora.layer import Linear as LoraLinear
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from kt_core import patches


def use(model: nn.Module) -> None:
    """From now on `model`, loaded for training, computes its norms and LoRA linears so. A norm
    that is not the usual formula is left alone.
    """
    for module in model.modules():
        if type(module) is LoraLinear:
            _turn_into(module, _LoraLinear)
        elif isinstance(module, _RmsNorm):
            continue
        elif type(module).__name__.endswith("RMSNorm") and _is_rms_norm(module):
            _become(module, _RmsNorm)


def _become(module: nn.Module, mixin: type[nn.Module]) -> None:
    kind = type(module)
    _turn_into(module, type(kind.__name__, (mixin, kind), {"__module__": kind.__module__}))


def _turn_into(module: nn.Module, kind: type[nn.Module]) -> None:
    patches.give(
        *(module, "__class__", kind),
        of="our models' norms and LoRA linears",
        by=__name__,
        why="fewer operators on CPUs, in our models only",
    )


def _plain(*tensors: Tensor) -> bool:
    """Whether all are ordinary fp32 tensors on the CPU, computed as they are."""
    return not torch.is_autocast_enabled("cpu") and all(
        type(t) in (Tensor, nn.Parameter) and t.dtype is torch.float32 and t.is_cpu for t in tensors
    )


class _Norm(torch.autograd.Function):
    """weight * x / sqrt(mean(x^2) + eps) over the last dimension; weight is frozen."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        inverse = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
        inverse.square_().div_(x.shape[-1]).add_(eps).rsqrt_()
        ctx.save_for_backward(x, weight, inverse)
        return (x * inverse).mul_(weight)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, inverse = ctx.saved_tensors
        grad = grad * weight
        along = (grad * x).sum(-1, keepdim=True)
        along.mul_(inverse.pow(3)).div_(-x.shape[-1])
        return grad.mul_(inverse).addcmul_(x, along), None, None


class _RmsNorm(nn.Module):
    weight: nn.Parameter
    variance_epsilon: float

    def forward(self, hidden_states: Tensor) -> Tensor:
        """[..., H] -> [..., H]."""
        if self.weight.requires_grad or not _plain(hidden_states, self.weight):
            out: Tensor = super().forward(hidden_states)
            return out
        return _Norm.apply(hidden_states, self.weight, self.variance_epsilon)


def _is_rms_norm(module: Any) -> bool:
    """Asked of the module itself: some families scale by 1 + weight, or norm in groups."""
    weight, eps = getattr(module, "weight", None), getattr(module, "variance_epsilon", None)
    if weight is None or eps is None or weight.dim() != 1 or not _plain(weight):
        return False
    x = torch.linspace(-2, 3, 3 * len(weight)).view(3, -1)
    with torch.no_grad():
        return torch.allclose(module(x), _Norm.apply(x, weight, eps), rtol=1e-5, atol=1e-6)


class _Lora(torch.autograd.Function):
    """x W^T + bias + s (x A^T) B^T; W and bias are frozen."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, w: Tensor, bias: Tensor | None, a: Tensor, b: Tensor, scaling: float
    ) -> Tensor:
        rows = x.reshape(-1, x.shape[-1])
        narrow = rows @ a.t()
        out = rows @ w.t() if bias is None else torch.addmm(bias, rows, w.t())
        out.addmm_(narrow, b.t(), alpha=scaling)
        ctx.save_for_backward(rows, w, a, b, narrow)
        ctx.scaling, ctx.shape = scaling, x.shape
        return out.view(*x.shape[:-1], len(w))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        rows, w, a, b, narrow = ctx.saved_tensors
        need_x, _, _, need_a, need_b, _ = ctx.needs_input_grad
        grad = grad.reshape(-1, len(w))
        back = grad @ b
        da = torch.addmm(a, back.t(), rows, beta=0, alpha=ctx.scaling) if need_a else None
        db = torch.addmm(b, grad.t(), narrow, beta=0, alpha=ctx.scaling) if need_b else None
        dx = (grad @ w).addmm_(back, a, alpha=ctx.scaling).view(ctx.shape) if need_x else None
        return dx, None, None, da, db, None


class _LoraLinear(LoraLinear):
    def forward(self, x: Tensor, *args: Any, **kw: Any) -> Tensor:
        """[..., in] -> [..., out]."""
        parts = None if args or kw else self._parts(x)
        if parts is None:
            out: Tensor = super().forward(x, *args, **kw)
            return out
        return _Lora.apply(x, *parts)

    def _parts(self, x: Tensor) -> tuple[Any, ...] | None:
        """What _Lora takes beside x, or None where peft does more than that."""
        active = self.active_adapters
        if (
            self.disable_adapters
            or self.merged
            or len(active) != 1
            or active[0] in self.lora_variant
        ):
            return None
        name, base = active[0], self.base_layer
        if name not in self.lora_A or type(base) is not nn.Linear:
            return None
        down, up, dropout = self.lora_A[name], self.lora_B[name], self.lora_dropout[name]
        if isinstance(dropout, nn.Dropout) and dropout.training and dropout.p > 0:
            return None
        if up.bias is not None or any(
            m._forward_hooks or m._forward_pre_hooks for m in (base, down, up)
        ):
            return None
        frozen = [base.weight] if base.bias is None else [base.weight, base.bias]
        if any(t.requires_grad for t in frozen) or not _plain(x, down.weight, up.weight, *frozen):
            return None
        return base.weight, base.bias, down.weight, up.weight, self.scaling[name]
