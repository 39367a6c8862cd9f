"""Decode inside transformers' generate: do the experts run as fast there as alone?

    python bench/generate.py [--layers 4] [--tokens 64] [--format int8]

Builds a random Qwen3-MoE of shape S with `--layers` layers, generates greedily, and compares the
milliseconds per layer and token in the experts with the same layers called in a loop. torch's own
threads run between our calls there, so this shows what waking up, sharing cores and cold caches
cost. Afterwards the process must be idle. Writes bench/results/generate.json.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path
from typing import Any

import machine
import torch
import transformers
from workloads import SHAPES, batch

from kt_core import runtime
from kt_core.hf import load_model
from kt_core.module import KTExpertsLinear

RESULTS = Path(__file__).resolve().parent / "results"


def save_model(path: Path, layers: int) -> None:
    """Random weights of shape S's experts, 16 heads, a vocabulary of 4096."""
    shape = SHAPES["S"]
    config = transformers.Qwen3MoeConfig(
        hidden_size=shape.hidden,
        moe_intermediate_size=shape.intermediate,
        intermediate_size=shape.intermediate,
        num_experts=shape.experts,
        num_experts_per_tok=shape.top_k,
        num_hidden_layers=layers,
        num_attention_heads=16,
        num_key_value_heads=4,
        head_dim=64,
        vocab_size=4096,
        eos_token_id=None,
    )
    torch.manual_seed(0)
    transformers.AutoModelForCausalLM.from_config(config).bfloat16().save_pretrained(path)


def in_generate(model: Any, tokens: int) -> dict[str, float]:
    """Milliseconds per token, of the whole and of the experts; prefill is one token."""
    prompt = torch.tensor([[7]])
    settings = {"max_new_tokens": tokens, "min_new_tokens": tokens, "do_sample": False}
    model.generate(prompt, **settings)
    runs = []
    for _ in range(5):
        before, start = runtime.seconds()["forward"], time.perf_counter()
        model.generate(prompt, **settings)
        whole, experts = time.perf_counter() - start, runtime.seconds()["forward"] - before
        runs.append((experts / tokens * 1e3, whole / tokens * 1e3))
    experts_ms, whole_ms = min(runs)
    return {"experts_ms_per_token": experts_ms, "whole_ms_per_token": whole_ms}


def alone(layers: list[KTExpertsLinear], tokens: int) -> float:
    """Milliseconds per token of the same layers, one call after the other."""
    data = [batch(SHAPES["S"], 1, seed) for seed in range(8)]
    best = float("inf")
    for _ in range(5):
        before = runtime.seconds()["forward"]
        for i in range(tokens):
            b = data[i % len(data)]
            for layer in layers:
                layer(b.x, b.index, b.weights)
        best = min(best, (runtime.seconds()["forward"] - before) / tokens * 1e3)
    return best


def idle_share() -> float:
    """CPU seconds per second of this process when it does nothing, after a moment to settle."""
    time.sleep(0.2)
    cpu, wall = time.process_time(), time.perf_counter()
    time.sleep(1.0)
    return (time.process_time() - cpu) / (time.perf_counter() - wall)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--format", default="int8")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        save_model(Path(folder), options.layers)
        model = load_model(folder, format=options.format)
    experts = [m for m in model.modules() if isinstance(m, KTExpertsLinear)]
    with torch.no_grad():
        result = in_generate(model, options.tokens)
        result["experts_alone_ms_per_token"] = alone(experts, options.tokens)
    result["in_generate_over_alone"] = (
        result["experts_ms_per_token"] / result["experts_alone_ms_per_token"]
    )
    result["idle_cpu_share"] = idle_share()
    roofs = machine.Roofs(runtime.threads())
    about = machine.describe(runtime.threads(), roofs)
    roofs.sample()
    print(json.dumps(result, indent=1))
    RESULTS.mkdir(exist_ok=True)
    out = {"machine": about, "layers": options.layers, "format": options.format, **result}
    (RESULTS / "generate.json").write_text(json.dumps(out, indent=1) + "\n")


if __name__ == "__main__":
    main()
