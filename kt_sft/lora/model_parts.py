"""The parts of a mixture-of-experts model by name: attention, shared_experts, experts, router.

`lora_target` may name them beside ordinary module names; `kt_config.lora_rank` gives each its rank;
the trainer callback counts by them. shared_experts also means the dense MLPs of layers that have no
routed experts.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

from peft import LoraConfig
from torch import nn

from kt_core.module import KTExpertsLinear, is_linear
from kt_sft.config import LORA_GROUPS

GROUPS = (*LORA_GROUPS, "other")
_ROUTERS = ("gate", "router")


def group_of(name: str) -> str:
    """The group that a module or parameter belongs to, from its name."""
    parts = name.split(".")
    if "experts" in parts:
        return "experts"
    if any("attn" in p or "attention" in p for p in parts):
        return "attention"
    if any(router in parts for router in _ROUTERS):
        return "router"
    if any(p in ("mlp", "shared_experts", "shared_expert", "feed_forward") for p in parts):
        return "shared_experts"
    return "other"


@dataclass(frozen=True)
class NewAdapters:
    """What holds for adapters that are created now, beside their LoraConfig.

    ranks: by group, see KTConfig.lora_rank. router: whether routers are adapted where target names
    happen to fit them (`lora_target: all` leaves them alone).
    """

    ranks: Mapping[str, int] = field(default_factory=dict)
    router: bool = True


_rules: ContextVar[NewAdapters] = ContextVar("kt_new_adapters")


def _current() -> NewAdapters:
    return _rules.get(NewAdapters())


@contextmanager
def rules(new: NewAdapters) -> Iterator[None]:
    """Inside it, adapters are created by `new`; `NewAdapters()` is peft's own way."""
    token = _rules.set(new)
    try:
        yield
    finally:
        _rules.reset(token)


def has_router_loss(config: Any) -> bool:
    """Whether a model of this transformers config adds a router loss to its own loss."""
    parts = (config, config.get_text_config())
    return any(bool(vars(part).get("output_router_logits")) for part in parts)


def routers_of(model: nn.Module) -> dict[str, nn.Module]:
    """What decides which experts a token goes to, by path as on the model without any adapter: the
    modules that hold a matrix `weight` [experts, hidden], at any depth, in the child named gate or
    router beside an experts module.

    That child is a Linear (Jamba), a module with the matrix as its own parameter (Qwen3-MoE), or
    one with a Linear below it (HunYuan: gate.wg).
    """
    parents = {
        name.removesuffix(".base_layer").rpartition(".")[0]
        for name, module in model.named_modules()
        if isinstance(module, KTExpertsLinear)
    }
    tops = {f"{parent}.{name}" for parent in parents for name in _ROUTERS}
    found = {}
    for name, module in model.named_modules():
        path = name.replace(".base_layer", "")
        if ".lora_" in path or not any(path == t or path.startswith(f"{t}.") for t in tops):
            continue
        weight = dict(module.named_parameters(recurse=False)).get("weight")
        if weight is not None and weight.dim() == 2:
            found[path] = module
    return found


def expand(config: LoraConfig, model: nn.Module) -> None:
    """Puts module and parameter names in the place of group names in `config`, in place; `experts`
    is left, see targets.py.

    Raises ValueError for a group that this model does not have, and for a router with dropout.
    """
    if isinstance(config.target_modules, str) or config.target_modules is None:
        return
    targets = set(config.target_modules)
    parameters = set(config.target_parameters or ())
    linears = _linears(model)
    routers = routers_of(model)
    for group in (*LORA_GROUPS, "all"):
        if group not in targets or group == "experts":
            continue
        targets.discard(group)
        if group == "router":
            found = list(routers)
        elif group == "all":
            head = _leaf_of_head(model)
            found = [p for p in linears if p not in routers and p.rpartition(".")[2] != head]
            targets.add("experts")
        else:
            found = [p for p in linears if group_of(p) == group and p not in routers]
        if not found:
            raise ValueError(
                f"lora_target {group}: {type(model).__name__} has no such part; remove it"
            )
        targets |= {p for p in found if p in linears}
        parameters |= {f"{p}.weight" for p in found if p not in linears}
    config.target_modules, config.target_parameters = targets, sorted(parameters) or None


def settle_routers(config: LoraConfig, model: nn.Module) -> None:
    """Leaves out the routers that `config` hits and must not adapt, in place; after `expand`.

    `lora_target: all` of LLaMA-Factory means none; `all-linear` those alone that peft can adapt as
    a Linear, with effect. Raises ValueError for one that is asked for by name and cannot be.
    """
    routers = routers_of(model)
    parameters = config.target_parameters or []
    hit = {p for p in routers if matches(config.target_modules, p)} - {
        p for p in routers if config.exclude_modules and matches(config.exclude_modules, p)
    }
    whole = {p for p in routers if any(f"{p}.weight".endswith(t) for t in parameters)}
    if not _current().router:
        config.target_parameters = [
            t for t in parameters if not any(f"{p}.weight".endswith(t) for p in whole)
        ] or None
        _exclude(config, hit)
    elif config.target_modules == "all-linear":
        _exclude(config, {p for p in hit if not is_linear(routers[p]) or _reads(model, p)})
    else:
        for path in sorted(hit - whole):
            if not is_linear(routers[path]):
                leaf = path.rpartition(".")[2]
                raise ValueError(
                    f"LoRA target {leaf} is the router {path}, whose weight is adapted as a whole; "
                    "write router in its place"
                )
        for path in sorted(hit | whole):
            _check_called(model, path)


