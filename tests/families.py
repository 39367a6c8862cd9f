"""Every mixture-of-experts family of the installed transformers, found by looking, and tiny configs
of them.

Nothing here is a list of families: transformers' auto mappings are walked, a configuration that
speaks of experts is shrunk by the names of its keys, and the model's experts decide whether it is
one (kt_core.loading.experts_contract). A family of a newer transformers shows up by itself.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import transformers
from transformers.models.auto import modeling_auto
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

# The auto classes whose models LLaMA-Factory trains, text first.
MAPPINGS = ("MODEL_FOR_CAUSAL_LM_MAPPING_NAMES", "MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES")
_SPEAKS_OF_EXPERTS = re.compile(r"\b(num|n|moe_num)_(local_|routed_)?experts\b")

# Tiny values by key. All sizes differ from one another where the families allow it, so that a
# swapped axis cannot go unseen.
_TINY: dict[str, Any] = {
    "vocab_size": 128,
    "vocab_size_per_layer_input": 128,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "head_dim": 16,
    "global_head_dim": 16,
    "num_global_key_value_heads": 2,
    "hidden_size_per_layer_input": 8,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
    # experts
    "num_experts": 8,
    "num_local_experts": 8,
    "n_routed_experts": 8,
    "moe_num_experts": 8,
    "num_experts_per_tok": 2,
    "top_k_experts": 2,
    "moe_k": 2,
    "moe_topk": 2,
    "intermediate_size": 72,
    "dense_intermediate_size": 72,
    "ffn_hidden_size": 72,
    "moe_intermediate_size": 40,
    "expert_ffn_hidden_size": 40,
    "shared_expert_intermediate_size": 56,
    "n_shared_experts": 1,
    "num_shared_experts": 1,
    "n_group": 2,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "num_dense_layers": 1,
    "moe_layer_start_index": 0,
    "decoder_sparse_step": 1,
    "enable_moe_block": True,
    "expert_layer_period": 2,
    "expert_layer_offset": 1,
    "attn_layer_period": 2,
    "attn_layer_offset": 0,
    "zero_expert_num": 4,
    "mlp_only_layers": [],
    "mlp_layer_types": ["dense", "sparse"],
    # latent attention
    "kv_lora_rank": 32,
    "q_lora_rank": 24,
    "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 16,
    "qk_head_dim": 32,
    "v_head_dim": 16,
    "index_n_heads": 2,
    "index_head_dim": 32,
    "index_topk": 8,
    # linear attention and state spaces
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "mamba_d_state": 8,
    "mamba_n_heads": 8,
    "mamba_d_head": 16,
    "mamba_dt_rank": 4,
    "mamba_num_heads": 8,
    "mamba_head_dim": 16,
    # vision
    "depth": 2,
    "num_heads": 4,
    "out_hidden_size": 64,
    "patch_size": 4,
    "image_size": 16,
    "num_position_embeddings": 16,
    "deepstack_visual_indexes": [0],
    "fullatt_block_indexes": [0],
}


@dataclass(frozen=True)
class Family:
    """One class that an auto mapping names: model_type is its key there."""

    model_type: str
    class_name: str
    mapping: str

    @property
    def cls(self) -> type[transformers.PreTrainedModel]:
        """The model class; importing its module takes a while."""
        return getattr(transformers, self.class_name)


def families() -> Iterator[Family]:
    """All classes of the auto mappings whose configuration speaks of experts, each once."""
    seen = set()
    for mapping in MAPPINGS:
        for model_type, classes in vars(modeling_auto)[mapping].items():
            for name in [classes] if isinstance(classes, str) else classes:
                if name in seen or not _speaks_of_experts(model_type):
                    continue
                seen.add(name)
                yield Family(model_type, name, mapping)


def _default(model_type: str) -> transformers.PreTrainedConfig | None:
    """The configuration of a model type with nothing given; None where that is not possible."""
    try:
        return CONFIG_MAPPING[model_type]()
    except Exception:
        return None


def _speaks_of_experts(model_type: str) -> bool:
    default = _default(model_type)
    return default is not None and any(_SPEAKS_OF_EXPERTS.search(k) for k in _keys(default))


def _keys(config: transformers.PreTrainedConfig) -> set[str]:
    """The keys of a configuration and of those below it."""
    found = set(config.to_dict())
    for part in config.sub_configs:
        if isinstance(inner := vars(config).get(part), transformers.PreTrainedConfig):
            found |= _keys(inner)
    return found


def tiny(family: Family) -> transformers.PreTrainedConfig:
    """The tiny configuration of a family; of its text part where the class takes that."""
    default = _default(family.model_type)
    assert default is not None
    config = type(default)(**_shrunk(default))
    wanted = family.cls.config_class
    return config if wanted is type(config) else config.get_text_config()


def _shrunk(config: transformers.PreTrainedConfig) -> dict[str, Any]:
    defaults = config.to_dict()
    values = {key: value for key, value in _TINY.items() if key in defaults}
    own_size = {"moe_intermediate_size", "expert_ffn_hidden_size"} & set(defaults)
    if "intermediate_size" in defaults and not own_size:
        values["intermediate_size"] = _TINY["moe_intermediate_size"]
    for key, value in values.items():
        if isinstance(defaults[key], list) and not isinstance(value, list):
            values[key] = [value] * len(defaults[key])
    if "layer_types" in defaults:  # one layer of each of the first two kinds
        kinds = list(dict.fromkeys(defaults["layer_types"] or ["full_attention"]))
        values["layer_types"] = [*kinds, *kinds][:2]
    if "kv_lora_rank" in defaults:  # latent attention has no groups, and its own head sizes
        values["num_key_value_heads"] = values["num_attention_heads"]
        values.pop("head_dim", None)
        if defaults.get("head_dim") == defaults["qk_rope_head_dim"]:
            values["head_dim"] = values["qk_rope_head_dim"]
    for part in config.sub_configs:
        if isinstance(inner := vars(config).get(part), transformers.PreTrainedConfig):
            values[part] = _shrunk(inner)
            rope = inner.to_dict().get("rope_parameters") or {}
            if part == "text_config" and "rope_theta" in rope:  # sections for head_dim 16
                values[part]["rope_parameters"] = rope | {"mrope_section": [2, 1, 1]}
    return values
