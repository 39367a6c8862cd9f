"""Safetensors with one 3-D tensor for all experts of a layer.

    <module>.gate_up_proj    [E, 2I, H], gate rows first
    <module>.down_proj       [E, H, I]
The names are those that the model's own loader gives them (Granite stores input_linear.weight for
gate_up_proj). Where it transposes these tensors (Qwen3-VL-MoE), they are stored [E, H, 2I]
and [E, I, H]; as transformers does, a tensor that already has the model's shape is then taken as it
is. One expert's slice is read at a time.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

from torch import Tensor

from kt_core.loading.parts import (
    CheckpointFiles,
    ExpertRequest,
    ExpertTensor,
    TensorHeader,
    bad_shape,
)
from kt_core.names import STACKED


def scan(source: CheckpointFiles, request: ExpertRequest) -> Iterator[ExpertTensor]:
    """The matrices of the stacked tensors of `source`. Raises ValueError for one of the wrong
    shape.
    """
    for stored in source.safetensors:
        module, _, tensor = request.parameter(stored.name).rpartition(".")
        if tensor not in STACKED or module not in request.shapes or len(stored.shape) != 3:
            continue
        num_experts, hidden, intermediate = request.shapes[module]
        down = tensor == "down_proj"
        out, inner = (hidden, intermediate) if down else (2 * intermediate, hidden)
        if stored.shape == (num_experts, out, inner):
            transposed = False
        elif request.transposed and stored.shape == (num_experts, inner, out):
            transposed = True
        else:
            expected = (
                (num_experts, inner, out) if request.transposed else (num_experts, out, inner)
            )
            raise bad_shape(stored.name, stored.file, stored.shape, expected)
        rows = {"down": (0, out)} if down else {"gate": (0, out // 2), "up": (out // 2, out)}
        for expert in range(num_experts):
            for projection, (first, last) in rows.items():
                yield ExpertTensor(
                    module=module,
                    expert=expert,
                    projection=projection,
                    shape=(last - first, inner),
                    dtype=stored.dtype,
                    tensor=stored.name,
                    file=stored.file,
                    read=partial(_slice, stored, expert, first, last, transposed),
                    view=partial(_rows, expert, first, last, transposed),
                )


def _slice(stored: TensorHeader, expert: int, first: int, last: int, transposed: bool) -> Tensor:
    """Rows [first, last) of one expert's matrix, [last - first, in], contiguous."""
    lazy = stored.handle.get_slice(stored.name)
    return _rows(expert, first, last, transposed, lazy).contiguous()


def _rows(expert: int, first: int, last: int, transposed: bool, stored: Any) -> Tensor:
    part: Tensor = stored[expert, :, first:last].T if transposed else stored[expert, first:last]
    return part
