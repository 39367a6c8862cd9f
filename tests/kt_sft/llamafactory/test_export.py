"""What leaves a training run: adapters for servers, and merged checkpoints."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import lf_cases
import models
import pytest
import sft_cases as cases
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from kt_core import adapters, hf
from kt_core.adapters.peft_format import CONFIG_FILE, WEIGHTS_FILE, read_adapter


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return lf_cases.workspace(tmp_path_factory.mktemp("export"))


@pytest.fixture(scope="module")
def tuned(root):
    args = lf_cases.arguments(root, "tuned")
    lf_cases.run(args)
    return Path(args["output_dir"])


def _export(root, directory, name, **changes):
    from llamafactory.train.tuner import export_model

    out = root / name
    args = {
        "model_name_or_path": str(root / "model"),
        "adapter_name_or_path": str(directory),
        "template": "chatml",
        "use_kt": True,
        "export_dir": str(out),
    }
    export_model({k: v for k, v in (args | changes).items() if v is not None})
    return out


def _with_adapter(root, directory, ids):
    model = hf.load_model(root / "model", format="bf16")
    adapters.load_adapter(model, directory, "a")
    with adapters.adapter(model, "a"):
        return cases.logits(model, ids)


def test_fused_layout_through_llamafactory(root, tuned):
    """The same training, saved for servers that want fused experts: the same factors."""
    args = lf_cases.arguments(root, "fused", kt_config={"format": "bf16", "export_layout": "fused"})
    lf_cases.run(args)
    out = Path(args["output_dir"])
    tensors, config = load_file(out / WEIGHTS_FILE), json.loads((out / CONFIG_FILE).read_text())
    path = "base_model.model.model.layers.0.mlp.experts"
    shapes = {k.removeprefix(path): tuple(t.shape) for k, t in tensors.items() if path in k}
    assert shapes == {  # E = 8, H = 64, I = 40, r = 4; gate and up together have rank 8
        ".base_layer.lora_A.weight": (8 * 8, 64),
        ".base_layer.lora_B.weight": (80, 8 * 8),
        ".lora_A.weight": (8 * 4, 40),
        ".lora_B.weight": (64, 8 * 4),
    }
    assert config["target_parameters"] == ["mlp.experts.down_proj", "mlp.experts.gate_up_proj"]
    assert (config["r"], config["lora_alpha"]) == (8, 16)
    assert config["rank_pattern"][r"experts\.down_proj"] == 4
    fused, standard = read_adapter(out), read_adapter(tuned)
    for module, projections in standard.experts.items():
        for p, f in projections.items():
            g = fused.experts[module][p]
            assert torch.equal(f.a, g.a) and torch.equal(f.b, g.b) and f.scaling == g.scaling
    more = lf_cases.arguments(root, "more", adapter_name_or_path=str(out), max_steps=1)
    lf_cases.run(more)
    assert lf_cases.losses(more["output_dir"])[0] < lf_cases.losses(out)[0]


def test_a_fused_file_that_was_changed(root, tmp_path, tuned):
    from kt_core.adapters.peft_config import write_adapter

    data = read_adapter(tuned)
    write_adapter(tmp_path, data, model_type="qwen3_moe", linear_paths=[], layout="fused")
    tensors = load_file(tmp_path / WEIGHTS_FILE)
    from safetensors import safe_open
    from safetensors.torch import save_file

    with safe_open(tmp_path / WEIGHTS_FILE, "pt") as file:
        metadata = file.metadata()
    key = next(k for k in tensors if k.endswith("base_layer.lora_B.weight"))
    tensors[key] = torch.ones_like(tensors[key])
    save_file(tensors, tmp_path / WEIGHTS_FILE, metadata=metadata)
    with pytest.raises(ValueError, match="gate is not zero outside of the factors"):
        read_adapter(tmp_path)


def test_llamafactory_export_merges_into_bf16(root, tuned):
    out = _export(root, tuned, "merged")
    weights = {}
    for file in out.glob("*.safetensors"):
        weights |= load_file(file)
    base = load_file(root / "model" / "model.safetensors")
    assert weights.keys() == base.keys()
    assert {t.dtype for t in weights.values()} == {torch.bfloat16}
    data = read_adapter(tuned)
    for key, f, e in (
        (
            "model.layers.1.mlp.experts.3.up_proj",
            data.experts["model.layers.1.mlp.experts"]["up"],
            3,
        ),
        ("model.layers.0.self_attn.q_proj", data.dense["model.layers.0.self_attn.q_proj"], ...),
    ):
        delta = f.scaling * (f.b[e] @ f.a[e])
        want = (base[f"{key}.weight"].float() + delta).bfloat16()
        assert torch.equal(weights[f"{key}.weight"], want)
    ids = cases.token_ids()
    merged = AutoModelForCausalLM.from_pretrained(out, dtype=torch.bfloat16)
    want, got = _with_adapter(root, tuned, ids), cases.logits(merged, ids)
    plain = cases.logits(AutoModelForCausalLM.from_pretrained(root / "model"), ids)
    assert (got - want).norm() < 0.02 * want.norm()
    assert (plain - want).norm() > 0.05 * want.norm()
    assert AutoTokenizer.from_pretrained(out).padding_side == "left"
    assert (out / "Modelfile").is_file() and not list(root.glob(".merged*"))
    wide = _export(root, tuned, "merged32", infer_dtype="float32")
    assert {t.dtype for t in load_file(wide / "model.safetensors").values()} == {torch.float32}
    config = json.loads((wide / "config.json").read_text())
    assert config.get("dtype", config.get("torch_dtype")) == "float32"


def test_export_of_new_tokens_and_of_a_value_head(root):
    words = {"add_special_tokens": "<|new1|>,<|new2|>", "resize_vocab": True, "bf16": True}
    args = lf_cases.arguments(root, "words", max_steps=2, **words)
    lf_cases.run(args)
    trained = Path(args["output_dir"])
    (trained / "value_head.safetensors").write_bytes(b"head")
    out = _export(root, trained, "merged-words", stage="rm")
    weights = load_file(out / "model.safetensors")
    whole = load_file(trained / WEIGHTS_FILE)["base_model.model.lm_head.weight"]
    assert torch.equal(weights["lm_head.weight"], whole.bfloat16())
    assert json.loads((out / "config.json").read_text())["vocab_size"] == len(whole)
    assert (out / "value_head.safetensors").read_bytes() == b"head"
    AutoModelForCausalLM.from_pretrained(out)


def _tensors(directory):
    out = {}
    for file in Path(directory).glob("*.safetensors"):
        out |= load_file(file)
    return out


def _same_as_stock(root, adapters, name, **options):
    """Our export and LLaMA-Factory's own give the same tensors and the same config."""
    ours = _export(root, adapters, f"{name}-ours", infer_dtype="float32", **options)
    stock = _export(root, adapters, f"{name}-stock", infer_dtype="float32", use_kt=None, **options)
    mine, theirs = _tensors(ours), _tensors(stock)
    assert mine.keys() == theirs.keys()
    for key, tensor in mine.items():
        assert torch.allclose(tensor, theirs[key], atol=2e-6), key
    configs = [json.loads((d / "config.json").read_text()) for d in (ours, stock)]
    for key in ("tie_word_embeddings", "vocab_size"):
        assert configs[0][key] == configs[1][key]
    assert (ours / "Modelfile").read_text() == (stock / "Modelfile").read_text()
    assert len(AutoTokenizer.from_pretrained(ours)) == len(AutoTokenizer.from_pretrained(stock))
    return ours


