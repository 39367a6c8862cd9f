"""The module that stands where a model's experts module stood.

Its call signature is that of transformers' experts modules (hidden_states [T, H], top_k_index
[T, K] int64, top_k_weights [T, K]) -> [T, H]. It owns no nn.Parameter and no buffer: the packed
weights are a plain attribute, so FSDP2, state_dict, `.to()`, dtype casts and optimizers never see
them. Its class name contains "Linear" because LLaMA-Factory's `lora_target: all` finds adaptable
modules by class name.

What carries out the call is a `Runner`. The one here is for inference; kt_sft sets its own on the
modules of a model that is loaded for training.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from kt_core.experts import Experts, Lora
from kt_core.loading.checkpoint import Origin
from kt_core.settings import ExpertSettings

Runner = Callable[[Experts, Tensor, Tensor, Tensor, Lora | None], Tensor]

_KERNEL_DTYPES = (torch.bfloat16, torch.float32)


def inference_runner(
    experts: Experts, x: Tensor, top_k_index: Tensor, top_k_weights: Tensor, lora: Lora | None
) -> Tensor:
    """Runs the experts on the CPU and returns [T, H] on the device and in the dtype of x.

    x [T, H] of any device and floating dtype (computed as bf16 or fp32), top_k_index and
    top_k_weights [T, K]. Raises RuntimeError if autograd would need a gradient through the result.
    """
    if torch.is_grad_enabled() and (x.requires_grad or top_k_weights.requires_grad):
        raise RuntimeError(
            f"{experts.name or 'the experts'}: a gradient is needed through experts that were "
            "loaded for inference; "
            "call the model under torch.no_grad(), or load it for training (use_kt: true)"
        )
    dtype = x.dtype if x.dtype in _KERNEL_DTYPES else torch.float32
    out, _ = experts.forward(
        x.detach().to("cpu", dtype),
        top_k_index.to("cpu", torch.int64),
        top_k_weights.detach().to("cpu"),
        lora,
    )
    return out.to(x.device, x.dtype)


def by_token(
    run: Callable[[Tensor, Tensor, Tensor], Tensor],
    hidden_states: Tensor,
    top_k_index: Tensor,
    top_k_weights: Tensor,
) -> Tensor:
    """`run`, which takes x [T, H], index and weights [T, K] and gives [T, H], for a batch as
    transformers' experts get it: hidden_states [..., H], top_k_index and top_k_weights [..., K].
    """
    k = top_k_index.shape[-1]
    rows = hidden_states.reshape(-1, hidden_states.shape[-1])
    return run(rows, top_k_index.reshape(-1, k), top_k_weights.reshape(-1, k)).view(
        hidden_states.shape
    )


def is_linear(module: nn.Module) -> bool:
    """Whether `module` is a Linear that returns its product. transformers' own subclasses return
    more (PhiMoE's router: also the chosen experts), so what adapts them adapts their weight.
    """
    own = type(module).__module__.startswith("transformers.models.")
    return isinstance(module, nn.Linear) and not own


class KTExpertsLinear(nn.Module):
    """Routed experts of one layer, kept in packed CPU memory.

    num_experts, hidden_dim and intermediate_dim are those of the module it replaces; `layer_index`
    is the decoder layer it belongs to (it seeds LoRA dropout); `runner` may be replaced at any
    time. `settings` and `origin`: how and from which checkpoint its model was loaded, None for
    experts that were packed by hand.
    """

    def __init__(
        self,
        experts: Experts,
        *,
        layer_index: int,
        runner: Runner = inference_runner,
        settings: ExpertSettings | None = None,
        origin: Origin | None = None,
    ) -> None:
        super().__init__()
        self.experts = experts
        self.runner = runner
        self.layer_index = layer_index
        self.settings = settings
        self.origin = origin
        self.num_experts: int = experts.num_experts
        self.hidden_dim: int = experts.hidden
        self.intermediate_dim: int = experts.intermediate
        self._is_hf_initialized = True  # transformers: nothing here to initialise

    @property
    def weight(self) -> Tensor:
        """An empty CPU tensor: peft asks a base layer for `weight.device` and `weight.dtype`."""
        return torch.empty(0)

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """hidden_states [..., H], top_k_index and top_k_weights [..., K] -> [..., H]; leading sizes
        may differ in shape but not in number of tokens.
        """

        def run(x: Tensor, index: Tensor, weights: Tensor) -> Tensor:
            return self.runner(self.experts, x, index, weights, None)

        return by_token(run, hidden_states, top_k_index, top_k_weights)

    def extra_repr(self) -> str:
        """Shapes and storage, for print(model)."""
        e = self.experts
        return (
            f"experts={self.num_experts}, hidden={self.hidden_dim}, "
            f"intermediate={self.intermediate_dim}, "
            f"format={e.format}, group={e.group}, bytes={e.nbytes}"
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> KTExpertsLinear:
        """A second module over the same packed weights: they are frozen, so a copy would only cost
        memory.
        """
        twin = type(self)(
            self.experts,
            layer_index=self.layer_index,
            runner=self.runner,
            settings=self.settings,
            origin=self.origin,
        )
        twin.train(self.training)
        memo[id(self)] = twin
        return twin

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise TypeError(
            f"{self.experts.name or type(self).__name__} holds packed experts in CPU memory and "
            "cannot be pickled; save the adapter (save_pretrained on the PEFT model) and load the "
            "base model from its checkpoint"
        )
