"""Checkpoints whose expert tensors have names that only the model's own loader knows, as Granite's
have since transformers 5.15.
"""

from __future__ import annotations

import families
import pytest
import round_trip
import slow_experts
import torch
from safetensors.torch import load_file, save_file
from transformers.conversion_mapping import (
    get_checkpoint_conversion_mapping,
    register_checkpoint_conversion_mapping,
)
from transformers.core_model_loading import Concatenate, MergeModulelist, WeightConverter

from kt_core import hf

QWEN3 = families.Family("qwen3_moe", "Qwen3MoeForCausalLM", families.MAPPINGS[0])
GRANITE = {  # its names -> those of Qwen3-MoE
    r"block_sparse_moe\.input_linear\.weight": "mlp.experts.gate_up_proj",
    r"block_sparse_moe\.output_linear\.weight": "mlp.experts.down_proj",
}


@pytest.fixture(autouse=True)
def slow(monkeypatch):
    slow_experts.patch(monkeypatch)


def _rename(path, *pairs: tuple[str, str]) -> None:
    def new(name: str) -> str:
        for before, after in pairs:
            name = name.replace(before, after)
        return name

    file = path / "model.safetensors"
    save_file({new(n): t for n, t in load_file(file).items()}, file, metadata={"format": "pt"})


@pytest.fixture
def granite(tmp_path):
    path = tmp_path / "granite"
    round_trip.build(QWEN3, path, save_original_format=False)
    _rename(
        path,
        ("mlp.experts.gate_up_proj", "block_sparse_moe.input_linear.weight"),
        ("mlp.experts.down_proj", "block_sparse_moe.output_linear.weight"),
    )
    return path


def test_fused_tensors_that_are_renamed_on_load(granite):
    stock = QWEN3.cls.from_pretrained(granite, dtype=torch.float32, key_mapping=GRANITE)
    ours = hf.load_model(granite, format="bf16", dtype=torch.float32, key_mapping=GRANITE)
    assert round_trip.error(round_trip.logits(ours), round_trip.logits(stock)) < 1e-5


def test_names_that_nobody_knows_do_not_blame_the_file(granite):
    with pytest.raises(ValueError) as refused:
        hf.load_model(granite)
    message = str(refused.value)
    assert "such as model.layers.0.block_sparse_moe.input_linear.weight [8, 80, 64]" in message
    assert "install a transformers version that knows its names" in message
    assert "download" not in message


@pytest.fixture
def fc():
    """Qwen3-MoE's table says that experts are stored as fc1 (gate), fc3 (up) and fc2 (down)."""
    before = get_checkpoint_conversion_mapping("qwen3_moe")
    experts = "mlp.experts.*."
    table = [
        WeightConverter(
            source_patterns=[f"{experts}fc1.weight", f"{experts}fc3.weight"],
            target_patterns="mlp.experts.gate_up_proj",
            operations=[MergeModulelist(dim=0), Concatenate(dim=1)],
        ),
        WeightConverter(
            source_patterns=f"{experts}fc2.weight",
            target_patterns="mlp.experts.down_proj",
            operations=[MergeModulelist(dim=0)],
        ),
    ]
    register_checkpoint_conversion_mapping("qwen3_moe", table, overwrite=True)
    yield
    register_checkpoint_conversion_mapping("qwen3_moe", before, overwrite=True)


def test_tensors_per_expert_of_any_name_load_and_merge(fc, tmp_path):
    trained = round_trip.train(QWEN3, tmp_path / "base")
    assert any(".3.fc3.weight" in name for name in round_trip.stored(trained.base))
    assert (
        round_trip.error(
            round_trip.logits(hf.load_model(trained.base, format="bf16", dtype=torch.float32)),
            trained.plain,
        )
        < 1e-5
    )
    plain = round_trip.logits(round_trip.stock_model(QWEN3, trained.base))
    assert round_trip.error(trained.plain, plain) < 1e-5
    trained.save("auto", tmp_path / "adapter")
    assert round_trip.merged(trained, tmp_path / "adapter", tmp_path / "merged") < 1e-5
