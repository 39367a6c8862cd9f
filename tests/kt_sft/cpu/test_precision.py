"""The dtype of the layers beside the experts in bf16 runs on CPUs."""

from __future__ import annotations

import os

import lf_cases
import pytest
import torch
from cpus import MACHINES
from transformers import TrainerCallback

from kt_core import _kt, runtime
from kt_sft.cpu import dense_ops, precision

BF16_UNITS = {"sapphire_rapids", "zen4", "zen5"}


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return lf_cases.workspace(tmp_path_factory.mktemp("precision"))


@pytest.mark.parametrize("machine", MACHINES)
def test_cpus_with_units_for_bf16(machine):
    fake, best, _ = MACHINES[machine]
    _kt.testing.use_cpu(fake)
    try:
        built = best in {k["isa"] for k in runtime.kernels()}
        assert runtime.multiplies_bf16() == (built and machine in BF16_UNITS)
    finally:
        _kt.testing.use_cpu(None)
        runtime.force_isa(os.environ.get("KT_ISA"))


class _Look(TrainerCallback):
    """The dtypes of a weight that is no expert's, of what goes to the experts, and of LoRA."""

    def __init__(self) -> None:
        self.found: set[tuple[torch.dtype, torch.dtype, torch.dtype]] = set()
        self.fused: bool | None = None

    def on_train_begin(self, args, state, control, **kw):
        model = kw["model"]
        weight = model.get_base_model().get_input_embeddings().weight
        layer = model.get_base_model().model.layers[0]
        factor = next(p for p in model.parameters() if p.requires_grad)
        self.fused = isinstance(layer.input_layernorm, dense_ops._RmsNorm)
        assert self.fused == isinstance(layer.self_attn.q_proj, dense_ops._LoraLinear)
        layer.mlp.register_forward_pre_hook(
            lambda module, given: self.found.add((weight.dtype, given[0].dtype, factor.dtype))
        )


def _run(root, name, monkeypatch, **changes):
    """(dtypes, losses) of a run."""
    from llamafactory.train import tuner

    look = _Look()
    run_sft = tuner.run_sft

    def with_look(*args):
        args[-1].append(look)
        return run_sft(*args)

    with monkeypatch.context() as patch:
        patch.setattr(tuner, "run_sft", with_look)
        args = lf_cases.arguments(root, name, **changes)
        lf_cases.run(args)
    (dtypes,) = look.found
    assert look.fused == (dtypes[0] is torch.float32)
    return dtypes, lf_cases.losses(args["output_dir"])


def test_what_the_layers_beside_the_experts_are(root, monkeypatch):
    single, half = torch.float32, torch.bfloat16
    losses, said = {}, []
    monkeypatch.setattr(precision.log, "info", lambda text, *args: said.append(text % args))
    for asked, units, expected in (
        ("auto", False, single),
        ("auto", True, half),
        ("fp32", True, single),
        ("bf16", False, half),
    ):
        monkeypatch.setattr(runtime, "multiplies_bf16", lambda units=units: units)
        said.clear()
        config = {"format": "int8", "dense_dtype": asked}
        changes = {"bf16": True, "kt_config": config}
        found, losses[asked, units] = _run(root, "dtype", monkeypatch, **changes)
        assert found == (expected, expected, single)
        told = [line for line in said if "beside the experts are in fp32, not bf16" in line]
        assert len(told) == (expected == single)
    assert losses["auto", False] == losses["fp32", True] != losses["bf16", False]
    assert losses["auto", True] == losses["bf16", False]
    assert losses["bf16", False] == pytest.approx(losses["fp32", True], rel=5e-3)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({}, "it is for runs with bf16: true"),
        ({"fp16": True}, "it is for runs with bf16: true"),
        ({"pure_bf16": True}, "pure_bf16=True asks for bf16 throughout"),
    ],
)
def test_where_it_cannot_act(root, changes, reason):
    config = {"format": "int8", "dense_dtype": "fp32"}
    with pytest.raises(ValueError, match=f"dense_dtype=fp32 cannot act: {reason}; remove"):
        lf_cases.run(lf_cases.arguments(root, "none", kt_config=config, **changes))
