"""What the training tests share: tiny models in both engines, adapters with B != 0, and a stock run
in a subprocess.

Engine "reference" puts SlowExperts (fp32) in the place of the kernels, so that differences of 1e-6
show; "kernels" runs the native core on bf16 weights.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import models
import peft
import pytest
import slow_experts
import torch
from packaging.version import Version
from peft import LoraConfig, get_peft_model

from kt_sft import session
from kt_sft.config import KTConfig

STOCK_HAS_EXPERTS = pytest.mark.skipif(
    Version(peft.__version__) < Version("0.20"),
    reason="stock peft reads and writes adapters of experts from 0.20 on",
)
ENGINES = ("reference", "kernels")
TESTS = Path(__file__).parent


def token_ids(rows: int = 2, length: int = 24) -> torch.Tensor:
    """Fixed random token ids [rows, length] below every tiny model's vocabulary size."""
    generator = torch.Generator().manual_seed(7)
    return torch.randint(3, 120, (rows, length), generator=generator)


def checkpoint(tmp_path: Path, family: str = "qwen3_moe", **overrides: object) -> Path:
    """A tiny fp32 checkpoint of a family."""
    return models.build(family, tmp_path / family, dtype=torch.float32, **overrides)


def use(engine: str, monkeypatch) -> None:
    """Chooses the engine for the models that are loaded from here on."""
    if engine == "reference":
        slow_experts.patch(monkeypatch)


def load(path: Path, **config: object):
    """The checkpoint with its experts on the CPU, ready for training, everything else in fp32."""
    return session.load_for_training(
        str(path), KTConfig(**({"format": "bf16"} | config)), dtype=torch.float32
    )


def adapted(model, targets="all-linear", *, b=0.05, seed=3, **lora: object):
    """`model` with an adapter whose B factors are N(0, b), so that every factor matters."""
    kw = {"r": 4, "lora_alpha": 8, "task_type": "CAUSAL_LM"} | lora
    torch.manual_seed(seed)
    peft_model = get_peft_model(model, LoraConfig(target_modules=targets, **kw))
    randomise(peft_model, b)
    return peft_model


def randomise(model, deviation: float = 0.05) -> None:
    """Fills every lora_B of a PEFT model with N(0, deviation)."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(0, deviation)


def trained(model) -> dict[str, torch.nn.Parameter]:
    """The trainable parameters by name."""
    return {n: p for n, p in model.named_parameters() if p.requires_grad}


def gradients(model, ids: torch.Tensor) -> dict[str, torch.Tensor]:
    """Gradients of the language modelling loss, by name."""
    model.zero_grad()
    model(input_ids=ids, labels=ids).loss.backward()
    return {n: p.grad.clone() for n, p in trained(model).items()}


def logits(model, ids: torch.Tensor) -> torch.Tensor:
    """Logits without gradients."""
    with torch.no_grad():
        return model(input_ids=ids).logits


def stock(script: str, *args: object) -> str:
    """Runs Python code in a process without our hooks; returns its standard output."""
    env = os.environ | {
        "TORCH_DEVICE_BACKEND_AUTOLOAD": "0",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(TESTS),
    }
    # this module imports the session, which installs them
    script = f"from kt_sft import hooks, session; hooks.uninstall()\n{script}"
    done = subprocess.run(
        [sys.executable, "-c", script, *map(str, args)], env=env, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout
