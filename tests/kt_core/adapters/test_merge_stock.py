"""What stock peft writes beside plain LoRA of Linears and experts (embeddings, heads, rows, biases,
whole modules, resized vocabularies; tied models or not): our server and our merge give the logits
of the stock model with that adapter.
"""

from __future__ import annotations

import json
from pathlib import Path

import models
import pytest
import sft_cases as cases
import slow_experts
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from kt_core import adapters, hf

# (LoraConfig, rows of the vocabulary if resized, what keeps the server from serving it)
CASES = {
    "lora of the head": ({"target_modules": ["o_proj", "lm_head"]}, None, None),
    "lora of the embedding": ({"target_modules": ["o_proj", "embed_tokens"]}, None, None),
    "lora of both, tied": (
        {"target_modules": ["o_proj", "embed_tokens"], "ensure_weight_tying": True},
        None,
        None,
    ),
    "whole embedding": (
        {"target_modules": ["o_proj"], "modules_to_save": ["embed_tokens"]},
        None,
        None,
    ),
    "whole embedding, tied": (
        {
            "target_modules": ["o_proj"],
            "modules_to_save": ["embed_tokens"],
            "ensure_weight_tying": True,
        },
        None,
        None,
    ),
    "both whole": (
        {"target_modules": ["o_proj"], "modules_to_save": ["embed_tokens", "lm_head"]},
        None,
        None,
    ),
    "a whole norm and router": (
        {"target_modules": ["o_proj"], "modules_to_save": ["input_layernorm", "gate"]},
        None,
        None,
    ),
    "rows": ({"target_modules": ["o_proj"], "trainable_token_indices": [5, 9]}, None, None),
    "rows of each": (
        {
            "target_modules": ["o_proj"],
            "trainable_token_indices": {"embed_tokens": [5, 9], "lm_head": [7]},
        },
        None,
        None,
    ),
    "biases": ({"target_modules": ["q_proj", "o_proj"], "bias": "all"}, None, None),
    "resized, both whole": (
        {"target_modules": ["o_proj"], "modules_to_save": ["embed_tokens", "lm_head"]},
        160,
        "160 rows of .* merge it",
    ),
    "resized": ({"target_modules": ["o_proj"]}, 160, "160 rows of .* merge it"),
}
# (family, tied, LoraConfig, rows) of adapters with a test of their own
OWN = {
    "lora_only": (
        "qwen3_moe",
        True,
        {"target_modules": ["q_proj", "o_proj"], "bias": "lora_only"},
        None,
    ),
    "lora_only without biases": (
        "mixtral",
        True,
        {"target_modules": ["q_proj", "o_proj"], "bias": "lora_only"},
        None,
    ),
    "resized, lora of the head": (
        "qwen3_moe",
        False,
        {"target_modules": ["o_proj", "lm_head"]},
        160,
    ),
    "shards": ("qwen3_moe", "shards", {"target_modules": ["o_proj", "lm_head"]}, None),
}
FEW = ("lora of the head", "lora of the embedding", "whole embedding", "rows")
OTHERS = ("mixtral", "olmoe", "deepseek_v3")
# Cases in which a tied model ends with a head of its own.
UNTIED = {
    "lora of the head",
    "lora of the embedding",
    "whole embedding",
    "both whole",
    "rows of each",
    "resized, both whole",
}
WRITE = """
import json, sys, torch
from peft import LoraConfig, get_peft_model
from sft_cases import token_ids
from transformers import AutoModelForCausalLM
for path, directory, lora, rows in json.loads(sys.argv[1]):
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    if rows:
        model.resize_token_embeddings(rows)
    torch.manual_seed(0)
    tuned = get_peft_model(model, LoraConfig(r=4, lora_alpha=8, task_type="CAUSAL_LM", **lora))
    with torch.no_grad():
        for parameter in tuned.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn(parameter.shape) * 0.05)
        torch.save(tuned(input_ids=token_ids()).logits, directory + ".pt")
    tuned.save_pretrained(directory)
"""


