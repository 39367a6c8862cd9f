"""The amx tier against the reference. tests/csrc/test_amx.py runs this file in a process of its
own: with trap.cpp preloaded, or as it is on a CPU that has AMX. Arguments by environment:
TILE_PROBE (probe.cpp), TILE_REPORT (where to write what was counted and the largest errors).

Shapes are small: the emulator runs about 200,000 AMX instructions per second.
"""

from __future__ import annotations

import ctypes
import json
import os
import threading
from collections import defaultdict

import pytest
import torch
from emulated_cpu import EMULATOR
from kernel_cases import (
    EVERY_SHAPE,
    FORMATS,
    GROUPS,
    INT8_BAR,
    INT8_ELEMENT_BAR,
    INT8_GROUPS,
    ODD_SIZES,
    check_case,
    check_close,
    make_case,
    small_group,
)
from test_kernels import calls, read_mask

from kt_core import _kt, runtime
from kt_core.experts import Experts
from kt_core.names import PROJECTIONS

OPCODES = ("ldtilecfg", "tilerelease", "tilezero", "tileloadd", "tilestored")
PRODUCTS = ("tdpbf16ps", "tdpbssd", "tdpbsud", "tdpbusd", "tdpbuud")

errors: dict[str, float] = defaultdict(float)


class Tiles:
    """What ran on tiles, and who still has them configured."""

    def __init__(self) -> None:
        self.probe = ctypes.CDLL(os.environ["TILE_PROBE"])
        self.emulator = ctypes.CDLL(EMULATOR) if EMULATOR else None
        if self.emulator:
            self.emulator.amx_count.restype = ctypes.c_uint64
            self.emulator.amx_traps.restype = ctypes.c_uint64

    def counts(self) -> dict[str, int]:
        if not self.emulator:
            return {}
        return {n: int(self.emulator.amx_count(n.encode())) for n in (*OPCODES, *PRODUCTS)}

    def configured(self) -> int:
        """Threads with configured tiles; a real CPU only tells about the calling thread."""
        if self.emulator:
            return int(self.emulator.amx_configured_threads())
        return int(self.probe.tiles_configured_here())


@pytest.fixture(scope="module")
def tiles():
    t = Tiles()
    yield t
    report = {
        "mode": "emulated" if EMULATOR else "real",
        "instructions": t.counts(),
        "traps": int(t.emulator.amx_traps()) if t.emulator else 0,
        "largest_relative_errors": {k: float(f"{v:.3g}") for k, v in sorted(errors.items())},
    }
    with open(os.environ["TILE_REPORT"], "w") as f:
        json.dump(report, f, indent=1)


@pytest.fixture(autouse=True)
def on_tiles(tiles, request):
    """Every test multiplies on tiles (a silent fall back to vectors must not pass), with the
    instructions it names, and leaves no thread with tiles configured.
    """
    mark = request.node.get_closest_marker("products")
    before, ran = tiles.counts(), sum(calls("amx", f) for f in FORMATS)
    yield
    assert tiles.configured() == 0 and tiles.probe.tiles_configured_here() == 0
    assert sum(calls("amx", f) for f in FORMATS) > ran
    after = tiles.counts()
    for name in mark.args if mark else ("tdpbf16ps",):
        assert not after or after[name] > before[name], name
    if after:
        assert after["ldtilecfg"] > before["ldtilecfg"]


def record(what: str, found: dict[str, float]) -> None:
    for name, value in found.items():
        errors[f"{what} {name}"] = max(errors[f"{what} {name}"], value)


def run_int8(case, n: int | None = None):
    x, index, weights = case.x[:n].float(), case.index[:n], case.weights[:n]
    return case.layer.forward(x, index, weights, case.lora, compute="int8")[0]


def int8_on_vectors(case):
    """The int8 domain of the tier below: the same exact sums, folded in the same order."""
    runtime.force_isa("avx512_vnni")
    try:
        return run_int8(case)
    finally:
        runtime.force_isa("amx")


@pytest.mark.parametrize(
    "format,tokens",
    [(f, t) for f in FORMATS for t in (3, 8, 17, 33, 50) if f in EVERY_SHAPE or t == 17],
)
def test_matches_reference(format, tokens):
    case = make_case(E=3, H=128, I=96, T=tokens, K=2, format=format, seed=tokens)
    record(format, check_case(case))


