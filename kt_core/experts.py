"""Packed routed experts of one MoE layer: pack, forward, backward.

The checked face of the native core: shapes, dtypes and devices are verified here, the kernels get
addresses. Weight shapes: gate and up ``[I, H]``, down ``[H, I]``; docs/kernels.md has the
packed layout and the numerics.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from kt_core import _kt, formats, openmp, runtime
from kt_core.names import PROJECTIONS

openmp.share_threads()

ACTIVATIONS = {"silu": 0, "gelu": 1, "gelu_tanh": 2, "relu": 3, "sigmoid": 4}
COMPUTE = {"bf16": 0, "int8": 1, "int16": 2}
_DTYPES = {torch.bfloat16: 0, torch.float16: 1, torch.float32: 2}


@dataclass(frozen=True)
class Lora:
    """Per-expert LoRA factors of one layer.

    ``a[p]``: ``[E, r, in]``, ``b[p]``: ``[E, out, r]``, CPU tensors, all bf16 or all fp32;
    a projection may be absent from both. delta W_p = scaling * b[p] @ a[p]. The kernels round the
    factors to bf16.

    ``dropout`` zeroes elements of the input of A, keyed by (seed, projection, token * top_k + slot,
    element), so a second forward with the same seed repeats it. ``seed``: 0 <= seed < 2**63.
    """

    a: Mapping[str, Tensor]
    b: Mapping[str, Tensor]
    scaling: float | Mapping[str, float]
    dropout: float = 0.0
    seed: int = 0

    def scaling_of(self, projection: str) -> float:
        """The scaling of one projection."""
        return self.scaling if isinstance(self.scaling, float | int) else self.scaling[projection]


@dataclass(frozen=True)
class Share:
    """One process's share of a batch that several have put together, end to end.

    ``mine``: ``[E]`` bool; assignments to other experts are left out: ``out`` and ``dx`` are sums
    over mine, in fp32, and ``dw`` and LoRA gradients of the others are zero. ``parts``: tokens and
    dropout seed of every process, so that a row's mask is that of its own batch.
    """

    mine: Tensor
    parts: Sequence[tuple[int, int]]


@dataclass(frozen=True)
class Grads:
    """Gradients of a layer: ``dx [T, H]`` (dtype of x), ``dw [T, K]`` fp32, ``a``/``b`` fp32."""

    dx: Tensor | None
    dw: Tensor | None
    a: dict[str, Tensor] = field(default_factory=dict)
    b: dict[str, Tensor] = field(default_factory=dict)


class Experts:
    """Packed routed experts of one MoE layer, in CPU memory.

    Args:
        num_experts, hidden, intermediate: E, H, I.
        format: a name in :func:`kt_core.formats.names`.
        group: values of the reduction dimension per scale, one of the format's ``groups``, or None
            for its default.
        activation: key of ``ACTIVATIONS``.
        slices: pieces of the intermediate dimension, up to :meth:`max_slices`, each of which one
            NUMA node can keep and compute. Results differ in rounding between numbers of slices,
            and for one number are the same bits on any number of nodes.
        buffer: where packed bytes live (buffer protocol, 64-byte aligned, e.g. an mmap); None
            allocates private memory that does not follow a fork, each slice on its NUMA node.
        name: used in error messages.

    Attributes:
        check_finite: have forward and backward refuse NaN and Inf in what they are given (a pass
            over x, weights, LoRA factors and gradients; off unless it is set).

    Raises:
        ValueError: unknown format, group or activation, sizes < 1, slices out of range, or a
            buffer that is too small.
    """

    def __init__(
        self,
        num_experts: int,
        hidden: int,
        intermediate: int,
        *,
        format: str = formats.DEFAULT,
        group: int | None = None,
        activation: str = "silu",
        slices: int = 1,
        buffer: Any = None,
        name: str = "experts",
    ) -> None:
        self.num_experts, self.hidden, self.intermediate = num_experts, hidden, intermediate
        self.format, self.activation, self.name = format, activation, name
        self.slices = slices
        self.check_finite = False
        self._layer = _native_layer(
            num_experts, hidden, intermediate, format, group, activation, name, slices
        )
        self.group = int(self._layer.group)
        self.nbytes = int(self._layer.nbytes)
        self._buffer = _kt.Arena(self.nbytes) if buffer is None else buffer
        self._layer.attach(self._buffer)
        if buffer is None:
            self.bind_slices()
        self._to_fill = {(e, p) for e in range(num_experts) for p in range(3)}

    @staticmethod
    def packed_nbytes(
        num_experts: int,
        hidden: int,
        intermediate: int,
        format: str,
        group: int | None = None,
        slices: int = 1,
    ) -> int:
        """Bytes of a packed layer of these sizes."""
        layer = _native_layer(
            num_experts, hidden, intermediate, format, group, "silu", "experts", slices
        )
        return int(layer.nbytes)

    @staticmethod
    def max_slices(intermediate: int, format: str, group: int | None = None) -> int:
        """Slices that an intermediate dimension can be cut into: 8, or less for a small one."""
        layer = _native_layer(1, 1, intermediate, format, group, "silu", "experts", 1)
        return int(layer.max_slices)

    @classmethod
    def from_packed(
        cls,
        num_experts: int,
        hidden: int,
        intermediate: int,
        *,
        buffer: Any,
        format: str,
        group: int | None = None,
        activation: str = "silu",
        slices: int = 1,
        name: str = "experts",
    ) -> Experts:
        """A layer over ``buffer``, which holds its complete packed bytes (read only is fine)."""
        layer = cls(
            num_experts,
            hidden,
            intermediate,
            format=format,
            group=group,
            activation=activation,
            slices=slices,
            buffer=buffer,
            name=name,
        )
        layer._to_fill.clear()
        return layer

    def bind_slices(self) -> None:
        """Have the pages of every slice come from the NUMA node that will compute with it.

        Acts on pages that nobody has touched, of private memory or a memfd; on one node on none.
        """
        if self.slices > 1:
            self._layer.bind_slices()
            runtime.log_refusals()

    def put_packed(self, packed: memoryview) -> None:
        """Copy a layer's complete packed bytes, as another one of the same sizes gave them."""
        memoryview(self._buffer).cast("B")[: self.nbytes] = packed.cast("B")
        self._to_fill.clear()

    def put(self, expert: int, projection: str, weight: Tensor) -> None:
        """Pack one matrix: gate/up ``[I, H]``, down ``[H, I]``, bf16, fp16 or fp32 on CPU.

        Raises:
            ValueError: wrong shape, dtype or device, expert out of range, NaN or Inf in the weight.
        """
        what = f"{self.name} expert {expert} {projection}_proj"
        p = self._projection(expert, projection)
        shape = self._shape(projection)
        if tuple(weight.shape) != shape:
            raise ValueError(f"{what} has shape {tuple(weight.shape)}; this layer needs {shape}")
        if weight.dtype not in _DTYPES or weight.device.type != "cpu":
            raise ValueError(
                f"{what} is {weight.dtype} on {weight.device}; give bf16, fp16 or fp32 on cpu"
            )
        if weight.stride(1) != 1:
            weight = weight.contiguous()
        if not self._layer.pack(
            expert, p, weight.data_ptr(), _DTYPES[weight.dtype], weight.stride(0)
        ):
            raise ValueError(
                f"{what} holds NaN or Inf; the checkpoint is damaged, load a good copy"
            )
        self._to_fill.discard((expert, p))

    def put_codes(
        self,
        expert: int,
        projection: str,
        codes: Tensor,
        scales: Tensor,
        zeros: Tensor | None = None,
        factor: Tensor | None = None,
    ) -> None:
        """Pack one matrix as it is published, bit for bit: codes of the layer's format and group.

        Args:
            codes: uint8 ``[n, k]``, one code a byte; n and k as in :meth:`put`.
            scales: fp32 ``[n, ceil(k / group)]``; ``[n, 1]`` with one scale per channel.
            zeros: uint8 of that shape, zero points of a format that has them.
            factor: fp32 ``[n]``, second scales of channels, in a format that has them.

        What they mean is said in kt_core/loading/codes.py. Views with any strides are read as they
        are. A format with bf16 scales rounds those that are no bf16 numbers.

        Raises:
            ValueError: wrong shape, dtype or device, parts that the format does not have, expert
                out of range, a code or zero point that the format does not have, NaN or Inf.
        """
        what = f"{self.name} expert {expert} {projection}_proj"
        p = self._projection(expert, projection)
        n, k = self._shape(projection)
        of_group = (n, -(-k // self.group) if self.group else 1)
        kept = formats.of(self.format)
        for part, tensor, dtype, shape, wanted in (
            ("codes", codes, torch.uint8, (n, k), kept.scaled),
            ("scales", scales, torch.float32, of_group, kept.scaled),
            ("zeros", zeros, torch.uint8, of_group, kept.zeros),
            ("factor", factor, torch.float32, (n,), kept.factor and factor is not None),
        ):
            if (tensor is not None) != wanted:
                raise ValueError(
                    f"{what} has {'no ' if tensor is None else ''}{part}; format {self.format} "
                    f"{'needs' if wanted else 'has no'} {part}"
                )
            if tensor is not None and (
                tensor.dtype != dtype or tuple(tensor.shape) != shape or not tensor.is_cpu
            ):
                raise ValueError(
                    f"{part} of {what} are {tensor.dtype} {tuple(tensor.shape)} on "
                    f"{tensor.device}; this layer needs {dtype} {shape} on cpu"
                )
        native = _kt.Codes(
            codes=(codes.data_ptr(), codes.stride(0), codes.stride(1)),
            scales=(scales.data_ptr(), scales.stride(0), scales.stride(1)),
            zeros=(0, 0, 0)
            if zeros is None
            else (zeros.data_ptr(), zeros.stride(0), zeros.stride(1)),
            factor=(0, 0) if factor is None else (factor.data_ptr(), factor.stride(0)),
        )
        if not self._layer.pack_codes(expert, p, native):
            raise ValueError(
                f"{what} holds codes or scales that are no numbers of format {self.format}; the "
                "checkpoint is damaged, load a good copy"
            )
        self._to_fill.discard((expert, p))

    def get(self, expert: int, projection: str) -> Tensor:
        """The dequantized matrix, fp32."""
        p = self._projection(expert, projection)
        out = torch.empty(self._shape(projection), dtype=torch.float32, device="cpu")
        self._layer.unpack(expert, p, out.data_ptr())
        return out

    @property
    def training_compute(self) -> str:
        """`compute` for training: "int16" where this CPU multiplies such rows faster than bf16
        (VNNI without bf16 units, formats of the int8 domain), at the same error; else "bf16"."""
        return "int16" if self._layer.int16_pays else "bf16"

    def missing(self) -> list[tuple[int, str]]:
        """(expert, projection) pairs that were never put."""
        return [(e, PROJECTIONS[p]) for e, p in sorted(self._to_fill)]

    def packed(self) -> memoryview:
        """The packed bytes (``nbytes`` long)."""
        return memoryview(self._buffer).cast("B")[: self.nbytes]

    def forward(
        self,
        x: Tensor,
        top_k_index: Tensor,
        top_k_weights: Tensor,
        lora: Lora | None = None,
        *,
        save: bool = False,
        compute: str = "bf16",
        share: Share | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """Expert outputs weighted and summed per token.

        Args:
            x: ``[T, H]`` bf16 or fp32 (rounded to bf16).
            top_k_index: ``[T, K]`` int64, values in [0, E).
            top_k_weights: ``[T, K]`` floating point.
            lora: adapter factors.
            save: also return the gate and up pre-activations for :meth:`backward`.
            compute: domain of the products with base weights: "bf16"; "int16" (formats of
                the int8 domain): activations as 16-bit codes per row and group of up to 128 values,
                multiplied exactly, at the error of bf16; or "int8" (the same formats, inference
                only): 8-bit codes, about 1 % relative error instead of 0.2 %.
            share: which experts to compute, in place of all.

        Returns:
            ``(out [T, H] in x's dtype, saved [rows, 2, I] bf16 or None)``; rows: T * K, less what
            ``share`` leaves out.

        Raises:
            ValueError: shapes, dtypes, devices or indices that do not fit, or missing weights.
            FloatingPointError: NaN or Inf in x, top_k_weights or lora, with `check_finite`.
        """
        batch = self._batch(x, top_k_index, top_k_weights, share)
        kind = x.dtype if share is None else torch.float32
        out = torch.empty(len(x), self.hidden, dtype=kind, device="cpu")
        saved = None
        if save:
            shape = batch.rows, 2, self.intermediate
            saved = torch.empty(shape, dtype=torch.bfloat16, device="cpu")
        if compute not in COMPUTE or (compute == "int8" and save):
            raise ValueError(
                f"compute is {compute!r}{' with save' if save else ''}; give 'bf16', 'int16', or "
                "'int8' without save (training is in bf16 or int16)"
            )
        if self.check_finite:
            self._refuse_non_finite(lora, x=x, top_k_weights=top_k_weights)
        native, keep = self._lora(lora)
        with runtime.Timed("forward"):
            self._layer.forward(
                batch.native,
                native,
                COMPUTE[compute],
                _kt.Output(out.data_ptr(), kind == torch.bfloat16),
                _address(saved),
            )
        del keep
        return out, saved

    def backward(
        self,
        grad_out: Tensor,
        x: Tensor,
        top_k_index: Tensor,
        top_k_weights: Tensor,
        lora: Lora | None = None,
        saved: Tensor | None = None,
        *,
        need_dx: bool = True,
        need_dw: bool = True,
        need_lora: bool = True,
        compute: str = "bf16",
        share: Share | None = None,
    ) -> Grads:
        """Gradients of :meth:`forward` for ``grad_out [T, H]``; without ``saved`` gate and up are
        computed again, to the same bits if ``compute`` is that of the forward.

        ``compute``: "bf16" or "int16". Of the transposed products, those with weights of at least
        64 values per scale are computed in 16-bit rows."""
        if compute not in ("bf16", "int16"):
            raise ValueError(f"compute is {compute!r}; give 'bf16' or 'int16'")
        batch = self._batch(x, top_k_index, top_k_weights, share)
        if grad_out.shape != x.shape:
            raise ValueError(f"grad_out has shape {tuple(grad_out.shape)}; x has {tuple(x.shape)}")
        if saved is not None and tuple(saved.shape) != (batch.rows, 2, self.intermediate):
            raise ValueError(
                f"saved has shape {tuple(saved.shape)}; forward returned "
                f"{(batch.rows, 2, self.intermediate)} for this batch"
            )
        if self.check_finite:
            self._refuse_non_finite(
                lora, grad_out=grad_out, x=x, top_k_weights=top_k_weights, saved=saved
            )
        dy = grad_out.to(torch.bfloat16).contiguous()
        kind = x.dtype if share is None else torch.float32
        dx = torch.empty(x.shape, dtype=kind, device="cpu") if need_dx else None
        dw = torch.empty(top_k_index.shape, dtype=torch.float32, device="cpu") if need_dw else None
        native, keep = self._lora(lora)
        a: dict[str, Tensor] = {}
        b: dict[str, Tensor] = {}
        if lora is not None and need_lora:
            a = {p: _recycled(t.shape) for p, t in lora.a.items()}
            b = {p: _recycled(t.shape) for p, t in lora.b.items()}
        grads = _kt.Grads(
            dx=_kt.Output(_address(dx), kind == torch.bfloat16),
            dw=_address(dw),
            da=[_address(a.get(p)) for p in PROJECTIONS],
            db=[_address(b.get(p)) for p in PROJECTIONS],
        )
        with runtime.Timed("backward"):
            self._layer.backward(
                batch.native, native, COMPUTE[compute], dy.data_ptr(), _address(saved), grads
            )
        del keep
        return Grads(dx, dw, a, b)

    # -- checks ---------------------------------------------------------------------------------

    def _refuse_non_finite(self, lora: Lora | None, **given: Tensor | None) -> None:
        if lora is not None:
            given |= {
                f"LoRA {n} of {p}": t
                for n, f in (("A", lora.a), ("B", lora.b))
                for p, t in f.items()
            }
        for what, tensor in given.items():
            if tensor is None or (good := torch.isfinite(tensor)).all():
                continue
            first = tuple((~good).nonzero()[0].tolist())
            raise FloatingPointError(
                f"{self.name}: {what} has {int((~good).sum())} values that are NaN or Inf, the "
                f"first at {first}; lower learning_rate, set max_grad_norm, or look at the data "
                "of this step"
            )

    def _shape(self, projection: str) -> tuple[int, int]:
        h, i = self.hidden, self.intermediate
        return (h, i) if projection == "down" else (i, h)

    def _projection(self, expert: int, projection: str) -> int:
        if projection not in PROJECTIONS:
            raise ValueError(f"projection is {projection!r}; give one of {', '.join(PROJECTIONS)}")
        if not 0 <= expert < self.num_experts:
            raise ValueError(
                f"expert is {expert}; {self.name} has experts 0..{self.num_experts - 1}"
            )
        return PROJECTIONS.index(projection)

    def _batch(self, x: Tensor, index: Tensor, weights: Tensor, share: Share | None) -> _Batch:
        for what, t in (("x", x), ("top_k_index", index), ("top_k_weights", weights)):
            if not t.is_cpu or t.ndim != 2:
                raise ValueError(
                    f"{what} is {t.ndim}-D on {t.device}; {self.name} needs 2-D on cpu"
                )
        if x.dtype not in (torch.bfloat16, torch.float32) or x.shape[1] != self.hidden:
            raise ValueError(
                f"x is {x.dtype} {tuple(x.shape)}; {self.name} needs bf16|fp32 [T, {self.hidden}]"
            )
        if index.dtype != torch.int64 or not weights.is_floating_point():
            raise ValueError(
                f"top_k_index is {index.dtype} and top_k_weights {weights.dtype}; "
                "give int64 and a floating dtype"
            )
        if index.shape != weights.shape or index.shape[0] != x.shape[0]:
            raise ValueError(
                f"top_k_index {tuple(index.shape)}, top_k_weights {tuple(weights.shape)} and "
                f"x {tuple(x.shape)} do not agree on [T, K]"
            )
        if self._to_fill:
            expert, projection = self.missing()[0]
            raise ValueError(
                f"{self.name} expert {expert} {projection}_proj was never loaded; put it first"
            )
        tokens, top_k = index.shape
        x = _plain(x, torch.bfloat16)
        index = _plain(index, torch.int64)
        weights = _plain(weights, torch.float32)
        rows, mine = index.numel(), 0
        if share is not None:
            self._check_share(share, tokens)
            rows, mine = int(share.mine[index].sum()), share.mine.data_ptr()
        native = _kt.Batch(
            tokens=tokens,
            top_k=top_k,
            x=x.data_ptr(),
            index=index.data_ptr(),
            weight=weights.data_ptr(),
            mine=mine,
            parts=() if share is None else share.parts,
        )
        return _Batch(native, rows, (x, index, weights))

    def _check_share(self, share: Share, tokens: int) -> None:
        mine = share.mine
        fits = mine.dtype == torch.bool and mine.shape == (self.num_experts,) and mine.is_cpu
        if not fits or not mine.is_contiguous():
            raise ValueError(
                f"share.mine is {mine.dtype} {tuple(mine.shape)} on {mine.device}; {self.name} "
                f"needs bool [{self.num_experts}], contiguous on cpu"
            )
        if sum(part for part, _ in share.parts) != tokens:
            raise ValueError(f"share.parts {share.parts} do not add up to {tokens} tokens")

    def _lora(self, lora: Lora | None) -> tuple[_kt.Lora | None, list[Tensor]]:
        """The native form, and the tensors it points to."""
        if lora is None or not lora.a:
            return None, []
        if set(lora.a) != set(lora.b):
            raise ValueError(f"lora.a has {sorted(lora.a)} but lora.b has {sorted(lora.b)}")
        if not 0.0 <= lora.dropout < 1.0:
            raise ValueError(f"lora dropout is {lora.dropout}; give a value in [0, 1)")
        dtypes = {t.dtype for t in (*lora.a.values(), *lora.b.values())}
        if len(dtypes) != 1 or not dtypes <= {torch.bfloat16, torch.float32}:
            raise ValueError(
                f"lora factors are {sorted(map(str, dtypes))}; give all bf16 or all fp32"
            )
        keep: list[Tensor] = []
        at_a, at_b, ranks, scaling = [0] * 3, [0] * 3, [0] * 3, [0.0] * 3
        for p, a in lora.a.items():
            slot = self._projection(0, p)
            out, inner = self._shape(p)
            a, b = a.detach().contiguous(), lora.b[p].detach().contiguous()
            r = a.shape[1]
            if tuple(a.shape) != (self.num_experts, r, inner) or tuple(b.shape) != (
                self.num_experts,
                out,
                r,
            ):
                raise ValueError(
                    f"lora {p} has A {tuple(a.shape)} and B {tuple(b.shape)}; {self.name} needs "
                    f"A [{self.num_experts}, r, {inner}] and B [{self.num_experts}, {out}, r]"
                )
            keep += [a, b]
            at_a[slot], at_b[slot] = a.data_ptr(), b.data_ptr()
            ranks[slot], scaling[slot] = r, float(lora.scaling_of(p))
        native = _kt.Lora(
            a=at_a,
            b=at_b,
            r=ranks,
            scaling=scaling,
            dtype=_DTYPES[next(iter(dtypes))],
            dropout=lora.dropout,
            seed=lora.seed,
        )
        return native, keep


def in_one_dtype(factors: Sequence[Tensor]) -> list[Tensor]:
    """LoRA factors as the kernels take them, all bf16 or all fp32: fp32 where they come in another
    dtype, say fp16, or in several.
    """
    if {t.dtype for t in factors} == {torch.bfloat16}:
        return list(factors)
    return [t.to(torch.float32) for t in factors]


@dataclass(frozen=True)
class _Batch:
    """What the native core is told of a batch; ``rows``: assignments that are computed; ``tensors``
    keeps the memory that ``native`` points to.
    """

    native: _kt.Batch
    rows: int
    tensors: tuple[Tensor, ...]


def _address(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


def _plain(t: Tensor, dtype: torch.dtype) -> Tensor:
    """The values as the kernels read them. Decode calls this in every layer, so nothing is asked of
    torch that is already so."""
    if t.dtype != dtype or t.requires_grad:
        t = t.detach().to(dtype)
    return t if t.is_contiguous() else t.contiguous()


def _recycled(shape: torch.Size) -> Tensor:
    """fp32, uninitialised, in memory of an earlier gradient where one of this size is gone."""
    if not shape.numel():  # of rank 0; frombuffer takes no empty buffer
        return torch.empty(shape, dtype=torch.float32, device="cpu")
    memory = torch.frombuffer(_kt.RecycledBuffer(4 * shape.numel()), dtype=torch.uint8)
    strides = torch.empty(shape, device="meta").stride()
    own = torch.empty(0, dtype=torch.float32, device="cpu")  # whatever torch's defaults are
    return own.set_(memory.untyped_storage(), 0, shape, strides)


def _native_layer(
    num_experts: int,
    hidden: int,
    intermediate: int,
    format: str,
    group: int | None,
    activation: str,
    name: str,
    slices: int,
) -> _kt.Layer:
    if min(num_experts, hidden, intermediate) < 1:
        raise ValueError(
            f"{name} has sizes E={num_experts}, H={hidden}, I={intermediate}; all must be >= 1"
        )
    if activation not in ACTIVATIONS:
        raise ValueError(f"{name} has activation {activation!r}; known: {', '.join(ACTIVATIONS)}")
    group = formats.of(format).check_group(group)
    return _kt.Layer(
        num_experts, hidden, intermediate, format, group, ACTIVATIONS[activation], slices
    )
