"""Two proofs on the demo model itself (the tests give them on tiny ones).

    python bench/demo_proofs.py interop ADAPTER   # trained with bf16 experts: see demo_bars.py
    python bench/demo_proofs.py steps             # 20 steps against one nn.Linear per expert

interop: stock PEFT on the stock model, in a process without our hooks, applied and merged, gives
our logits to bf16 rounding. steps: losses of bf16 experts follow stock PEFT LoRA on per-expert
Linears, A and B copied, within 0.5 %.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parent.parent
MODEL = ROOT / "demo" / "model"
STEPS, BATCH = 20, 8

STOCK = """
import sys, torch
from peft import PeftModel
from transformers import AutoModelForCausalLM
model_dir, adapter, prompts, out = sys.argv[1:]
ids = torch.load(prompts)
model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
model = PeftModel.from_pretrained(model, adapter).eval()
found = {}
with torch.no_grad():
    found["applied"] = [model(input_ids=i).logits for i in ids]
    with model.disable_adapter():
        found["base"] = [model(input_ids=i).logits for i in ids]
    merged = model.merge_and_unload()
    found["merged"] = [merged(input_ids=i).logits for i in ids]
torch.save(found, out)
"""


def chats(count: int) -> list[torch.Tensor]:
    """The first training records as token ids [1, n], answer included."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    records = json.loads((ROOT / "examples" / "data" / "identity.json").read_text())
    ids = []
    for record in records[:count]:
        chat = [
            {"role": "user", "content": record["instruction"]},
            {"role": "assistant", "content": record["output"]},
        ]
        text = tokenizer.apply_chat_template(chat, tokenize=False)
        ids.append(tokenizer(text, return_tensors="pt").input_ids)
    return ids


def relative(a: list[torch.Tensor], b: list[torch.Tensor]) -> float:
    top = sum(float((x.float() - y.float()).pow(2).sum()) for x, y in zip(a, b, strict=True))
    return (top / sum(float(y.float().pow(2).sum()) for y in b)) ** 0.5


def interop(adapter: str) -> dict[str, float]:
    """Relative logit differences; `effect` is how far the adapter moves the logits at all."""
    from kt_core.adapters import adapter as switched
    from kt_core.adapters import load_adapter
    from kt_core.hf import load_model

    ids = chats(12)
    with tempfile.TemporaryDirectory() as folder:
        prompts, out = Path(folder) / "ids.pt", Path(folder) / "out.pt"
        torch.save(ids, prompts)
        env = os.environ | {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
        command = [sys.executable, "-c", STOCK, str(MODEL), adapter, str(prompts), str(out)]
        subprocess.run(command, env=env, check=True)
        stock = torch.load(out)
    model = load_model(MODEL, format="bf16", dtype=torch.float32)
    load_adapter(model, adapter, "tuned")
    with torch.no_grad():
        with switched(model, "tuned"):
            ours = [model(input_ids=i).logits for i in ids]
        with switched(model, None):
            base = [model(input_ids=i).logits for i in ids]
    return {
        "applied": relative(ours, stock["applied"]),
        "merged": relative(ours, stock["merged"]),
        "base": relative(base, stock["base"]),
        "effect": relative(stock["applied"], stock["base"]),
    }


def steps() -> dict[str, Any]:
    """Losses of 20 optimizer steps on the demo's records, ours and the reference."""
    sys.path.insert(0, str(ROOT / "tests"))
    import sft_cases as cases
    import test_sft_steps as twin

    ours = cases.adapted(
        cases.load(MODEL), ["q_proj", "v_proj", "experts"], b=0.0, r=4, lora_alpha=8
    )
    reference = twin._per_expert(MODEL)
    twin._copy_factors(ours, reference)
    ids = [i[0] for i in chats(STEPS * BATCH)]
    losses = {}
    for name, model in (("ours", ours), ("reference", reference)):
        model.train()
        # the demo's rate and warm-up
        optimizer = torch.optim.AdamW(list(cases.trained(model).values()), lr=6e-4)
        warmup = torch.optim.lr_scheduler.LinearLR(optimizer, 1 / 15, total_iters=14)
        mine = losses[name] = []
        for step in range(STEPS):
            rows = ids[step * BATCH : (step + 1) * BATCH]
            batch = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
            mask = torch.nn.utils.rnn.pad_sequence(
                [torch.ones_like(r) for r in rows], batch_first=True
            )
            labels = batch.masked_fill(mask == 0, -100)
            loss = model(input_ids=batch, attention_mask=mask, labels=labels).loss
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            warmup.step()
            mine.append(float(loss.detach()))
            print(name, step, f"{mine[-1]:.4f}", flush=True)
    pairs = list(zip(losses["ours"], losses["reference"], strict=True))
    return {"largest_relative": max(abs(a - b) / b for a, b in pairs), **losses}


def main() -> None:
    what, *rest = sys.argv[1:]
    print(json.dumps({"interop": interop, "steps": steps}[what](*rest), indent=1))


if __name__ == "__main__":
    main()