def matches(names: str | Collection[str] | None, path: str) -> bool:
    """Whether peft takes `path` for one of `names` (the ends of paths, or one pattern); all-linear
    is every path here.
    """
    if isinstance(names, str):
        return names == "all-linear" or re.fullmatch(names, path) is not None
    return any(path == name or path.endswith(f".{name}") for name in names or ())


def _exclude(config: LoraConfig, paths: Collection[str]) -> None:
    """Adds `paths` to exclude_modules."""
    if not paths:
        return
    if isinstance(config.exclude_modules, str):
        more = "|".join(re.escape(p) for p in sorted(paths))
        config.exclude_modules = f"(?:{config.exclude_modules})|{more}"
    else:
        config.exclude_modules = sorted({*(config.exclude_modules or ()), *paths})


def _reads(model: nn.Module, router: str) -> tuple[str, str] | None:
    """The block around `router` and what it reads of it, such as its weight, rather than only call
    it: what peft puts around the router would then not be used. Reading a dtype does no harm.
    """
    parent, _, leaf = router.rpartition(".")
    block = type(model.get_submodule(parent))
    read = re.search(
        rf"self\.{leaf}\.(\w+)\b(?!\.(?:dtype|device|shape)\b)", inspect.getsource(block)
    )
    return (block.__name__, read[1]) if read else None


def _check_called(model: nn.Module, router: str) -> None:
    """Raises ValueError if LoRA around `router` would have no effect, see `_reads`."""
    if read := _reads(model, router):
        leaf = router.rpartition(".")[2]
        raise ValueError(
            f"the router {router} cannot carry LoRA, because {read[0]} reads its {read[1]} instead "
            f"of only calling it; take router (or {leaf}) out of lora_target"
        )


def check_dropout(config: LoraConfig, model: nn.Module) -> None:
    """Raises ValueError for dropout on a parameter that is not a Linear's: routers choose experts
    inside their forward, so peft adapts the weight itself, which dropout cannot reach.
    """
    if config.target_parameters and config.lora_dropout:
        raise ValueError(
            f"lora_dropout={config.lora_dropout} is not possible on {config.target_parameters[0]}, "
            "whose weight is adapted as a whole; set lora_dropout: 0.0 or take router out of "
            "lora_target"
        )


def set_ranks(config: LoraConfig, adapted: Mapping[str, list[str]]) -> None:
    """Enters the ranks by group into rank_pattern and alpha_pattern; `adapted` are module paths (of
    parameters: with `.weight`) by group. Scales stay alpha / r of the whole adapter (with rslora
    alpha stays). Raises ValueError for a rank of a group without any adapted module.
    """
    for group, rank in _current().ranks.items():
        paths = adapted.get(group, [])
        if not paths:
            raise ValueError(
                f"kt_config: lora_rank.{group}={rank} has no effect because lora_target picks "
                f"nothing of that part; add {group} to lora_target or remove the rank"
            )
        alpha: Any = config.lora_alpha
        if not config.use_rslora:
            alpha = rank * config.lora_alpha / config.r
        for path in paths:
            config.rank_pattern[re.escape(path)] = rank
            config.alpha_pattern[re.escape(path)] = alpha


def check_whole_modules(config: LoraConfig, model: nn.Module) -> None:
    """Raises ValueError for modules_to_save (additional_target) that match nothing or hold experts,
    of which there is no trainable copy.
    """
    modules = [(n.replace(".base_layer", ""), m) for n, m in model.named_modules()]
    for target in config.modules_to_save or ():
        matched = [m for n, m in modules if n.endswith(target)]
        if not matched:
            leaves = sorted({n.rpartition(".")[2] for n, _ in modules if n} - {""})
            raise ValueError(
                f"additional_target {target} matches no module of this model; names here are "
                f"{', '.join(leaves)}"
            )
        if any(isinstance(inner, KTExpertsLinear) for m in matched for inner in m.modules()):
            raise ValueError(
                f"additional_target {target} holds experts, which use_kt keeps frozen; name them "
                "in lora_target instead"
            )


def _linears(model: nn.Module) -> set[str]:
    return {
        n.replace(".base_layer", "")
        for n, m in model.named_modules()
        if is_linear(m) and ".lora_" not in f".{n}"
    }


def _leaf_of_head(model: Any) -> str:
    head = model.get_output_embeddings()
    names = [n for n, m in model.named_modules() if m is head and head is not None]
    return names[0].rpartition(".")[2] if names else "lm_head"
