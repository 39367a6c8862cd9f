"""What layer_major brings: seconds of an optimizer step, accumulation loop against one batch.

    python bench/layer_major.py [--rows 1] [--length 128] [--micro-batches 8] [--shape demo]

The whole model trains, attention too, through the same calls as a Trainer's: forward and backward
per micro-batch with the loss divided by the step's tokens, then the optimizer. The model has the
shape of the demo's (SmolLM2-135M with 8 experts, 2 per token), random weights, fewer layers.
Prints JSON.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time

import torch
import transformers
from peft import LoraConfig, get_peft_model

from kt_core import runtime
from kt_sft import session
from kt_sft.config import KTConfig
from kt_sft.cpu import loss

SHAPES = {
    # examples/make_demo_model.py
    "demo": {
        "hidden_size": 576,
        "moe_intermediate_size": 1536,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "head_dim": 64,
        "vocab_size": 49152,
    },
    # Qwen3-30B-A3B's experts, a quarter of their number
    "q32": {
        "hidden_size": 2048,
        "moe_intermediate_size": 768,
        "num_experts": 32,
        "num_experts_per_tok": 8,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "head_dim": 64,
        "vocab_size": 4096,
    },
}


def build(shape: str, layers: int, format: str) -> torch.nn.Module:
    """A model with LoRA on attention and experts, checkpointed as LLaMA-Factory does, bf16."""
    config = transformers.Qwen3MoeConfig(
        **SHAPES[shape], num_hidden_layers=layers, intermediate_size=64, tie_word_embeddings=True
    )
    with tempfile.TemporaryDirectory() as path:
        torch.manual_seed(0)
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
        model.save_pretrained(path)
        del model
        model = session.load_for_training(path, KTConfig(format=format), dtype=torch.bfloat16)
    lora = LoraConfig(r=8, lora_alpha=16, target_modules="all-linear", task_type="CAUSAL_LM")
    model = get_peft_model(model, lora)
    model.enable_input_require_grads()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    return model.train()


def step(model, optimizer, batches: list[torch.Tensor]) -> float:
    """One optimizer step over micro-batches [rows, length]; returns its seconds."""
    tokens = sum(ids[:, 1:].numel() for ids in batches)
    start = time.perf_counter()
    for ids in batches:
        model(input_ids=ids, labels=ids, num_items_in_batch=tokens).loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return time.perf_counter() - start


def main() -> None:
    """Alternates the two ways and prints the best of each."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=1)
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--micro-batches", type=int, default=8)
    parser.add_argument("--shape", choices=SHAPES, default="demo")
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--format", default="int8")
    parser.add_argument("--repeats", type=int, default=4)
    args = parser.parse_args()
    model = build(args.shape, args.layers, args.format)
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-4, fused=True)
    shape = (args.micro_batches * args.rows, args.length)
    ids = torch.randint(0, SHAPES[args.shape]["vocab_size"], shape)
    base = model.get_base_model()
    loss.in_blocks(base)
    ways = {"loop": list(ids.split(args.rows)), "layer_major": [ids]}
    found: dict[str, dict[str, float]] = {}
    for repeat in range(1 + args.repeats):  # the first warms up
        for way, batches in ways.items():
            before = runtime.seconds()
            seconds = step(model, optimizer, batches)
            inside = sum(runtime.seconds().values()) - sum(before.values())
            if repeat and seconds < found.get(way, {"step": float("inf")})["step"]:
                found[way] = {"step": seconds, "experts": inside}
    gain = {k: found["loop"][k] / found["layer_major"][k] for k in ("step", "experts")}
    print(json.dumps({"arguments": vars(args), "seconds": found, "gain": gain}, indent=1))


if __name__ == "__main__":
    main()
