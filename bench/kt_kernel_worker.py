"""kt-kernel 0.7.2 as a process: JSON lines in on stdin, one JSON line out per request on stdout.

Runs under build/peers-venv (bench/peers_setup.py); bench/rivals.py is the other end. Requests:

    {"op": "prepare", "shape": "S", "format": "bf16", "mode": "inference"|"sft", "rank": 8,
     "threads": [1, 2], "max_tokens": 1024}
        builds one layer per thread count from impls.seeded_weights and checks it
    {"op": "check"}     relative errors found by `prepare`, the worst over thread counts
    {"op": "run", "which": "forward"|"step", "tokens": 8, "seeds": [0, 1], "zipf": 0.0,
     "repeats": 4}      call i takes seed i modulo their number; -> seconds, per setting
    {"op": "quit"}

A reply is {"ok": true, ...} or {"ok": false, "error": "..."}; end of input ends the process.
`KTMoEWrapper` pins memory and so needs CUDA; the classes below are what it wraps, called as its
own code calls them, without its copies of inputs and outputs. Only the call is timed.
"""

from __future__ import annotations

import ctypes
import json
import os
import sys
import time
import traceback
from functools import lru_cache, partial
from typing import Any

import kt_kernel
import layer_reference
import torch
from impls import lora_factors, seeded_weights
from torch import Tensor
from workloads import SHAPES, Batch, Shape, batch

EXT = kt_kernel.kt_kernel_ext
PROJECTIONS = ("gate", "up", "down")
# "AMX" is their naming: on a CPU without AMX these run AVX-512 BF16 and VNNI. int4 is their
# AMXINT4 method (one scale per row), int4_g32 their RAWINT4 (bf16 scale per 32 along K).
INFERENCE = {
    "bf16": "AMXBF16_MOE",
    "int8": "AMXInt8_MOE",
    "int4": "AMXInt4_MOE",
    "int4_g32": "AMXInt4_KGroup_MOE",
}
# Their int4 training class adds to whatever the LoRA gradients hold: left out.
SFT = {"bf16": "AMXBF16_SFT_MOE", "int8": "AMXInt8_SFT_MOE"}
# Their pool threads spin for 50 ms after a job and only then sleep: waited for, so that neither
# the next setting nor the next contestant shares its cores with them.
IDLE_SECONDS = 0.07
FEW = 64  # tokens below which fewer threads, or a call past their queue, may win: all are timed


def pool(threads: int) -> Any:
    """Their worker pool: one subpool of `threads` on NUMA node 0."""
    config = EXT.WorkerPoolConfig()
    config.subpool_count = 1
    config.subpool_numa_map = [0]
    config.subpool_thread_count = [threads]
    return EXT.CPUInfer(config)


def held(weight: Tensor, format: str) -> Tensor:
    """The fp32 values that kt-kernel's packing of bf16 `weight` [.., out, in] stands for."""
    w = weight.float()
    if format == "bf16":
        return w
    if format == "int4_g32":
        codes, scale = group_codes(weight)
        return (codes * scale.float().unsqueeze(-1)).reshape(w.shape)
    # Per row, amax / 127 (int8) or amax / 112 (int4: 7 * 16), rounded to int8; int4 then rounds
    # those to multiples of 16, half away from zero.
    d = (w.abs().amax(-1, keepdim=True).double() / (127 if format == "int8" else 112)).float()
    codes = (w * (1 / d)).round().clamp(-128, 127)
    if format == "int4":
        codes = codes.sign() * ((codes.abs() + 8) / 16).floor() * 16
    return codes * d


