"""Rows per weight read: each rank computes its own tokens, or a host's ranks compute all together.

    python bench/rows.py [--experts 64] [--format int8] [--rows 4 8 16 32 64] [--out rows.json]

With R rows per expert and rank on two ranks: *own*, two processes with one thread each compute R
rows per expert over the same packed weights at the same time; *switched*, the same two compute them
together as kt_sft/op/exchange.py does, messages included; *gathered*, one process with two threads
computes 2R, and copies once the bytes that would have to move. One layer of the shape of
Qwen3-30B-A3B's experts, forward and backward, LoRA of rank 8. Each time is the best of several
calls, in which own and switched take turns. Prints JSON.
"""

from __future__ import annotations

import argparse
import json
import mmap
import multiprocessing
import tempfile
import time
from pathlib import Path

import machine
import torch
from torch import distributed

from kt_core import runtime
from kt_core.experts import Experts, Lora
from kt_sft.op.exchange import HostRanks

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
        batch = self.x, self.index, self.weights, self.lora
        _, saved = self.layer.forward(*batch, save=True)
        self.layer.backward(self.grad, *batch, saved)

    def run_with(self, ranks: HostRanks) -> None:
        """The same, together with the other rank."""
        batch = self.x, self.index, self.weights, self.lora
        _, saved = ranks.forward(self.layer, *batch, save=True)
        needs = {"need_dx": True, "need_dw": True, "need_lora": True}
        ranks.backward(self.layer, self.grad, *batch, saved, **needs)


def _rank(shared, experts, format, rows, rank, repeats, folder, results) -> None:
    torch.set_num_threads(1)
    runtime.set_threads(1)
    distributed.init_process_group(
        "gloo", init_method=f"file://{folder}/group", rank=rank, world_size=RANKS
    )
    ranks = HostRanks(distributed.group.WORLD)
    work = Work(shared, experts, format, rows, rank)
    ways = {"own": work.run, "switched": lambda: work.run_with(ranks)}
    best = dict.fromkeys(ways, float("inf"))
    for repeat in range(repeats + 1):
        for way, run in ways.items():
            distributed.barrier()
            start = time.perf_counter()
            run()
            distributed.barrier()  # the slower rank is what the step waits for
            if repeat:
                best[way] = min(best[way], time.perf_counter() - start)
    results.put(best)
    results.close()
    results.join_thread()
    distributed.destroy_process_group()


def by_ranks(
    shared: mmap.mmap, experts: int, format: str, rows: int, repeats: int
) -> dict[str, float]:
    """Seconds of two processes, each computing its own rows, and both together."""
    context = multiprocessing.get_context("fork")
    results = context.Queue()
    with tempfile.TemporaryDirectory() as folder:
        work = shared, experts, format, rows
        ranks = [
            context.Process(target=_rank, args=(*work, r, repeats, folder, results))
            for r in range(RANKS)
        ]
        for rank in ranks:
            rank.start()
        found = [results.get() for _ in ranks]
        for rank in ranks:
            rank.join()
    return {way: max(times[way] for times in found) for way in found[0]}


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
    """Prints the times for every number of rows; --out adds them to those of a file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--experts", type=int, default=64)
    parser.add_argument("--format", default="int8")
    parser.add_argument("--rows", type=int, nargs="+", default=[4, 8, 16, 32, 64])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    shared = packed(args.experts, args.format)
    found = []
    for rows in args.rows:
        call = (shared, args.experts, args.format, rows, args.repeats)
        times = by_ranks(*call) | {"gathered": gathered(*call)}
        found.append({"rows_per_expert_and_rank": rows, **times})
        found[-1]["gain"] = times["own"] / times["switched"]
        found[-1]["gain_without_messages"] = times["own"] / times["gathered"]
    result = {
        "machine": machine.about(),
        "shape": {"experts": args.experts, "format": args.format, "ranks": RANKS},
        "seconds": found,
    }
    if args.out is not None and args.out.exists():  # other rows, measured before
        rest = json.loads(args.out.read_text())
        if rest["shape"] != result["shape"]:
            raise SystemExit(f"{args.out} holds times of {rest['shape']}; give another file")
        seconds = {s["rows_per_expert_and_rank"]: s for s in rest["seconds"] + found}
        result["seconds"] = [seconds[rows] for rows in sorted(seconds)]
    text = json.dumps(result, indent=1)
    print(text)
    if args.out is not None:
        args.out.write_text(text + "\n")


if __name__ == "__main__":
    main()