def _names():
    for tied in (True, False):
        for name in CASES:
            yield "qwen3_moe", tied, name
        for family in OTHERS:
            for name in FEW:
                yield family, tied, name


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """(base, adapter) by case; everything was written by stock transformers and stock peft."""
    root, out, orders = tmp_path_factory.mktemp("stock"), {}, []
    for number, (family, tied, name) in enumerate(_names()):
        base = root / f"{family}-{tied}"
        if not base.exists():
            bias = {"attention_bias": True} if family == "qwen3_moe" else {}
            models.build(family, base, dtype=torch.float32, tie_word_embeddings=tied, **bias)
        lora, rows, _ = CASES[name]
        orders.append((str(base), str(root / f"adapter{number}"), lora, rows))
        out[family, tied, name] = (base, root / f"adapter{number}")
    models.build(
        "qwen3_moe",
        root / "qwen3_moe-shards",
        dtype=torch.float32,
        tie_word_embeddings=True,
        max_shard_size="60KB",
    )
    for name, (family, tied, lora, rows) in OWN.items():
        base, directory = root / f"{family}-{tied}", root / name
        orders.append((str(base), str(directory), lora, rows))
        out[name] = (base, directory)
    cases.stock(WRITE, json.dumps(orders))
    return out


@pytest.fixture(scope="module")
def served(written):
    """Our models by base directory, their experts in fp32."""
    with pytest.MonkeyPatch.context() as patch:
        slow_experts.patch(patch)
        bases = {base for base, _ in written.values()}
        out = {b: hf.load_model(b, format="bf16", dtype=torch.float32) for b in bases}
        yield out


def _close(got, want) -> bool:
    return bool((got - want).norm() < 2e-6 * want.norm())


@pytest.mark.parametrize(("family", "tied", "name"), list(_names()))
def test_serving_and_merging_what_stock_peft_wrote(family, tied, name, written, served, tmp_path):
    base, directory = written[family, tied, name]
    ids, want = cases.token_ids(), torch.load(f"{directory}.pt")
    model, refused = served[base], CASES[name][2]
    plain = cases.logits(model, ids)
    assert plain.shape != want.shape or (plain - want).norm() > 0.02 * want.norm()
    if refused is None:
        adapters.load_adapter(model, directory, "a")
        with adapters.adapter(model, "a"):
            assert _close(cases.logits(model, ids), want)
        adapters.unload_adapter(model, "a")
        assert torch.equal(cases.logits(model, ids), plain)
    else:
        with pytest.raises(ValueError, match=refused):
            adapters.load_adapter(model, directory, "a")
    adapters.merge(base, directory, tmp_path / "merged")
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float32)
    assert _close(cases.logits(merged, ids), want)
    untied = not tied or name in UNTIED
    config = json.loads((tmp_path / "merged" / "config.json").read_text())
    assert config["tie_word_embeddings"] is not untied
    weights = load_file(tmp_path / "merged" / "model.safetensors")
    assert ("lm_head.weight" in weights) is untied
    assert config["vocab_size"] == len(weights["model.embed_tokens.weight"])


def test_stock_says_the_same_of_tied_models(written, tmp_path):
    """config.json and the tensors of a merge are those of peft's merge_and_unload where that gives
    its own logits."""
    for name in ("whole embedding", "whole embedding, tied", "both whole", "rows", "resized"):
        base, directory = written["qwen3_moe", True, name]
        stock = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
        if CASES[name][1]:
            stock.resize_token_embeddings(CASES[name][1])
        PeftModel.from_pretrained(stock, directory).merge_and_unload().save_pretrained(
            tmp_path / f"stock {name}"
        )
        adapters.merge(base, directory, tmp_path / name)
        ours, theirs = (
            json.loads((tmp_path / d / "config.json").read_text()) for d in (name, f"stock {name}")
        )
        assert ours["tie_word_embeddings"] == theirs["tie_word_embeddings"]
        assert ours["vocab_size"] == theirs["vocab_size"]
        ours, theirs = (
            load_file(tmp_path / d / "model.safetensors") for d in (name, f"stock {name}")
        )
        assert ours.keys() == theirs.keys()
        assert all(torch.allclose(ours[k], theirs[k], atol=1e-6) for k in ours)


