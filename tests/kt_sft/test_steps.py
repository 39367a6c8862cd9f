"""20 optimizer steps against a model whose experts are one nn.Linear each, with stock PEFT LoRA on
them.
"""

from __future__ import annotations

import pytest
import sft_cases as cases
import torch
import torch.nn.functional as F
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import AutoModelForCausalLM

from kt_core.module import KTExpertsLinear
from kt_core.names import PROJECTIONS

STEPS = 20
# names that peft takes neither for fused experts nor for the router
LEAVES = {"wg": "gate_proj", "wu": "up_proj", "wd": "down_proj"}


class Expert(nn.Module):
    """One expert of ordinary Linears."""

    def __init__(self, gate, up, down):
        super().__init__()
        for name, weight in (("wg", gate), ("wu", up), ("wd", down)):
            linear = nn.Linear(weight.shape[1], weight.shape[0], bias=False)
            linear.weight = nn.Parameter(weight.clone())
            setattr(self, name, linear)

    def forward(self, x):
        return self.wd(F.silu(self.wg(x)) * self.wu(x))


class Experts(nn.ModuleList):
    """The call signature of transformers' experts over a list of them."""

    def forward(self, hidden_states, top_k_index, top_k_weights):
        out = torch.zeros_like(hidden_states)
        for e, expert in enumerate(self):
            slot, token = torch.where((top_k_index == e).T)
            if len(token):
                y = expert(hidden_states[token]) * top_k_weights[token, slot, None]
                out.index_add_(0, token, y)
        return out


def _per_expert(path, packed):
    """The stock model in fp32 with the weights that `packed`, the experts of its layers, hold."""
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    for layer, held in zip(model.model.layers, packed, strict=True):
        layer.mlp.experts = Experts(
            Expert(*(held.get(e, p) for p in PROJECTIONS)) for e in range(held.num_experts)
        )
    config = LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj", *LEAVES])
    return get_peft_model(model, config)


def _copy_factors(ours, reference):
    source = dict(ours.named_parameters())
    with torch.no_grad():
        for name, p in cases.trained(reference).items():
            if ".experts." not in name:
                p.copy_(source[name])
                continue
            head, tail = name.split(".experts.")
            e, projection, ab, *_ = tail.split(".")
            p.copy_(source[f"{head}.experts.{ab}.default.{LEAVES[projection]}"][int(e)])


def _losses(model):
    ids = cases.token_ids(4, 32)
    optimizer = torch.optim.AdamW(list(cases.trained(model).values()), lr=5e-3)
    losses = []
    for _ in range(STEPS):
        loss = model(input_ids=ids, labels=ids).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


@pytest.mark.parametrize(
    ("engine", "format", "bar"),
    [
        ("reference", "bf16", 1e-5),
        ("kernels", "bf16", 5e-3),
        ("kernels", "int8", 5e-3),
        ("kernels", "int4", 5e-3),
    ],
)
def test_twenty_steps(engine, format, bar, tmp_path, monkeypatch):
    """The reference's experts have the weights that ours hold: of int8 and int4, what comes out of
    the codes; bf16 ones are those of the checkpoint.
    """
    cases.use(engine, monkeypatch)
    path = cases.models.build("qwen3_moe", tmp_path / "model", dtype=torch.bfloat16)
    model = cases.load(path, format=format)
    packed = [m.experts for m in model.modules() if isinstance(m, KTExpertsLinear)]
    fused = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).model.layers[0]
    exact = torch.equal(packed[0].get(0, "down"), fused.mlp.experts.down_proj[0])
    assert exact == (format == "bf16")
    ours = cases.adapted(model, ["q_proj", "v_proj", "experts"], b=0.0)
    reference = _per_expert(path, packed)
    _copy_factors(ours, reference)
    assert sum(p.numel() for p in cases.trained(ours).values()) == sum(
        p.numel() for p in cases.trained(reference).values()
    )
    got, want = _losses(ours), _losses(reference)
    assert want[-1] < 0.8 * want[0] and got[-1] < 0.8 * got[0]
    for a, b in zip(got, want, strict=True):
        assert abs(a - b) <= bar * b, (got, want)
