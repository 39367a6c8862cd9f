"""`make test-transformers`: what it compares, what it lets pass, and that our experts act in it."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]

# A family's tests as transformers has them: the first needs right experts, forward and backward,
# also after the weights have changed; the second counts calls of transformers' own.
SUITE = """
import copy
import torch
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM
from transformers.models.qwen3_moe import modeling_qwen3_moe as modeling

EAGER = modeling.Qwen3MoeExperts.forward


def model():
    torch.manual_seed(0)
    return Qwen3MoeForCausalLM(Qwen3MoeConfig(
        vocab_size=64, hidden_size=64, intermediate_size=72, moe_intermediate_size=40, head_dim=16,
        num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, num_experts=8,
        num_experts_per_tok=2,
    ))


class TestModel:
    def test_values(self):
        experts = model().model.layers[0].mlp.experts
        x = torch.randn(7, 64, requires_grad=True)
        index, weights = torch.randint(0, 8, (7, 2)), torch.rand(7, 2)
        for _ in range(2):
            found = []
            for forward in (experts.forward, lambda *a: EAGER(experts, *a)):
                out = forward(x, index, weights)
                found.append((out.detach(), torch.autograd.grad(out.square().sum(), x)[0]))
            for got, want in zip(*found):
                assert (got - want).norm() < 0.02 * want.norm()
            with torch.no_grad():
                experts.down_proj.mul_(3)

    def test_{name}(self):
        assert type(model().model.layers[0].mlp.experts).forward is EAGER
"""


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    import model_tests as module

    monkeypatch.setattr(module, "FOLDER", tmp_path / "build")
    monkeypatch.setattr(module, "PAGE", tmp_path / "page.md")
    monkeypatch.setattr(module, "install_parameterized", lambda: None)
    return module


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    root = tmp_path / "transformers"
    (root / "src" / "transformers").mkdir(parents=True)
    return root


def suite(checkout: Path, name: str) -> None:
    family = checkout / "tests" / "models" / "qwen3_moe"
    family.mkdir(parents=True)
    (family / "test_modeling_qwen3_moe.py").write_text(SUITE.replace("{name}", name))


def test_what_fails_with_our_experts_must_be_expected(script, checkout, monkeypatch):
    suite(checkout, "calls")
    arguments = ["--transformers", str(checkout), "qwen3_moe"]
    with pytest.raises(SystemExit, match="qwen3_moe: TestModel::test_calls passes as it is, not"):
        script.main(arguments)
    runs = {w: (script.FOLDER / f"qwen3_moe-{w}.log").read_text() for w in ("stock", "ours")}
    assert "2 passed" in runs["stock"] and "1 failed, 1 passed" in runs["ours"]
    monkeypatch.setattr(script, "run", lambda family, checkout, which: OUTCOMES[which])
    (xml, json) = ((script.FOLDER / f"qwen3_moe-ours.{end}").read_text() for end in ("xml", "json"))
    OUTCOMES = {"ours": script.outcome_of(xml, json)}
    OUTCOMES["stock"] = script.Outcome(dict.fromkeys(OUTCOMES["ours"].ended, "passed"), 0, {})
    monkeypatch.setattr(script, "EXPECTED", {"test_call*": "it counts calls"})
    script.main(arguments)
    page = script.PAGE.read_text()
    assert "| qwen3_moe | 2 | 2 | 1 |" in page
    assert "- it counts calls:\n  - `test_calls` (qwen3_moe)\n" in page


def test_a_run_without_our_experts_is_no_success(script):
    same = {"T::test_a": "passed"}
    stock = script.Outcome(same, 0, {})
    assert script.unexpected(stock, script.Outcome(same, 5, {})) == []
    assert "never ran: {'XExperts': 'no'}" in script.unexpected(
        stock, script.Outcome(same, 0, {"XExperts": "no"})
    )[0]  # fmt: skip
    nothing = script.Outcome({"T::test_a": "skipped"}, 0, {})
    assert "no test passes" in script.unexpected(nothing, script.Outcome(same, 5, {}))[0]
    assert script.unexpected(stock, script.Outcome({"T::test_a": "skipped"}, 5, {}))


def test_without_a_checkout_it_says_so(script, checkout, capsys, monkeypatch):
    script.main([])
    assert "skipped: transformers' own model tests are not at hand" in capsys.readouterr().out
    script.main(["--transformers", str(checkout), "no_family"])
    assert "test_modeling_no_family.py does not exist; correct FAMILIES" in capsys.readouterr().out
    assert not script.PAGE.exists() and "model_tests_plugin" not in sys.modules
