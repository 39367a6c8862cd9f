"""Safetensors with one 3-D tensor for all experts of a layer.

    <module>.gate_up_proj    [E, 2I, H], gate rows first
    <module>.down_proj       [E, H, I]
The names are those that the model's own loader gives them (Granite stores input_linear.weight for
gate_up_proj). Where it transposes these tensors (Qwen3-VL-MoE), they are stored [E, H, 2I]
and [E, I, H]; as transformers does, a tensor that already has the model's shape is then taken as it
is. One expert's slice is read at a time.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from kt_core.loading.parts import (
    ExpertRequest,
    ExpertTensor,
    Rows,
    Stored,
    TensorHeader,
    bad_shape,
)
from kt_core.names import STACKED


def scan(weights: Sequence[Stored], request: ExpertRequest) -> Iterator[ExpertTensor]:
    """The matrices of the stacked tensors among `weights`. Raises ValueError for one of the wrong
    shape.
    """
    for stored in weights:
        module, _, tensor = request.parameter(stored.name).rpartition(".")
        if tensor not in STACKED or module not in request.shapes or len(stored.shape) != 3:
            continue
        num_experts, hidden, intermediate = request.shapes[module]
        down = tensor == "down_proj"
        out, inner = (hidden, intermediate) if down else (2 * intermediate, hidden)
        turned = request.transposed and isinstance(stored, TensorHeader)
        if stored.shape == (num_experts, out, inner):
            transposed = False
        elif turned and stored.shape == (num_experts, inner, out):
            transposed = True
        else:
            expected = (num_experts, inner, out) if turned else (num_experts, out, inner)
            raise bad_shape(stored.name, stored.file, stored.shape, expected)
        rows = {"down": (0, out)} if down else {"gate": (0, out // 2), "up": (out // 2, out)}
        for expert in range(num_experts):
            for projection, (first, last) in rows.items():
                yield ExpertTensor(
                    module=module,
                    expert=expert,
                    projection=projection,
                    shape=(last - first, inner),
                    stored=stored,
                    rows=Rows(expert, first, last, transposed),
                )
