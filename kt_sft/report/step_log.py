"""Measures every logging interval of a run (see trainer_log.KEYS) and draws the experts' load.

`log` stands in the place of transformers' Trainer.log (hooks.py): it puts the numbers into the
Trainer's own entry before any reporter sees it. All ranks log at the same steps and run the same
two collectives there.
"""

from __future__ import annotations

import dataclasses
import logging
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from kt_core import runtime
from kt_core.loading import memory
from kt_core.module import KTExpertsLinear
from kt_sft.op import row_counts
from kt_sft.ranks.collective import joined, over_ranks

logger = logging.getLogger("kt")
HEAT_MAP = "expert_load.png"


def log(
    original: Callable[..., None], trainer: Any, logs: dict[str, float], *args: Any, **kw: Any
) -> None:
    """Trainer.log; a training entry of a run with a StepLog gets its numbers."""
    if "loss" in logs:
        for callback in trainer.callback_handler.callbacks:
            if isinstance(callback, StepLog):
                logs.update(callback.measure())
    original(trainer, logs, *args, **kw)


class StepLog(TrainerCallback):
    """Added by the LLaMA-Factory seam; may be given to any transformers Trainer of a model with CPU
    experts.

    Its numbers are in every log entry that has a loss; when training ends, it draws
    `expert_load.png` into output_dir.
    """

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kw: Any
    ) -> None:
        """Starts the clocks."""
        self._accumulation: int | None = args.gradient_accumulation_steps
        modules = [m for m in kw["model"].modules() if isinstance(m, KTExpertsLinear)]
        self._layers = {module.layer_index: module.experts for module in modules}
        self._tokens = row_counts.TokenCount(kw["model"])
        self._first_rows = self._rows()
        self._main = state.is_world_process_zero
        self._mark()

    def measure(self) -> dict[str, float]:
        """The numbers since the last call (or the start), under trainer_log.KEYS. A collective."""
        before, rows = self._numbers(), self._last_rows
        self._mark()
        after = self._numbers()
        own = [b - a for a, b in zip(before, after, strict=True)]
        ranks = torch.distributed.get_world_size() if joined() else 1
        load = self._last_rows - rows
        summed = over_ranks(torch.cat([torch.tensor(own).double(), load.double().view(-1)]), "sum")
        largest = over_ranks(torch.tensor([memory.resident_bytes()]).double(), "max")
        trained, forward, backward, wall, calls, together, reads = summed[: len(own)].tolist()
        load = summed[len(own) :].view_as(load)
        per_pass = float(load.sum()) / (reads or 1) / load.shape[1]
        self._advise(per_pass)
        return {
            "tokens_per_second": trained / (wall / ranks),
            "experts_forward_s": forward / ranks,
            "experts_backward_s": backward / ranks,
            "rest_s": (wall - forward - backward) / ranks,
            "rss_gib": float(largest) / 2**30,
            "expert_rows_per_pass": per_pass,
            "experts_gathered": together / max(calls, 1),
            **load_numbers(load),
        }

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kw: Any
    ) -> None:
        """Draws what each expert was trained on since on_train_begin. A collective."""
        self._tokens.remove()
        load = over_ranks((self._rows() - self._first_rows).double(), "sum")
        if state.is_world_process_zero and args.output_dir is not None and load.sum() > 0:
            os.makedirs(args.output_dir, exist_ok=True)
            draw_load(load, sorted(self._layers), Path(args.output_dir) / HEAT_MAP)

    def _rows(self) -> Tensor:
        """Rows so far, [layers, E] in the order of layers; models have the same E everywhere."""
        return torch.stack([row_counts.rows(self._layers[i]) for i in sorted(self._layers)])

    def _advise(self, per_pass: float) -> None:
        """Once: what would read the weights less often."""
        n, self._accumulation = self._accumulation, None
        if n is not None and n > 1 and per_pass < row_counts.FEW_ROWS and self._main:
            logger.info(
                "kt: an expert gets %.1f rows each time its weights are read; "
                "kt_config.layer_major: true would read them once per step instead of %d times",
                per_pass,
                n,
            )

    def _numbers(self) -> list[float]:
        """What counts and clocks said at the last mark."""
        return [self._seen, *self._seconds.values(), self._at, *self._passes]

    def _mark(self) -> None:
        each = [
            dataclasses.astuple(row_counts.passes(experts)) for experts in self._layers.values()
        ]
        self._passes = [sum(column) for column in zip(*each, strict=True)]
        self._seconds, self._seen = runtime.seconds(), self._tokens.tokens
        self._last_rows, self._at = self._rows(), time.perf_counter()


def load_numbers(load: Tensor) -> dict[str, float]:
    """Fewest, median and most rows over layers and experts, and the worst layer's most / mean;
    load [layers, E]. A layer without rows has imbalance 1.
    """
    load = load.double()
    mean = load.mean(1)
    worst = torch.where(mean > 0, load.max(1).values / mean, 1.0).max()
    return {
        "expert_tokens_min": float(load.min()),
        "expert_tokens_median": float(load.view(-1).quantile(0.5)),
        "expert_tokens_max": float(load.max()),
        "expert_imbalance": float(worst),
    }


def draw_load(load: Tensor, layers: list[int], path: Path) -> None:
    """A PNG: one row per layer, one column per expert, colour = rows / mean of the layer.

    load [len(layers), E]; needs matplotlib, which LLaMA-Factory brings along.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        logger.warning("kt: %s is not drawn, matplotlib is not installed", path)
        return
    relative = load.double() / load.double().mean(1, keepdim=True).clamp(min=1e-12)
    count, experts = relative.shape
    size = (min(4 + experts / 10, 20), min(2 + count / 5, 16))
    figure = Figure(figsize=size, layout="constrained")  # not pyplot: no global state
    axes = figure.subplots()
    image = axes.imshow(relative.numpy(), aspect="auto", vmin=0, cmap="viridis")
    axes.set(xlabel="expert", ylabel="layer", title="Tokens per expert / mean of its layer")
    shown = range(0, count, -(-count // 24))
    axes.set_yticks(list(shown), [str(layers[i]) for i in shown])
    figure.colorbar(image, ax=axes)
    figure.savefig(path, dpi=100)
