"""`make bench` and `make bench-peers`: workloads W1-W4 on shapes S and Q.

    python bench/run.py [--peers] [--shapes S,Q] [--workloads W1,W2,W3,W4] [--threads N]
                        [--out FILE]

Probes the machine's roofs first, checks every contestant against the fp32 reference before timing
it, times contestants in turns within one run, and writes bench/results/latest.json and
roofline.png. A row's roof is the smaller of compute and bandwidth time.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import layer_reference
import machine
import plot
import result_files
from impls import Ours, TorchInt8, Transformers, seeded_weights
from rivals import KtKernel, Spec, local_seconds
from workloads import (
    SHAPES,
    VARIANTS,
    Shape,
    batch,
    forward_flops,
    lora_flops,
    step_flops,
    weight_bytes,
)

from kt_core import runtime

RESULTS = Path(__file__).resolve().parent / "results"
ROUNDS, BUDGET = 7, 4.0  # rounds of all contestants; seconds per contestant and workload
DRAWS = 48  # batches in rotation: experts redrawn, so that decode reads weights from DRAM


def relative_error(impl: Any, shape: Shape, which: str) -> float:
    """Of a forward of 32 tokens, or of the gradient of x, against the weights as this contestant
    holds them."""
    b = batch(shape, 32, seed=77)
    weights = impl.expert if isinstance(impl, Ours) else partial(seeded_weights, shape)
    # PEFT's own LoRA starts with B = 0: its layer is the base's
    lora = (impl.lora.a, impl.lora.b) if isinstance(impl, Ours) and impl.lora else None
    x = b.x.float().requires_grad_(which == "step")
    expected = layer_reference.forward(x, b, weights, lora)
    if which == "forward":
        return layer_reference.relative_error(impl.forward(b), expected)
    expected.backward(b.dy.float())
    assert x.grad is not None
    return layer_reference.relative_error(impl.step(b), x.grad)


def measure(
    impls: list[Any], which: str, shape: Shape, spec: Spec, repeats: int, roofs: machine.Roofs
) -> list[list[float]]:
    """Seconds of each contestant, in turns: every round times everybody, with a sample of the roofs
    before each, so that a slow spell of the machine meets all of them."""
    samples: list[list[float]] = [[] for _ in impls]
    roofs.start()
    roofs.sample()
    for turn in range(ROUNDS):
        for impl, mine in zip(impls, samples, strict=True):
            if sum(mine) > BUDGET and turn > 2:
                continue
            roofs.sample(("dram",) if spec.tokens < 64 else None)
            seeds = spec.seeds[turn * repeats % len(spec.seeds) :] + spec.seeds
            turn_spec = Spec(spec.tokens, seeds, spec.zipf)
            remote = isinstance(impl, KtKernel)
            time_it = impl.seconds if remote else partial(local_seconds, impl)
            mine += time_it(which, shape, turn_spec, repeats)
    return samples


@dataclass
class Contestant:
    """One row's subject: an implementation with the weights it holds and its measured error."""

    impl: Any
    format: str
    group: int
    domain: str
    error: float
    rss_mb: float  # resident memory that preparing its layer took


