"""Layer-major accumulation: the micro-batches of an optimizer step go through each layer together.

An accumulation loop reads every expert's weights once per micro-batch, forward and backward. With
`kt_config.layer_major` the Trainer gets the n micro-batches of a step as one batch instead: the
weights are read once per step, and each expert sees n times the rows. The samples of a step are
those of the loop, on every rank and at the end of an epoch too, because its batches are joined n
by n (`_Joined`). So is the loss: SFT and pre-training divide by the tokens of the whole step either
way, preference losses are means over pairs; a loss that depends on the micro-batch is refused. What
it costs is memory for n micro-batches at once (budget.py refuses what does not fit) and padding to
the longest of them.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from torch.utils.data import BatchSampler, DataLoader, IterableDataset

from kt_sft.lora import model_parts

log = logging.getLogger("kt")

_STAGES = ("pt", "sft", "dpo", "rm")
# Stages whose loss is the model's own, from labels that it is given.
_OF_TOKENS = ("pt", "sft")


@dataclass(frozen=True)
class Together:
    """What a run's training arguments carry, as `kt_together`, once apply() has changed them: how
    many micro-batches are one, and the stage."""

    micro_batches: int
    stage: str


def check(training_args: Any, finetuning_args: Any) -> None:
    """Raises ValueError, in one sentence, where layer_major would do nothing or change the loss."""
    if training_args.gradient_accumulation_steps == 1:
        raise ValueError(
            "kt_config.layer_major=true has no effect with gradient_accumulation_steps=1; raise "
            "gradient_accumulation_steps or remove layer_major"
        )
    if finetuning_args.stage not in _STAGES:
        raise ValueError(
            f"kt_config.layer_major=true would change the loss of stage={finetuning_args.stage}, "
            "which is not a mean over a step's samples; remove layer_major"
        )
    if training_args.deepspeed is not None:
        raise ValueError(
            "kt_config.layer_major=true changes the batch size after DeepSpeed has read it; remove "
            "layer_major, or run with FSDP2 or DDP instead of deepspeed"
        )
    for option, value, reason in _of_micro_batches(training_args, finetuning_args):
        raise ValueError(
            f"kt_config.layer_major=true would change the loss of {option}={value}, which is "
            f"{reason}; remove one of them"
        )


def _of_micro_batches(training_args: Any, finetuning_args: Any) -> Iterator[tuple[str, Any, str]]:
    """(option, value, what its loss is) of the options in use that depend on the micro-batch."""
    mean = "a mean per micro-batch"
    if finetuning_args.stage == "sft" and finetuning_args.use_asft_loss:
        yield "use_asft_loss", True, mean
    if finetuning_args.stage in _OF_TOKENS and training_args.label_smoothing_factor:
        yield "label_smoothing_factor", training_args.label_smoothing_factor, mean
    if finetuning_args.stage == "dpo":
        if finetuning_args.pref_loss == "kto_pair":
            yield "pref_loss", "kto_pair", "measured against the mean of a micro-batch"
        if finetuning_args.pref_bco_weight:
            weight = finetuning_args.pref_bco_weight
            yield "pref_bco_weight", weight, "measured against a running mean of micro-batches"


def apply(training_args: Any, stage: str) -> None:
    """Makes one batch of the micro-batches of a step; call it once per parsed arguments."""
    n, rows = training_args.gradient_accumulation_steps, training_args.per_device_train_batch_size
    training_args.per_device_train_batch_size = n * rows
    training_args.gradient_accumulation_steps = 1
    training_args.kt_together = Together(n, stage)
    log.info(
        "kt: layer_major: %d micro-batches of %d go through each layer together, as one batch of "
        "%d (dropout and noise draw other numbers than the loop would)",
        n,
        rows,
        n * rows,
    )


def get_train_dataloader(
    original: Callable[..., DataLoader[Any]], trainer: Any, *args: Any, **kw: Any
) -> DataLoader[Any]:
    """Trainer.get_train_dataloader. Raises ValueError where the trainer's loss, now that its model
    is known, depends on the micro-batch.
    """
    together: Together | None = vars(trainer.args).get("kt_together")
    if together is None:
        return original(trainer, *args, **kw)
    _check_loss(trainer, together.stage)
    if isinstance(trainer.train_dataset, IterableDataset):  # its samples come as they come
        return original(trainer, *args, **kw)
    rows = trainer._train_batch_size
    trainer._train_batch_size = rows // together.micro_batches
    try:
        loader = original(trainer, *args, **kw)
    finally:
        trainer._train_batch_size = rows
    pairs, each = len(trainer.train_dataset), rows // together.micro_batches
    uneven = pairs % each and trainer.args.world_size == 1 and not trainer.args.dataloader_drop_last
    if uneven and together.stage not in _OF_TOKENS:
        log.warning(
            "kt: layer_major: the last step of an epoch has a micro-batch of %d pairs beside those "
            "of %d; its loss is the mean over pairs here, over micro-batches in the loop",
            pairs % each,
            each,
        )
    return _joined(loader, together.micro_batches)


def _check_loss(trainer: Any, stage: str) -> None:
    if stage not in _OF_TOKENS or trainer.compute_loss_func is not None:
        return
    if not trainer.model_accepts_loss_kwargs:
        raise ValueError(
            f"kt_config.layer_major=true would change the loss of stage={stage} with a "
            f"{type(_inner(trainer)).__name__}, which LLaMA-Factory trains by the mean of every "
            "micro-batch (it has a processor, or takes no number of tokens); remove layer_major"
        )
    if model_parts.has_router_loss(_inner(trainer).config):
        raise ValueError(
            "kt_config.layer_major=true would change the loss of a model with a router loss "
            "(output_router_logits=true in its config, by moe_aux_loss_coef or its config.json), "
            "which is added once per micro-batch; remove one of them"
        )


def _inner(trainer: Any) -> Any:
    from transformers import PreTrainedModel

    model = trainer.accelerator.unwrap_model(trainer.model)
    return next(m for m in model.modules() if isinstance(m, PreTrainedModel))


def _joined(loader: DataLoader[Any], n: int) -> DataLoader[Any]:
    """`loader`, as accelerate has prepared it for a rank, with n of its batches as one."""
    from accelerate import skip_first_batches

    # accelerate's own way to the same loader with other batches, of which none is skipped
    copy = skip_first_batches(loader, 0)
    batches: Any = copy.batch_sampler
    batches.batch_sampler = _Joined(batches.batch_sampler, n)
    return copy


class _Joined(BatchSampler):
    """n batches of another sampler at a time; the last one has what is left."""

    def __init__(self, batches: Any, n: int) -> None:
        from accelerate.data_loader import BatchSamplerShard

        self._batches, self._n = batches, n
        whole = batches.batch_sampler if isinstance(batches, BatchSamplerShard) else batches
        self.sampler = whole.sampler  # accelerate tells it the epoch
        self.drop_last = False

    def __iter__(self) -> Iterator[list[int]]:
        joined: list[int] = []
        number = 0
        for number, batch in enumerate(self._batches, start=1):
            joined += batch
            if number % self._n == 0:
                yield joined
                joined = []
        if number % self._n:
            yield joined

    def __len__(self) -> int:
        return -(-len(self._batches) // self._n)
