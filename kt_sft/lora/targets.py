"""From a LoraConfig's target names to the modules and expert projections they mean on a model with
CPU experts.

Groups (attention, ...) are written out first, see model_parts.py. Expert projections are named
gate_proj, up_proj, down_proj, or as the model's published checkpoints name them (Mixtral: w1, w3,
w2), alone or behind a path; `experts` means all three; so does `all-linear`. Stock peft cannot
match names below an experts module, so the config it sees names the experts modules, and an
`ExpertAdapter` says which projections they get.
"""

from __future__ import annotations

import contextvars
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from peft import LoraConfig
from peft.tuners.tuners_utils import _maybe_include_all_linear_layers
from torch import nn

from kt_core.adapters.peft_format import expert_names, pattern_value
from kt_core.module import KTExpertsLinear, is_linear
from kt_core.names import PROJECTION_KEYS, STACKED
from kt_sft.lora import model_parts


@dataclass(frozen=True)
class ExpertAdapter:
    """What one adapter puts on one experts module."""

    rank: Mapping[str, int]  # by projection: gate, up, down
    alpha: Mapping[str, float]
    config: LoraConfig


_injected: contextvars.ContextVar[Mapping[int, ExpertAdapter]] = contextvars.ContextVar(
    "kt_expert_adapters"
)


def adapter_of(base: KTExpertsLinear) -> ExpertAdapter:
    """What goes on `base` while an adapter is injected; raises RuntimeError outside of that."""
    try:
        return _injected.get()[id(base)]
    except LookupError:
        raise RuntimeError(
            "expert LoRA layers are created by peft through get_peft_model or add_adapter, with "
            "kt_sft.session imported"
        ) from None


@contextmanager
def injecting(adapters: Mapping[int, ExpertAdapter]) -> Iterator[None]:
    """Makes `adapters`, by id of the experts module, visible to `adapter_of`."""
    token = _injected.set(adapters)
    try:
        yield
    finally:
        _injected.reset(token)


def experts_of(model: nn.Module) -> dict[str, KTExpertsLinear]:
    """The CPU experts modules of `model` by path, as on the model without any adapter."""
    found = {}
    for name, module in model.named_modules():
        if isinstance(module, KTExpertsLinear):
            found[name.removesuffix(".base_layer")] = module
    return found


def resolve(config: LoraConfig, model: nn.Module, model_type: str) -> dict[int, ExpertAdapter]:
    """Rewrites `config.target_modules` in place to what stock peft can match, and returns what
    each experts module gets, by its id.

    Raises ValueError where a target matches nothing, or where ranks differ in a way the standard
    format cannot hold.
    """
    experts = experts_of(model)
    names = expert_names(model_type)
    model_parts.check_whole_modules(config, model)
    _take_stacked_parameters(config, model, experts)
    model_parts.expand(config, model)
    model_parts.settle_routers(config, model)
    model_parts.check_dropout(config, model)
    chosen = _chosen(config, model, experts, names)
    model_parts.set_ranks(config, _adapted(config, model, chosen))
    adapters: dict[int, ExpertAdapter] = {}
    for path, projections in chosen.items():
        rank, alpha = {}, {}
        for p in projections:
            named = _names(path, experts[path], p, names)
            rank[p] = int(_pattern_value("rank_pattern", config.rank_pattern, named, config.r))
            alpha[p] = float(
                _pattern_value("alpha_pattern", config.alpha_pattern, named, config.lora_alpha)
            )
        adapters[id(experts[path])] = ExpertAdapter(rank, alpha, config)
    _check_patterns(config, experts, chosen, names)
    _check_expressible(list(adapters.values()), len(experts))
    _rewrite(config, model, chosen)
    return adapters


@dataclass(frozen=True)
class _Names:
    """What one projection of one experts module may be called: `whole` names mean all experts, of
    `single` each means one.
    """

    whole: tuple[str, ...]
    single: tuple[tuple[str, ...], ...]


