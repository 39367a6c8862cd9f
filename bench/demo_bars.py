"""The bars of the demo, measured: losses in int8 and bf16, held-out loss, memory, speed.

    python bench/demo_bars.py [--runs base,int8,bf16,noise,experts,stock] [--out FILE]

Each run is examples/demo_lora.yaml through LLaMA-Factory in a process of its own:
  base     no training: the held-out loss to start from
  int8     the demo itself                       bf16     the same with bf16 experts
  noise    bf16 with every embedding rounded once more: how far rounding alone moves the losses
  experts  LoRA on the experts only              stock    LLaMA-Factory without use_kt, PEFT's own
                                                          LoRA on the fused expert parameters
Memory is RssAnon + RssShmem, sampled, minus its value after imports.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import machine

ROOT = Path(__file__).resolve().parent.parent
WORK = ROOT / "demo" / "bars"
RUNS: dict[str, dict[str, Any]] = {
    "base": {"do_train": False, "kt_config.format": "int8"},
    "int8": {"kt_config.format": "int8"},
    "bf16": {"kt_config.format": "bf16"},
    "noise": {"kt_config.format": "bf16"},
    "experts": {"kt_config.format": "int8", "lora_target": "experts"},
    "stock": {
        "use_kt": False,
        "lora_target": "q_proj,k_proj,v_proj,o_proj,w1,w2,w3",
        "max_steps": 2,  # they take long
    },
}


def resident_bytes() -> int:
    """Anonymous and shared memory of this process."""
    fields = dict(
        line.split(":", 1)
        for line in Path("/proc/self/status").read_text().splitlines()
        if ":" in line
    )
    return sum(int(fields[key].split()[0]) * 1024 for key in ("RssAnon", "RssShmem"))


class Sampler(threading.Thread):
    """The largest `resident_bytes` seen, every 50 ms."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.start_bytes = self.peak = resident_bytes()

    def run(self) -> None:
        while True:
            self.peak = max(self.peak, resident_bytes())
            time.sleep(0.05)


def watch_batches() -> list[int]:
    """A one-element list that will hold the tokens of the largest micro-batch, padding included."""
    from torch.nn import Embedding

    forward, largest = Embedding.forward, [0]

    def watched(self: Embedding, ids: Any) -> Any:
        largest[0] = max(largest[0], ids.numel())
        return forward(self, ids)

    Embedding.forward = watched  # type: ignore[method-assign]
    return largest


def round_embeddings_once_more() -> None:
    """x -> bf16(bf16(3 x) / 3): one rounding more on every embedding of the model."""
    import torch
    from torch.nn import Embedding

    forward = Embedding.forward

    def rounded(self: Embedding, ids: torch.Tensor) -> torch.Tensor:
        x = forward(self, ids).float()
        return ((x * 3).bfloat16().float() / 3).bfloat16()

    Embedding.forward = rounded  # type: ignore[method-assign]


def child(name: str) -> None:
    """One run, in this process; writes WORK/<name>.json."""
    import yaml

    settings = yaml.safe_load((ROOT / "examples" / "demo_lora.yaml").read_text())
    out = WORK / name
    settings |= {
        "output_dir": str(out),
        "do_eval": True,
        "eval_dataset": "identity_heldout",
        "per_device_eval_batch_size": 8,
        "plot_loss": False,
    }
    for key, value in RUNS[name].items():
        if key.startswith("kt_config."):
            settings["kt_config"][key.split(".", 1)[1]] = value
        else:
            settings[key] = value
    if not settings["use_kt"]:
        del settings["use_kt"], settings["kt_config"]
    if name == "noise":
        round_embeddings_once_more()
    import torch
    import torch._dynamo  # torch.library imports it at an operator's first call: it is no tensor
    from llamafactory.train import tuner
    from transformers import Trainer

    largest = watch_batches()
    sampler = Sampler()
    sampler.start()
    training, train_peak = Trainer.train, [0]

    def train(self: Trainer, *args: Any, **kw: Any) -> Any:
        result = training(self, *args, **kw)
        train_peak[0] = sampler.peak  # before the evaluation that only this file asks for
        return result

    Trainer.train = train  # type: ignore[method-assign]
    start = time.perf_counter()
    tuner.run_exp(settings)
    result: dict[str, Any] = {
        "seconds": time.perf_counter() - start,
        "memory_bytes": (train_peak[0] or sampler.peak) - sampler.start_bytes,
        "torch": torch.__version__,
        "largest_batch": largest[0],
        "eval_loss": json.loads((out / "eval_results.json").read_text())["eval_loss"],
    }
    if settings["do_train"]:
        lines = (out / "trainer_log.jsonl").read_text().splitlines()
        result["losses"] = [e["loss"] for e in map(json.loads, lines) if "loss" in e]
        result["train"] = json.loads((out / "train_results.json").read_text())
        if (out / "kt_stats.json").exists():
            result["kt"] = json.loads((out / "kt_stats.json").read_text())
    (WORK / f"{name}.json").write_text(json.dumps(result))