def test_untying_over_shards_keeps_the_index(written, tmp_path):
    """The new head is in the index, which counts the bytes that are there."""
    base, directory = written["shards"]
    for dtype in (torch.bfloat16, None):
        out = tmp_path / f"merged {dtype}"
        adapters.merge(base, directory, out, dtype=dtype)
        index = json.loads((out / "model.safetensors.index.json").read_text())
        stored = {f.name: load_file(f) for f in out.glob("*.safetensors")}
        assert index["weight_map"] == {k: f for f, tensors in stored.items() for k in tensors}
        assert "lm_head.weight" in index["weight_map"] and len(stored) > 3
        tensors = [t for shard in stored.values() for t in shard.values()]
        assert index["metadata"]["total_size"] == sum(t.nbytes for t in tensors)
    merged = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32)
    assert _close(cases.logits(merged, cases.token_ids()), torch.load(f"{directory}.pt"))


def test_a_checkpoint_that_stores_the_tied_head_too(written, tmp_path):
    """Some checkpoints of tied models hold lm_head; it is merged as what it is."""
    for name in ("lora of the head", "whole embedding", "rows"):
        base, directory = written["qwen3_moe", True, name]
        both = tmp_path / f"both {name}"
        both.mkdir()
        tensors = load_file(base / "model.safetensors")
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
        save_file(tensors, both / "model.safetensors", metadata={"format": "pt"})
        (both / "config.json").write_text((base / "config.json").read_text())
        adapters.merge(both, directory, tmp_path / name)
        merged = AutoModelForCausalLM.from_pretrained(tmp_path / name, dtype=torch.float32)
        want = torch.load(f"{directory}.pt")
        assert _close(cases.logits(merged, cases.token_ids()), want)


def test_what_peft_trains_but_does_not_save(written, served, tmp_path):
    """Biases with bias: lora_only, and the resized embedding beside LoRA of the head. Stock peft
    loads such files as another model, without a word."""
    for name, message in (
        ("lora_only", r"does not hold .*\.bias \(peft leaves"),
        ("resized, lora of the head", r"embed_tokens.weight': 128, 'lm_head.weight': 160"),
    ):
        base, directory = written[name]
        said = []
        for act in (
            lambda: adapters.load_adapter(served[base], directory, "a"),  # noqa: B023
            lambda: adapters.merge(base, directory, tmp_path / "merged"),  # noqa: B023
        ):
            with pytest.raises(ValueError, match=message) as caught:
                act()
            said.append(str(caught.value))
        assert said[0] == said[1]
    adapters.merge(*written["lora_only without biases"], tmp_path / "merged")


def test_a_head_that_is_not_the_bases(written, served):
    """The copies of the base's weights that peft writes beside LoRA of embeddings: another base's
    take its place, as in stock peft."""
    base, directory = written["qwen3_moe", False, "lora of the head"]
    file = Path(directory) / "adapter_model.safetensors"
    tensors = load_file(file)
    key = "base_model.model.lm_head.base_layer.weight"
    tensors[key] = tensors[key] * 1.5
    other = Path(f"{directory}-other")
    other.mkdir()
    save_file(tensors, other / file.name, metadata={"format": "pt"})
    (other / "adapter_config.json").write_text((directory / "adapter_config.json").read_text())
    stock = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    want = cases.logits(PeftModel.from_pretrained(stock, other), cases.token_ids())
    assert (want - torch.load(f"{directory}.pt")).norm() > 0.1 * want.norm()
    adapters.load_adapter(served[base], other, "other")
    with adapters.adapter(served[base], "other"):
        assert _close(cases.logits(served[base], cases.token_ids()), want)


def test_attention_of_a_family_whose_experts_we_refuse(tmp_path):
    """GPT-OSS keeps its experts; an adapter of the rest merges all the same."""
    path = models.build("gpt_oss", tmp_path / "base", dtype=torch.float32)
    stock = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    lora = LoraConfig(target_modules=["q_proj", "o_proj"], r=4, task_type="CAUSAL_LM")
    tuned = get_peft_model(stock, lora)
    cases.randomise(tuned, 0.1)
    tuned.save_pretrained(tmp_path / "adapter")
    want, ids = cases.logits(tuned, cases.token_ids()), cases.token_ids()
    adapters.merge(path, tmp_path / "adapter", tmp_path / "merged")
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float32)
    assert _close(cases.logits(merged, ids), want)
