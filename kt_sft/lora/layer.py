"""LoRA on the routed experts of one layer: a peft LoraLayer with ordinary parameters.

For each adapter and projection there are two parameters, A [E, r, in] and B [E, out, r] (E experts,
r rank; gate and up: in = hidden, out = intermediate; down the other way round), named like

    model.layers.0.mlp.experts.lora_A.default.gate_proj

so that peft, the optimizer, clipping, FSDP2 and `disable_adapter` treat them as any LoRA parameter.
They are read afresh at every call: FSDP2 frees and refills them between forward and backward.
"""

from __future__ import annotations

import dataclasses
import math
import warnings
from functools import partial
from typing import Any

import peft
import torch
from peft import LoraConfig
from peft.tuners.lora.layer import LoraLayer
from torch import Tensor, nn

from kt_core.experts import Lora
from kt_core.module import KTExpertsLinear, by_token
from kt_core.names import PROJECTION_KEYS
from kt_sft.lora.targets import adapter_of

# LoRA options that dense modules may have, and experts not.
_DENSE_ONLY = ("use_dora", "lora_bias", "fan_in_fan_out")
# Options that nothing here can train, save and load again. peft >= 0.19 also marks such fields
# itself ("is_lora_variant").
_REFUSED = ("use_qalora", "alora_invocation_tokens", "arrow_config", "layer_replication")
# Options of peft 0.18 to 0.21 that act on what is trained here, say where an adapter comes from or
# goes, or set up an option above. A later version may have more.
_KNOWN = (
    *("r", "lora_alpha", "lora_dropout", "rank_pattern", "alpha_pattern", "use_rslora", "bias"),
    *("target_modules", "exclude_modules", "target_parameters", "layers_to_transform"),
    *("layers_pattern", "modules_to_save", "trainable_token_indices", "ensure_weight_tying"),
    *("init_lora_weights", "loftq_config", "eva_config", "corda_config", "lora_ga_config"),
    *("qalora_group_size", "runtime_config", "megatron_config", "megatron_core", "task_type"),
    *("peft_type", "auto_mapping", "peft_version", "base_model_name_or_path", "revision"),
    "inference_mode",
)
_INITS = (True, False, "gaussian")
MERGE = (
    "packed expert weights cannot take a LoRA delta; save the adapter and merge it into the "
    "checkpoint with kt_core.adapters.merge(model_dir, adapter_dir, out_dir)"
)


class ExpertFactors(nn.Module):
    """The A or B tensors of one adapter: a parameter per projection, named gate_proj, up_proj,
    down_proj.
    """

    def __init__(self, tensors: dict[str, Tensor]) -> None:
        super().__init__()
        for name, tensor in tensors.items():
            self.register_parameter(name, nn.Parameter(tensor))

    def by_projection(self) -> dict[str, Tensor]:
        """Parameters by projection (gate, up, down), as they are at this moment."""
        held = self._parameters
        return {p: held[key] for p, key in PROJECTION_KEYS.items() if held.get(key) is not None}  # type: ignore[misc]


