"""Rivals that run in a process of their own, and the one way to time any contestant.

Every contestant is asked `seconds(which, shape, spec, repeats)`; one that runs in this process
answers through `local_seconds`, kt-kernel through its worker (bench/kt_kernel_worker.py).
"""

from __future__ import annotations

import json
import os
import select
import subprocess
import tempfile
import time
import weakref
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import IO, Any

from impls import Weights, seeded_weights
from workloads import Batch, Shape, batch

ROOT = Path(__file__).resolve().parent.parent
PEERS_PYTHON = ROOT / "build" / "peers-venv" / "bin" / "python"
WORKER = Path(__file__).resolve().with_name("kt_kernel_worker.py")
TIMEOUT = 600.0  # seconds for one reply: far beyond any workload here, ends a deadlock


@dataclass(frozen=True)
class Spec:
    """Batches by what generates them: call i of a timing takes seeds[i % len(seeds)]."""

    tokens: int
    seeds: tuple[int, ...]
    zipf: float = 0.0


@lru_cache(maxsize=32)
def local_batch(shape: Shape, tokens: int, seed: int, zipf: float) -> Batch:
    """workloads.batch, kept for the next contestant."""
    return batch(shape, tokens, seed, zipf)


def local_seconds(impl: Any, which: str, shape: Shape, spec: Spec, repeats: int) -> list[float]:
    """Seconds of `repeats` calls of impl.forward or impl.step, after one that is not counted."""
    call = impl.forward if which == "forward" else impl.step
    seeds = [spec.seeds[i % len(spec.seeds)] for i in range(repeats)]
    batches = [local_batch(shape, spec.tokens, seed, spec.zipf) for seed in seeds]
    call(batches[-1])
    seconds = []
    for b in batches:
        start = time.perf_counter()
        call(b)
        seconds.append(time.perf_counter() - start)
    return seconds


def _stop(process: subprocess.Popen[bytes], log: IO[bytes]) -> None:
    process.kill()
    process.wait()
    log.close()


