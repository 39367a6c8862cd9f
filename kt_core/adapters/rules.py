"""What an adapter's config asks for: which settings can be read at all, and which modules
target_modules and its limits mean, by peft's rule.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

# Fields of LoraConfig (peft 0.20) that a reader honours, or that change nothing after training.
_KNOWN = frozenset(
    """
    task_type peft_type auto_mapping peft_version base_model_name_or_path revision inference_mode r
    target_modules exclude_modules lora_alpha lora_dropout fan_in_fan_out bias use_rslora
    modules_to_save init_lora_weights layers_to_transform layers_pattern rank_pattern alpha_pattern
    megatron_core trainable_token_indices loftq_config eva_config corda_config lora_ga_config
    velora_config qalora_group_size target_parameters ensure_weight_tying runtime_config use_dora
    lora_bias
    """.split()  # noqa: SIM905 - a table
)
# Values of init_lora_weights beside true and false that leave the base weights as they are.
_KIND_INITS = frozenset({"gaussian", "eva", "orthogonal", "mica"})


def check_config(config: Mapping[str, Any], where: str) -> None:
    """Raises ValueError for a config of anything but LoRA factors that are added to the weights of
    the base model as it is published.
    """
    if config.get("peft_type") != "LORA":
        raise ValueError(
            f"{where}: peft_type={config.get('peft_type')!r} is not supported; only LORA is"
        )
    for key in sorted(config.keys() - _KNOWN):
        value = config[key]
        if value is True or (isinstance(value, list | dict) and value):
            raise ValueError(
                f"{where}: {key}={value!r} is not supported; train the adapter without it"
            )
    init = config.get("init_lora_weights")
    if isinstance(init, str) and init.lower() not in _KIND_INITS:
        raise ValueError(
            f"{where}: init_lora_weights={init!r} is not known to leave the base weights as they "
            "are (PiSSA, OLoRA, CorDA, LoftQ and LoRA-GA change them), so the adapter does not fit "
            "the published base model; save it with peft's "
            "path_initial_model_for_weight_conversion, or train with init_lora_weights: true"
        )


def ends(name: str, target: str) -> bool:
    """peft's rule for lists of names: the whole name, or its last components."""
    return name == target or name.endswith(f".{target}")


def picked_by(config: Mapping[str, Any], path: str) -> str | None:
    """The target with which peft adapts the module `path`, None if it does not."""
    excluded = config.get("exclude_modules") or ()
    if isinstance(excluded, str):
        if re.fullmatch(excluded, path):
            return None
    elif any(ends(path, name) for name in excluded):
        return None
    whole = config.get("modules_to_save") or ()
    if any(re.match(rf"(^|.*\.){name}($|\..*)", path) for name in whole):
        return None
    targets = config.get("target_modules") or ()
    if isinstance(targets, str):
        return targets if re.fullmatch(targets, path) else None
    target = next((t for t in sorted(targets) if ends(path, t)), None)
    return target if target == path or _in_layers(config, path) else None


def _in_layers(config: Mapping[str, Any], path: str) -> bool:
    layers = config.get("layers_to_transform")
    if layers is None or layers == []:
        return True
    patterns = config.get("layers_pattern") or [r"[^.]*"]
    patterns = [patterns] if isinstance(patterns, str) else patterns
    found = next(filter(None, (re.match(rf".*?\.{p}\.(\d+)\.", path) for p in patterns)), None)
    if found is None:
        return False
    return int(found[1]) in ([layers] if isinstance(layers, int) else layers)


def picks_expert(
    config: Mapping[str, Any], path: str, expert: int | None, names: Sequence[str]
) -> str | None:
    """The target that means projection `names` (any of them) of the experts module `path`, or of
    one expert in it.
    """
    inner = f"{path}." if expert is None else f"{path}.{expert}."
    found = (picked_by(config, f"{inner}{name}") for name in names)
    return next((target for target in found if target is not None), None)