class KTExpertsLoraLinear(nn.Module, LoraLayer):
    """LoRA around a KTExpertsLinear; created by peft. Called like transformers' experts modules."""

    # What LoraLayer sets up, by adapter name; peft is not typed.
    r: dict[str, int]
    lora_alpha: dict[str, float]
    scaling: dict[str, float]
    use_rslora: dict[str, bool]
    use_dora: dict[str, bool]
    lora_bias: dict[str, bool]
    lora_dropout: Any
    lora_A: Any  # noqa: N815 - peft names it so
    lora_B: Any  # noqa: N815
    active_adapters: list[str]
    disable_adapters: bool
    get_base_layer: Any
    set_adapter: Any
    _caches: dict[str, Any]

    def __init__(
        self,
        base_layer: KTExpertsLinear,
        adapter_name: str,
        r: int = 0,
        lora_alpha: float = 1,
        **kwargs: Any,
    ) -> None:
        super().__init__()
        with warnings.catch_warnings():
            # peft < 0.19 warns of a base layer whose features it cannot tell
            warnings.filterwarnings("ignore", message="Unsupported layer type")
            LoraLayer.__init__(self, base_layer, ephemeral_gpu_offload=False)
        self._active_adapter = adapter_name
        self.update_layer(adapter_name, r, lora_alpha)

    def _get_in_out_features(self, module: nn.Module) -> tuple[int, int]:
        base = self.get_base_layer()
        return base.hidden_dim, base.hidden_dim

    def update_layer(self, adapter_name: str, r: int, lora_alpha: float, **kwargs: Any) -> None:
        """Adds or replaces the factors of `adapter_name`; ranks and alphas are those of the
        adapter that is injected.
        """
        base = self.get_base_layer()
        given = adapter_of(base)
        config = given.config
        check_supported(config, experts=True)
        self.use_rslora[adapter_name], self.use_dora[adapter_name] = config.use_rslora, False
        self.lora_bias[adapter_name] = False
        p = config.lora_dropout
        self.lora_dropout[adapter_name] = nn.Dropout(p) if p > 0.0 else nn.Identity()
        a, b, scaling = {}, {}, {}
        for projection, rank in given.rank.items():
            fan_in, fan_out = base.hidden_dim, base.intermediate_dim
            if projection == "down":
                fan_in, fan_out = fan_out, fan_in
            key = PROJECTION_KEYS[projection]
            a[key] = torch.empty(base.num_experts, rank, fan_in)
            b[key] = torch.zeros(base.num_experts, fan_out, rank)
            _initialise(a[key], b[key], config.init_lora_weights)
            alpha = given.alpha[projection]
            scaling[projection] = alpha / (math.sqrt(rank) if config.use_rslora else rank)
        # peft's contract is one number per adapter, which set_scale and scale_layer change (from r
        # and lora_alpha); projections may have their own beside it
        first = next((p for p in scaling if scaling[p]), next(iter(scaling)))
        self.r[adapter_name], self.lora_alpha[adapter_name] = given.rank[first], given.alpha[first]
        self.scaling[adapter_name] = scaling[first]
        self._caches[f"scaling.{adapter_name}"] = (scaling[first], scaling)
        self.lora_A[adapter_name] = ExpertFactors(a)
        self.lora_B[adapter_name] = ExpertFactors(b)
        self.set_adapter(self.active_adapters)
        if config.inference_mode:
            for factors in (self.lora_A[adapter_name], self.lora_B[adapter_name]):
                factors.requires_grad_(False)

    def projection_scaling(self, adapter_name: str) -> dict[str, float]:
        """alpha / r (rslora: alpha / sqrt r) by projection."""
        first, scaling = self._caches[f"scaling.{adapter_name}"]
        # the ratios stay when peft changes the adapter's one number; at lora_alpha 0 all are 0
        ratio = self.scaling[adapter_name] / first if first else 1.0
        return {p: s * ratio for p, s in scaling.items()}

    def forward(
        self,
        hidden_states: Tensor,
        top_k_index: Tensor,
        top_k_weights: Tensor,
        adapter_names: list[str] | None = None,
    ) -> Tensor:
        """hidden_states [..., H], top_k_index and top_k_weights [..., K] -> [..., H].

        adapter_names: one adapter, or "__base__", for each sample of the batch; the tokens of a
        sample follow one another.
        """
        if adapter_names is None:
            run = partial(self._run, names=self.active_adapters)
        else:
            run = partial(self._run_samples, names=adapter_names)
        return by_token(run, hidden_states, top_k_index, top_k_weights)

    def _run_samples(self, x: Tensor, index: Tensor, weights: Tensor, names: list[str]) -> Tensor:
        """Samples of equally many tokens, each with the adapter that `names` has for it."""
        out = torch.empty_like(x)
        tokens = len(x) // len(names)
        for name in dict.fromkeys(names):
            mine = torch.tensor([n == name for n in names], device=x.device)
            rows = mine.repeat_interleave(tokens)
            out[rows] = self._run(x[rows], index[rows], weights[rows], [name])
        return out

    def _run(self, x: Tensor, index: Tensor, weights: Tensor, names: list[str]) -> Tensor:
        """The experts with those adapters of `names` that this layer has; arguments by token."""
        base = self.get_base_layer()
        active = [] if self.disable_adapters else [n for n in names if n in self.lora_A]
        lora = self._lora(active) if active else None
        return base.runner(base.experts, x, index, weights, lora)

    def _lora(self, active: list[str]) -> Lora:
        dropout, seed = self._dropout(active)
        parts = [
            (
                self.lora_A[n].by_projection(),
                self.lora_B[n].by_projection(),
                self.projection_scaling(n),
            )
            for n in active
        ]
        if len(parts) == 1:
            return Lora(*parts[0], dropout, seed)
        # Several adapters: one LoRA of summed rank, scales folded into B.
        a, b = {}, {}
        for p in PROJECTION_KEYS:
            having = [(fa[p], fb[p] * scaling[p]) for fa, fb, scaling in parts if p in fa]
            if having:
                a[p] = torch.cat([x for x, _ in having], dim=1)
                b[p] = torch.cat([x for _, x in having], dim=2)
        return Lora(a, b, 1.0, dropout, seed)

    def _dropout(self, active: list[str]) -> tuple[float, int]:
        rates = {
            d.p if isinstance(d := self.lora_dropout[n], nn.Dropout) and d.training else 0.0
            for n in active
        }
        if len(rates) != 1:
            raise ValueError(
                f"adapters {', '.join(active)} have different lora_dropout {sorted(rates)}; make "
                "them equal to use them together"
            )
        rate = rates.pop()
        if rate == 0.0:
            return 0.0, 0
        # Drawn from torch's generator, so that a checkpoint's recomputation, which restores it,
        # drops the same.
        drawn = int(torch.randint(0, 2**62, ()).item())
        layer = self.get_base_layer().layer_index
        return rate, (drawn ^ (layer * 0x9E3779B97F4A7C15)) & (2**63 - 1)

    def merge(self, safe_merge: bool = False, adapter_names: list[str] | None = None) -> None:
        """Not possible in packed weights; raises ValueError with the way that is."""
        raise ValueError(MERGE)

    def unmerge(self) -> None:
        """Nothing is ever merged here."""


