"""The same training by another route: accumulation, packing, checkpointing, order of backward.

Losses agree to 1e-5 with the fp32 reference in place of the kernels and to 1e-3 with them; what
must not change a bit is compared with torch.equal. The models are fp32 (LLaMA-Factory trains in the
dtype of the checkpoint), so that nothing but the experts rounds to bf16.
"""

from __future__ import annotations

import json
import logging

import lf_cases
import pytest
import safetensors.torch
import sft_cases as cases
import torch
from transformers import AutoModelForCausalLM

from kt_core.adapters.peft_format import WEIGHTS_FILE

BARS = {"reference": 1e-5, "kernels": 1e-3}
SAMPLES = 8


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """A workspace with fp32 weights and a second data set, "lengths", of unequal answers."""
    root = lf_cases.workspace(tmp_path_factory.mktemp("lf"), dtype=torch.float32)
    answers = [
        {
            "instruction": f"Count to {i}.",
            "input": "",
            "output": " ".join(map(str, range(1, i + 1))),
        }
        for i in range(2, 2 + SAMPLES)
    ]
    (root / "lengths.json").write_text(json.dumps(answers))
    info = json.loads((root / "dataset_info.json").read_text())
    info["lengths"] = {"file_name": "lengths.json"}
    (root / "dataset_info.json").write_text(json.dumps(info))
    return root


@pytest.fixture(params=BARS)
def engine(request, monkeypatch):
    cases.use(request.param, monkeypatch)
    return request.param


def _losses(root, name, **changes):
    args = lf_cases.arguments(root, name, **({"max_steps": 6} | changes))
    lf_cases.run(args)
    return lf_cases.losses(args["output_dir"])


def test_f5_accumulation_of_four_against_a_batch_of_four(engine, root):
    """Micro-batches of one against one batch of four: same samples, padded differently."""
    changes = {"dataset": "lengths", "lora_dropout": 0.0}
    one = _losses(
        root, "acc", per_device_train_batch_size=1, gradient_accumulation_steps=4, **changes
    )
    four = _losses(
        root, "batch", per_device_train_batch_size=4, gradient_accumulation_steps=1, **changes
    )
    assert one[-1] < 0.9 * one[0]
    assert four == pytest.approx(one, rel=BARS[engine])


def test_packing_against_padding(engine, root):
    """All eight samples are one step: as eight padded rows, and as one packed row in which a token
    sees only its own sample.
    """
    changes = {"dataset": "lengths", "gradient_accumulation_steps": 1, "cutoff_len": 512}
    padded = _losses(root, "padded", per_device_train_batch_size=SAMPLES, **changes)
    changes |= {"packing": True, "neat_packing": True}
    packed = _losses(root, "packed", per_device_train_batch_size=1, **changes)
    assert padded[-1] < 0.9 * padded[0]
    assert packed == pytest.approx(padded, rel=BARS[engine])


@pytest.mark.parametrize("router_loss", [None, 1.0])
def test_f5_checkpointing_on_and_off_give_the_same_bits(router_loss, root, caplog, monkeypatch):
    """Losses and the adapter, with dropout, whatever is kept or computed again. Reentrant
    checkpoints lose the gradient of a router loss, as in stock: whoever asks for them is told."""
    monkeypatch.setattr(logging.getLogger("kt"), "propagate", True)
    runs = {
        "off": {"disable_gradient_checkpointing": True},
        "retain": {},
        "recompute": {"kt_cpu_activation": "recompute"},
        "reentrant": {"kt_cpu_activation": "recompute", "use_reentrant_gc": True},
    }
    results = {}
    for name, changes in runs.items():
        caplog.clear()
        changes |= {"lora_dropout": 0.1, "max_steps": 3, "moe_aux_loss_coef": router_loss}
        losses = _losses(root, name, **changes)
        results[name] = losses, safetensors.torch.load_file(root / name / WEIGHTS_FILE)
        lost = router_loss is not None and name == "reentrant"
        assert ("use_reentrant_gc=True keeps no gradient of the router loss" in caplog.text) == lost
    losses, tensors = results.pop("off")
    if router_loss is not None:
        others, adapter = results.pop("reentrant")
        assert others[0] == losses[0] and others[1:] != losses[1:]
        assert not all(torch.equal(adapter[key], tensors[key]) for key in tensors)
    for name, (others, adapter) in results.items():
        assert others == losses, name
        assert all(torch.equal(adapter[key], tensors[key]) for key in tensors), name


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
@pytest.mark.parametrize("activation", ["retain", "recompute"])
def test_f5_two_forwards_then_two_backwards(engine, activation, order, tmp_path):
    """Through the whole model under checkpointing: each gradient is that of its forward alone.

    Both add into .grad, so the sum of two is compared; a sum of two has one order only.
    """
    model = cases.adapted(cases.load(cases.checkpoint(tmp_path), activation=activation)).train()
    model.enable_input_require_grads()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    batches = cases.token_ids(4, 24).split(2)
    alone = [cases.gradients(model, ids) for ids in batches]
    model.zero_grad()
    losses = [model(input_ids=ids, labels=ids).loss for ids in batches]
    for k in order:
        losses[k].backward()
    for name, parameter in cases.trained(model).items():
        assert torch.equal(parameter.grad, alone[0][name] + alone[1][name]), name


@pytest.fixture(scope="module")
def long_model(tmp_path_factory):
    """A checkpoint that takes 1,024 tokens, the stock model, and ours with a random adapter."""
    path = cases.models.build(
        "qwen3_moe", tmp_path_factory.mktemp("f9") / "model", max_position_embeddings=1024
    )
    stock = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    return stock, cases.adapted(cases.load(path)).train()


@pytest.mark.parametrize("batch", [1, 2, 3, 8])
@pytest.mark.parametrize("length", [1, 17, 1024])
def test_f9_any_batch_and_length(batch, length, long_model):
    """Logits against the stock model, and a backward that reaches every trained parameter."""
    stock, model = long_model
    ids = torch.randint(3, 120, (batch, length), generator=torch.Generator().manual_seed(length))
    with torch.no_grad(), model.disable_adapter():
        want, got = stock(input_ids=ids).logits, model(input_ids=ids).logits
    assert got.shape == (batch, length, 128)
    for row, expected in zip(got, want, strict=True):
        assert (row - expected).norm() <= 2e-2 * expected.norm()
    model.zero_grad()
    model(input_ids=ids).logits.square().mean().backward()
    for name, parameter in cases.trained(model).items():
        assert parameter.grad is not None and parameter.grad.isfinite().all(), name
        if "lora_B" in name and "experts" in name and batch * length >= 17:
            assert parameter.grad.any(), name
