"""KTConfig: what the YAML may say, and what it is told when it says something else."""

from __future__ import annotations

import dataclasses

import pytest

from kt_sft.config import KTConfig, resolve


def test_defaults_and_every_key():
    assert KTConfig.from_mapping(None) == KTConfig()
    values = {
        "format": "int4",
        "group": 64,
        "threads": 2,
        "numa_nodes": 1,
        "activation": "recompute",
        "packed_dir": "packed",
        "layer_major": True,
        "check_finite": True,
        "gather_rows": False,
        "dense_dtype": "fp32",
        "lora_rank": {"experts": 4},
        "export_layout": "fused",
        "merged_eval": 2,
    }
    config = KTConfig.from_mapping(values)
    assert dataclasses.asdict(config) == values
    assert set(values) == {f.name for f in dataclasses.fields(KTConfig)}


def test_the_command_line_gives_json():
    assert KTConfig.from_mapping('{"format": "bf16"}').format == "bf16"
    with pytest.raises(ValueError, match="is not JSON"):
        KTConfig.from_mapping("{format: bf16}")


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"fromat": "int8"}, "unknown key fromat='int8'; did you mean format"),
        ({"experts": "hot"}, "experts='hot' is not supported: LoRA goes on all experts"),
        ({"merged_eval": -1}, "merged_eval=-1 is not a whole number of at least 0"),
        (
            {"export_layout": "3d"},
            "export_layout='3d' is not known; use one of auto, per_expert, fused",
        ),
        ({"zzz": 1}, "unknown key zzz=1; known keys are format"),
        ({"format": "int3"}, "format='int3' is not known; use one of bf16, fp8, int8"),
        ({"group": 48}, "group=48 is not known"),
        ({"group": 32, "format": "bf16"}, "group=32 has no meaning with format=bf16"),
        ({"group": True}, "group=True is not a whole number"),
        ({"threads": 0}, "threads=0 is not a whole number of at least 1"),
        ({"threads": "4"}, "threads='4' is not a whole number"),
        ({"threads": True}, "threads=True is not a whole number"),
        ({"numa_nodes": -1}, "numa_nodes=-1"),
        (
            {"numa_nodes": 4, "threads": 3},
            "numa_nodes=4 needs a thread for every node, but threads=3",
        ),
        ({"activation": "keep"}, "activation='keep' is not known; use one of retain, recompute"),
        ({"packed_dir": ""}, "packed_dir='' is not a directory name"),
        ({"layer_major": 1}, "layer_major=1 is neither true nor false"),
        ({"check_finite": "no"}, "check_finite='no' is neither true nor false"),
        ({"gather_rows": "auto"}, "gather_rows='auto' is neither true nor false"),
        ({"dense_dtype": "fp16"}, "dense_dtype='fp16' is not known; use one of auto, bf16, fp32"),
        ([1], "is not a mapping"),
    ],
)
def test_bad_values_name_key_value_and_fix(values, message):
    with pytest.raises(ValueError, match=message):
        KTConfig.from_mapping(values)


def test_the_alias_of_activation():
    assert resolve(None, "recompute").activation == "recompute"
    assert resolve({"activation": "recompute"}, "recompute").activation == "recompute"
    with pytest.raises(ValueError, match="contradict each other; keep one"):
        resolve({"activation": "retain"}, "recompute")
    with pytest.raises(ValueError, match="kt_cpu_activation='x' is not known"):
        resolve(None, "x")