@pytest.fixture(scope="module")
def tied(tmp_path_factory):
    where = tmp_path_factory.mktemp("tied")
    return lf_cases.workspace(where, tie_word_embeddings=True, dtype=torch.float32, vocab_size=264)


# The template adds two tokens to 260, so that these go beyond the 264 rows of `tied`.
WORDS = {"add_special_tokens": "<|new1|>,<|new2|>,<|new3|>", "resize_vocab": True}
MORE = {"add_tokens": "kuchen,torte,keks"}


@pytest.mark.parametrize(
    ("name", "training", "options"),
    [
        ("embed", {"additional_target": "embed_tokens"}, {}),
        ("both", {"additional_target": "embed_tokens,lm_head"}, {}),
        ("words", WORDS, WORDS),
        ("add", MORE, MORE),
    ],
)
def test_a_tied_model_is_exported_as_stock_does(name, training, options, tied):
    """Tied embeddings, of which the training changes one or both, or to which it adds tokens."""
    args = lf_cases.arguments(tied, name, max_steps=1, **training)
    lf_cases.run(args)
    out = _same_as_stock(tied, args["output_dir"], name, **options)
    assert json.loads((out / "config.json").read_text())["tie_word_embeddings"] is False


def test_adapters_below_and_beside_one_another(tied):
    """adapter_folder is a folder below the adapter, in export as in every other command; two
    adapters are merged one after the other."""
    for name, seed in (("first", 5), ("second", 9)):
        lf_cases.run(lf_cases.arguments(tied, name, max_steps=2, seed=seed))
    first, second, nest = tied / "first", tied / "second", tied / "nest"
    shutil.copytree(first, nest)
    shutil.copytree(second, nest / "below")
    below = _same_as_stock(tied, nest, "below", adapter_folder="below")
    expected = _tensors(_export(tied, second, "direct", infer_dtype="float32"))
    other = _tensors(_export(tied, nest, "above", infer_dtype="float32"))
    assert all(torch.equal(t, expected[k]) for k, t in _tensors(below).items())
    assert any(not torch.equal(t, expected[k]) for k, t in other.items())
    both = _tensors(_same_as_stock(tied, f"{first},{second}", "two"))
    base = _tensors(tied / "model")
    for key, weight in base.items():
        added = (expected[key] - weight) + (other[key] - weight)
        assert torch.allclose(both[key], weight + added, atol=1e-6)
    assert not list(tied.glob(".two*"))
    again = lf_cases.arguments(tied, "again", adapter_name_or_path=str(nest), max_steps=1)
    lf_cases.run(again | {"adapter_folder": "below"})  # training continues the one below
    started = lf_cases.arguments(tied, "started", adapter_name_or_path=str(second), max_steps=1)
    lf_cases.run(started)
    assert lf_cases.losses(again["output_dir"]) == lf_cases.losses(started["output_dir"])


