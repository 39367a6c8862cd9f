"""Loading a model whose experts stay in CPU memory, ready for peft and training."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from kt_core import hf
from kt_core.module import KTExpertsLinear
from kt_sft import hooks
from kt_sft.config import KTConfig, settings_of
from kt_sft.cpu import malloc
from kt_sft.lora import model_parts
from kt_sft.op import autograd
from kt_sft.op.checkpointing import retain_experts
from kt_sft.ranks import cpu_fsdp
from kt_sft.ranks.host import host_of_run


@contextmanager
def loading(config: KTConfig, *, router: bool = True, again: bool = False) -> Iterator[None]:
    """Inside it, `from_pretrained` of a causal language model puts the experts into CPU memory,
    ready for training, one copy per host, and new adapters get the ranks of `config`; for `router`
    see NewAdapters. `again`: a second model of the run, which shares the experts of the first if it
    is from the same checkpoint. Collective: every rank of a run loads the model.
    """
    hooks.install()
    cpu_fsdp.want(True)
    runner = autograd.runner(config.activation)
    new = model_parts.NewAdapters(config.lora_rank or {}, router)
    with (
        host_of_run() as host,
        hf.experts_on_cpu(config, runner=runner, host=host, reuse=again),
        model_parts.rules(new),
    ):
        yield


def load_for_training(path: str, config: KTConfig | None = None, **kw: Any) -> nn.Module:
    """The model at `path` with the experts in CPU memory, ready for peft and training; `kw` go to
    `from_pretrained`. The class is that of `kt_core.hf.load_model`.
    """
    config = config or KTConfig()
    hf.refuse_quantized(path, kw)
    auto = hf.auto_class(hf.config_of(path, kw))
    with loading(config):
        model: nn.Module = auto.from_pretrained(path, **kw)
    prepare(model)
    return model


def prepare(model: nn.Module) -> None:
    """What a model that was loaded inside `loading` needs beside its experts: checkpointing that
    keeps their outputs (activation: retain), their checks, and, without an accelerator, a heap that
    suits training.
    """
    modules = [m for m in model.modules() if isinstance(m, KTExpertsLinear)]
    if not modules:
        raise ValueError(
            f"{type(model).__name__} has no experts in CPU memory; use_kt is for "
            "mixture-of-experts models, remove it"
        )
    config = settings_of(model)
    for module in modules:
        module.experts.check_finite = config.check_finite
    if not torch.accelerator.is_available():
        malloc.tend(model)
    if config.activation == "retain":
        retain_experts(model)


# Python looks up PeftModel.from_pretrained before it calls load_for_training for its argument, so
# the hooks are there from the moment this module is imported.
hooks.install()
