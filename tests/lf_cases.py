"""LLaMA-Factory runs on a tiny model: data, arguments, and running them in this process or as a
user would.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import models

from kt_sft import bootstrap

bootstrap.autoload()  # torch's autoload has done so already where the package is installed


def workspace(root: Path, family: str = "qwen3_moe", **overrides: object) -> Path:
    """A directory with a tiny model and tokenizer, an instruction set and a preference set;
    `overrides` go to models.build (dtype=torch.float32: LLaMA-Factory trains in the dtype of the
    checkpoint, bf16 here).
    """
    models.build(family, root / "model", tokenizer=True, **({"vocab_size": 300} | overrides))
    asks = [f"Say number {i}." for i in range(32)]
    sft = [
        {"instruction": ask, "input": "", "output": f"It is {i}, of course."}
        for i, ask in enumerate(asks)
    ]
    dpo = [
        {"instruction": ask, "input": "", "chosen": f"It is {i}.", "rejected": f"Not {i} today."}
        for i, ask in enumerate(asks)
    ]
    columns = {"prompt": "instruction", "query": "input"}
    pairs = {"chosen": "chosen", "rejected": "rejected"}
    info = {
        "sft": {"file_name": "sft.json"},
        "dpo": {"file_name": "dpo.json", "ranking": True, "columns": columns | pairs},
    }
    for name, content in (("sft.json", sft), ("dpo.json", dpo), ("dataset_info.json", info)):
        (root / name).write_text(json.dumps(content))
    return root


def arguments(root: Path, output: str = "out", **changes: Any) -> dict[str, Any]:
    """Arguments of a small SFT run with use_kt; a change to None removes a key."""
    args: dict[str, Any] = {
        "model_name_or_path": str(root / "model"),
        "use_kt": True,
        "kt_config": {"format": "bf16"},
        "stage": "sft",
        "do_train": True,
        "finetuning_type": "lora",
        "lora_target": "all",
        "lora_rank": 4,
        "dataset_dir": str(root),
        "dataset": "sft",
        "template": "chatml",
        "cutoff_len": 64,
        "use_cpu": True,
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 2,
        "max_steps": 4,
        "learning_rate": 5.0e-3,
        "logging_steps": 1,
        "save_strategy": "no",
        "output_dir": str(root / output),
        "overwrite_output_dir": True,
        "report_to": "none",
        "disable_tqdm": True,
        "seed": 5,
    }
    args.update(changes)
    return {k: v for k, v in args.items() if v is not None}


def run(args: dict[str, Any], *callbacks: Any) -> None:
    """What `llamafactory-cli train` does in one process, without the start-up time."""
    from accelerate.state import AcceleratorState
    from llamafactory.train.tuner import run_exp

    AcceleratorState._reset_state(reset_partial_state=True)
    run_exp(dict(args), list(callbacks))


def command(
    args: dict[str, Any], *launcher: str, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Runs a launcher (default: llamafactory-cli train) with the arguments as a YAML file."""
    import yaml

    path = Path(args["output_dir"]).with_suffix(".yaml")
    path.write_text(yaml.safe_dump(args))
    program = launcher or (str(Path(sys.executable).with_name("llamafactory-cli")), "train")
    env = os.environ | {"OMP_NUM_THREADS": "1"} | environment
    return subprocess.run([*program, str(path)], env=env, capture_output=True, text=True)


def losses(output: str | Path) -> list[float]:
    """The losses of a finished run, from its trainer_state.json."""
    state = json.loads((Path(output) / "trainer_state.json").read_text())
    return [entry["loss"] for entry in state["log_history"] if "loss" in entry]
