"""README.md of an adapter directory: what the Trainer writes, and below it what was trained, how,
and with which result. Nothing in it is guessed: what was not measured is said to be so.
"""

from __future__ import annotations

import enum
import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from huggingface_hub import ModelCard

from kt_core import formats
from kt_sft.config import KTConfig, settings_of
from kt_sft.lora.adapter_io import has_experts
from kt_sft.report import heldout
from kt_sft.report.heldout import HeldOut
from kt_sft.report.stats import STATS_FILE

_BEGIN, _END = "<!-- kt-sft:begin -->", "<!-- kt-sft:end -->"


def create_model_card(original: Callable[..., None], self: Any, *args: Any, **kw: Any) -> None:
    """Trainer.create_model_card: the Trainer's own, then our part. Collective: every rank calls
    it.
    """
    original(self, *args, **kw)
    model = self.accelerator.unwrap_model(self.model)
    if not has_experts(model):
        return
    config = settings_of(model)
    losses = heldout.measure(self, config.merged_eval)
    if not self.is_world_process_zero():
        return
    path = Path(self.args.output_dir) / "README.md"
    card = ModelCard.load(path)
    kept = re.sub(rf"\n*{_BEGIN}.*?{_END}\n*", "\n", card.text, flags=re.DOTALL)
    section = _section(self, model, config, losses, kw.get("dataset"))
    card.text = f"{kept.rstrip()}\n\n{_BEGIN}\n{section}\n{_END}\n"
    tags = [t for t in card.data.tags or [] if t != "kt-kernel"]  # of the fork that this is not
    card.data.tags = [*tags, *(["kt-sft"] if "kt-sft" not in tags else [])]
    card.save(path)


def _section(
    trainer: Any, model: Any, config: KTConfig, losses: Mapping[str, HeldOut], dataset: Any
) -> str:
    adapter = _adapter_config(model)
    args, state = trainer.args, trainer.state
    stats_file = Path(args.output_dir) / STATS_FILE
    stats = json.loads(stats_file.read_text()) if stats_file.is_file() else {}
    rows = {
        "base model": f"`{adapter.base_model_name_or_path}`",
        "data": ", ".join(f"`{d}`" for d in _listed(dataset)) or "not named",
        "expert weights in training": _format(config),
        "LoRA": f"rank {adapter.r}, alpha {adapter.lora_alpha}, dropout {adapter.lora_dropout}"
        + (", rank-stabilized" if adapter.use_rslora else "")
        + (f"; ranks by group {dict(config.lora_rank)}" if config.lora_rank else ""),
        "trained parameters": _counts(stats.get("trainable", {})),
        "optimizer": f"{_text(args.optim)}, learning rate {args.learning_rate:g} "
        f"({_text(args.lr_scheduler_type)}, {args.warmup_steps:g} warm-up steps), weight decay "
        f"{args.weight_decay:g}",
        "batch": f"{args.per_device_train_batch_size} records x "
        f"{args.gradient_accumulation_steps} accumulated x {args.world_size} processes",
        "length": f"{state.global_step} steps, {state.epoch or 0:.2f} epochs, seed {args.seed}",
        "compute": "bf16" if args.bf16 else "fp16" if args.fp16 else "fp32",
    }
    table = "\n".join(f"| {key} | {value} |" for key, value in rows.items())
    return (
        f"## How it was trained\n\n| | |\n| --- | --- |\n{table}\n\n"
        f"## Result\n\n| | |\n| --- | --- |\n{_results(stats, config, losses)}\n\n"
        "## Use\n\nStandard PEFT: `PeftModel.from_pretrained(base, directory)` with peft >= 0.20 "
        "and transformers >= 5.5.4. Merged into the base checkpoint: `llamafactory-cli export` "
        "with `use_kt: true`, or `kt_core.adapters.merge(base_dir, adapter_dir, out_dir)`."
    )


def _results(stats: Mapping[str, Any], config: KTConfig, losses: Mapping[str, HeldOut]) -> str:
    rows = {}
    if stats:
        first, last = stats["first_loss"], stats["last_loss"]
        if first is not None:
            rows["training loss"] = f"{first:.4f} at the first logged step, {last:.4f} at the last"
    for name, held in losses.items():
        of = f" of {name}" if name else ""
        records = f"{held.examples} records"
        rows[f"held-out loss{of}, as trained ({_format(config)})"] = (
            f"{held.as_trained:.4f} ({records})"
        )
        rows[f"held-out loss{of}, merged into bf16"] = f"{held.merged:.4f} ({records})"
    if not losses:
        rows["held-out loss"] = "not measured: no evaluation set, or kt_config.merged_eval: 0"
    if stats:
        rows["speed"] = f"{stats['tokens_per_s']:.1f} tokens/s over {stats['train_seconds']:.0f} s"
        rows["in the experts"] = f"{sum(stats['expert_seconds'].values()):.1f} s"
        rows["peak memory"] = f"{stats['peak_rss_bytes'] / 2**30:.2f} GiB of the first process"
    return "\n".join(f"| {key} | {value} |" for key, value in rows.items())


def _adapter_config(model: Any) -> Any:
    from peft import PeftModel

    tuned = next(m for m in model.modules() if isinstance(m, PeftModel))
    return tuned.peft_config[tuned.active_adapter]


def _format(config: KTConfig) -> str:
    format = formats.of(config.known_format)
    if not format.scaled:
        return format.name
    group = format.check_group(config.group)
    return f"{format.name}, one scale per {f'{group} weights' if group else 'output channel'}"


def _counts(trainable: Mapping[str, int]) -> str:
    parts = [f"{group} {count:,}" for group, count in trainable.items() if count]
    return f"{sum(trainable.values()):,} ({', '.join(parts)})" if parts else "not counted"


def _listed(value: Any) -> list[str]:
    return [] if value is None else [value] if isinstance(value, str) else [str(v) for v in value]


def _text(value: Any) -> str:
    return str(value.value) if isinstance(value, enum.Enum) else str(value)