def computed_memory(format: str, trainable: int, longest: int) -> dict[str, float]:
    """Bytes from shapes: what a run of the demo has to hold. `longest`: tokens of the largest
    micro-batch, padding included."""
    from kt_core.experts import Experts

    config = json.loads((ROOT / "demo" / "model" / "config.json").read_text())
    layers, hidden, inner = (
        config["num_hidden_layers"],
        config["hidden_size"],
        config["intermediate_size"],
    )
    heads, kv = config["num_attention_heads"], config["num_key_value_heads"]
    head = hidden // heads
    experts, top_k, vocabulary = (
        config["num_local_experts"],
        config["num_experts_per_tok"],
        config["vocab_size"],
    )
    attention = layers * (2 * hidden * hidden + 2 * hidden * kv * head)
    rest = vocabulary * hidden + attention + layers * (experts * hidden + 2 * hidden) + hidden
    # Kept for backward, per token and layer: gate and up of every assignment (2 bytes each); rows
    # of width hidden in bf16: per norm its fp32 input (two) and its output, which is also the input
    # of LoRA or experts; attention's rotated q and its output, and that output as LoRA input; then
    # k and v. torch's saved_tensors_hooks count 26.1 kB per token and layer, this 25.3.
    saved = 4 * top_k * inner + 2 * hidden * 10 + 2 * 2 * kv * head * 2
    return {
        "packed": layers * Experts.packed_nbytes(experts, hidden, inner, format),
        "non_expert": 2.0 * rest,
        "trainable": 16.0 * trainable,
        "saved": float(longest * layers * saved),
        "logits": 10.0 * vocabulary * longest,
    }


def run(name: str) -> dict[str, Any]:
    WORK.mkdir(parents=True, exist_ok=True)
    with (WORK / f"{name}.log").open("w") as log:
        done = subprocess.run(
            [sys.executable, __file__, "--child", name],
            cwd=ROOT,
            stdout=log,
            stderr=subprocess.STDOUT,
            check=False,
        )
    if done.returncode:
        sys.exit(f"run {name} failed with {done.returncode}; see {WORK / f'{name}.log'}")
    return dict(json.loads((WORK / f"{name}.json").read_text()))


def difference(a: list[float], b: list[float]) -> dict[str, float]:
    gaps = [abs(x - y) for x, y in zip(a, b, strict=True)]
    return {"mean": sum(gaps) / len(gaps), "max": max(gaps)}


def summary(results: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """The bars of issue 2, from whichever runs are there."""
    found: dict[str, Any] = {}
    if {"int8", "bf16"} <= set(results):
        a, b = results["int8"], results["bf16"]
        found["int8_vs_bf16_loss"] = difference(a["losses"], b["losses"])
        found["heldout_ratio"] = a["eval_loss"] / b["eval_loss"]
        found["memory_saved_gb"] = (b["memory_bytes"] - a["memory_bytes"]) / 1e9
    if {"noise", "bf16"} <= set(results):
        found["noise_floor"] = difference(results["noise"]["losses"], results["bf16"]["losses"])
    if {"base", "experts"} <= set(results):
        found["experts_only_heldout"] = (
            results["experts"]["eval_loss"] / results["base"]["eval_loss"]
        )
    for name, result in results.items():
        if "kt" in result:
            parts = computed_memory(
                RUNS[name]["kt_config.format"],
                sum(result["kt"]["trainable"].values()),
                result["largest_batch"],
            )
            found[f"{name}_memory_mb"] = {
                "measured": result["memory_bytes"] / 1e6,
                "computed": sum(parts.values()) / 1e6,
                "ratio": result["memory_bytes"] / sum(parts.values()),
                **{part: size / 1e6 for part, size in parts.items()},
            }
        if "train" in result:
            found[f"{name}_train_seconds"] = result["train"]["train_runtime"]
        if "kt" in result:
            found[f"{name}_tokens_per_s"] = result["kt"]["tokens_per_s"]
    if {"int8", "stock"} <= set(results):
        rate = {n: results[n]["train"]["train_steps_per_second"] for n in ("int8", "stock")}
        found["speedup_over_stock"] = rate["int8"] / rate["stock"]
    return found


def without_losses(result: dict[str, Any]) -> dict[str, Any]:
    """A run without its loss of every step; `summary` has what they were compared for."""
    return {key: value for key, value in result.items() if key != "losses"}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--runs", default=",".join(RUNS))
    parser.add_argument("--child")
    parser.add_argument("--out", type=Path, default=ROOT / "bench" / "results" / "demo.json")
    options = parser.parse_args()
    if options.child:
        return child(options.child)
    results = {}
    for name in options.runs.split(","):
        results[name] = run(name)
        print(name, json.dumps(without_losses(results[name])), flush=True)
    found = summary(results)
    print(json.dumps(found, indent=1))
    options.out.parent.mkdir(parents=True, exist_ok=True)
    runs = {name: without_losses(result) for name, result in results.items()}
    out = {"machine": machine.about(), "summary": found, "runs": runs}
    options.out.write_text(json.dumps(out, indent=1) + "\n")


if __name__ == "__main__":
    main()
