"""From a LoraConfig's target names to the modules and expert projections they mean on a model with
CPU experts.

Groups (attention, ...) are written out first, see groups.py. Expert projections are named
gate_proj, up_proj, down_proj, or as the model's published checkpoints name them (Mixtral: w1, w3,
w2), alone or behind a path; `experts` means all three; so does `all-linear`. Stock peft cannot
match names below an experts module, so the config it sees names the experts modules, and a plan
says which projections they get.
"""

from __future__ import annotations

import contextvars
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from peft import LoraConfig
from peft.tuners.tuners_utils import _maybe_include_all_linear_layers
from torch import nn

from kt_core.adapter_format import PROJECTION_KEYS, expert_names, pattern_value
from kt_core.module import KTExpertsLinear, is_linear
from kt_sft import groups


@dataclass(frozen=True)
class ExpertPlan:
    """What one adapter puts on one experts module."""

    rank: Mapping[str, int]  # by projection: gate, up, down
    alpha: Mapping[str, float]
    config: LoraConfig


_plans: contextvars.ContextVar[Mapping[int, ExpertPlan]] = contextvars.ContextVar("kt_plans")


def plan_of(base: KTExpertsLinear) -> ExpertPlan:
    """The plan for `base` while an adapter is injected; raises RuntimeError outside of that."""
    try:
        return _plans.get()[id(base)]
    except LookupError:
        raise RuntimeError(
            "expert LoRA layers are created by peft through get_peft_model or add_adapter, with "
            "kt_sft.plugin installed"
        ) from None


@contextmanager
def injecting(plans: Mapping[int, ExpertPlan]) -> Iterator[None]:
    """Makes `plans`, by id of the experts module, visible to `plan_of`."""
    token = _plans.set(plans)
    try:
        yield
    finally:
        _plans.reset(token)


def experts_of(model: nn.Module) -> dict[str, KTExpertsLinear]:
    """The CPU experts modules of `model` by path, as on the model without any adapter."""
    found = {}
    for name, module in model.named_modules():
        if isinstance(module, KTExpertsLinear):
            found[name.removesuffix(".base_layer")] = module
    return found


def resolve(config: LoraConfig, model: nn.Module, model_type: str) -> dict[int, ExpertPlan]:
    """Rewrites `config.target_modules` in place to what stock peft can match, and returns the plans
    of the experts.

    Raises ValueError where a target matches nothing, or where ranks differ in a way the standard
    format cannot hold.
    """
    experts = experts_of(model)
    names = expert_names(model_type)
    groups.check_whole_modules(config, model)
    _take_fused_parameters(config, model, experts)
    groups.expand(config, model)
    groups.settle_routers(config, model)
    groups.check_dropout(config, model)
    chosen = _chosen(config, model, experts, names)
    groups.set_ranks(config, _adapted(config, model, chosen))
    plans: dict[int, ExpertPlan] = {}
    for path, projections in chosen.items():
        rank, alpha = {}, {}
        for p in projections:
            virtual = [f"{path}.{PROJECTION_KEYS[p]}", f"{path}.{names[p]}", path]
            rank[p] = int(pattern_value(config.rank_pattern, virtual, config.r))
            alpha[p] = float(pattern_value(config.alpha_pattern, virtual, config.lora_alpha))
        plans[id(experts[path])] = ExpertPlan(rank, alpha, config)
    _check_expressible(list(plans.values()), len(experts))
    _rewrite(config, model, chosen)
    return plans


def _chosen(
    config: LoraConfig,
    model: nn.Module,
    experts: Mapping[str, KTExpertsLinear],
    names: Mapping[str, str],
) -> dict[str, list[str]]:
    targets = config.target_modules
    paths = [name.replace(".base_layer", "") for name, _ in model.named_modules()]
    used: set[str] = set()

    def matches(name: str) -> bool:
        if targets is None:
            return False
        if isinstance(targets, str):
            return targets == "all-linear" or re.fullmatch(targets, name) is not None
        hits = {t for t in targets if name == t or name.endswith(f".{t}")}
        used.update(hits)
        return bool(hits)

    chosen: dict[str, list[str]] = {}
    for path in experts:
        whole = matches(path)
        picked = [
            p
            for p, key in PROJECTION_KEYS.items()
            # every name is tried, so that all targets that match something are counted as used
            if any([matches(f"{path}{e}.{n}") for e in ("", ".0") for n in {key, names[p]}])
            or whole
        ]
        if picked and not _excluded(config, path) and _layer_wanted(config, path):
            chosen[path] = picked
    if not isinstance(targets, str) and targets is not None:
        for path in paths:
            matches(path)
        if unused := sorted(set(targets) - used):
            leaves = sorted({p.rsplit(".", 1)[-1] for p in paths if p} | set(names.values()))
            raise ValueError(
                f"LoRA target {', '.join(unused)} matches no module of this model; names here are "
                f"{', '.join(leaves)}"
            )
    return chosen


