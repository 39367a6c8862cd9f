"""The language modelling loss in blocks of tokens.

torch's cross entropy of [N, V] logits makes three more fp32 tensors of their size: log-softmax, the
gradient of the negative log-likelihood, the gradient of the logits; bf16 logits a fourth. With the
vocabularies of today they are the peak of a training step, and on a CPU their fresh pages take as
long as the sums. Here a block of tokens at a time goes through memory that stays in the cache, and
what is kept between forward and backward is one number per token; the gradient is the only tensor
of the logits' size and has their dtype.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

# Of a block in fp32: within an L2 cache; elsewhere enough to occupy a GPU.
_BLOCK_BYTES = {"cpu": 2 << 20}
_BLOCK_BYTES_ELSEWHERE = 128 << 20


def in_blocks(model: Any) -> None:
    """Has a PreTrainedModel compute its causal language modelling loss in blocks of tokens; a loss
    that is not transformers' own is left alone.
    """
    from transformers.loss.loss_utils import ForCausalLMLoss

    if model.loss_function is ForCausalLMLoss:
        model.loss_function = causal_loss  # a public setter of transformers


def causal_loss(
    logits: Tensor,
    labels: Tensor,
    vocab_size: int,
    num_items_in_batch: Tensor | int | None = None,
    ignore_index: int = -100,
    shift_labels: Tensor | None = None,
    **_: Any,
) -> Tensor:
    """What transformers' ForCausalLMLoss returns, fp32: the sum over tokens divided by
    `num_items_in_batch`, or by the number of labels.

    logits [..., S, vocab_size], labels [..., S]: those of the next token, unless `shift_labels`
    [..., S] has them in place.
    """
    if shift_labels is None:
        shift_labels = torch.nn.functional.pad(labels, (0, 1), value=ignore_index)[..., 1:]
    wanted = shift_labels.reshape(-1).to(logits.device)
    total = _Sum.apply(logits.view(-1, vocab_size), wanted, ignore_index)
    if num_items_in_batch is None:
        return total / (wanted != ignore_index).sum()
    if isinstance(num_items_in_batch, Tensor):
        num_items_in_batch = num_items_in_batch.to(total.device)
    return total / num_items_in_batch


class _Sum(torch.autograd.Function):
    """Sum over tokens of -log softmax(logits)[label], fp32."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor, ignore_index: int) -> Tensor:
        kept = labels != ignore_index
        at = labels.where(kept, 0)[:, None]
        norms = logits.new_zeros(len(logits), dtype=torch.float32)
        for block in _blocks(logits):
            if kept[block].any():
                norms[block] = torch.logsumexp(logits[block].float(), -1)
        picked = logits.gather(1, at)[:, 0].float()
        ctx.save_for_backward(logits, at, kept, norms)
        return (norms - picked).where(kept, 0).sum()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        logits, at, kept, norms = ctx.saved_tensors
        weight = torch.where(kept, grad, 0)[:, None]
        out = torch.empty_like(logits)
        for block in _blocks(logits):
            if not kept[block].any():
                out[block] = 0
                continue
            p = logits[block].float() - norms[block, None]
            p.exp_().scatter_add_(1, at[block], torch.full_like(at[block], -1, dtype=p.dtype))
            torch.mul(p, weight[block], out=out[block])
        return out, None, None


def _blocks(logits: Tensor) -> list[slice]:
    bytes_ = _BLOCK_BYTES.get(logits.device.type, _BLOCK_BYTES_ELSEWHERE)
    rows = max(1, bytes_ // (4 * logits.shape[1]))
    return [slice(i, i + rows) for i in range(0, len(logits), rows)]
