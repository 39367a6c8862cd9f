"""Published codes are packed bit for bit: what is unpacked is what they mean, on every tier."""

from __future__ import annotations

import pytest
import torch
from kernel_cases import (
    FORMATS,
    INT8_BAR,
    INT8_ELEMENT_BAR,
    TIERS,
    check_case,
    check_close,
    choose_tier,
    make_case,
)

from kt_core import formats
from kt_core.experts import Experts
from kt_core.loading.codes import Codes
from kt_core.names import PROJECTIONS

CASES = [(f, g) for f in FORMATS if formats.of(f).scaled for g in formats.of(f).groups]
# nf4's quantiles are no bf16 numbers: csrc/format/nf4.h says what is lost.
TOLERANCE = {"nf4": 2e-3}


@pytest.fixture(autouse=True)
def chosen_tier():
    yield
    choose_tier()


def random_codes(format: str, group: int, n: int, k: int, seed: int = 0) -> Codes:
    """Codes of all kinds, as views that are transposed and part of a larger tensor."""
    g = torch.Generator().manual_seed(seed)
    kept = formats.of(format)
    codes = torch.randint(0, 1 << kept.bits, (k + 3, 2 * n), generator=g, dtype=torch.uint8)
    if kept.codes in ("fp8", "mxfp8"):
        codes[(codes & 0x7F) == 0x7F] = 0x7E  # no NaN
    if format == "int8":
        codes[codes == 0x80] = 0x81  # no -128
    of_group = (-(-k // group) if group else 1, n)
    scales = torch.rand(*of_group, generator=g) / 2 + 0.5
    if format in ("int4", "int8"):
        scales = scales.bfloat16().float()
    elif format.startswith("mx"):
        scales = torch.exp2(torch.randint(-9, -4, of_group, generator=g).float())
    elif format == "nvfp4":
        scales = (200 * torch.rand(*of_group, generator=g)).to(torch.float8_e4m3fn).float()
    zeros = None
    if kept.zeros:
        zeros = torch.randint(6, 11, of_group, generator=g, dtype=torch.uint8)
        zeros[0, :2] = torch.tensor([0, 16], dtype=torch.uint8)  # GPTQ's least is 1, its most 16
    factor = torch.rand(2 * n, generator=g)[::2] / 500 + 1e-4 if kept.factor else None
    views = codes[3:, ::2].T, scales.T, None if zeros is None else zeros.T, factor
    values = Codes(kept.codes, group, *views).dequantize()
    # by a power of two, which keeps scales what they are: values as of a layer of that size
    scales *= 2.0 ** float(torch.log2(1 / (values.pow(2).mean() * k)).div(2).round())
    return Codes(kept.codes, group, *views)


def put(layer: Experts, expert: int, projection: str, c: Codes) -> None:
    layer.put_codes(expert, projection, c.codes, c.scales, c.zeros, c.factor)


@pytest.mark.parametrize("format,group", CASES)
def test_unpacking_gives_what_codes_mean(format, group):
    n, k = 72, 200  # neither whole panels nor whole groups
    shapes = {"gate": (n, k), "up": (n, k), "down": (k, n)}
    codes = {p: random_codes(format, group, *s, seed=i) for i, (p, s) in enumerate(shapes.items())}
    packed = set()
    for isa in TIERS:
        choose_tier(isa)
        layer = Experts(2, k, n, format=format, group=group)
        for e in range(2):
            for p in PROJECTIONS:
                put(layer, e, p, codes[p])
        for p in PROJECTIONS:
            want, got = codes[p].dequantize(), layer.get(1, p)
            if format in TOLERANCE:
                assert ((got - want).abs() <= TOLERANCE[format] * want.abs()).all(), p
            else:
                assert torch.equal(got, want), p
        packed.add(bytes(layer.packed()))
    assert len(packed) == 1


@pytest.mark.parametrize("format,group", CASES)
def test_slices_take_their_parts_of_codes(format, group):
    n, k = 456, 64
    sliced, whole = (Experts(1, k, n, format=format, group=group, slices=s) for s in (3, 1))
    for p in PROJECTIONS:
        codes = random_codes(format, group, *((k, n) if p == "down" else (n, k)))
        for layer in (sliced, whole):
            put(layer, 0, p, codes)
        assert torch.equal(sliced.get(0, p), whole.get(0, p)), p


@pytest.mark.parametrize("isa", TIERS)
@pytest.mark.parametrize("format", [f for f in FORMATS if formats.of(f).scaled])
def test_layers_of_published_codes_match_the_reference(isa, format):
    """Forward and backward in all domains: codes that encode() never chooses, zero points of 16."""
    choose_tier(isa)
    case = make_case(E=2, H=136, I=72, T=19, format=format)
    for e in range(2):
        for i, p in enumerate(PROJECTIONS):
            n, k = case.dense[p][e].shape
            codes = random_codes(format, case.layer.group, n, k, seed=3 * e + i)
            put(case.layer, e, p, codes)
            case.dense[p][e] = (
                codes.dequantize() if format not in TOLERANCE else case.layer.get(e, p)
            )
    check_case(case)
    if "int8" in formats.of(format).domains:
        ref, _ = case.run_reference()
        args = case.x.float(), case.index, case.weights, case.lora
        out, _ = case.layer.forward(*args, compute="int8")
        check_close("int8 forward", out, ref, INT8_BAR, element=INT8_ELEMENT_BAR)


def test_packing_values_and_their_codes_gives_the_same_bytes():
    """Of int4 codes that values stand for exactly."""
    codes = random_codes("int4", 32, 32, 64)
    codes.codes[:, ::32] = 0  # -8: the value of the largest size
    a, b = Experts(1, 64, 32, format="int4"), Experts(1, 64, 32, format="int4")
    put(a, 0, "gate", codes)
    b.put(0, "gate", codes.dequantize())
    assert bytes(a.packed())[: a.nbytes // 3] == bytes(b.packed())[: b.nbytes // 3]


@pytest.mark.parametrize(
    "format,change,message",
    [
        ("int8", {"codes": 0x80}, "no numbers of format int8"),
        ("fp8", {"codes": 0x7F}, "no numbers of format fp8"),
        ("mxfp8", {"codes": 0xFF}, "no numbers of format mxfp8"),
        ("mxfp4", {"codes": 16}, "no numbers of format mxfp4"),
        ("uint4", {"zeros": 17}, "no numbers of format uint4"),
        ("int8", {"scales": float("nan")}, "no numbers of format int8"),
        ("nvfp4", {"factor": float("inf")}, "no numbers of format nvfp4"),
        ("uint4", {"zeros": None}, "has no zeros; format uint4 needs zeros"),
        ("int4", {"zeros": torch.zeros(32, 2, dtype=torch.uint8)}, "format int4 has no zeros"),
        ("bf16", {}, "format bf16 has no codes"),
        ("int8", {"codes": torch.zeros(32, 64)}, "codes of .* are torch.float32"),
        ("int8", {"scales": torch.zeros(32, 2)}, r"needs torch.float32 \(32, 1\)"),
    ],
)
def test_what_is_no_code_is_refused(format, change, message):
    layer = Experts(1, 64, 32, format=format)
    given = random_codes(format if format != "bf16" else "int8", layer.group or 128, 32, 64)
    parts = {k: getattr(given, k) for k in ("codes", "scales", "zeros", "factor")}
    for name, value in change.items():
        if isinstance(value, torch.Tensor) or value is None:
            parts[name] = value
        else:
            parts[name] = parts[name].clone(memory_format=torch.contiguous_format)
            parts[name].view(-1)[5] = value
    with pytest.raises(ValueError, match=message):
        layer.put_codes(0, "gate", **parts)
    assert len(layer.missing()) == 3