def _take_fused_parameters(
    config: LoraConfig, model: nn.Module, experts: Mapping[str, KTExpertsLinear]
) -> None:
    """target_parameters of fused experts (gate_up_proj, down_proj), stock peft's way to name them,
    become projections; others must be matrices of this model.
    """
    if not config.target_parameters:
        return
    if isinstance(config.target_modules, str):
        raise ValueError(
            f"target_parameters={config.target_parameters} beside the pattern "
            f"target_modules={config.target_modules!r} is not supported with experts in CPU "
            "memory; give target_modules as a list"
        )
    fused = {"gate_up_proj": ("gate", "up"), "down_proj": ("down",)}
    names = [n.replace(".base_layer", "") for n, p in model.named_parameters() if p.dim() == 2]
    targets, rest = set(config.target_modules or ()), []
    for target in config.target_parameters:
        hits = {
            f"{path}.{PROJECTION_KEYS[p]}"
            for path in experts
            for name, projections in fused.items()
            if f"{path}.{name}" == target or f"{path}.{name}".endswith(f".{target}")
            for p in projections
        }
        if not hits and not any(n == target or n.endswith(f".{target}") for n in names):
            raise ValueError(
                f"LoRA target parameter {target} matches no parameter of this model; correct or "
                "remove it"
            )
        targets |= hits
        if not hits:
            rest.append(target)
    config.target_modules, config.target_parameters = targets, rest or None


def _adapted(
    config: LoraConfig, model: nn.Module, chosen: Mapping[str, list[str]]
) -> dict[str, list[str]]:
    """What `config` adapts, by group: paths of modules, and of parameters."""
    targets, parameters = config.target_modules, config.target_parameters or ()
    found: dict[str, list[str]] = {}
    for name, module in model.named_modules():
        path = name.replace(".base_layer", "")
        if isinstance(targets, str):
            hit = targets == "all-linear" or re.fullmatch(targets, path) is not None
        else:
            hit = any(path == t or path.endswith(f".{t}") for t in targets or ())
        if hit and is_linear(module) and not _excluded(config, path):
            found.setdefault(groups.group_of(path), []).append(path)
    for path in parameters:
        found.setdefault(groups.group_of(path), []).append(path)
    if chosen:
        found["experts"] = list(chosen)
    return found


def _excluded(config: LoraConfig, path: str) -> bool:
    excluded = config.exclude_modules
    if not excluded:
        return False
    if isinstance(excluded, str):
        return re.fullmatch(excluded, path) is not None
    return any(path == e or path.endswith(f".{e}") for e in excluded)


def _layer_wanted(config: LoraConfig, path: str) -> bool:
    layers = config.layers_to_transform
    if layers is None or layers == []:
        return True
    numbers = re.findall(r"\.(\d+)\.", path)
    wanted = [layers] if isinstance(layers, int) else layers
    return bool(numbers) and int(numbers[0]) in wanted


def _check_expressible(plans: list[ExpertPlan], modules: int) -> None:
    """The standard adapter has one rank and one alpha for gate and up and one for down, over all
    layers.
    """
    if not plans:
        return
    first = plans[0]
    if len(plans) != modules or any(
        (p.rank, p.alpha) != (first.rank, first.alpha) for p in plans[1:]
    ):
        ranks = sorted({r for p in plans for r in p.rank.values()})
        raise ValueError(
            f"expert LoRA differs between layers ({len(plans)} of {modules} experts modules, ranks "
            f"{ranks}), which a standard PEFT adapter cannot hold; target the experts of every "
            "layer with the same rank and alpha"
        )
    if {"gate", "up"} <= set(first.rank) and (
        first.rank["gate"] != first.rank["up"] or first.alpha["gate"] != first.alpha["up"]
    ):
        raise ValueError(
            f"gate_proj has rank {first.rank['gate']} alpha {first.alpha['gate']} but up_proj rank "
            f"{first.rank['up']} "
            f"alpha {first.alpha['up']}, which a standard PEFT adapter cannot hold; give both the "
            "same"
        )


def _rewrite(config: LoraConfig, model: nn.Module, chosen: Mapping[str, list[str]]) -> None:
    """Targets without names of expert projections that no ordinary module has, and with the experts
    modules.
    """
    suffixes = {".".join(path.split(".")[-2:]) for path in chosen}
    targets = config.target_modules
    if targets == "all-linear":
        targets = _maybe_include_all_linear_layers(config, model).target_modules
    if isinstance(targets, str):
        extra = "".join(rf"|(.*\.)?{re.escape(s)}" for s in sorted(suffixes))
        # Below an adapted experts module the regex must not match the factors themselves.
        config.target_modules = f"(?:{targets}){extra}" if extra else targets
        return
    paths = [n.replace(".base_layer", "") for n, _ in model.named_modules() if ".lora_" not in n]
    experts = set(experts_of(model))
    kept = {
        t
        for t in (targets or ())
        if any((n == t or n.endswith(f".{t}")) and n not in experts for n in paths)
    }
    config.target_modules = kept | suffixes


def model_type_of(model: Any) -> str:
    """transformers' model type, e.g. "qwen3_moe"; of the text part where a model has several."""
    return str(model.config.get_text_config().model_type)