def group_codes(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Round to nearest in groups of 32: codes fp32 [.., in / 32, 32] in -8..7, bf16 scales."""
    groups = weight.float().unflatten(-1, (-1, 32))
    scale = (groups.abs().amax(-1) / 7).bfloat16()
    return (groups / scale.float().unsqueeze(-1)).round().clamp(-8, 7), scale


def group_packed(weight: Tensor) -> tuple[Tensor, Tensor]:
    """RAWINT4 as compressed-tensors stores it: code + 8, even columns in low nibbles; scales."""
    codes, scale = group_codes(weight)
    unsigned = (codes + 8).to(torch.uint8).flatten(-2)
    return (unsigned[..., 0::2] | (unsigned[..., 1::2] << 4)).contiguous(), scale.contiguous()


def rss_mb() -> float:
    """Resident set of this process, without what malloc keeps for later."""
    ctypes.CDLL(None).malloc_trim(0)
    with open("/proc/self/statm") as f:
        return int(f.read().split()[1]) * os.sysconf("SC_PAGESIZE") / 1e6


def all_weights(shape: Shape) -> dict[str, Tensor]:
    """The layer's seeded weights, p -> bf16 [E, out, in]."""
    E, H, I = shape.experts, shape.hidden, shape.intermediate
    sizes = {"gate": (E, I, H), "up": (E, I, H), "down": (E, H, I)}
    weights = {p: torch.empty(sizes[p], dtype=torch.bfloat16) for p in PROJECTIONS}
    for e in range(E):
        for p, w in zip(PROJECTIONS, seeded_weights(shape, e), strict=True):
            weights[p][e] = w
    return weights


class Layer:
    """One layer in one pool. `weights`: p -> bf16 [E, out, in], needed until construction ends."""

    def __init__(
        self,
        shape: Shape,
        format: str,
        rank: int | None,
        threads: int,
        max_tokens: int,
        weights: dict[str, Tensor],
    ) -> None:
        self.shape, self.rank, self.threads = shape, rank, threads
        self.pool = pool(threads)
        self.map = torch.arange(shape.experts)  # physical to logical: the identity
        self.on_gpu = torch.zeros(shape.experts, dtype=torch.bool)
        self.kept: list[Any] = []
        if rank is None:
            self.moe = self._inference(format, max_tokens, weights)
        else:
            self.moe = self._sft(format, rank, max_tokens, weights)
        self.kept.clear()  # they copied and packed everything

    def _inference(self, format: str, max_tokens: int, weights: dict[str, Tensor]) -> Any:
        s = self.shape
        config = EXT.moe.MOEConfig(
            s.experts, s.top_k, s.hidden, s.intermediate, self.on_gpu.data_ptr()
        )
        config.layer_idx = 0
        config.max_len = max_tokens
        config.pool = self.pool.backend_
        for p, w in weights.items():
            if format == "int4_g32":
                experts = [group_packed(x) for x in w]
                self.kept.append(experts)
                setattr(config, f"{p}_projs", [[packed.data_ptr() for packed, _ in experts]])
                setattr(config, f"{p}_scales", [[scale.data_ptr() for _, scale in experts]])
            else:
                setattr(config, f"{p}_proj", w.data_ptr())
        if format == "int4_g32":
            config.quant_config.bits = 4
            config.quant_config.group_size = 32
            config.quant_config.zero_point = False
        moe = getattr(EXT.moe, INFERENCE[format])(config)
        self._do(moe.load_weights_task(self.map.data_ptr()))
        return moe

    def _sft(self, format: str, rank: int, max_tokens: int, weights: dict[str, Tensor]) -> Any:
        s = self.shape
        config = EXT.moe.MOESFTConfig(s.experts, s.top_k, s.hidden, s.intermediate)
        config.layer_idx = 0
        config.max_len = -(-max_tokens // 32) * 32  # their M step
        config.max_cache_depth = 1
        config.pool = self.pool.backend_
        config.physical_to_logical_map = self.map.data_ptr()
        config.share_backward_bb = False  # faster: keeps the transposed copy, repacks nothing
        config.share_cache_pool = False
        for p, w in weights.items():
            setattr(config, f"{p}_proj", w.data_ptr())
        self.lora: dict[str, Tensor] = {}
        self.lora_grad: dict[str, Tensor] = {}
        if rank:
            config.lora_rank = rank
            config.lora_alpha = float(rank)  # scaling 1
            config.authoritative_optimizer_grads = True  # a step overwrites, nothing accumulates
            a, b = lora_factors(s, rank)
            for p in PROJECTIONS:
                for name, factor in ((f"{p}_lora_a", a[p]), (f"{p}_lora_b", b[p])):
                    self.lora[name] = factor.bfloat16().contiguous()
                    self.lora_grad[name] = torch.zeros_like(self.lora[name])
                    setattr(config, name, self.lora[name].data_ptr())
        moe = getattr(EXT.moe, SFT[format] + ("" if rank else "_SkipLoRA"))(config)
        self._do(moe.load_weights_task())
        if rank:
            moe.update_lora_weights(*(x.data_ptr() for x in self.lora.values()))
        return moe

    def _do(self, task: Any) -> None:
        self.pool.submit(task)
        self.pool.sync()

    def bind(self, b: Batch) -> Bound:
        """Output and gradient buffers of a batch, and the pointers of its calls."""
        return Bound(self, b)


class Bound:
    """A layer on one batch: calls write `out`, and after a step `dx` and the LoRA gradients."""

    def __init__(self, layer: Layer, b: Batch) -> None:
        self.layer, self.b = layer, b
        self.tokens = torch.tensor([b.x.shape[0]], dtype=torch.int32)
        self.out, self.dx = torch.empty_like(b.x), torch.empty_like(b.x)
        self.d_routing = torch.empty_like(b.weights)
        tensors = (b.index, b.weights, b.x, self.out)
        pointers = (t.data_ptr() for t in tensors)
        self.forward_args = (self.tokens.data_ptr(), layer.shape.top_k, *pointers)
        grads = [g.data_ptr() for g in layer.lora_grad.values()] if layer.rank else [0] * 6
        self.backward_args = (
            b.dy.data_ptr(), self.dx.data_ptr(), *grads, self.d_routing.data_ptr(), 0, 0, 0
        )  # fmt: skip

    def forward(self, direct: bool = False) -> None:
        """Inference: through their queue, or calling the layer from this thread."""
        layer = self.layer
        if layer.rank is not None:
            layer._do(layer.moe.forward_sft_task(*self.forward_args, False))
        elif direct:
            layer.moe.forward(*self.forward_args, False)
        else:
            layer._do(layer.moe.forward_task(*self.forward_args, False))

    def step(self) -> None:
        """Forward that keeps what backward needs, and backward with fresh LoRA gradients."""
        layer = self.layer
        layer._do(layer.moe.forward_sft_task(*self.forward_args, True))
        layer._do(layer.moe.backward_task(*self.backward_args))


def gradient(leaf: Tensor) -> Tensor:
    """The gradient of a leaf after backward."""
    assert leaf.grad is not None
    return leaf.grad


def errors_of(
    layer: Layer, weights: dict[str, Tensor], format: str, tokens: int
) -> dict[str, float]:
    """Relative errors on one batch: `forward` against the weights as packed, `forward_source`,
    `dx` and `lora` (the worst factor gradient) against the bf16 weights given."""
    b = batch(layer.shape, tokens, seed=77)
    bound = layer.bind(b)
    lora: layer_reference.Factors | None = None
    factors: dict[str, Tensor] = {}
    if layer.rank:
        factors = {name: f.float().requires_grad_() for name, f in layer.lora.items()}
        lora_a, lora_b = ({p: factors[f"{p}_lora_{ab}"] for p in PROJECTIONS} for ab in "ab")
        lora = lora_a, lora_b

    def source(e: int) -> tuple[Tensor, Tensor, Tensor]:
        return weights["gate"][e], weights["up"][e], weights["down"][e]

    def packed(e: int) -> tuple[Tensor, Tensor, Tensor]:
        gate, up, down = source(e)
        return held(gate, format), held(up, format), held(down, format)

    with torch.no_grad():
        as_packed = layer_reference.forward(b.x, b, packed, lora)
    if layer.rank is None:
        bound.forward()
        queued = bound.out.clone()
        bound.forward(direct=True)
        if not torch.equal(queued, bound.out):
            raise RuntimeError("kt-kernel's forward differs between its queue and a direct call")
    else:
        bound.step()
    x = b.x.float().requires_grad_(layer.rank is not None)
    expected = layer_reference.forward(x, b, source, lora)
    found = {
        "forward": layer_reference.relative_error(bound.out, as_packed),
        "forward_source": layer_reference.relative_error(bound.out, expected.detach()),
    }
    if layer.rank is not None:
        expected.backward(b.dy.float())
        found["dx"] = layer_reference.relative_error(bound.dx, gradient(x))
    if layer.rank:
        found["lora"] = max(
            layer_reference.relative_error(layer.lora_grad[name], gradient(f))
            for name, f in factors.items()
        )
    return found


class Server:
    """State between requests: the layers, by thread count."""

    def __init__(self) -> None:
        self.layers: list[Layer] = []
        self.errors: dict[str, float] = {}
        self.shape = SHAPES["S"]
        self.bound = lru_cache(maxsize=64)(self._bound)

    def prepare(self, r: dict[str, Any]) -> dict[str, Any]:
        """Builds and checks; the source weights are gone when it returns."""
        if self.layers:
            raise ValueError("this worker has its layer already; start another process")
        table = INFERENCE if r["mode"] == "inference" else SFT
        if r["format"] not in table:
            raise ValueError(f"no kt-kernel {r['mode']} class for {r['format']}; have {[*table]}")
        self.shape = SHAPES[r["shape"]]
        before = rss_mb()
        weights = all_weights(self.shape)
        rank = r["rank"] if r["mode"] == "sft" else None
        # Their kernels switch from vector to matrix form at 4 E / k tokens: check both.
        switch = 4 * self.shape.experts // self.shape.top_k
        for threads in r["threads"]:
            layer = Layer(self.shape, r["format"], rank, threads, r["max_tokens"], weights)
            self.layers.append(layer)
            for tokens in (min(8, r["max_tokens"]), min(switch + 8, r["max_tokens"])):
                for name, error in errors_of(layer, weights, r["format"], tokens).items():
                    self.errors[name] = max(error, self.errors.get(name, 0.0))
        del weights
        return {
            "errors": self.errors,
            "rss_before_mb": before,
            "rss_mb": rss_mb(),
            "layers": len(self.layers),
            "kernel": type(self.layers[0].moe).__name__,
            "variant": kt_kernel.__cpu_variant__,
        }

    def check(self, r: dict[str, Any]) -> dict[str, Any]:
        """The errors found while preparing."""
        return {"errors": self.errors}

    def _bound(self, layer: int, tokens: int, seed: int, zipf: float) -> Bound:
        return self.layers[layer].bind(batch(self.shape, tokens, seed, zipf))

    def run(self, r: dict[str, Any]) -> dict[str, Any]:
        """Times every setting worth trying; the caller takes the best."""
        if r["which"] == "step" and self.layers[0].rank is None:
            raise ValueError("an inference layer has no step; prepare with mode sft")
        seconds, settings = [], []
        for i, layer in enumerate(self.layers):
            widest = layer.threads == max(x.threads for x in self.layers)
            if r["tokens"] >= FEW and not widest:
                continue
            many_ways = r["which"] == "forward" and layer.rank is None and r["tokens"] < FEW
            for direct in (False, True) if many_ways else (False,):
                seconds.append(self._time(i, direct, r))
                settings.append({"threads": layer.threads, "direct": direct})
        return {"seconds": seconds, "settings": settings, "rss_mb": rss_mb()}

    def _time(self, i: int, direct: bool, r: dict[str, Any]) -> list[float]:
        seeds = [r["seeds"][turn % len(r["seeds"])] for turn in range(r["repeats"])]
        bounds = [self.bound(i, r["tokens"], seed, r["zipf"]) for seed in seeds]
        calls = [
            bound.step if r["which"] == "step" else partial(bound.forward, direct)
            for bound in bounds
        ]
        calls[-1]()  # wakes the threads, and leaves caches as any other call leaves them
        seconds = []
        for call in calls:
            start = time.perf_counter()
            call()
            seconds.append(time.perf_counter() - start)
        time.sleep(IDLE_SECONDS)
        return seconds


def main() -> None:
    # Their C++ prints to standard output: keep the real one for replies, send theirs to stderr.
    replies = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    torch.set_num_threads(max(1, len(os.sched_getaffinity(0))))
    server = Server()
    operations = {"prepare": server.prepare, "check": server.check, "run": server.run}
    for line in sys.stdin:
        request = json.loads(line)
        if request["op"] == "quit":
            break
        try:
            reply = {"ok": True, **operations[request["op"]](request)}
        except Exception as error:
            traceback.print_exc()
            reply = {"ok": False, "error": f"{type(error).__name__}: {error}"}
        print(json.dumps(reply), file=replies)
    os._exit(0)  # past the destructors of their pools


if __name__ == "__main__":
    main()