class Bench:
    """Collects rows. A row's roofs are the best samples taken between its own."""

    def __init__(self, threads: int, peers: bool) -> None:
        self.threads, self.peers = threads, peers
        self.roofs = machine.Roofs(threads)
        self.machine = machine.describe(threads, self.roofs)
        self.isa = runtime.isa()
        self.rows: list[dict[str, Any]] = []
        self.process = psutil.Process()

    def roof_seconds(self, flops: float, bytes_read: float, domain: str, isa: str) -> float:
        """The larger of arithmetic and DRAM time. AVX2 has no bf16 or byte products of its own:
        its peak is that of fp32 in the bf16 domain, and twice that in the int8 domain, where
        vpmaddwd multiplies two pairs of 16 bits where an fp32 multiply-add has one."""
        roofs = self.roofs.now
        if isa == "avx2":
            peak = roofs["fp32_avx2_gflops"] * (2 if domain == "int8" else 1)
        elif domain in ("int8", "int16"):  # a row of 16 bits is two of 8
            peak = roofs.get("int8_gops", roofs["fp32_avx2_gflops"]) / (1 + (domain == "int16"))
        else:
            peak = max(roofs.get(f"{name}_gflops", 0.0) for name in ("bf16", "fp32", "fp32_avx2"))
        return max(flops / (peak * 1e9), bytes_read / (roofs["dram_gbps"] * 1e9))

    def add(
        self,
        case: dict[str, Any],
        who: Contestant,
        samples: list[float],
        flops: float,
        bytes_read: float,
    ) -> None:
        """One row. `flops` and `bytes_read` are those of the mathematics, not of the contestant:
        LoRA's own and recomputed products are not counted."""
        best, median, impl = min(samples), statistics.median(samples), who.impl
        isa = (impl.isa or self.isa) if isinstance(impl, Ours) else ""
        roof = self.roof_seconds(flops, bytes_read, who.domain, isa)
        row = case | {
            "isa": isa,
            "format": who.format,
            "group": who.group,
            "domain": who.domain,
            "impl": impl.name,
            "threads": impl.setting["threads"] if isinstance(impl, KtKernel) else self.threads,
            "ms": round(median * 1e3, 4),
            "best_ms": round(best * 1e3, 4),
            "gflops": round(flops / best * 1e-9, 2),
            "gbps": round(bytes_read / best * 1e-9, 2),
            "roof_pct": round(100 * roof / best, 1),
            "rss_mb": round(who.rss_mb, 1),
            "rel_err": float(f"{who.error:.4g}"),
            "samples": len(samples),
            "load": round(os.getloadavg()[0], 2),
        }
        self.rows.append(row)
        print(
            f"{row['workload']} {row['shape']} T={row['tokens']:<5} {row['routing']:<8}"
            f"{row['impl']:<24} {isa:<12} {row['format']:<5}g={row['group']:<4}{row['domain']:<5}"
            f"r={row['rank']:<3} {row['ms']:>9.3f} ms  best {row['best_ms']:>9.3f}"
            f"  {row['gflops']:>7.1f} GFLOP/s {row['gbps']:>6.1f} GB/s"
            f"  {row['roof_pct']:>5.1f} % of roof",
            flush=True,
        )

    def compare(
        self, workload: str, shape: Shape, spec: Spec, field: list[Contestant], rank: int = 0
    ) -> None:
        """Times one case for the whole field and adds its rows."""
        train = workload in ("W3", "W4")
        which, repeats = ("step", 1) if train else ("forward", 24 if spec.tokens < 64 else 1)
        samples = measure([who.impl for who in field], which, shape, spec, repeats, self.roofs)
        batches = [batch(shape, spec.tokens, seed, spec.zipf) for seed in spec.seeds[:8]]
        hit = sum(b.experts_hit for b in batches) / len(batches)
        case = {
            "workload": workload,
            "shape": shape.name,
            "tokens": spec.tokens,
            "routing": "zipf" if spec.zipf else "uniform",
            "rank": rank,
            # FLOPs that LoRA adds to what gflops and roof_pct count
            "lora_pct": round(100 * lora_flops(shape, 1, rank) / step_flops(shape, 1), 1),
        }
        flops = step_flops(shape, spec.tokens) if train else forward_flops(shape, spec.tokens)
        for who, mine in zip(field, samples, strict=True):
            read = weight_bytes(shape, who.format, who.group, hit) * (2 if train else 1)
            self.add(case, who, mine, flops, read)

    def forward_workloads(self, shape: Shape, names: set[str], base: list[Contestant]) -> None:
        codes = [who for who in base if who.format != "bf16"]
        int8 = [self.twin(who, shape, compute="int8") for who in codes]
        avx2 = [self.twin(who, shape, isa="avx2") for who in base]
        avx2 += [self.twin(who, shape, compute="int8", isa="avx2") for who in codes]
        rivals: list[Contestant] = []
        if self.peers:
            impls: list[Any] = [
                (Transformers(i), "bf16", 0, "bf16") for i in ("eager", "grouped_mm")
            ]
            impls += [(TorchInt8(), "int8", 0, "int8"), (KtKernel("bf16"), "bf16", 0, "bf16")]
            impls += [(KtKernel(f), f, 0, "int8") for f in ("int8", "int4")]
            impls += [(KtKernel("int4_g32"), "int4", 32, "int8")]
            rivals = [self.prepared(shape, *each) for each in impls]
        field = base + int8 + rivals
        if "W1" in names:
            for tokens in (1, 2, 4, 8):
                self.compare("W1", shape, Spec(tokens, tuple(range(DRAWS))), field)
            self.compare("W1", shape, Spec(1, tuple(range(DRAWS))), avx2)
        if "W2" in names:
            for tokens in (64, 256, 1024):
                self.compare("W2", shape, Spec(tokens, (0, 1)), field)
            self.compare("W2", shape, Spec(1024, (0, 1), 1.0), base + int8)
            self.compare("W2", shape, Spec(1024, (0, 1)), avx2)
        self.close(rivals)

    def training_workloads(self, shape: Shape, names: set[str], base: list[Contestant]) -> None:
        for workload, rank in (("W3", 0), ("W4", 8), ("W4", 64)):
            if workload not in names:
                continue
            ours = [self.twin(who, shape, "step", rank=rank) for who in base]
            ours += [  # what training takes, where that is not bf16
                self.twin(who, shape, "step", rank=rank, compute=who.impl.layer.training_compute)
                for who in base
                if who.impl.layer.training_compute != "bf16"
            ]
            for tokens in (512, 2048):
                rivals = self.training_rivals(shape, rank, tokens) if rank < 64 else []
                self.compare(workload, shape, Spec(tokens, (0, 1)), ours + rivals, rank)
                self.close(rivals)

    def training_rivals(self, shape: Shape, rank: int, tokens: int) -> list[Contestant]:
        if not self.peers:
            return []
        impls: list[Any] = [
            (KtKernel(f, rank, max_tokens=tokens), f, 0, "bf16") for f in ("bf16", "int8")
        ]
        stock = ("grouped_mm",) if rank else ("eager", "grouped_mm")
        impls += [(Transformers(i, rank), "bf16", 0, "bf16") for i in stock]
        return [self.prepared(shape, *each, which="step") for each in impls]

    def prepared(
        self,
        shape: Shape,
        impl: Any,
        format: str,
        group: int,
        domain: str,
        *,
        which: str = "forward",
    ) -> Contestant:
        """Builds the layer and checks it."""
        before = self.process.memory_info().rss
        impl.prepare(shape, seeded_weights)
        mine = (self.process.memory_info().rss - before) / 1e6
        error = self.checked(impl, shape, format, domain, which)
        rss = impl.layer_mb() if isinstance(impl, KtKernel) else mine
        return Contestant(impl, format, group, domain, error, rss)

    def twin(
        self, who: Contestant, shape: Shape, which: str = "forward", **changes: Any
    ) -> Contestant:
        """The same layer of ours used in another way, checked again."""
        impl = who.impl.twin(**changes)
        error = self.checked(impl, shape, who.format, impl.compute, which)
        return Contestant(impl, who.format, who.group, impl.compute, error, who.rss_mb)

    def checked(self, impl: Any, shape: Shape, format: str, domain: str, which: str) -> float:
        """Nobody is timed for a wrong answer: the error, if it is below the bar."""
        if isinstance(impl, KtKernel):
            error, bar = float(impl.relative_error()), 0.03
        else:
            error = relative_error(impl, shape, which)
            bar = 0.08 if isinstance(impl, TorchInt8) else 0.02 if domain == "int8" else 0.01
        if error > bar:
            raise SystemExit(
                f"{impl.name} {format} on shape {shape.name}: relative error {error:.3f}"
            )
        return error

    def close(self, rivals: list[Contestant]) -> None:
        for who in rivals:
            if isinstance(who.impl, KtKernel):
                who.impl.close()

    def write(self, path: Path) -> None:
        self.machine["load_end"] = list(os.getloadavg())
        path.parent.mkdir(parents=True, exist_ok=True)
        run = {"machine": self.machine, "rows": self.rows}
        result_files.write(path, {result_files.name_of(run): run})
        plot.roofline(run, path.with_name("roofline.png"))
        print(f"wrote {path} and roofline.png")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--peers", action="store_true")
    parser.add_argument("--shapes", default="S,Q")
    parser.add_argument("--workloads", default="W1,W2,W3,W4")
    parser.add_argument("--threads", type=int, default=runtime.allowed_cpus())
    parser.add_argument("--out", type=Path, default=RESULTS / "latest.json")
    options = parser.parse_args()
    runtime.set_threads(options.threads)
    torch.set_num_threads(options.threads)
    names = set(options.workloads.split(","))
    bench, start = Bench(options.threads, options.peers), time.monotonic()
    print("load", bench.machine["load"], flush=True)
    for name in options.shapes.split(","):
        shape = SHAPES[name]
        base = [bench.prepared(shape, Ours(f, g), f, g, "bf16") for f, g in VARIANTS]
        if names & {"W1", "W2"}:
            bench.forward_workloads(shape, names, base)
        if names & {"W3", "W4"}:
            bench.training_workloads(shape, names, base)
    bench.machine["seconds"] = round(time.monotonic() - start)
    bench.write(options.out)


if __name__ == "__main__":
    main()
