"""Resident memory of one training layer against the sum computed from shapes.

    python bench/memory.py [--shape Q] [--tokens 2048] [--rank 8]

One process per weight format: packs a layer, makes one training step with expert LoRA, and samples
anonymous and shared memory all the while; what the process held before the layer (imports, one
tiny step) is subtracted. Writes bench/results/memory.json.
"""

from __future__ import annotations

import argparse
import gc
import json
import subprocess
import sys
from pathlib import Path

import machine
import torch
from demo_bars import Sampler, resident_bytes
from impls import Ours, seeded_weights
from workloads import SHAPES, VARIANTS, Shape, batch, weight_bytes

from kt_core.loading import memory

RESULTS = Path(__file__).resolve().parent / "results"


def computed(shape: Shape, packed: int, tokens: int, rank: int) -> dict[str, int]:
    """Bytes of a step: packed weights, saved gate and up (bf16), LoRA factors and their gradients
    (fp32), and the tensors that go in and out: x, dy, y, dx (bf16), with y and dx summed in fp32.
    """
    E, K, H, I = shape.experts, shape.top_k, shape.hidden, shape.intermediate
    return {
        "packed": packed,
        "saved": tokens * K * 2 * I * 2,
        "lora": E * rank * 3 * (H + I) * 4 * 2,
        "in_out": tokens * H * (4 * 2 + 4),
    }


def child(shape: Shape, format: str, group: int, tokens: int, rank: int) -> None:
    """One format in this process; prints its entry."""
    memory.keep_freed_tensors()
    tiny = Ours(format, group)
    tiny.prepare(Shape("tiny", 2, 1, 64, 64), seeded_weights)
    tiny.twin(rank=rank).step(batch(tiny.shape, 4, seed=0))
    gc.collect()
    sampler = Sampler()
    layer = Ours(format, group)
    layer.prepare(shape, seeded_weights)
    impl = layer.twin(rank=rank)
    data = batch(shape, tokens, seed=0)
    memory.return_freed_tensors()  # as before the logits of every training step
    sampler.start()
    impl.step(data)
    impl.step(data)
    parts = computed(shape, layer.layer.nbytes, tokens, rank)
    used = max(sampler.peak, resident_bytes()) - sampler.start_bytes
    print(
        json.dumps(
            {
                "shape": shape.name,
                "format": format,
                "group": group,
                "tokens": tokens,
                "rank": rank,
                "measured_mb": used / 1e6,
                "computed_mb": sum(parts.values()) / 1e6,
                "ratio": used / sum(parts.values()),
                "ratio_without_in_out": used / (sum(parts.values()) - parts["in_out"]),
                "packed_over_bits": parts["packed"]
                / weight_bytes(shape, format, group, shape.experts),
                **{f"{name}_mb": size / 1e6 for name, size in parts.items()},
            }
        )
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--shape", default="Q")
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--rank", type=int, default=8)
    parser.add_argument("--child", nargs=2, metavar=("FORMAT", "GROUP"))
    options = parser.parse_args()
    torch.set_num_threads(1)
    shape = SHAPES[options.shape]
    if options.child:
        format, group = options.child
        return child(shape, format, int(group), options.tokens, options.rank)
    entries = []
    for format, group in VARIANTS:
        command = [sys.executable, __file__, *sys.argv[1:], "--child", format, str(group)]
        entries.append(json.loads(subprocess.check_output(command)))
        print(json.dumps(entries[-1]), flush=True)
    RESULTS.mkdir(exist_ok=True)
    result = {"machine": machine.about(), "rows": entries}
    (RESULTS / "memory.json").write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
