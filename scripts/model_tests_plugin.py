"""A pytest plugin for transformers' own model tests: with KT_MODEL_TESTS=ours, every experts module
that kt_core takes over computes with our kernels, from the weights that it has at that moment.

The module keeps its parameters, frozen as they are in a use_kt run, so the tests may save, load,
resize, convert and initialise the model as they like; the kernels pack them again whenever they
have changed. scripts/model_tests.py runs pytest with this plugin.
"""

from __future__ import annotations

import copy
import json
import os
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import pytest
from torch import Tensor, nn
from transformers import PreTrainedModel

from kt_core.experts import Experts
from kt_core.loading.experts_contract import find_experts
from kt_core.module import KTExpertsLinear
from kt_sft.op import autograd

# transformers' own conftest.py, which is not loaded, makes these known.
MARKERS = (
    *("is_pipeline_test", "is_staging_test", "accelerate_tests", "not_device_test"),
    *("torch_compile_test", "torch_export_test", "flash_attn_test", "flash_attn_3_test"),
    *("flash_attn_4_test", "all_flash_attn_test", "training_ci", "tensor_parallel_ci"),
)
_packed: WeakKeyDictionary[nn.Module, tuple[Any, KTExpertsLinear]] = WeakKeyDictionary()
_taken: dict[type, str] = {}  # class of experts -> why it is left to transformers; "" if it is not
calls = 0


def pytest_configure(config: pytest.Config) -> None:
    for marker in MARKERS:
        config.addinivalue_line("markers", marker)
    os.environ["DISABLE_SAFETENSORS_CONVERSION"] = "true"
    if os.environ["KT_MODEL_TESTS"] == "ours":
        _take_over()


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Says how often our experts ran, and which were left out."""
    left = {kind.__name__: why for kind, why in _taken.items() if why}
    Path(os.environ["KT_MODEL_TESTS_COUNT"]).write_text(json.dumps({"calls": calls, "left": left}))


def _take_over() -> None:
    original = PreTrainedModel.post_init

    def post_init(self: PreTrainedModel) -> None:
        original(self)
        for module in self.modules():
            if any(p.dim() == 3 for p in module.parameters(recurse=False)):
                _take(module)

    PreTrainedModel.post_init = post_init


def _take(module: nn.Module) -> None:
    kind = type(module)
    if kind not in _taken:
        try:
            found = _layout(module)
        except ValueError as error:
            _taken[kind] = str(error)
            return
        if found is None:  # no experts at all
            return
        _taken[kind] = ""
        kind.forward = _forward
    if not _taken[kind]:
        for parameter in module.parameters(recurse=False):
            parameter.requires_grad_(False)


def _layout(module: nn.Module) -> Any:
    model = nn.Module()
    model.add_module("experts", copy.deepcopy(module).to("meta"))
    found = find_experts(model)
    return found[0] if found else None


def _forward(
    self: nn.Module, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor
) -> Tensor:
    global calls
    calls += 1
    out: Tensor = _kernels(self)(hidden_states, top_k_index, top_k_weights)
    return out


def _kernels(module: Any) -> KTExpertsLinear:
    weights = (module.gate_up_proj, module.down_proj)
    now = [(w.data_ptr(), w._version, w.dtype) for w in weights]
    before = _packed.get(module)
    if before is not None and before[0] == now:
        return before[1]
    layout = _layout(module)
    experts = Experts(*layout.shape, format="bf16", activation=layout.activation)
    for e in range(layout.num_experts):
        gate, up = weights[0][e].detach().chunk(2)
        for projection, weight in (("gate", gate), ("up", up), ("down", weights[1][e].detach())):
            experts.put(e, projection, weight.cpu())
    twin = KTExpertsLinear(experts, runner=autograd.runner("retain"), layer_index=0)
    _packed[module] = (now, twin)
    return twin.train(module.training)
