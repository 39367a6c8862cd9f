"""The training settings: one frozen dataclass, filled from `kt_config` of the training YAML.

    use_kt: true
    kt_config: {format: int8, threads: 8, activation: retain}

Unknown keys, wrong values and settings that contradict each other raise ValueError with the key,
the value and the fix.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from kt_core import formats
from kt_core.module import KTExpertsLinear
from kt_core.settings import ExpertSettings

ACTIVATIONS = ("retain", "recompute")
DENSE_DTYPES = ("auto", "bf16", "fp32")
EXPORT_LAYOUTS = ("auto", "per_expert", "fused")
LORA_GROUPS = ("attention", "shared_experts", "experts", "router")


@dataclass(frozen=True)
class KTConfig(ExpertSettings):
    """Settings of a training run: how experts are kept (ExpertSettings), and

    activation     retain: gate and up pre-activations are kept for backward; recompute: nothing is
                   kept
    lora_rank      rank by group (attention, shared_experts, experts, router) where it differs from
                   LLaMA-Factory's lora_rank; alpha changes with it, so that alpha / rank stays
    export_layout  expert tensors of a saved adapter: per_expert, fused (peft's target_parameters),
                   or auto, the first of them that stock peft reads in full
    merged_eval    evaluation batches on which the end of a run measures the held-out loss twice, as
                   trained and merged into bf16; each reads the base checkpoint once; 0: none
    layer_major    the micro-batches of gradient accumulation go through each layer together
    check_finite   NaN and Inf in what experts are given end the run, with layer and tensor
    gather_rows    the ranks of a machine compute their experts' rows together where each has few
    dense_dtype    dtype of the layers beside the experts in a bf16 run on CPUs: bf16, fp32, or
                   auto, which is fp32 where the CPU multiplies that faster

    threads is None for this process's share of the CPUs.
    """

    activation: str = "retain"
    layer_major: bool = False
    check_finite: bool = False
    gather_rows: bool = True
    dense_dtype: str = "auto"
    lora_rank: Mapping[str, int] | None = None
    export_layout: str = "auto"
    merged_eval: int = 2

    def __post_init__(self) -> None:
        if self.format is not None:
            _one_of("format", self.format, formats.names())
        _one_of("export_layout", self.export_layout, EXPORT_LAYOUTS)
        _one_of("activation", self.activation, ACTIVATIONS)
        _one_of("dense_dtype", self.dense_dtype, DENSE_DTYPES)
        _switch("layer_major", self.layer_major)
        _switch("check_finite", self.check_finite)
        _switch("gather_rows", self.gather_rows)
        _whole("merged_eval", self.merged_eval, least=0)
        if self.lora_rank is not None:
            _ranks(self.lora_rank)
        if self.group is not None:
            _whole("group", self.group, least=0)
            form = formats.of(self.known_format)
            if not form.scaled:
                raise ValueError(
                    f"kt_config: group={self.group} has no meaning with format={form.name}, which "
                    "has no scales; remove group"
                )
            _one_of("group", self.group, form.groups)
        if self.threads is not None:
            _whole("threads", self.threads, least=1)
        if self.numa_nodes is not None:
            _whole("numa_nodes", self.numa_nodes, least=1)
            if self.threads is not None and self.threads < self.numa_nodes:
                raise ValueError(
                    f"kt_config: numa_nodes={self.numa_nodes} needs a thread for every node, but "
                    f"threads={self.threads}; raise threads or lower numa_nodes"
                )
        if self.packed_dir is not None and (
            not isinstance(self.packed_dir, str) or not self.packed_dir
        ):
            raise ValueError(
                f"kt_config: packed_dir={self.packed_dir!r} is not a directory name; give a path "
                "or remove it"
            )

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any] | str | None) -> KTConfig:
        """Builds the settings from the YAML's `kt_config`: a mapping, its JSON text (command line),
        or None.
        """
        values = _mapping_of(values)
        known = [field.name for field in dataclasses.fields(cls)]
        for key, value in values.items():
            if key == "experts":
                raise ValueError(
                    f"kt_config: experts={value!r} is not supported: LoRA goes on all experts of a "
                    "layer; remove it and name experts in lora_target"
                )
            if key not in known:
                near = difflib.get_close_matches(str(key), known, n=1)
                fix = f"did you mean {near[0]}?" if near else f"known keys are {', '.join(known)}"
                raise ValueError(f"kt_config: unknown key {key}={value!r}; {fix}")
        return cls(**{key: value for key, value in values.items() if value is not None})


def _mapping_of(values: Mapping[str, Any] | str | None) -> Mapping[str, Any]:
    """`kt_config` as a mapping, also where it is JSON text or None."""
    if isinstance(values, str):
        try:
            values = json.loads(values)
        except json.JSONDecodeError as error:
            raise ValueError(
                f"kt_config={values!r} is not JSON ({error}); write a mapping, e.g. "
                "{format: int8}"
            ) from error
    if values is None:
        return {}
    if not isinstance(values, Mapping):
        raise ValueError(
            f"kt_config={values!r} is not a mapping; write e.g. kt_config: {{format: int8}}"
        )
    return values


def resolve(values: Mapping[str, Any] | str | None, cpu_activation: str | None = None) -> KTConfig:
    """Settings from the YAML key `kt_config` and from `kt_cpu_activation`, LLaMA-Factory's own name
    of `activation`; two different values of it raise.
    """
    config = KTConfig.from_mapping(values)
    if cpu_activation is None:
        return config
    _one_of("kt_cpu_activation", cpu_activation, ACTIVATIONS)
    given = _mapping_of(values).get("activation")
    if given not in (None, cpu_activation):
        raise ValueError(
            f"kt_cpu_activation={cpu_activation} and kt_config.activation={given} contradict each "
            "other; keep one of them"
        )
    return dataclasses.replace(config, activation=cpu_activation)


def settings_of(model: nn.Module) -> KTConfig:
    """The settings with which `model` was loaded for training; the defaults for any other."""
    found = (m.settings for m in model.modules() if isinstance(m, KTExpertsLinear))
    return next((s for s in found if isinstance(s, KTConfig)), KTConfig())


def _one_of(key: str, value: object, allowed: tuple[Any, ...]) -> None:
    if value not in allowed or isinstance(value, bool):
        raise ValueError(
            f"kt_config: {key}={value!r} is not known; use one of {', '.join(map(str, allowed))}"
        )


def _switch(key: str, value: object) -> None:
    if not isinstance(value, bool):
        raise ValueError(
            f"kt_config: {key}={value!r} is neither true nor false; correct or remove it"
        )


def _ranks(value: object) -> None:
    if not isinstance(value, Mapping) or not value:
        raise ValueError(
            f"kt_config: lora_rank={value!r} is not a mapping of groups to ranks; write e.g. "
            "lora_rank: {experts: 4, attention: 8}, or set LLaMA-Factory's lora_rank for all"
        )
    for group, rank in value.items():
        if group not in LORA_GROUPS:
            raise ValueError(
                f"kt_config: lora_rank.{group}={rank!r} names no group; the groups are "
                f"{', '.join(LORA_GROUPS)}"
            )
        _whole(f"lora_rank.{group}", rank, least=1)


def _whole(key: str, value: object, *, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ValueError(
            f"kt_config: {key}={value!r} is not a whole number of at least {least}; correct or "
            "remove it"
        )
