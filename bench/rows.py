"""Rows per weight read: each rank computes its own tokens, or one pass computes those of all.

    python bench/rows.py [--experts 64] [--format int8] [--rows 4 8 16 32 64]

With R rows per expert and rank on two ranks: *own*, two processes with one thread each compute R
rows per expert over the same packed weights at the same time; *gathered*, one process with two
threads computes 2R. One layer of the shape of Qwen3-30B-A3B's experts, forward and backward, LoRA
of rank 8. Gathering would also have to move x, dY and the results between the ranks: those bytes
are copied once in the gathered time. Prints JSON.
"""

from __future__ import annotations

import argparse
import json
import mmap
import multiprocessing
import time

import torch

from kt_core import runtime
from kt_core.experts import Experts, Lora

H, I, K, RANKS, LORA = 2048, 768, 8, 2, 8


def packed(experts: int, format: str) -> mmap.mmap:
    """A layer's packed bytes in memory that forked processes share."""
    layer = Experts(experts, H, I, format=format)
    generator = torch.Generator().manual_seed(0)
    for name, shape in (("gate", (I, H)), ("up", (I, H)), ("down", (H, I))):
        weight = torch.randn(shape, generator=generator).bfloat16() * 0.02
        for e in range(experts):
            layer.put(e, name, weight.roll(e, 0))
    shared = mmap.mmap(-1, layer.nbytes)
    shared[:] = layer.packed()
    return shared


class Work:
    """A forward and backward of `rows` rows per expert."""

    def __init__(self, shared: mmap.mmap, experts: int, format: str, rows: int, seed: int) -> None:
        self.layer = Experts.from_packed(experts, H, I, buffer=shared, format=format)
        generator = torch.Generator().manual_seed(seed)
        tokens = rows * experts // K
        self.x = torch.randn(tokens, H, generator=generator).bfloat16()
        self.grad = torch.randn(tokens, H, generator=generator).bfloat16()
        self.weights = torch.rand(tokens, K, generator=generator)
        # every expert gets exactly `rows` rows, every token K different experts
        first = torch.randperm(experts, generator=generator)
        self.index = first[(torch.arange(tokens * K) % experts)].view(tokens, K).contiguous()
        sizes = {"gate": (H, I), "up": (H, I), "down": (I, H)}
        a = {p: torch.randn(experts, LORA, i) * 0.02 for p, (i, _) in sizes.items()}
        b = {p: torch.randn(experts, o, LORA) * 0.02 for p, (_, o) in sizes.items()}
        self.lora = Lora(a, b, 2.0)

    def run(self) -> None:
        """Both passes, gate and up kept between them."""
        _, saved = self.layer.forward(self.x, self.index, self.weights, self.lora, save=True)
        self.layer.backward(self.grad, self.x, self.index, self.weights, self.lora, saved)


def _rank(shared, experts, format, rows, rank, repeats, barrier, results) -> None:
    torch.set_num_threads(1)
    runtime.set_threads(1)
    work = Work(shared, experts, format, rows, rank)
    best = float("inf")
    for repeat in range(repeats + 1):
        barrier.wait()
        start = time.perf_counter()
        work.run()
        barrier.wait()  # the slower rank is what the step waits for
        if repeat:
            best = min(best, time.perf_counter() - start)
    results.put(best)


def own(shared: mmap.mmap, experts: int, format: str, rows: int, repeats: int) -> float:
    """Seconds of two processes that each compute their own rows."""
    context = multiprocessing.get_context("fork")
    barrier, results = context.Barrier(RANKS), context.Queue()
    ranks = [
        context.Process(
            target=_rank, args=(shared, experts, format, rows, r, repeats, barrier, results)
        )
        for r in range(RANKS)
    ]
    for rank in ranks:
        rank.start()
    seconds = [results.get() for _ in ranks]
    for rank in ranks:
        rank.join()
    return max(seconds)


def gathered(shared: mmap.mmap, experts: int, format: str, rows: int, repeats: int) -> float:
    """Seconds of one process that computes the rows of all."""
    work = Work(shared, experts, format, RANKS * rows, 0)
    theirs = work.x[len(work.x) // RANKS :]
    best = float("inf")
    for repeat in range(repeats + 1):
        start = time.perf_counter()
        for _ in range(4):  # x and dY come, y and dX go
            theirs.clone()
        work.run()
        if repeat:
            best = min(best, time.perf_counter() - start)
    return best


def main() -> None:
    """Prints both times for every number of rows."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--experts", type=int, default=64)
    parser.add_argument("--format", default="int8")
    parser.add_argument("--rows", type=int, nargs="+", default=[4, 8, 16, 32, 64])
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()
    shared = packed(args.experts, args.format)
    found = []
    for rows in args.rows:
        call = (shared, args.experts, args.format, rows, args.repeats)
        times = {"own": own(*call), "gathered": gathered(*call)}
        found.append({"rows_per_expert_and_rank": rows, **times})
        found[-1]["gain"] = times["own"] / times["gathered"]
    print(json.dumps({"arguments": vars(args), "seconds": found}, indent=1))


if __name__ == "__main__":
    main()