def check_supported(config: LoraConfig, *, experts: bool) -> None:
    """Raises ValueError naming the first LoRA option that cannot be had on a model with CPU
    experts, or, for `experts`, on these themselves.
    """
    for field in dataclasses.fields(config):
        value = vars(config)[field.name]
        if value and field.name in _DENSE_ONLY:
            if experts:
                raise ValueError(
                    f"{field.name}={value!r} is not supported on experts in CPU memory; remove it, "
                    "or take the experts out of the LoRA targets"
                )
        elif value and (field.name in _REFUSED or field.metadata.get("is_lora_variant")):
            raise ValueError(
                f"{field.name}={value!r} is not supported beside experts in CPU memory; remove it"
            )
        elif field.name not in (*_KNOWN, *_DENSE_ONLY) and value and value != field.default:
            raise ValueError(
                f"{field.name}={value!r} of peft {peft.__version__} is not known beside experts in "
                "CPU memory; remove it, or install a peft from constraints.txt"
            )
    known = any(config.init_lora_weights is i or config.init_lora_weights == i for i in _INITS)
    if experts and not known:
        raise ValueError(
            f"init_lora_weights={config.init_lora_weights!r} is not supported on experts in CPU "
            "memory; use True, False or gaussian"
        )


def _initialise(a: Tensor, b: Tensor, init: bool | str) -> None:
    """As peft does for a Linear: A uniform in +-1/sqrt(in), B zero; gaussian: A normal with
    deviation 1/r; False: B uniform too. a [E, r, in], b [E, out, r]; meta tensors stay as they
    are."""
    if a.device.type == "meta":
        return
    if init == "gaussian":
        nn.init.normal_(a, std=1 / a.shape[1])
        return
    nn.init.uniform_(a, -1 / math.sqrt(a.shape[2]), 1 / math.sqrt(a.shape[2]))
    if init is False:
        nn.init.uniform_(b, -1 / math.sqrt(b.shape[2]), 1 / math.sqrt(b.shape[2]))
