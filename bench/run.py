"""`make bench` and `make bench-peers`: workloads W1-W4 on shapes S and Q.

    python bench/run.py [--peers] [--shapes S,Q] [--workloads W1,W2,W3,W4] [--threads N] [--quick]

Probes the machine's roofs first, checks every contestant against the fp32 reference before timing
it, times contestants in turns within one run, and writes bench/results/latest.json and
roofline.png. A row's roof is the smaller of compute and bandwidth time.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parent))
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import layer_reference
import machine
import plot
from impls import Ours, Transformers, seeded_weights
from rivals import KtKernel, Spec, local_seconds
from workloads import (
    SHAPES,
    Shape,
    batch,
    forward_flops,
    lora_flops,
    step_flops,
    weight_bytes,
)

from kt_core import runtime

RESULTS = Path(__file__).resolve().parent / "results"
FORMATS = ("bf16", "int8", "int4")
ROUNDS, BUDGET = 7, 4.0  # rounds of all contestants; seconds per contestant and workload
DRAWS = 48  # batches in rotation: experts redrawn, so that decode reads weights from DRAM


def relative_error(impl: Any, shape: Shape) -> float:
    """Of a forward of 32 tokens, against the weights as this contestant holds them."""
    b = batch(shape, 32, seed=77)

    def weights(e: int) -> tuple[Tensor, Tensor, Tensor]:
        if not isinstance(impl, Ours):
            return seeded_weights(shape, e)
        gate, up, down = (impl.layer.get(e, p) for p in ("gate", "up", "down"))
        return gate, up, down

    # PEFT's own LoRA starts with B = 0: its forward is the base's
    lora = (impl.lora.a, impl.lora.b) if isinstance(impl, Ours) and impl.lora else None
    return layer_reference.relative_error(
        impl.forward(b), layer_reference.forward(b.x, b, weights, lora)
    )


def measure(
    impls: list[Any], which: str, shape: Shape, spec: Spec, repeats: int
) -> list[list[float]]:
    """Seconds of each contestant, in turns: every round times all of them, so that a slow spell of
    the machine meets everybody."""
    samples: list[list[float]] = [[] for _ in impls]
    for turn in range(ROUNDS):
        for impl, mine in zip(impls, samples, strict=True):
            if sum(mine) > BUDGET and turn > 2:
                continue
            seeds = spec.seeds[turn * repeats % len(spec.seeds) :] + spec.seeds
            turn_spec = Spec(spec.tokens, seeds, spec.zipf)
            remote = isinstance(impl, KtKernel)
            time_it = impl.seconds if remote else partial(local_seconds, impl)
            mine += time_it(which, shape, turn_spec, repeats)
    return samples


class Bench:
    """Collects rows; `roofs` come from bench/machine.py."""

    def __init__(self, threads: int, peers: bool) -> None:
        self.threads, self.peers = threads, peers
        self.machine = machine.describe(threads)
        self.isa = runtime.isa()
        self.rows: list[dict[str, Any]] = []
        self.process = psutil.Process()

    def roof_seconds(self, flops: float, bytes_read: float, domain: str) -> float:
        roofs = self.machine["roofs"]
        peak = {
            "bf16": max(roofs.get("bf16_gflops", 0.0), roofs.get("fp32_gflops", 0.0)),
            "int8": roofs.get("int8_gops", 0.0),
            "avx2": roofs["fp32_avx2_gflops"],
        }[domain]
        return max(flops / (peak * 1e9), bytes_read / (roofs["dram_gbps"] * 1e9))

    def add(
        self,
        workload: str,
        shape: Shape,
        tokens: int,
        routing: str,
        impl: Any,
        format: str,
        samples: list[float],
        flops: float,
        bytes_read: float,
        rel_err: float,
        rank: int = 0,
        domain: str = "bf16",
    ) -> None:
        best, median = min(samples), statistics.median(samples)
        isa = (impl.isa or self.isa) if isinstance(impl, Ours) else ""
        roof = self.roof_seconds(flops, bytes_read, "avx2" if isa == "avx2" else domain)
        row = {
            "workload": workload,
            "shape": shape.name,
            "tokens": tokens,
            "routing": routing,
            "isa": isa,
            "format": format,
            "domain": domain,
            "rank": rank,
            "impl": impl.name,
            "threads": impl.setting["threads"] if isinstance(impl, KtKernel) else self.threads,
            "ms": round(median * 1e3, 4),
            "best_ms": round(best * 1e3, 4),
            "gflops": round(flops / best * 1e-9, 2),
            "gbps": round(bytes_read / best * 1e-9, 2),
            "roof_pct": round(100 * roof / best, 1),
            "tokens_per_s": round(tokens / best, 1),
            "rss_mb": round(self.process.memory_info().rss / 1e6, 1),
            "rel_err": rel_err,
            "samples_ms": [round(s * 1e3, 4) for s in samples],
            "load": os.getloadavg()[0],
        }
        self.rows.append(row)
        print(
            f"{workload} {shape.name} T={tokens:<5} {routing:<8} {impl.name:<24} {format:<5} "
            f"r={rank:<3} {row['ms']:>9.3f} ms  best {row['best_ms']:>9.3f}"
            f"  {row['gflops']:>7.1f} GFLOP/s {row['gbps']:>6.1f} GB/s"
            f"  {row['roof_pct']:>5.1f} % of roof",
            flush=True,
        )

    def compare(
        self,
        workload: str,
        shape: Shape,
        spec: Spec,
        impls: list[tuple[Any, str, str, float]],
        rank: int = 0,
    ) -> None:
        """Times one case for all contestants (impl, format, domain, error) and adds their rows."""
        train = workload in ("W3", "W4")
        which, repeats = ("step", 1) if train else ("forward", 8 if spec.tokens < 64 else 1)
        samples = measure([impl for impl, *_ in impls], which, shape, spec, repeats)
        batches = [batch(shape, spec.tokens, seed, spec.zipf) for seed in spec.seeds[:8]]
        hit = sum(b.experts_hit for b in batches) / len(batches)
        tokens, routing = spec.tokens, "zipf" if spec.zipf else "uniform"
        flops = forward_flops(shape, tokens)
        if train:
            flops = step_flops(shape, tokens) + lora_flops(shape, tokens, rank)
        for (impl, format, domain, error), mine in zip(impls, samples, strict=True):
            read = weight_bytes(shape, format, hit) * (2 if train else 1)
            self.add(
                workload,
                shape,
                tokens,
                routing,
                impl,
                format,
                mine,
                flops,
                read,
                error,
                rank,
                domain,
            )

    def forward_workloads(self, shape: Shape, names: set[str]) -> None:
        impls: list[tuple[Any, str, str, float]] = []
        for format in FORMATS:
            impls.append(self.prepared(Ours(format), shape, format, "bf16"))
        mine = [impl for impl, *_ in impls]
        avx2: list[tuple[Any, str, str, float]] = []
        for ours in mine:
            if ours.format != "bf16":
                impls.append(self.checked(ours.twin("int8"), shape, ours.format, "int8"))
                avx2.append(self.checked(ours.twin("int8", "avx2"), shape, ours.format, "int8"))
            avx2.append(self.checked(ours.twin("bf16", "avx2"), shape, ours.format, "bf16"))
        if self.peers:
            for implementation in ("eager", "grouped_mm"):
                impls.append(self.prepared(Transformers(implementation), shape, "bf16", "bf16"))
            for format in FORMATS:
                impls.append(self.prepared(KtKernel(format), shape, format, "bf16"))
        if "W1" in names:
            for tokens in (1, 2, 4, 8):
                self.compare("W1", shape, Spec(tokens, tuple(range(DRAWS))), impls)
            self.compare("W1", shape, Spec(1, tuple(range(DRAWS))), avx2)
        if "W2" in names:
            for tokens in (64, 256, 1024):
                self.compare("W2", shape, Spec(tokens, (0, 1)), impls)
            self.compare("W2", shape, Spec(1024, (0, 1), 1.0), impls)
            self.compare("W2", shape, Spec(1024, (0, 1)), avx2)

    def training_workloads(self, shape: Shape, names: set[str]) -> None:
        for workload, rank in (("W3", 0), ("W4", 8), ("W4", 64)):
            if workload not in names:
                continue
            impls = [self.prepared(Ours(f, rank), shape, f, "bf16") for f in FORMATS]
            for tokens in (512, 2048):
                here = list(impls)
                if self.peers and rank < 64:
                    here += self.training_peers(shape, rank, tokens)
                self.compare(workload, shape, Spec(tokens, (0, 1)), here, rank)
                for impl, *_ in here[len(impls) :]:
                    if isinstance(impl, KtKernel):
                        impl.close()

    def training_peers(
        self, shape: Shape, rank: int, tokens: int
    ) -> list[tuple[Any, str, str, float]]:
        rivals: list[tuple[Any, str]] = [
            (KtKernel(f, rank, max_tokens=tokens), f) for f in ("bf16", "int8")
        ]
        if rank:
            rivals.append((Transformers("grouped_mm", rank), "bf16"))
        else:
            rivals += [(Transformers(i), "bf16") for i in ("eager", "grouped_mm")]
        return [self.prepared(impl, shape, format, "bf16") for impl, format in rivals]

    def prepared(
        self, impl: Any, shape: Shape, format: str, domain: str
    ) -> tuple[Any, str, str, float]:
        """Builds the layer and checks it."""
        impl.prepare(shape, seeded_weights)
        return self.checked(impl, shape, format, domain)

    def checked(
        self, impl: Any, shape: Shape, format: str, domain: str
    ) -> tuple[Any, str, str, float]:
        """Nobody is timed for a wrong answer."""
        if isinstance(impl, KtKernel):
            error = float(impl.relative_error())
        else:
            error = relative_error(impl, shape)
        bar = 0.03 if isinstance(impl, KtKernel) else 0.02 if domain == "int8" else 0.01
        if error > bar:
            raise SystemExit(
                f"{impl.name} {format} on shape {shape.name}: relative error {error:.3f}"
            )
        return impl, format, domain, error

    def write(self, path: Path) -> None:
        self.machine["load_end"] = list(os.getloadavg())
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps({"machine": self.machine, "rows": self.rows}, indent=1) + "\n")
        plot.roofline(path, path.with_name("roofline.png"))
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
    bench = Bench(options.threads, options.peers)
    print(json.dumps(bench.machine["roofs"]), "load", bench.machine["load"], flush=True)
    for name in options.shapes.split(","):
        if names & {"W1", "W2"}:
            bench.forward_workloads(SHAPES[name], names)
        if names & {"W3", "W4"}:
            bench.training_workloads(SHAPES[name], names)
    bench.write(options.out)


if __name__ == "__main__":
    main()