def _names(
    path: str, module: KTExpertsLinear, projection: str, published: Mapping[str, str]
) -> _Names:
    stacked = next(name for name, parts in STACKED.items() if projection in parts)
    leaves = sorted({PROJECTION_KEYS[projection], published[projection]})
    return _Names(
        (path, *(f"{path}.{leaf}" for leaf in {*leaves, stacked})),
        tuple(tuple(f"{path}.{e}.{leaf}" for leaf in leaves) for e in range(module.num_experts)),
    )


def _meant(hit: Callable[[str], bool], names: _Names, what: str) -> bool:
    """Whether `hit` takes a projection, of all experts. Raises ValueError if it takes it of some
    experts only, which share one tensor.
    """
    # every name is tried, so that a hit can count what it was given for
    whole = any([hit(name) for name in names.whole])
    singles = [any([hit(name) for name in one]) for one in names.single]
    if not whole and any(singles) and not all(singles):
        first = names.single[singles.index(True)][0]
        raise ValueError(
            f"{what} picks {first} but not that projection of all {len(singles)} experts, which "
            "are adapted together; name it without the expert's number"
        )
    return whole or any(singles)


def _chosen(
    config: LoraConfig,
    model: nn.Module,
    experts: Mapping[str, KTExpertsLinear],
    names: Mapping[str, str],
) -> dict[str, list[str]]:
    targets = config.target_modules
    paths = [name.replace(".base_layer", "") for name, _ in model.named_modules()]
    used: set[str] = set()

    def targeted(name: str) -> bool:
        if isinstance(targets, str):
            return model_parts.matches(targets, name)
        hits = {t for t in targets or () if model_parts.matches([t], name)}
        used.update(hits)
        return bool(hits)

    given = config.exclude_modules or ()
    acted: set[str] = set()

    def excluded(name: str) -> bool:
        hits = {e for e in _each(given) if model_parts.matches(_one(given, e), name)}
        acted.update(hits)
        return bool(hits)

    chosen: dict[str, list[str]] = {}
    for path, module in experts.items():
        named = {p: _names(path, module, p, names) for p in PROJECTION_KEYS}
        picked = [p for p in named if _meant(targeted, named[p], "target_modules")]
        picked = [p for p in picked if not _meant(excluded, named[p], "exclude_modules")]
        if picked and _layer_wanted(config, path):
            chosen[path] = picked
    # what has done its work here would make peft warn that it does nothing
    done = {e for e in acted if not any(model_parts.matches(_one(given, e), p) for p in paths)}
    if done:
        config.exclude_modules = [e for e in _each(given) if e not in done] or None
    if not isinstance(targets, str) and targets is not None:
        for path in paths:
            targeted(path)
        if unused := sorted(set(targets) - used):
            leaves = sorted({p.rsplit(".", 1)[-1] for p in paths if p} | set(names.values()))
            raise ValueError(
                f"LoRA target {', '.join(unused)} matches no module of this model; names here are "
                f"{', '.join(leaves)}"
            )
    return chosen


def _each(given: str | Collection[str]) -> list[str]:
    """The names in exclude_modules, or the one pattern that it is."""
    return [given] if isinstance(given, str) else list(given)


def _one(given: str | Collection[str], name: str) -> str | list[str]:
    """`name` of `given`, as a pattern if `given` is one."""
    return name if isinstance(given, str) else [name]


def _pattern_value(
    option: str, patterns: Mapping[str, Any] | None, names: _Names, default: Any
) -> Any:
    """The value of rank_pattern or alpha_pattern for a projection: peft's rule, the first pattern
    that fits any of its names.
    """
    for pattern, value in (patterns or {}).items():
        if _meant(lambda name, p=pattern: _fits(p, name), names, f"{option} {pattern!r}"):  # type: ignore[misc]
            return value
    return default


def _fits(pattern: str, name: str) -> bool:
    return pattern_value({pattern: True}, [name], False) is True