class KtKernel:
    """kt-kernel 0.7.2 on the CPU; `format` bf16, int8, int4 (a scale per row) or int4_g32 (a scale
    per 32); training in bf16 and int8 only.

    `rank` None builds its inference layer, once per thread count in 1 and `threads`; 0 its
    training layer without LoRA (dX only), r > 0 with expert LoRA, with `threads` threads.
    """

    command = (str(PEERS_PYTHON), str(WORKER))

    def __init__(
        self, format: str, rank: int | None = None, threads: int = 0, max_tokens: int = 2048
    ) -> None:
        self.name = "kt_kernel" if format != "int4_g32" else "kt_kernel_g32"
        self.format, self.rank, self.max_tokens = format, rank, max_tokens
        self.threads = threads or len(os.sched_getaffinity(0))
        self.errors: dict[str, float] = {}
        self.kernel = ""  # their class and ISA variant
        self.rss_before_mb = 0.0  # of the worker with its imports, before it held weights
        self.rss_mb = 0.0  # of the worker; inference holds one layer per thread count
        self.layers = 1
        self.setting: dict[str, Any] = {}  # thread count and way of the last answer of `seconds`

    def prepare(self, shape: Shape, weights: Weights = seeded_weights) -> None:
        """Starts the worker, which draws the same weights itself, packs and checks them."""
        if weights is not seeded_weights:
            raise ValueError("kt-kernel's worker draws impls.seeded_weights itself; pass those.")
        if not Path(self.command[0]).is_file():
            raise FileNotFoundError(
                f"{self.command[0]} is missing; run bench/peers_setup.py first."
            )
        log = tempfile.TemporaryFile()  # noqa: SIM115 - closed by _stop
        self._process = subprocess.Popen(
            self.command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            bufsize=0,
        )
        self._log = log
        self.close = weakref.finalize(self, _stop, self._process, log)
        reply = self._ask(
            op="prepare",
            shape=shape.name,
            format=self.format,
            mode="inference" if self.rank is None else "sft",
            rank=self.rank,
            threads=sorted({1, self.threads}) if self.rank is None else [self.threads],
            max_tokens=self.max_tokens,
        )
        self.shape, self.errors = shape, reply["errors"]
        self.rss_mb, self.rss_before_mb = reply["rss_mb"], reply["rss_before_mb"]
        self.layers = reply["layers"]
        self.kernel = f"{reply['kernel']} ({reply['variant']})"

    def relative_error(self) -> float:
        """Of the forward against the weights as it holds them, the worst over both kernel forms
        and all thread counts. `errors` has the others."""
        return self.errors["forward"]

    def layer_mb(self) -> float:
        """Resident MB of one layer with its buffers, without torch's and Python's share."""
        return (self.rss_mb - self.rss_before_mb) / self.layers

    def seconds(self, which: str, shape: Shape, spec: Spec, repeats: int) -> list[float]:
        """Seconds of `repeats` calls ("forward" or "step") in its best setting, timed inside the
        worker around the call alone, after one that is not counted."""
        if shape != self.shape:
            raise ValueError(f"prepared for shape {self.shape.name}, asked for {shape.name}")
        if spec.tokens > self.max_tokens:
            raise ValueError(
                f"{spec.tokens} tokens, but the layer was built for {self.max_tokens}: raise "
                "max_tokens."
            )
        reply = self._ask(
            op="run",
            which=which,
            tokens=spec.tokens,
            seeds=spec.seeds,
            zipf=spec.zipf,
            repeats=repeats,
        )
        self.rss_mb = reply["rss_mb"]
        best = min(range(len(reply["seconds"])), key=lambda i: min(reply["seconds"][i]))
        self.setting = reply["settings"][best]
        return list(reply["seconds"][best])

    def _ask(self, **request: Any) -> dict[str, Any]:
        assert self._process.stdin is not None and self._process.stdout is not None
        try:
            self._process.stdin.write((json.dumps(request) + "\n").encode())
            line = self._read_line()
        except (BrokenPipeError, EOFError, TimeoutError) as error:
            self._process.kill()
            code = self._process.wait()
            self._log.seek(0)
            tail = self._log.read().decode(errors="replace")[-2000:]
            raise RuntimeError(f"kt-kernel's worker ended ({code}, {error}):\n{tail}") from error
        reply = json.loads(line)
        if not reply["ok"]:
            raise RuntimeError(f"kt-kernel's worker: {reply['error']}")
        return dict(reply)

    def _read_line(self) -> bytes:
        assert self._process.stdout is not None
        line, deadline = b"", time.monotonic() + TIMEOUT
        while not line.endswith(b"\n"):
            left = deadline - time.monotonic()
            if left <= 0 or not select.select([self._process.stdout], [], [], left)[0]:
                raise TimeoutError(f"no reply within {TIMEOUT:.0f} s")
            chunk = os.read(self._process.stdout.fileno(), 1 << 16)
            if not chunk:
                raise EOFError("end of output")
            line += chunk
        return line


def main() -> None:
    """Prints kt-kernel's errors, and a few timings, on shape S: `python bench/rivals.py`."""
    from workloads import SHAPES

    shape = SHAPES["S"]
    for format, rank in (
        ("bf16", None),
        ("int8", None),
        ("int4", None),
        ("int4_g32", None),
        ("bf16", 0),
        ("bf16", 8),
        ("int8", 0),
        ("int8", 8),
    ):
        impl = KtKernel(format, rank, max_tokens=64)
        impl.prepare(shape)
        which = "forward" if rank is None else "step"
        cases = []
        for tokens in (1, 64):
            best = min(impl.seconds(which, shape, Spec(tokens, (0, 1, 2)), 6))
            cases.append(f"T={tokens} {best * 1e3:.2f} ms {impl.setting}")
        errors = " ".join(f"{name} {e:.4f}" for name, e in impl.errors.items())
        print(f"{format} rank {rank}: {impl.kernel} {errors}")
        print(f"    {which} {'; '.join(cases)}; {impl.layer_mb():.0f} MB", flush=True)
        impl.close()


if __name__ == "__main__":
    main()
