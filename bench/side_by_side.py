"""Training beside stock LLaMA-Factory: the same model, data and steps, with and without use_kt.

    python bench/side_by_side.py [--models demo,qwen3] [--tokens 1024,128] [--steps 6]

Models: `demo` (examples/make_demo_model.py; `make demo` makes it) and `qwen3`, a random Qwen3-MoE
of 16 layers of shape S with 128 experts (with fewer, lm_head is most of a step; in Qwen3-30B-A3B it
is a sixth of the routed experts' work, here a half). Runs, each in a process of its own, one after
the other:
  int8, bf16   use_kt, experts in that format, LoRA r=8 on attention and every expert
  stock        LLaMA-Factory without use_kt: PEFT's own LoRA on the fused expert parameters
  stock_fp32   the same from a checkpoint in fp32 and with bf16: false, since our runs compute what
               is beside the experts in fp32 on CPUs that multiply it faster (dense_dtype)
  zero2, zero3 the same under DeepSpeed with the optimizer (and parameters) offloaded to the CPU,
               where DeepSpeed runs without a GPU
Every micro-batch is one packed sequence of `--tokens` tokens of plain text. Seconds per step leave
the first and the last step out. Memory is RssAnon + RssShmem at its peak, minus its value after
imports and minus the logits: 10 bytes each (bf16 logits, their fp32 copy and gradient), of ours 8
(fp32 logits and gradient). Writes bench/results/side_by_side.json, where other runs of the same
kernels stay, and, with the losses over one another, side_by_side.png.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import shutil
import socket
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import machine
from demo_bars import Sampler

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "bench" / "results"
WORK = ROOT / "build" / "side_by_side"
RUNS = ("int8", "bf16", "stock", "stock_fp32", "zero2", "zero3")
OURS = ("int8", "bf16")
# Names that stock PEFT 0.20 turns into LoRA on the fused expert parameters
STOCK_TARGETS = {
    "demo": "q_proj,k_proj,v_proj,o_proj,w1,w2,w3",
    "qwen3": "q_proj,k_proj,v_proj,o_proj,gate_proj,up_proj,down_proj",
}


def model_path(name: str) -> Path:
    """Where a model lies; makes `qwen3` with the tokenizer of the demo."""
    demo = ROOT / "demo" / "model"
    if not (demo / "config.json").exists():
        sys.exit(f"{demo} is missing: run `make demo` first, it makes the model")
    if name == "demo":
        return demo
    path = WORK / "qwen3"
    if (path / "config.json").exists():
        return path
    import torch
    import transformers

    vocabulary = json.loads((demo / "config.json").read_text())["vocab_size"]
    config = transformers.Qwen3MoeConfig(
        hidden_size=1024,
        moe_intermediate_size=512,
        intermediate_size=512,
        num_experts=128,
        num_experts_per_tok=4,
        num_hidden_layers=16,
        num_attention_heads=16,
        num_key_value_heads=4,
        head_dim=64,
        vocab_size=vocabulary,
        tie_word_embeddings=True,
    )
    torch.manual_seed(0)
    transformers.AutoModelForCausalLM.from_config(config).bfloat16().save_pretrained(path)
    for file in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(demo / file, path / file)
    return path


def in_fp32(name: str) -> Path:
    """A copy of the model with its weights in fp32."""
    path = WORK / f"{name}_fp32"
    if not (path / "config.json").exists():
        import torch
        import transformers

        source = model_path(name)
        model = transformers.AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
        model.save_pretrained(path)
        transformers.AutoTokenizer.from_pretrained(source).save_pretrained(path)
    return path


def settings(model: str, run: str, tokens: int, steps: int) -> dict[str, Any]:
    """The arguments of LLaMA-Factory."""
    found: dict[str, Any] = {
        "model_name_or_path": str(model_path(model)),
        "stage": "pt",
        "do_train": True,
        "finetuning_type": "lora",
        "lora_target": STOCK_TARGETS[model],
        "lora_rank": 8,
        "lora_alpha": 16,
        "lora_dropout": 0.0,
        "dataset_dir": str(ROOT / "examples" / "data"),
        "dataset": "plain_text",
        "template": "chatml",
        "cutoff_len": tokens,
        "preprocessing_num_workers": 1,
        "dataloader_num_workers": 0,
        "use_cpu": True,
        "bf16": True,
        "disable_gradient_checkpointing": True,
        "per_device_train_batch_size": 1,
        "gradient_accumulation_steps": 1,
        "max_steps": steps,
        "learning_rate": 5.0e-5,
        "lr_scheduler_type": "constant",
        "seed": 0,
        "output_dir": str(WORK / f"{model}_{tokens}_{run}"),
        "overwrite_output_dir": True,
        "overwrite_cache": True,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
    }
    if run == "stock_fp32":
        found |= {"model_name_or_path": str(in_fp32(model)), "bf16": False}
    if run in OURS:
        found |= {"use_kt": True, "lora_target": "all", "kt_config": {"format": run}}
    if run.startswith("zero"):
        found["deepspeed"] = zero_config(int(run[-1]))
    return found


def zero_config(stage: int) -> dict[str, Any]:
    """DeepSpeed's settings: what can be offloaded is, and torch's AdamW updates it."""
    zero: dict[str, Any] = {"stage": stage, "offload_optimizer": {"device": "cpu"}}
    if stage == 3:
        zero["offload_param"] = {"device": "cpu"}
    return {
        "zero_optimization": zero,
        "bf16": {"enabled": True},
        "zero_force_ds_cpu_optimizer": False,
        "zero_allow_untested_optimizer": True,
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": "auto",
        "gradient_clipping": "auto",
    }


def child(model: str, run: str, tokens: int, steps: int) -> None:
    """One run, in this process; writes a JSON file of what it measured."""
    import torch
    import torch._dynamo
    from llamafactory.train import tuner
    from transformers import Trainer

    sampler = Sampler()
    sampler.start()
    step, times = Trainer.training_step, []

    def timed(self: Trainer, model: Any, inputs: Any, *args: Any, **kw: Any) -> Any:
        times.append(time.perf_counter())
        return step(self, model, inputs, *args, **kw)

    Trainer.training_step = timed  # type: ignore[method-assign]
    arguments = settings(model, run, tokens, steps)
    tuner.run_exp(arguments)
    times.append(time.perf_counter())
    seconds = [b - a for a, b in itertools.pairwise(times)]
    timed_steps = seconds[1:-1]  # the last one also saves
    out = Path(arguments["output_dir"])
    entries = map(json.loads, (out / "trainer_log.jsonl").read_text().splitlines())
    vocabulary = json.loads((model_path(model) / "config.json").read_text())["vocab_size"]
    logit = 8 if run in OURS else 10
    result = {
        "losses": [e["loss"] for e in entries if "loss" in e],
        "median_step_s": statistics.median(timed_steps),
        "best_step_s": min(timed_steps),
        "steps_timed": len(timed_steps),
        "tokens_per_s": tokens / statistics.median(timed_steps),
        "memory_mb": (sampler.peak - sampler.start_bytes - logit * tokens * vocabulary) / 1e6,
        "peak_mb": sampler.peak / 1e6,
        "load": os.getloadavg()[0],
        "torch": torch.__version__,
    }
    (out / "side_by_side.json").write_text(json.dumps(result))


def start(model: str, run: str, tokens: int, steps: int) -> dict[str, Any]:
    """One run in a process; its figures, or why there are none."""
    out = Path(settings(model, run, tokens, steps)["output_dir"])
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    environment = dict(os.environ)
    if run.startswith("zero"):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = str(free.getsockname()[1])
        one = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
        environment |= {**one, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        environment |= {"DS_ACCELERATOR": "cpu"}
    log = out / "log.txt"
    command = [sys.executable, __file__, "--child", model, run, str(tokens), str(steps)]
    with log.open("w") as file:
        code = subprocess.run(
            command, cwd=ROOT, env=environment, stdout=file, stderr=subprocess.STDOUT, check=False
        ).returncode
    if code:
        lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
        return {"failed": code, "reason": lines[-1][:300] if lines else "no output"}
    return dict(json.loads((out / "side_by_side.json").read_text()))


def compared(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Ours against stock, per model and micro-batch."""
    found = []
    for model, tokens in dict.fromkeys((r["model"], r["tokens"]) for r in rows):
        of = {r["run"]: r for r in rows if (r["model"], r["tokens"]) == (model, tokens)}
        stock = of.get("stock", {})
        for run in OURS:
            if "losses" not in stock or "losses" not in of.get(run, {}):
                continue
            gaps = [abs(a / b - 1) for a, b in zip(of[run]["losses"], stock["losses"], strict=True)]
            found.append(
                {
                    "model": model,
                    "tokens": tokens,
                    "run": run,
                    "speedup": of[run]["tokens_per_s"] / stock["tokens_per_s"],
                    "memory_share": of[run]["memory_mb"] / stock["memory_mb"],
                    "largest_loss_gap": max(gaps),
                }
            )
    return found


