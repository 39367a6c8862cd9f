"""The record of published codes: what it means, and what it refuses."""

from __future__ import annotations

import pytest
import torch

from kt_core.experts import Experts
from kt_core.loading.codes import Codes, put


def row(*codes: int) -> torch.Tensor:
    return torch.tensor([codes], dtype=torch.uint8)


def one(scale: float = 1.0) -> torch.Tensor:
    return torch.tensor([[scale]])


@pytest.mark.parametrize(
    "format,codes,values",
    [
        ("int8", (0x80, 0xFF, 0, 0x7F), (-128, -1, 0, 127)),
        ("int4", (0, 7, 8, 15), (-8, -1, 0, 7)),
        ("fp8", (0x01, 0x38, 0xC0, 0x7E), (2.0**-9, 1, -2, 448)),
        ("mxfp8", (0x38, 0xFE), (1, -448)),
        ("mxfp4", (1, 3, 7, 9, 15), (0.5, 1.5, 6, -0.5, -6)),
        ("nvfp4", (5, 12), (3, -2)),
        ("nf4", (0, 7, 15), (-1, 0, 1)),
    ],
)
def test_values_of_codes(format, codes, values):
    got = Codes(format, 0, row(*codes), one(0.5)).dequantize()
    assert got.tolist() == [[0.5 * v for v in values]]


def test_groups_zero_points_and_factors():
    codes = Codes(
        "uint4",
        2,
        torch.tensor([[1, 2, 3], [4, 5, 6]], dtype=torch.uint8),
        torch.tensor([[1.0, 2.0], [0.5, 4.0]]),
        zeros=torch.tensor([[0, 8], [15, 6]], dtype=torch.uint8),
        factor=torch.tensor([1.0, 10.0]),
    )
    assert codes.dequantize().tolist() == [[1, 2, -10], [-55, -50, 0]]


def test_views_are_taken_as_they_are():
    fused = torch.arange(24, dtype=torch.uint8).view(4, 6) % 16
    scales = torch.rand(3, 6).T[::2]
    turned = Codes("mxfp4", 2, fused.T[::2, :], scales[:, :2])
    plain = Codes("mxfp4", 2, fused.T[::2, :].contiguous(), scales[:, :2].contiguous())
    assert torch.equal(turned.dequantize(), plain.dequantize())


@pytest.mark.parametrize(
    "change,message",
    [
        ({"format": "fp6"}, "format 'fp6'; give one of fp8, int4"),
        ({"group": 2}, r"scales of 1 x 4 codes with group 2 are torch.float32 \(1, 1\)"),
        ({"codes": torch.zeros(1, 4)}, "codes of 1 x 4 codes with group 0 are torch.float32"),
        ({"codes": row(1)[0]}, r"codes have shape \(1,\)"),
        ({"zeros": torch.zeros(1, 1, dtype=torch.uint8)}, "format int4 come with zero points"),
        ({"format": "uint4"}, "format uint4 come without zero points"),
        ({"factor": torch.ones(2)}, r"factor of .* give torch.float32 \(1,\)"),
    ],
)
def test_what_does_not_fit_is_refused(change, message):
    with pytest.raises(ValueError, match=message):
        Codes(**{"format": "int4", "group": 0, "codes": row(1, 2, 3, 4), "scales": one()} | change)


@pytest.mark.parametrize(
    "published,group,format,kept,exact",
    [
        ("int8", 128, "int8", 128, False),  # bf16 holds no such scales
        ("int8", 128, "int8_fp32", 128, True),
        ("int8", 0, "int8_fp32", 128, True),
        ("int8", 128, "int8_fp32", 0, False),
        ("fp8", 128, "fp8", 128, True),
        ("fp8", 0, "fp8", 0, True),
        ("fp8", 300, "fp8", 0, True),  # longer than a channel
        ("fp8", 128, "mxfp8", 32, False),
        ("int4", 128, "uint4", 64, True),
        ("uint4", 128, "uint4", 32, True),
        ("uint4", 32, "uint4", 64, False),
        ("nvfp4", 16, "nvfp4", 16, True),
        ("nvfp4", 16, "mxfp4", 32, False),
    ],
)
def test_codes_go_into_a_layer_bit_for_bit_where_they_can(published, group, format, kept, exact):
    n, k = 32, 256
    g = torch.Generator().manual_seed(0)
    count = -(-k // group) if group else 1
    codes = Codes(
        published,
        group,
        torch.randint(0, 16, (n, k), generator=g, dtype=torch.uint8),
        (torch.rand(n, count, generator=g) * 16).to(torch.float8_e4m3fn).float()
        if published == "nvfp4"
        else torch.rand(n, count, generator=g),
        torch.randint(0, 17, (n, count), generator=g, dtype=torch.uint8)
        if published == "uint4"
        else None,
        torch.rand(n, generator=g) + 0.1 if published == "nvfp4" else None,
    )
    layer = Experts(1, k, n, format=format, group=kept)
    assert put(layer, 0, "gate", codes) == exact
    got, want = layer.get(0, "gate"), codes.dequantize()
    assert torch.equal(got, want) == exact
    assert float((got - want).norm() / want.norm()) < 0.15