@pytest.mark.parametrize("rows", [5, 15, 16, 17, 31, 32, 33, 47, 49, 65, 95, 191, 193, 209])
def test_every_kind_of_row_count(rows):
    """Whole and partial tiles, odd and even numbers of them, a second block of rows."""
    record("bf16", check_case(make_case(E=1, H=64, I=64, T=rows, K=1, format="bf16", r=16)))


@pytest.mark.parametrize("format,group", GROUPS)
def test_groups(format, group):
    record(format, check_case(make_case(E=2, H=192, I=160, T=20, format=format, group=group)))


@pytest.mark.parametrize("format,hidden,intermediate", ODD_SIZES)
def test_sizes_that_divide_nothing(format, hidden, intermediate):
    group = small_group(format)
    case = make_case(E=2, H=hidden, I=intermediate, T=25, format=format, group=group, r=3)
    record(format, check_case(case))


@pytest.mark.parametrize("rank", [1, 3, 4, 7, 8, 16, 24, 64, 200])
def test_ranks(rank):
    record("lora", check_case(make_case(E=1, T=37, K=1, r=rank, scaling=2.0 / max(4, rank))))


@pytest.mark.parametrize("lora", [(), ("gate",), ("down",), ("gate", "up")])
def test_subsets_of_projections(lora):
    record("lora", check_case(make_case(E=2, T=34, lora=lora, format="bf16")))


@pytest.mark.parametrize("dropout", [0.1, 0.5])
def test_dropout(dropout):
    case = make_case(E=2, H=64, I=96, T=40, K=2, dropout=dropout)
    masks = {p: read_mask(case, p) for p in PROJECTIONS}
    record("dropout", check_case(case, masks=masks))


def test_chunks_do_not_show():
    """A reduction of several chunks (kChunk) and a last tile that repeats rows, added to C."""
    record("bf16", check_case(make_case(E=1, H=640, I=64, T=35, K=1, format="bf16")))
    record("int4", check_case(make_case(E=1, H=64, I=592, T=35, K=1, format="int4")))


@pytest.mark.parametrize("format", FORMATS)
def test_rows_on_tiles_do_not_see_each_other(format):
    """One arithmetic per row whatever the number of rows (without an adapter: its products are
    small enough for vectors below some row count)."""
    case = make_case(
        E=1, H=96, I=72, T=130, K=1, format=format, lora=(), dtype=torch.float32, seed=4
    )
    args = case.x, case.index, case.weights
    dy = torch.randn(case.x.shape, generator=torch.Generator().manual_seed(3))
    full, saved = case.layer.forward(*args, save=True)
    grad = case.layer.backward(dy, *args, saved=saved)
    for n in (6, 16, 17, 31, 33, 49, 129):
        cut = [t[:n] for t in args]
        out, _ = case.layer.forward(*cut)
        assert torch.equal(out, full[:n]), n
        assert torch.equal(case.layer.backward(dy[:n], *cut).dx, grad.dx[:n]), n


def test_nan_stays_in_its_row():
    case = make_case(E=1, T=35, K=1, lora=())
    clean, _ = case.layer.forward(case.x.float(), case.index, case.weights)
    bad = case.x.float().clone()
    bad[20, 3] = float("nan")
    out, _ = case.layer.forward(bad, case.index, case.weights)
    keep = torch.arange(35) != 20
    assert torch.isnan(out[20]).all() and torch.equal(out[keep], clean[keep])


@pytest.mark.products("tdpbsud")
@pytest.mark.parametrize("format,group", INT8_GROUPS)
@pytest.mark.parametrize("tokens", [5, 16, 33, 50, 201])
def test_int8_domain_has_the_bits_of_vectors(format, group, tokens):
    case = make_case(E=1, H=300, I=200, T=tokens, K=1, format=format, group=group, lora=())
    if tokens > 100:
        # so small a layer comes near the bar of elements in any format (0.05 to 0.10 by seed)
        shape = {"E": 1, "H": 96, "I": 64, "T": tokens, "K": 1, "seed": 1}
        case = make_case(**shape, format=format, group=group, lora=())
    ref, _ = case.run_reference()
    out = run_int8(case)
    err = check_close("int8 forward", out, ref, INT8_BAR, element=INT8_ELEMENT_BAR)
    record(f"{format} int8 domain", {"forward": err})
    assert torch.equal(out, int8_on_vectors(case))
    for n in {1, 4, 5, 17, 33} & set(range(tokens)):
        assert torch.equal(run_int8(case, n), out[:n]), n