def test_two_adapters_are_refused_where_one_is_loaded(root, tuned):
    from llamafactory.chat import ChatModel

    message = "names 2 adapters, of which use_kt loads one; merge the others"
    two = {"adapter_name_or_path": f"{tuned},{tuned}"}
    with pytest.raises(ValueError, match=message):
        lf_cases.run(lf_cases.arguments(root, "never", **two))
    with pytest.raises(ValueError, match=message):
        args = {"model_name_or_path": str(root / "model"), "template": "chatml", "use_kt": True}
        ChatModel(args | two)


def test_only_what_describes_the_merged_model_is_copied(root, tuned, tmp_path):
    base = tmp_path / "base"
    shutil.copytree(root / "model", base)
    kept = {
        "generation_config.json": "{}",
        "preprocessor_config.json": "{}",
        "video_preprocessor_config.json": "{}",
        "chat_template.jinja": "x",
        "tokenizer.model": "x",
        "merges.txt": "x",
        "LICENSE": "x",
        "NOTICE.txt": "x",
        "additional_chat_templates/tool.jinja": "x",
    }
    dropped = (
        "pytorch_model.bin",
        "pytorch_model.bin.index.json",
        "model-q4.gguf",
        "consolidated.safetensors",
        "consolidated.00.pth",
        "model.safetensors.index.json",  # transformers reads model.safetensors where that is
        "params.json",
        "onnx/model.onnx",
        "original/params.json",
        "flax_model.msgpack",
        "tf_model.h5",
        "training_args.bin",
        "README.md",
        ".gitattributes",
        "modeling_mine.py",
        "an_adapter/adapter_model.safetensors",
    )
    old = {name: '{"weight_map": {}}' for name in dropped if name.endswith(".json")}
    for name in (*kept, *dropped):
        (base / name).parent.mkdir(exist_ok=True)
        (base / name).write_text((kept | old).get(name, "old weights"))
    adapters.merge(base, tuned, tmp_path / "merged")
    there = {
        f.relative_to(tmp_path / "merged").as_posix() for f in (tmp_path / "merged").rglob("*")
    }
    tokenizer = {f.name for f in (root / "model").glob("*token*")}
    files = {*kept, *tokenizer, "config.json", "model.safetensors", "additional_chat_templates"}
    assert there == files
    config = json.loads((base / "config.json").read_text())
    (base / "config.json").write_text(
        json.dumps(config | {"auto_map": {"AutoTokenizer": "modeling_mine.Mine"}})
    )
    adapters.merge(base, tuned, tmp_path / "code")
    assert (tmp_path / "code" / "modeling_mine.py").is_file()


def test_half_precision_is_that_of_the_checkpoint(root, tuned, tmp_path):
    base = tmp_path / "half"
    models.build("qwen3_moe", base, tokenizer=True, vocab_size=300, dtype=torch.float16)
    out = _export(root, tuned, "half", model_name_or_path=str(base))
    assert {t.dtype for t in _tensors(out).values()} == {torch.float16}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"export_dir": None}, "export_dir is missing"),
        ({"adapter_name_or_path": None}, "adapter_name_or_path is missing"),
        ({"export_size": 1}, "export_size=1 is not supported with use_kt; remove it: the base"),
        ({"rope_scaling": "linear"}, "rope_scaling='linear' is not supported with use_kt; remove"),
        ({"use_kv_cache": False}, "use_kv_cache=False is not supported with use_kt; remove it"),
        (
            {"add_tokens": ",".join(f"<{i}>" for i in range(41))},
            "has 303 tokens but the merged embeddings would have 300 rows",
        ),
        ({"export_hub_model_id": "a/b"}, "export_hub_model_id='a/b' is not supported"),
        ({"export_dir": "model"}, "exists; give a directory that does not"),
    ],
)
def test_exports_that_are_refused(changes, message, root, tuned):
    if changes.get("export_dir"):
        changes["export_dir"] = str(root / changes["export_dir"])
    with pytest.raises(ValueError, match=message):
        _export(root, tuned, "refused", **changes)


def test_f1_an_interrupted_replacement_leaves_nothing_that_loads(tmp_path, monkeypatch):
    """New weights beside an old config would load and be wrong."""
    from kt_sft.lora import adapter_io

    path = cases.checkpoint(tmp_path)
    model = cases.adapted(cases.load(path))
    model.save_pretrained(tmp_path / "adapter")
    replace, done = adapter_io.os.replace, []

    def interrupted(source, target):
        if done:
            raise KeyboardInterrupt
        done.append(target)
        replace(source, target)

    monkeypatch.setattr(adapter_io.os, "replace", interrupted)
    with pytest.raises(KeyboardInterrupt):
        model.save_pretrained(tmp_path / "adapter")
    with pytest.raises(FileNotFoundError, match=f"has no {CONFIG_FILE}"):
        read_adapter(tmp_path / "adapter")
