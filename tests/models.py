"""Tiny random checkpoints of the model families that the tests load.
 `build(family, path)` writes config and safetensors as transformers saves that family (so Mixtral's
come out as `block_sparse_moe.experts.N.w1.weight`). Sizes differ from one another everywhere, so a
swapped axis cannot go unseen: E = 8 experts, top-2, H = 64, I = 40, 2 decoder layers (DeepSeek: 3,
the first dense).
"""

from __future__ import annotations

from pathlib import Path

import torch
import transformers

_COMMON = {
    "vocab_size": 128,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "num_experts_per_tok": 2,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_DEEPSEEK = {
    "num_hidden_layers": 3,
    "intermediate_size": 72,
    "moe_intermediate_size": 40,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "num_key_value_heads": 4,
    "kv_lora_rank": 32,
    "q_lora_rank": 24,
    "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
    "n_group": 2,
    "topk_group": 1,
}
_FAMILIES: dict[str, tuple[str, dict[str, object]]] = {
    "qwen3_moe": (
        "Qwen3Moe",
        {"num_experts": 8, "moe_intermediate_size": 40, "intermediate_size": 72, "head_dim": 16},
    ),
    "mixtral": ("Mixtral", {"num_local_experts": 8, "intermediate_size": 40}),
    "deepseek_v2": ("DeepseekV2", _DEEPSEEK | {"topk_method": "greedy"}),
    "deepseek_v3": ("DeepseekV3", _DEEPSEEK),
    "olmoe": ("Olmoe", {"num_experts": 8, "intermediate_size": 40}),
    "gpt_oss": ("GptOss", {"num_local_experts": 8, "intermediate_size": 40, "head_dim": 16}),
}

FAMILIES = ("qwen3_moe", "mixtral", "deepseek_v2", "deepseek_v3", "olmoe")
"""The families whose experts we take over; "gpt_oss" can be built too, and is refused."""


def config(family: str, **overrides: object) -> transformers.PreTrainedConfig:
    """The tiny config of a family; `overrides` are config keys."""
    name, own = _FAMILIES[family]
    return getattr(transformers, f"{name}Config")(**(_COMMON | own | overrides))


def build(
    family: str,
    path: str | Path,
    *,
    seed: int = 0,
    dtype: torch.dtype = torch.bfloat16,
    max_shard_size: str = "5GB",
    tokenizer: bool = False,
    **overrides: object,
) -> Path:
    """Writes a random checkpoint of `family` into `path` and returns the path.

    Weights are N(0, 0.1) so that experts matter to the logits; values are rounded to `dtype`. A
    byte-level tokenizer with a chat template is written beside it if asked for (it needs vocab_size
    >= 260, which is then the default).
    """
    if tokenizer:
        overrides = {"vocab_size": 260} | overrides
    cfg = config(family, **overrides)
    torch.manual_seed(seed)
    model = transformers.AutoModelForCausalLM.from_config(cfg, dtype=torch.float32)
    randomize(model)
    model.to(dtype).save_pretrained(path, max_shard_size=max_shard_size)
    if tokenizer:
        byte_tokenizer().save_pretrained(path)
    return Path(path)


def randomize(model: torch.nn.Module) -> None:
    """Gives every parameter but those of norms random values, biases too."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, 0.1)
            elif "norm" not in name:
                parameter.uniform_(-0.1, 0.1)


def byte_tokenizer() -> transformers.PreTrainedTokenizerFast:
    """One token per byte, four special ones first: <pad>, <s>, </s> (end of text and of turn) and
    <unk>.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    special = ["<pad>", "<s>", "</s>", "<unk>"]
    symbols = special + sorted(pre_tokenizers.ByteLevel.alphabet())
    inner = Tokenizer(models.BPE({s: i for i, s in enumerate(symbols)}, [], unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    outer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=inner,
        pad_token="<pad>",
        bos_token="<s>",
        eos_token="</s>",
        unk_token="<unk>",
        model_max_length=512,
    )
    outer.chat_template = (
        "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}</s>\n{% endfor %}"
        "{% if add_generation_prompt %}assistant: {% endif %}"
    )
    return outer
