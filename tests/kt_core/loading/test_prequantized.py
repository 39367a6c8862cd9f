"""Checkpoints quantized in a way that no container reads are refused in one sentence, by everything
that reads checkpoints, before a quantizer of somebody else asks for packages.
"""

from __future__ import annotations

import json
import shutil

import lf_cases
import models
import pytest
import torch
from safetensors.torch import load_file, save_file

from kt_core import adapters, hf
from kt_core.loading import prequantized
from kt_core.serve import loading
from kt_core.settings import ExpertSettings
from kt_sft import session

# quant_method, further contents of quantization_config, what the sentence calls it
METHODS = [
    ("hqq", {"quant_config": {}}, "HQQ"),
    ("torchao", {"quant_type": "int4_weight_only"}, "torchao"),
    ("quanto", {"weights": "int8"}, "quanto"),
    ("a method of tomorrow", {}, "a method of tomorrow"),
]
# One weight of an expert -> the tensors that a quantizer leaves in its place
TENSORS = {
    "FP8 in blocks": {".weight": (torch.float8_e4m3fn, [40, 64]), ".weight_scale_inv": None},
    "GPTQ or AWQ": {".qweight": None, ".qzeros": None, ".g_idx": None, ".scales": None},
    "compressed-tensors": {".weight_packed": None, ".weight_shape": None},
    "bitsandbytes (4-bit)": {".weight": (torch.uint8, [1280, 1]), ".weight.absmax": None},
    "bitsandbytes (8-bit)": {".weight": (torch.int8, [40, 64]), ".SCB": None},
}
WEIGHT = "model.layers.1.mlp.experts.3.up_proj"


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    path = tmp_path_factory.mktemp("base") / "model"
    models.build("qwen3_moe", path)
    return path


def copy_of(base, tmp_path):
    shutil.copytree(base, tmp_path / "model")
    return tmp_path / "model"


def with_config(base, tmp_path, method, more):
    path = copy_of(base, tmp_path)
    config = json.loads((path / "config.json").read_text())
    config["quantization_config"] = {"quant_method": method, **more}
    (path / "config.json").write_text(json.dumps(config))
    return path


def readers(path, tmp_path):
    """Everything that takes a checkpoint, by name."""
    return {
        "load_model": lambda: hf.load_model(path),
        "load_for_training": lambda: session.load_for_training(str(path)),
        "serve": lambda: loading.check(str(path), None, [], ExpertSettings()),
        "merge": lambda: adapters.merge(path, tmp_path / "no adapter", tmp_path / "merged"),
    }


@pytest.mark.parametrize(("method", "more", "named"), METHODS, ids=[m[0] for m in METHODS])
def test_a_quantized_checkpoint_is_named(base, tmp_path, method, more, named):
    path = with_config(base, tmp_path, method, more)
    for who, read in readers(path, tmp_path).items():
        with pytest.raises(ValueError, match="give the model's bf16 or fp16 checkpoint") as caught:
            read()
        text = str(caught.value)
        assert text.startswith(f"{path} is a checkpoint quantized with {named}"), who
        assert f"quant_method: {method}" in text and "\n" not in text, who


@pytest.mark.parametrize("what", TENSORS)
def test_its_tensors_give_it_away_too(base, tmp_path, what):
    """config.json is silent: somebody's script, or GPTQ's and AWQ's own first files."""
    path = copy_of(base, tmp_path)
    (file,) = path.glob("*.safetensors")
    tensors = load_file(file)
    del tensors[f"{WEIGHT}.weight"]
    for end, form in TENSORS[what].items():
        dtype, shape = form or (torch.int32, [4, 4])
        tensors[WEIGHT + end] = torch.zeros(shape, dtype=torch.uint8).to(dtype)
    save_file(tensors, file, metadata={"format": "pt"})
    for who, read in readers(path, tmp_path).items():
        with pytest.raises(ValueError) as caught:
            read()
        assert f"holds weights quantized with {what} (its tensor" in str(caught.value), who
        assert "take config.json from where" in str(caught.value)


def test_an_index_is_enough(base, tmp_path):
    path = copy_of(base, tmp_path)
    prequantized.refuse_directory(path)  # as it is, it is not
    index = {"weight_map": {"model.layers.0.mlp.experts.gate_up_proj_blocks": "a"}}
    (path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ValueError, match="MXFP4"):
        hf.load_model(path)


@pytest.mark.parametrize("part", ["text_config", "thinker_config.text_config", ""])
@pytest.mark.parametrize("key", ["quantization_config", "compression_config"])
def test_a_part_of_a_model_may_be_quantized(part, key):
    config = {key: {"quant_method": "torchao"}}
    for name in reversed(part.split(".") if part else []):
        config = {"vision_config": {}, name: config}
    with pytest.raises(ValueError, match=rf"torchao \({key}.quant_method: torchao"):
        prequantized.refuse(config, "model")


@pytest.mark.parametrize("key", ["quantization_config", "load_in_4bit", "gguf_file"])
def test_a_quantizer_of_transformers_is_not_asked_for(base, key):
    for load in (hf.load_model, session.load_for_training):
        with pytest.raises(
            ValueError, match=f"{key} asks transformers for quantized weights.*int8"
        ):
            load(str(base), **{key: {"load_in_4bit": True}})


def test_a_directory_of_gguf_files(base, tmp_path):
    path = copy_of(base, tmp_path)
    for file in path.glob("*.safetensors"):
        file.unlink()
    (path / "model-q4_k_m.gguf").write_bytes(b"GGUF")
    for _, read in readers(path, tmp_path).items():
        with pytest.raises(ValueError, match=r"quantized with GGUF \(its only weights"):
            read()


def test_commands_of_llamafactory_end_before_they_begin(base, tmp_path):
    """Training, and inference and export alike."""
    from llamafactory.hparams import parser

    path = with_config(base, tmp_path, "hqq", {})
    train = lf_cases.arguments(tmp_path, model_name_or_path=str(path), kt_config=None)
    load = {"model_name_or_path": str(path), "template": "chatml", "use_kt": True}
    for parse, arguments in (
        (parser.get_train_args, train),
        (parser.get_infer_args, load),
        (parser.get_infer_args, load | {"export_dir": str(tmp_path / "merged")}),
        (parser.get_eval_args, load | {"task": "mmlu_test"}),
    ):
        with pytest.raises(ValueError, match="quantized with HQQ"):
            parse(dict(arguments))
