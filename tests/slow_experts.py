"""Slow, exact stand-in for kt_core.experts.Experts: fp32 torch, one expert at a time.
 Proofs about the seams (loading, PEFT, checkpointing, FSDP2) are run once with this class in place
of the kernels, so that a difference of 1e-6 is visible which int8 rounding would hide, and once
with the kernels. It has the API of `kt_core.experts.Experts`, ignores `format`, `group` and
`slices` (weights are held in fp32 exactly as given), does not round activations to bf16, saves gate
and up in fp32, and knows no dropout. The forward uses the very calls of transformers' eager
experts, in the same order, so base logits in fp32 agree bit for bit.
 Install it with `slow_experts.patch(monkeypatch)`; every user looks `Experts` up in
`kt_core.experts` at call time.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn import functional as F

from kt_core import experts as _experts
from kt_core.experts import Grads, Lora

PROJECTIONS = ("gate", "up", "down")
_ACTIVATIONS = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "relu": F.relu,
}


def patch(monkeypatch) -> None:
    """Puts SlowExperts in the place of the kernels for the length of one test."""
    monkeypatch.setattr(_experts, "Experts", SlowExperts)


class SlowExperts:
    """Experts of one layer in fp32; see the module text. Weight shapes: gate, up [I, H]; down [H,
    I].
    """

    def __init__(
        self,
        num_experts,
        hidden,
        intermediate,
        *,
        format="int8",
        group=None,
        activation="silu",
        slices=1,
        buffer=None,
        name="",
    ):
        self.num_experts, self.hidden, self.intermediate = num_experts, hidden, intermediate
        default = {"int8": 128, "int4": 32}.get(format, 0)
        self.group = default if group is None or format == "bf16" else group
        self.format, self.activation, self.name = format, activation, name
        self.nbytes = self.packed_nbytes(num_experts, hidden, intermediate, format, group)
        if (
            buffer is None
        ):  # torch's own allocation, aligned like a parameter: MKL's bits depend on it
            buffer = torch.empty(self.nbytes, dtype=torch.uint8).numpy()
        self._bytes = memoryview(buffer).cast("B")
        with warnings.catch_warnings():  # a read-only mapping is only ever read
            warnings.simplefilter("ignore")
            flat = torch.frombuffer(self._bytes, dtype=torch.float32, count=self.nbytes // 4)
        cut = num_experts * 2 * intermediate * hidden
        self.gate_up = flat[:cut].view(num_experts, 2 * intermediate, hidden)
        self.down = flat[cut:].view(num_experts, hidden, intermediate)
        self._missing = {(e, p) for e in range(num_experts) for p in PROJECTIONS}
        self.forwards = self.backwards = 0

    training_compute = "fp32"

    @staticmethod
    def packed_nbytes(num_experts, hidden, intermediate, format, group, slices=1) -> int:
        return 4 * 3 * num_experts * hidden * intermediate

    @staticmethod
    def max_slices(intermediate, format, group) -> int:
        return 8

    def bind_slices(self) -> None:
        pass

    @classmethod
    def from_packed(cls, num_experts, hidden, intermediate, *, buffer, **kw):
        self = cls(num_experts, hidden, intermediate, buffer=buffer, **kw)
        self._missing.clear()
        return self

    def _view(self, expert: int, projection: str) -> Tensor:
        if projection == "down":
            return self.down[expert]
        gate, up = self.gate_up[expert].split(self.intermediate)
        return {"gate": gate, "up": up}[projection]

    def put(self, expert: int, projection: str, weight: Tensor) -> None:
        view = self._view(expert, projection)
        if weight.shape != view.shape:
            raise ValueError(
                f"{self.name}: {projection} of expert {expert} is {tuple(weight.shape)}"
            )
        if not torch.isfinite(weight).all():
            raise ValueError(f"{self.name}: {projection} of expert {expert} holds NaN or Inf")
        view.copy_(weight)
        self._missing.discard((expert, projection))

    def get(self, expert: int, projection: str) -> Tensor:
        return self._view(expert, projection).clone()

    def missing(self) -> list[tuple[int, str]]:
        return sorted(self._missing)

    def packed(self) -> memoryview:
        return self._bytes

    def forward(
        self, x, top_k_index, top_k_weights, lora=None, *, save=False, compute="fp32", share=None
    ):
        """x [T, H], index and weights [T, K] -> (out [T, H], saved [T*K, 2, I] fp32 or None)."""
        self.forwards += 1
        saved = x.new_zeros(top_k_index.numel(), 2, self.intermediate, dtype=torch.float32)
        out = torch.zeros_like(x, dtype=torch.float32)
        weights = top_k_weights.float()
        for e, token, slot in self._rows(top_k_index, share):
            xe = x[token].float()
            gate, up = self._gate_up(xe, e, lora)
            saved[token * top_k_index.shape[1] + slot] = torch.stack([gate, up], 1)
            h = _ACTIVATIONS[self.activation](gate) * up
            y = _plus_delta(F.linear(h, self.down[e]), h, e, "down", lora)
            out.index_add_(0, token, y * weights[token, slot, None])
        return out if share else out.to(x.dtype), saved if save else None

    def backward(
        self,
        grad_out,
        x,
        top_k_index,
        top_k_weights,
        lora=None,
        saved=None,
        *,
        need_dx=True,
        need_dw=True,
        need_lora=True,
        compute="fp32",
        share=None,
    ) -> Grads:
        """Gradients of sum(grad_out * out): dx [T, H], dw [T, K], a and b by projection."""
        self.backwards += 1
        dx, dw = torch.zeros_like(x, dtype=torch.float32), torch.zeros(top_k_weights.shape)
        da = {p: torch.zeros(t.shape) for p, t in lora.a.items()} if lora else {}
        db = {p: torch.zeros(t.shape) for p, t in lora.b.items()} if lora else {}
        weights = top_k_weights.float()
        for e, token, slot in self._rows(top_k_index, share):
            xe, ge = x[token].float(), grad_out[token].float()
            if saved is None:
                gate, up = self._gate_up(xe, e, lora)
            else:
                gate, up = saved[token * top_k_index.shape[1] + slot].float().unbind(1)
            act = _ACTIVATIONS[self.activation](gate)
            h = act * up
            dh_raw = ge @ self.down[e] + _delta_back(ge, h, e, "down", lora, None, None)
            dw[token, slot] = (dh_raw * h).sum(-1)
            dy = ge * weights[token, slot, None]
            dh = dy @ self.down[e] + _delta_back(dy, h, e, "down", lora, da, db)
            dgate = dh * up * _derivative(self.activation, gate)
            dup = dh * act
            de = torch.cat([dgate, dup], 1) @ self.gate_up[e]
            de += _delta_back(dgate, xe, e, "gate", lora, da, db)
            de += _delta_back(dup, xe, e, "up", lora, da, db)
            dx.index_add_(0, token, de)
        return Grads(
            dx=(dx if share else dx.to(x.dtype)) if need_dx else None,
            dw=dw if need_dw else None,
            a=da if need_lora else {},
            b=db if need_lora else {},
        )

    def _gate_up(self, xe: Tensor, e: int, lora: Lora | None) -> tuple[Tensor, Tensor]:
        gate, up = F.linear(xe, self.gate_up[e]).chunk(2, dim=-1)
        return _plus_delta(gate, xe, e, "gate", lora), _plus_delta(up, xe, e, "up", lora)

    def _rows(self, index: Tensor, share) -> Iterator[tuple[int, Tensor, Tensor]]:
        for e in range(self.num_experts):
            if share and not share.mine[e]:
                continue
            slot, token = torch.where((index == e).T)  # slot-major, as transformers' eager loop
            if len(token):
                yield e, token, slot


def _derivative(activation: str, x: Tensor) -> Tensor:
    """d activation / dx, written out: inside a torch.library operator autograd is switched off."""
    if activation == "silu":
        s = torch.sigmoid(x)
        return s * (1 + x * (1 - s))
    if activation == "relu":
        return (x > 0).to(x.dtype)
    if activation == "gelu":
        density = torch.exp(-x * x / 2) / math.sqrt(2 * math.pi)
        return 0.5 * (1 + torch.erf(x / math.sqrt(2))) + x * density
    c, k = math.sqrt(2 / math.pi), 0.044715
    t = torch.tanh(c * (x + k * x**3))
    return 0.5 * (1 + t) + 0.5 * x * (1 - t * t) * c * (1 + 3 * k * x * x)


def _plus_delta(y: Tensor, x: Tensor, e: int, projection: str, lora: Lora | None) -> Tensor:
    """y + scaling * B A x; without LoRA y itself: silu's bits depend on its strides."""
    if lora is None or projection not in lora.a:
        return y
    if lora.dropout:
        raise NotImplementedError("SlowExperts knows no dropout; use the kernels")
    a, b = lora.a[projection][e].float(), lora.b[projection][e].float()
    return y + lora.scaling_of(projection) * ((x @ a.T) @ b.T)


def _delta_back(dy, x, e, projection, lora, da, db) -> Tensor | float:
    """dX of one LoRA branch; adds dA and dB where the dicts are given."""
    if lora is None or projection not in lora.a:
        return 0.0
    a, b = lora.a[projection][e].float(), lora.b[projection][e].float()
    t = dy @ b
    if da is not None:
        da[projection][e] += lora.scaling_of(projection) * (t.T @ x)
        db[projection][e] += lora.scaling_of(projection) * (dy.T @ (x @ a.T))
    return lora.scaling_of(projection) * (t @ a)
