"""W8: one AdamW step over expert LoRA, the bulk of what trains.

    python bench/optimizer.py [--layers 6] [--rank 8] [--threads N]

Parameters are those of `--layers` layers of shape Q, fp32 with fp32 moments; a full Qwen3-30B-A3B
has 48 such layers (415 M parameters at r = 8). Each contestant must first move a small model's
parameters as torch's plain loop does. Writes bench/results/optimizer.json.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import machine
import torch
from torch import Tensor
from workloads import SHAPES

RESULTS = Path(__file__).resolve().parent / "results"
STEPS = 7
# Bytes an AdamW step cannot avoid per parameter: reads p, g, m, v and writes p, m, v, fp32.
BYTES = 28


def parameters(layers: int, rank: int) -> list[Tensor]:
    """LoRA factors of `layers` layers with seeded values and gradients."""
    shape, g = SHAPES["Q"], torch.Generator().manual_seed(0)
    widths = (shape.hidden, shape.hidden, shape.intermediate)  # inputs of gate, up, down
    outs = (shape.intermediate, shape.intermediate, shape.hidden)
    made = []
    for _ in range(layers):
        for width, out in zip(widths, outs, strict=True):
            for size in ((shape.experts, rank, width), (shape.experts, out, rank)):
                p = (torch.randn(size, generator=g) * 0.02).requires_grad_()
                p.grad = torch.randn(size, generator=g) * 1e-3
                made.append(p)
    return made


def contestants() -> dict[str, Callable[[list[Tensor]], Any]]:
    """Name -> optimizer over parameters; DeepSpeed's where it is installed."""

    def torch_adamw(**how: bool) -> Callable[[list[Tensor]], Any]:
        return lambda ps: torch.optim.AdamW(ps, lr=1e-3, weight_decay=0.0, **how)

    found = {
        "torch_loop": torch_adamw(foreach=False, fused=False),
        "torch_foreach": torch_adamw(foreach=True),
        "torch_fused": torch_adamw(fused=True),
    }
    try:
        from deepspeed.ops.adam import DeepSpeedCPUAdam
    except ImportError:
        return found
    found["deepspeed_cpu"] = lambda ps: DeepSpeedCPUAdam(ps, lr=1e-3, weight_decay=0.0)
    return found


def check(makers: dict[str, Callable[[list[Tensor]], Any]]) -> dict[str, float]:
    """Largest difference of a small model's parameters from torch's plain loop after 3 steps."""
    after = {}
    for name, make in makers.items():
        ps = parameters(1, 1)
        optimizer = make(ps)
        for _ in range(3):
            optimizer.step()
        after[name] = ps
    errors = {}
    for name, ps in after.items():
        pairs = zip(ps, after["torch_loop"], strict=True)
        errors[name] = max(float((a - b).detach().abs().max()) for a, b in pairs)
        if errors[name] > 1e-5:  # a step moves a parameter by up to 1e-3
            raise SystemExit(f"{name} differs from torch's loop by {errors[name]:.1e}")
    return errors


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--rank", type=int, default=8)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    makers = contestants()
    errors = check(makers)
    roofs = machine.Roofs(options.threads)
    about = machine.describe(options.threads, roofs)
    count = sum(p.numel() for p in parameters(options.layers, options.rank))
    rows = []
    for name, make in makers.items():
        ps = parameters(options.layers, options.rank)
        optimizer, samples = make(ps), []
        for _ in range(STEPS + 1):
            roofs.sample()
            start = time.perf_counter()
            optimizer.step()
            samples.append(time.perf_counter() - start)
        samples = samples[1:]  # the first makes the moments
        gbps = count * BYTES / min(samples) * 1e-9
        rows.append(
            {
                "workload": "W8",
                "impl": name,
                "parameters": count,
                "threads": options.threads,
                "ms": statistics.median(samples) * 1e3,
                "best_ms": min(samples) * 1e3,
                "gbps": gbps,
                "roof_pct": 100 * gbps / roofs.best["dram_gbps"],
                "max_difference": errors[name],
                "samples": len(samples),
            }
        )
        print(f"{name:<16} {rows[-1]['ms']:8.1f} ms {gbps:6.1f} GB/s", flush=True)
    RESULTS.mkdir(exist_ok=True)
    result = {"machine": about, "rows": rows}
    (RESULTS / "optimizer.json").write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