def plot(rows: list[dict[str, Any]], target: Path) -> None:
    """Losses by step, one panel per model and micro-batch."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    panels = list(dict.fromkeys((r["model"], r["tokens"]) for r in rows))
    figure, axes = plt.subplots(1, len(panels), figsize=(4 * len(panels), 3.6), squeeze=False)
    for axis, (model, tokens) in zip(axes[0], panels, strict=True):
        for row in rows:
            if (row["model"], row["tokens"]) == (model, tokens) and "losses" in row:
                label = f"{row['run']}: {row['tokens_per_s']:.0f} tokens/s"
                steps = range(1, len(row["losses"]) + 1)
                axis.plot(steps, row["losses"], marker="o", markersize=3, label=label)
        axis.set(title=f"{model}, {tokens} tokens a step", xlabel="step", ylabel="loss")
        axis.legend(fontsize=7)
    figure.tight_layout()
    figure.savefig(target, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--models", default="demo,qwen3")
    parser.add_argument("--tokens", default="1024,128")
    parser.add_argument("--runs", default=",".join(RUNS))
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--child", nargs=4)
    options = parser.parse_args()
    if options.child:
        model, run, tokens, steps = options.child
        return child(model, run, int(tokens), int(steps))
    about = machine.about()
    rows = []
    for model in options.models.split(","):
        for tokens in map(int, options.tokens.split(",")):
            for run in options.runs.split(","):
                row = {"model": model, "tokens": tokens, "run": run}
                row |= start(model, run, tokens, options.steps)
                rows.append(row)
                print(json.dumps(row), flush=True)

    def case(row: dict[str, Any]) -> tuple[Any, ...]:
        return row["model"], row["tokens"], row["run"]

    done = {case(row) for row in rows}
    kept = earlier(RESULTS / "side_by_side.json", about, options.steps)
    rows = [row for row in kept if case(row) not in done] + rows
    found = compared(rows)
    print(json.dumps(found, indent=1))
    RESULTS.mkdir(exist_ok=True)
    out = {"machine": about, "steps": options.steps, "compared": found, "rows": rows}
    (RESULTS / "side_by_side.json").write_text(json.dumps(out, indent=1) + "\n")
    plot(rows, RESULTS / "side_by_side.png")


def earlier(path: Path, about: dict[str, Any], steps: int) -> list[dict[str, Any]]:
    """Rows of the recorded file, if they are of the same kernels and number of steps."""
    if not path.exists():
        return []
    recorded = json.loads(path.read_text())
    same = recorded["machine"]["csrc"] == about["csrc"] and recorded["steps"] == steps
    return list(recorded["rows"]) if same else []


if __name__ == "__main__":
    main()
