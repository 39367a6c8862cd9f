"""When the ranks of a host compute their experts' rows together (exchange.py).

A pass of few rows is mostly reading weights, and ranks that each compute their own tokens read them
all, each for itself. So, while a Trainer trains a model, a host's ranks compute together every
forward, and its backward, that brings an expert fewer than FEW_ROWS rows per rank. The first
layer decides for the whole forward, from the tokens of all ranks; what checkpointing computes again
goes the way of its forward. Evaluation and generation are never gathered, ranks are not in step
there.
"""

from __future__ import annotations

import logging
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor, distributed, nn
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from kt_core.experts import Experts, Lora
from kt_core.module import KTExpertsLinear
from kt_sft.config import KTConfig
from kt_sft.op import exchange, position
from kt_sft.op.row_counts import FEW_ROWS
from kt_sft.ranks import host
from kt_sft.ranks.collective import gather, joined

log = logging.getLogger("kt")


class RowGather(TrainerCallback):
    """Added by the LLaMA-Factory seam; may be given to any transformers Trainer of a model with CPU
    experts. Acts while training runs, where `config.gather_rows` is true and a host has several
    ranks.
    """

    def __init__(self, config: KTConfig) -> None:
        self._config = config
        self._group: Any = None
        self._together: bool | None = None  # the present forward, once its first layer is reached
        self._before: bool | None = None
        self._hooks: list[Any] = []
        self._gatherings: list[_Gathering] = []

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kw: Any
    ) -> None:
        """Sets the model's experts to it. A collective."""
        if not self._config.gather_rows or not joined() or distributed.get_world_size() == 1:
            return
        me = host.this_rank()
        ranks = gather(me)
        if len({rank.host for rank in ranks}) == len(ranks):
            return
        self._group = host.group_of_host(me, ranks, timedelta(seconds=args.ddp_timeout))
        if distributed.get_world_size(self._group) == 1:
            return
        exchange.use(exchange.HostRanks(self._group))
        model: nn.Module = kw["model"]
        modules = [m for m in model.modules() if isinstance(m, KTExpertsLinear)]
        self._gatherings = [_Gathering(self, module) for module in modules]
        self._hooks = [
            model.register_forward_pre_hook(self._enter),
            model.register_forward_hook(self._leave),
        ]

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kw: Any
    ) -> None:
        """Every rank computes its own rows again."""
        for hook in self._hooks:
            hook.remove()
        for gathering in self._gatherings:
            gathering.remove()
        self._hooks, self._gatherings = [], []
        exchange.use(None)
        if self._group is not None:
            distributed.destroy_process_group(self._group)
            self._group = None

    def _enter(self, model: nn.Module, inputs: Any) -> None:
        self._before, self._together = self._together, None

    def _leave(self, model: nn.Module, inputs: Any, output: Any) -> None:
        # A forward without gradients, say of DPO's reference, may lie between one with gradients
        # and its backward, which computes again what checkpointing dropped.
        if not torch.is_grad_enabled():
            self._together = self._before

    def together(self, module: KTExpertsLinear, experts: Experts, rows: int) -> bool:
        """Whether this call of `module`, with so many rows, is computed by all ranks."""
        if not module.training:
            return False
        if self._together is None:
            position.enter(experts.name, "forward")  # where this rank is if another is lost
            told = exchange.ranks().tell(rows)
            mean = sum(n for (n,) in told) / len(told) / experts.num_experts
            self._together = mean < FEW_ROWS
        return self._together


class _Gathering:
    """Stands before the runner of `module`, until remove(), and tells it whether to compute with
    the other ranks.
    """

    def __init__(self, callback: RowGather, module: KTExpertsLinear) -> None:
        self._callback: RowGather | None = callback
        self._module, self._runner = module, module.runner
        module.runner = self

    def __call__(
        self,
        experts: Experts,
        x: Tensor,
        top_k_index: Tensor,
        top_k_weights: Tensor,
        lora: Lora | None,
    ) -> Tensor:
        """A Runner."""
        if self._callback is None:
            return self._runner(experts, x, top_k_index, top_k_weights, lora)
        together = self._callback.together(self._module, experts, top_k_index.numel())
        with exchange.in_one_pass(together):
            return self._runner(experts, x, top_k_index, top_k_weights, lora)

    def remove(self) -> None:
        """Puts the runner back. Who has wrapped this one meanwhile keeps what it wrapped, which is
        the runner from now on.
        """
        self._callback = None
        if self._module.runner is self:
            self._module.runner = self._runner