@pytest.mark.products("tdpbsud", "tdpbf16ps")
def test_int8_domain_with_an_adapter():
    case = make_case(E=1, H=160, I=96, T=40, K=1, r=16)
    ref, _ = case.run_reference()
    err = check_close("int8 forward", run_int8(case), ref, INT8_BAR, element=INT8_ELEMENT_BAR)
    record("int8 int8 domain", {"forward": err})


@pytest.mark.products("tdpbsud")
@pytest.mark.parametrize("sign", [1, -1])
def test_int8_extremes(sign):
    """All codes at +-127: the largest sums there are."""
    H, I = 256, 32
    layer = Experts(1, H, I, format="int8", activation="relu")
    layer.put(0, "gate", torch.full((I, H), 1.0))
    layer.put(0, "up", torch.full((I, H), float(sign)))
    layer.put(0, "down", torch.eye(H, I))
    args = torch.full((19, H), 127.0), torch.zeros(19, 1).long(), torch.ones(19, 1)
    out, _ = layer.forward(*args, compute="int8")
    dot = 127.0 * float(layer.get(0, "gate").sum(1)[0])
    h = torch.tensor(sign * dot * dot).to(torch.bfloat16).float()
    want = h * float(layer.get(0, "down")[0, 0])
    torch.testing.assert_close(out[:, :I], want.expand(19, I), rtol=1e-6, atol=0)
    assert (out[:, I:] == 0).all()


def run_all(case, dy):
    out, saved = case.layer.forward(case.x, case.index, case.weights, case.lora, save=True)
    g = case.layer.backward(dy, case.x, case.index, case.weights, case.lora, saved)
    return [out, g.dx, g.dw, *g.a.values(), *g.b.values()]


@pytest.mark.products("tdpbf16ps", "tdpbsud")
def test_any_number_of_threads(tiles):
    """Workers have tiles of their own; the bits are those of one thread."""
    case = make_case(E=3, T=40, K=2, dtype=torch.float32)
    dy = torch.randn(case.x.shape, generator=torch.Generator().manual_seed(3))
    seen = {}
    for n in (1, 2, 4):
        _kt.testing.set_threads(n)
        _kt.testing.delay_tasks(200 if n > 1 else 0)
        _kt.testing.workers_seen()
        seen[n] = [*run_all(case, dy), run_int8(case)]
        assert _kt.testing.workers_seen() == n and tiles.configured() == 0
    _kt.testing.delay_tasks(0)
    _kt.set_threads(0)
    for n in (2, 4):
        assert all(torch.equal(a, b) for a, b in zip(seen[1], seen[n], strict=True)), n


@pytest.mark.products("tdpbf16ps")
def test_any_number_of_nodes(tiles):
    """Products have the same rows whoever computes them, so tiles add the same way."""
    case = make_case(E=2, H=64, I=96, T=40, K=1, format="bf16", slices=3, dtype=torch.float32)
    dy = torch.randn(case.x.shape, generator=torch.Generator().manual_seed(3))
    want = run_all(case, dy)
    _kt.testing.set_threads(3)
    for n in (2, 3):
        _kt.testing.pretend_nodes(n)
        _kt.set_nodes(n)
        got = run_all(case, dy)
        assert all(torch.equal(a, b) for a, b in zip(want, got, strict=True)), n
    assert tiles.configured() == 0
    _kt.set_nodes(1)
    _kt.testing.pretend_nodes(0)
    _kt.set_threads(0)


def test_calls_from_several_threads():
    cases = [make_case(E=2, T=40, seed=s, dtype=torch.float32) for s in range(3)]
    dy = torch.randn(cases[0].x.shape, generator=torch.Generator().manual_seed(3))
    want = [run_all(c, dy) for c in cases]
    wrong = []

    def work(i):
        got = run_all(cases[i], dy)
        wrong.extend(i for a, b in zip(want[i], got, strict=True) if not torch.equal(a, b))

    threads = [threading.Thread(target=work, args=(i,)) for i in range(3)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not wrong
