"""Predicts the memory that training takes beside the model, before the first step, and prints it.

Counted is what grows with the model's experts and with the batch: packed experts, what LoRA trains
(with gradients and the optimizer's state), what `activation: retain` keeps for backward, and the
logits. Attention's own activations are not.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any

import torch
from datasets import Dataset
from pyarrow import compute  # type: ignore[import-untyped]
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.training_args import OptimizerNames

from kt_core.loading import memory
from kt_core.module import KTExpertsLinear
from kt_sft.config import KTConfig
from kt_sft.ranks import host
from kt_sft.ranks.collective import gather

log = logging.getLogger("kt")

# At its peak, in backward, a loss over log-softmax holds three fp32 tensors of the logits' size:
# log-softmax, the gradient of the negative log-likelihood, the gradient of the logits.
_LOGITS_BYTES = 12
# Where the loss goes by blocks of tokens (loss.py): the logits and their gradient.
_LOGITS_COPIES = 2

_SEQUENCES = {"dpo": 2, "rm": 2}  # that a sample of a batch is made of; 1 elsewhere


@dataclass(frozen=True)
class Prediction:
    """Bytes. packed: experts; trained: parameters that train; gradients and optimizer: theirs;
    saved: gate and up pre-activations of `tokens` tokens in all layers; logits: of as many, if they
    are on the CPU.
    """

    packed: int
    trained: int
    gradients: int
    optimizer: int
    saved_per_token: int
    tokens: int
    logits: int

    @property
    def saved(self) -> int:
        """What the experts keep for backward, in all layers."""
        return self.tokens * self.saved_per_token

    @property
    def to_come(self) -> int:
        """What is still to be allocated when training starts."""
        return self.gradients + self.optimizer + self.saved + self.logits

    def __str__(self) -> str:
        kept = (
            f"{_size(self.saved)} kept for backward ({self.saved_per_token:,} bytes per token)"
            if self.saved_per_token
            else "nothing kept for backward"
        )
        return (
            f"experts {_size(self.packed)}, LoRA {_size(self.trained)} + gradients "
            f"{_size(self.gradients)} + optimizer {_size(self.optimizer)}, {kept} and logits "
            f"{_size(self.logits)} for at most {self.tokens:,} tokens at once"
        )


def predict(
    model: Any, tokens: int, *, activation: str, optimizer: str, loss_in_blocks: bool = False
) -> Prediction:
    """The prediction for a PreTrainedModel (or a PeftModel) and micro-batches of at most `tokens`
    tokens, padding counted.

    loss_in_blocks: it is loss.py's. optimizer: transformers' name; Adam's state is two tensors per
    parameter, that of others is not known here and counted as none.
    """
    experts = {m.experts: None for m in model.modules() if isinstance(m, KTExpertsLinear)}
    trained = sum(_local_bytes(p) for p in model.parameters() if p.requires_grad)
    config = model.config.get_text_config()
    kept = sum(4 * top_k(config) * e.intermediate for e in experts)
    first = next(model.parameters())
    on_cpu = first.device.type == "cpu"
    each = _LOGITS_COPIES * first.element_size() if loss_in_blocks else _LOGITS_BYTES
    return Prediction(
        packed=sum(e.nbytes for e in experts),
        trained=trained,
        gradients=trained,
        optimizer=2 * trained if "adam" in optimizer else 0,
        saved_per_token=kept if activation == "retain" else 0,
        tokens=tokens,
        logits=each * tokens * config.vocab_size if on_cpu else 0,
    )


def top_k(config: Any) -> int:
    """Experts per token of a transformers text config; the largest where layers differ."""
    try:
        k = config.num_experts_per_tok
    except AttributeError:
        k = config.top_k_experts  # Gemma 4
    return max(k) if isinstance(k, list) else int(k)


class Budget(TrainerCallback):
    """Added by the LLaMA-Factory seam: predicts the memory and prints it before the first step.

    cutoff_len: tokens of a row at most, for data whose rows cannot be looked at. Raises MemoryError
    if a layer_major batch does not fit.
    """

    def __init__(self, config: KTConfig, cutoff_len: int, finetuning_args: Any) -> None:
        self._config, self._cutoff_len, self._args = config, cutoff_len, finetuning_args

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kw: Any
    ) -> None:
        """Predicts, prints, compares with what the machine has left."""
        rows = args.per_device_train_batch_size * _SEQUENCES.get(self._args.stage, 1)
        prediction = predict(
            kw["model"],
            rows * (longest_row(kw["train_dataloader"].dataset) or self._cutoff_len),
            loss_in_blocks=self._args.stage in ("pt", "sft") and not _other_loss(self._args),
            activation=self._config.activation,
            optimizer=OptimizerNames(args.optim).value,
        )
        if state.is_world_process_zero:
            print(f"kt: memory: {prediction}", flush=True)
        ranks = ranks_of_this_host()
        to_come = ranks * prediction.to_come
        tightest = min(memory.limits(), key=lambda limit: limit.available, default=None)
        if tightest is None or to_come <= tightest.available:
            return
        each = f"{ranks} processes with " if ranks > 1 else ""
        needed = f"training needs {to_come:,} bytes beside the model ({each}{prediction})"
        if self._config.layer_major:
            raise MemoryError(
                f"{needed} but {tightest.name} leaves {tightest.available:,}; remove "
                "kt_config.layer_major, or lower gradient_accumulation_steps or cutoff_len"
            )
        log.warning(
            "kt: %s if a batch is all rows of the longest kind, but %s leaves %s",
            needed,
            tightest.name,
            f"{tightest.available:,}",
        )


def _other_loss(finetuning_args: Any) -> bool:
    """Whether the run replaces the model's own loss by one of LLaMA-Factory's."""
    names = ("use_dft_loss", "use_asft_loss", "use_eaft_loss")
    return any(getattr(finetuning_args, name, False) for name in names)


def longest_row(dataset: Any) -> int | None:
    """Tokens of the longest row, rounded up to 8 as LLaMA-Factory pads; None where the rows are not
    at hand (streaming).
    """
    if not isinstance(dataset, Dataset):
        return None
    names = [name for name in dataset.column_names if name.endswith("input_ids")]
    lengths = [compute.max(compute.list_value_length(dataset.data.column(n))) for n in names]
    longest = max((length.as_py() for length in lengths), default=None)
    return None if longest is None else -(-longest // 8) * 8


def ranks_of_this_host() -> int:
    """Ranks of the run that share this machine's memory; a collective."""
    here = host.host_identity()
    return gather(here).count(here)


def _local_bytes(parameter: torch.Tensor) -> int:
    """Bytes of this rank's part."""
    if isinstance(parameter, torch.distributed.tensor.DTensor):
        parameter = parameter.to_local()
    return parameter.numel() * parameter.element_size()


def _size(bytes_: int) -> str:
    return f"{bytes_ / 2**30:,.2f} GiB" if bytes_ >= 2**30 else f"{bytes_ / 2**20:,.1f} MiB"
