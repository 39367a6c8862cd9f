"""Layer-major accumulation: the micro-batches of an optimizer step go through each layer together.

An accumulation loop reads every expert's weights once per micro-batch, forward and backward. With
`kt_config.layer_major` the Trainer gets the n micro-batches of a step as one batch instead: the
weights are read once per step, and each expert sees n times the rows. The samples of a step and
their order are those of the loop, and so is the loss: SFT and pre-training divide by the tokens of
the whole step either way, preference losses are means over pairs. What it costs is memory for n
micro-batches at once (budget.py refuses what does not fit) and padding to the longest of them.
"""

from __future__ import annotations

import logging
from typing import Any

log = logging.getLogger("kt")

_STAGES = ("pt", "sft", "dpo", "rm")


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
    if finetuning_args.use_asft_loss:
        raise ValueError(
            "kt_config.layer_major=true would change the loss of use_asft_loss=True, which is a "
            "mean per micro-batch; remove one of them"
        )
    if training_args.deepspeed is not None:
        raise ValueError(
            "kt_config.layer_major=true changes the batch size after DeepSpeed has read it; remove "
            "layer_major, or run with FSDP2 or DDP instead of deepspeed"
        )


def apply(training_args: Any) -> None:
    """Makes one batch of the micro-batches of a step; call it once per parsed arguments."""
    n, rows = training_args.gradient_accumulation_steps, training_args.per_device_train_batch_size
    training_args.per_device_train_batch_size = n * rows
    training_args.gradient_accumulation_steps = 1
    log.info(
        "kt: layer_major: %d micro-batches of %d go through each layer together, as one batch of "
        "%d (dropout draws other elements than the loop would)",
        n,
        rows,
        n * rows,
    )
