"""The loss in blocks of tokens against transformers' own."""

from __future__ import annotations

import copy

import pytest
import sft_cases as cases
import torch
from transformers.loss.loss_utils import ForCausalLMLoss

from kt_sft.cpu import loss


def _both(logits, labels, **more):
    """(loss, gradient) of transformers and of ours."""
    found = []
    for function in (ForCausalLMLoss, loss.causal_loss):
        x = logits.clone().requires_grad_()
        value = function(x, labels, logits.shape[-1], **more)
        (gradient,) = torch.autograd.grad(3 * value, x)
        assert gradient.dtype == x.dtype and value.dtype == torch.float32
        found.append((value.detach(), gradient.float()))
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [1, 2, 7, 1000])
def test_it_is_the_loss(dtype, rows, monkeypatch):
    """Blocks of 1, 2, 7 and all tokens; tokens without a label, whole blocks of them among them."""
    monkeypatch.setitem(loss._BLOCK_BYTES, "cpu", rows * 4 * 50)
    torch.manual_seed(0)
    logits = (4 * torch.randn(3, 11, 50)).to(dtype)
    labels = torch.randint(0, 50, (3, 11))
    labels[1] = -100
    labels[0, 3:5] = -100
    shifted = torch.randint(0, 50, (3, 11))
    bar = 1e-6 if dtype == torch.float32 else 4e-3
    for more in (
        {},
        {"num_items_in_batch": torch.tensor(50)},
        {"num_items_in_batch": 50},
        {"shift_labels": shifted},
        {"ignore_index": 7},
    ):
        given = labels.where(labels != -100, 7) if "ignore_index" in more else labels
        (value, gradient), (ours, found) = _both(logits, given, **more)
        assert ours.item() == pytest.approx(value.item(), rel=1e-6)
        assert (found - gradient).norm() <= bar * gradient.norm()
        assert torch.equal(found == 0, gradient == 0)


def test_extremes():
    """No overflow at logits of 1e30, NaN where there are no labels at all, as in torch."""
    logits = torch.tensor([[[1e30, 0.0, -1e30], [5.0, 5.0, 5.0]]])
    (value, gradient), (ours, found) = _both(logits, torch.tensor([[0, 0]]))
    assert torch.equal(value, ours) and torch.equal(gradient, found)
    (value, _), (ours, _) = _both(logits, torch.full((1, 2), -100))
    assert value.isnan() and ours.isnan()


def test_a_model_that_has_it(tmp_path):
    """Gradients of its adapter, with and without a count of tokens; another loss stays."""
    model = cases.adapted(cases.load(cases.checkpoint(tmp_path)))
    ids = cases.token_ids(3, 24)
    labels = ids.clone()
    labels[1, :20] = -100
    for count in ({}, {"num_items_in_batch": torch.tensor(50)}):
        results = []
        for base in (model.get_base_model(), copy.copy(model.get_base_model())):
            if results:
                loss.in_blocks(base)
                assert base.loss_function is loss.causal_loss
            model.zero_grad()
            value = base(input_ids=ids, labels=labels, **count).loss
            value.backward()
            gradients = [p.grad.clone() for p in cases.trained(model).values()]
            results.append((float(value.detach()), gradients))
        (whole, wanted), (blocks, got) = results
        assert blocks == pytest.approx(whole, rel=1e-6)
        for a, b in zip(got, wanted, strict=True):
            assert (a - b).norm() <= 1e-5 * b.norm()
    other = copy.copy(model.get_base_model())
    other.loss_function = max
    loss.in_blocks(other)
    assert other.loss_function is max