def _check_patterns(
    config: LoraConfig,
    experts: Mapping[str, KTExpertsLinear],
    chosen: Mapping[str, list[str]],
    names: Mapping[str, str],
) -> None:
    """Raises ValueError for a rank_pattern or alpha_pattern that speaks of routed experts and fits
    no adapted projection. peft ignores such patterns.
    """
    for option in ("rank_pattern", "alpha_pattern"):
        for pattern in vars(config)[option] or {}:
            if not re.search(r"(?<![A-Za-z_])experts", pattern) or any(
                _meant(lambda n, p=pattern: _fits(p, n), _names(path, experts[path], p, names), "")  # type: ignore[misc]
                for path, projections in chosen.items()
                for p in projections
            ):
                continue
            adapted = sorted(
                {f"experts.{PROJECTION_KEYS[p]}" for ps in chosen.values() for p in ps}
            )
            raise ValueError(
                f"{option} {pattern!r} fits no expert projection that is adapted "
                f"({', '.join(adapted) or 'none is'}); correct or remove it"
            )


def _take_stacked_parameters(
    config: LoraConfig, model: nn.Module, experts: Mapping[str, KTExpertsLinear]
) -> None:
    """target_parameters of stacked experts (gate_up_proj, down_proj), stock peft's way to name
    them, become projections; others must be matrices of this model.
    """
    if not config.target_parameters:
        return
    if isinstance(config.target_modules, str):
        raise ValueError(
            f"target_parameters={config.target_parameters} beside the pattern "
            f"target_modules={config.target_modules!r} is not supported with experts in CPU "
            "memory; give target_modules as a list"
        )
    names = [n.replace(".base_layer", "") for n, p in model.named_parameters() if p.dim() == 2]
    targets, rest = set(config.target_modules or ()), []
    for target in config.target_parameters:
        hits = {
            f"{path}.{PROJECTION_KEYS[p]}"
            for path in experts
            for name, projections in STACKED.items()
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
        excluded = config.exclude_modules and model_parts.matches(config.exclude_modules, path)
        if model_parts.matches(targets, path) and is_linear(module) and not excluded:
            found.setdefault(model_parts.group_of(path), []).append(path)
    for path in parameters:
        found.setdefault(model_parts.group_of(path), []).append(path)
    if chosen:
        found["experts"] = list(chosen)
    return found


def _layer_wanted(config: LoraConfig, path: str) -> bool:
    """peft's layers_to_transform and layers_pattern, for the first numbered part of a path."""
    layers = config.layers_to_transform
    if layers is None or layers == []:
        return True
    patterns = config.layers_pattern or [r"[^.]*"]
    for pattern in [patterns] if isinstance(patterns, str) else patterns:
        if number := re.match(rf".*?\.{pattern}\.(\d+)\.", path):
            return int(number[1]) in ([layers] if isinstance(layers, int) else layers)
    return False


def _check_expressible(adapters: list[ExpertAdapter], modules: int) -> None:
    """The standard adapter has one rank and one alpha for gate and up and one for down, over all
    layers.
    """
    if not adapters:
        return
    first = adapters[0]
    if len(adapters) != modules or any(
        (p.rank, p.alpha) != (first.rank, first.alpha) for p in adapters[1:]
    ):
        ranks = sorted({r for p in adapters for r in p.rank.values()})
        raise ValueError(
            f"expert LoRA differs between layers ({len(adapters)} of {modules} experts modules, "
            f"ranks {ranks}), which a standard PEFT adapter cannot hold; target the experts of "
            "every layer with the same rank and alpha"
        )
    if {"gate", "up"} <= set(first.rank) and (
        first.rank["gate"] != first.rank["up"] or first.alpha["gate"] != first.alpha["up"]
    ):
        raise ValueError(
            f"gate_proj has rank {first.rank['gate']} alpha {first.alpha['gate']} but up_proj rank "
            f"{first.rank['up']} alpha {first.alpha['up']}, which a standard PEFT adapter cannot "
            "hold; give both the same"
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
