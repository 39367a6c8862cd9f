"""Experts: clear errors, threads, concurrency, fork."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time

import pytest
import torch
from kernel_cases import make_case

from kt_core import _kt, runtime
from kt_core.experts import Experts, Lora
from kt_core.names import PROJECTIONS


@pytest.fixture(autouse=True)
def default_threads():
    yield
    _kt.testing.delay_tasks(0)
    runtime.set_threads(None)


@pytest.mark.parametrize(
    "change,text",
    [
        (dict(format="int3"), "format 'int3' is not known; choose one of bf16, fp8, int8"),
        (dict(group=48), "group is 48; format int8 takes 32, 64, 128 or 0"),
        (dict(activation="swoosh"), "activation 'swoosh'; known: silu"),
        (dict(num_experts=0), "E=0"),
    ],
)
def test_unknown_settings_raise(change, text):
    kwargs = dict(num_experts=2, hidden=64, intermediate=64) | change
    with pytest.raises(ValueError, match=text.replace("(", r"\(")):
        Experts(**kwargs)


def test_bad_weights_raise_by_name():
    layer = Experts(2, 64, 32, name="model.layers.3.mlp.experts")
    with pytest.raises(
        ValueError, match=r"layers\.3.*expert 1 gate_proj has shape \(3, 64\).*\(32, 64\)"
    ):
        layer.put(1, "gate", torch.zeros(3, 64))
    with pytest.raises(ValueError, match="int64"):
        layer.put(0, "up", torch.zeros(32, 64, dtype=torch.int64))
    with pytest.raises(ValueError, match=r"expert is 7.*0\.\.1"):
        layer.put(7, "up", torch.zeros(32, 64))
    bad = torch.zeros(64, 32)
    bad[63, 31] = float("inf")
    with pytest.raises(ValueError, match="expert 0 down_proj holds NaN or Inf"):
        layer.put(0, "down", bad)
    assert len(layer.missing()) == 6
    with pytest.raises(ValueError, match="expert 0 gate_proj was never loaded"):
        layer.forward(torch.zeros(1, 64), torch.zeros(1, 1).long(), torch.ones(1, 1))


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_check_finite_names_what_is_not(bad):
    case = make_case(E=3, H=64, I=32, T=4, K=2)
    case.layer.name = "layers.3"
    good = case.x, case.index, case.weights, case.lora
    _, saved = case.layer.forward(*good, save=True)
    spoilt = case.x.clone()
    spoilt[2, 5] = bad
    case.layer.forward(spoilt, *good[1:])  # off: computed as it is
    case.layer.check_finite = True
    case.layer.backward(case.x, *good, saved)
    with pytest.raises(FloatingPointError, match=r"layers\.3: x has 1 values .* at \(2, 5\)"):
        case.layer.forward(spoilt, *good[1:])
    with pytest.raises(FloatingPointError, match=r"layers\.3: grad_out has 1 values"):
        case.layer.backward(spoilt, *good, saved)
    weights = case.weights.clone()
    weights[3, 1] = bad
    with pytest.raises(FloatingPointError, match=r"layers\.3: top_k_weights has 1 values"):
        case.layer.forward(case.x, case.index, weights, case.lora)
    case.lora.b["up"][0, 0, 0] = bad
    with pytest.raises(FloatingPointError, match=r"layers\.3: LoRA B of up has 1 values"):
        case.layer.forward(*good)


def test_bad_batches_raise_by_name():
    case = make_case(E=4, H=64, T=3, K=2)
    good = case.x, case.index, case.weights
    with pytest.raises(ValueError, match="top_k_index holds 4 for token 1.*experts 0..3"):
        index = case.index.clone()
        index[1, 0] = 4
        case.layer.forward(case.x, index, case.weights)
    with pytest.raises(ValueError, match="top_k_index holds -1"):
        case.layer.forward(
            case.x, case.index - 100 * (case.index == 3) * 0 - 1 - case.index, case.weights
        )
    with pytest.raises(ValueError, match=r"\[T, 64\]"):
        case.layer.forward(case.x[:, :32], case.index, case.weights)
    with pytest.raises(ValueError, match="do not agree"):
        case.layer.forward(case.x[:2], case.index, case.weights)
    with pytest.raises(ValueError, match="lora.a has"):
        case.layer.forward(*good, Lora(case.lora.a, {"up": case.lora.b["up"]}, 1.0))
    with pytest.raises(ValueError, match=r"lora gate has A \(4, 8, 3\)"):
        case.layer.forward(
            *good, Lora({"gate": torch.zeros(4, 8, 3)}, {"gate": torch.zeros(4, 96, 8)}, 1.0)
        )
    with pytest.raises(ValueError, match="dropout is 1.5"):
        case.layer.forward(*good, Lora(case.lora.a, case.lora.b, 1.0, dropout=1.5))


def test_threads_above_the_allowed_cpus_raise():
    allowed = runtime.allowed_cpus()
    with pytest.raises(
        ValueError, match=f"threads is {allowed + 1} but only {allowed} CPUs are allowed"
    ):
        runtime.set_threads(allowed + 1)
    with pytest.raises(ValueError, match="threads is 0"):
        runtime.set_threads(0)
    runtime.set_threads(1)
    assert runtime.threads() == 1


def test_kt_threads_must_agree_with_the_setting():
    code = "from kt_core import runtime as r\nprint(r.threads())\nr.set_threads(2)"
    env = {**os.environ, "KT_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True)
    assert done.stdout.strip() == "1"
    assert "threads is 2 but KT_THREADS is 1" in done.stderr


def run_all(case):
    args = case.x.float(), case.index, case.weights, case.lora
    out, saved = case.layer.forward(*args, save=True)
    g = case.layer.backward(args[0], *args, saved)
    return [out, saved, g.dx, g.dw, *(g.a[p] for p in PROJECTIONS), *(g.b[p] for p in PROJECTIONS)]


@pytest.mark.parametrize("tokens", [1, 37, 2100])  # 2100 x 2 rows: two waves
def test_bf16_results_are_the_fp32_ones_rounded_once(tokens):
    case = make_case(E=5, H=176, I=72, T=tokens, K=2)
    args = case.index, case.weights, case.lora
    whole, saved = case.layer.forward(case.x.float(), *args, save=True)
    rounded, _ = case.layer.forward(case.x, *args)
    assert rounded.dtype == torch.bfloat16
    assert torch.equal(rounded, whole.to(torch.bfloat16))
    whole = case.layer.backward(case.x.float(), case.x.float(), *args, saved).dx
    rounded = case.layer.backward(case.x, case.x, *args, saved).dx
    assert rounded.dtype == torch.bfloat16
    assert torch.equal(rounded, whole.to(torch.bfloat16))


def test_gradients_take_the_memory_of_earlier_ones_but_never_of_live_ones():
    case = make_case(E=4, H=64, I=96, T=20, K=2)
    size = sum(4 * t.numel() for t in (*case.lora.a.values(), *case.lora.b.values()))
    pages = lambda n: -(-n // 4096) * 4096  # noqa: E731
    run_all(case)
    runtime.release_recycled()
    assert _kt.recycled_bytes() == 0
    first = run_all(case)
    kept = [t.clone() for t in first]
    addresses = {t.data_ptr() for t in first[4:]}
    case.x = case.x + 1
    second = run_all(case)
    assert all(torch.equal(a, b) for a, b in zip(first, kept, strict=True))
    assert addresses.isdisjoint(t.data_ptr() for t in second[4:])
    del first
    assert size <= _kt.recycled_bytes() <= sum(pages(4 * t.numel()) for t in second[4:])
    third = run_all(case)
    assert {t.data_ptr() for t in third[4:]} == addresses
    assert all(torch.equal(a, b) for a, b in zip(second, third, strict=True))
    assert _kt.recycled_bytes() == 0
    del second, third
    runtime.release_recycled()
    assert _kt.recycled_bytes() == 0


@pytest.mark.parametrize("default", ["dtype", "device"])
def test_results_do_not_depend_on_the_defaults_of_torch(default):
    case = make_case(E=4, H=64, I=96, T=20, K=2)
    want = run_all(case)
    try:
        if default == "dtype":
            torch.set_default_dtype(torch.bfloat16)
        else:
            torch.set_default_device("meta")
        found = run_all(case)
    finally:
        torch.set_default_dtype(torch.float32)
        torch.set_default_device(None)
    assert all(a.dtype == b.dtype and torch.equal(a, b) for a, b in zip(found, want, strict=True))


def test_an_adapter_of_rank_0_changes_nothing_and_has_empty_gradients():
    case = make_case(E=4, H=64, I=96, T=20, K=2)
    case.lora = Lora(
        {p: t[:, :0] for p, t in case.lora.a.items()},
        {p: t[..., :0] for p, t in case.lora.b.items()},
        1.0,
    )
    found = run_all(case)
    assert [tuple(t.shape) for t in found[4:]] == [
        *[(4, 0, 64), (4, 0, 64), (4, 0, 96)],
        *[(4, 96, 0), (4, 96, 0), (4, 64, 0)],
    ]
    case.lora = None
    x = case.x.float()
    out, saved = case.layer.forward(x, case.index, case.weights, save=True)
    plain = case.layer.backward(x, x, case.index, case.weights, None, saved)
    want = [out, saved, plain.dx, plain.dw]
    assert all(torch.equal(a, b) for a, b in zip(found[:4], want, strict=True))


@pytest.mark.parametrize("tokens", [1, 37, 300])
def test_same_bits_for_any_number_of_threads(tokens):
    case = make_case(E=5, H=160, I=136, T=tokens, K=3, dropout=0.2)
    results = {}
    for n in (1, 2, 7, 32):
        _kt.testing.set_threads(n)
        _kt.testing.delay_tasks(
            200 if n > 1 else 0
        )  # all get a turn, worker 0 lags: others must steal
        _kt.testing.workers_seen()
        results[n] = run_all(case)
        assert _kt.testing.workers_seen() >= min(
            n, 24
        )  # at 32 a batch of one token may have fewer tasks
    for n in (2, 7, 32):
        assert all(torch.equal(a, b) for a, b in zip(results[1], results[n], strict=True)), n


def test_two_python_threads_at_once():
    cases = [make_case(T=50, seed=s) for s in (1, 2)]
    want = [run_all(c) for c in cases]
    bad = []

    def loop(i):
        for _ in range(20):
            if not all(torch.equal(a, b) for a, b in zip(want[i], run_all(cases[i]), strict=True)):
                bad.append(i)

    threads = [threading.Thread(target=loop, args=(i,)) for i in (0, 1)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not bad


def test_fork_after_use():
    """A dataloader worker that forks after the pool ran can use experts of its own."""
    code = """
import os, sys, torch
sys.path.insert(0, "tests")
from kernel_cases import make_case
case = make_case(T=20)
want, _ = case.layer.forward(case.x, case.index, case.weights)
pid = os.fork()
if pid == 0:
    try:
        case.layer.forward(case.x, case.index, case.weights)
        os._exit(4)
    except RuntimeError as e:
        assert "do not follow a fork" in str(e)
    case = make_case(T=20)
    out, _ = case.layer.forward(case.x, case.index, case.weights)
    os._exit(0 if torch.equal(out, want) else 3)
_, status = os.waitpid(pid, 0)
out, _ = case.layer.forward(case.x, case.index, case.weights)
assert torch.equal(out, want)
sys.exit(os.waitstatus_to_exitcode(status))
"""
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0


def test_workers_sleep_when_idle():
    run_all(make_case(T=20))
    time.sleep(0.05)
    before = time.process_time()
    time.sleep(2)
    assert time.process_time() - before < 0.02


def test_seconds_grow():
    before = runtime.seconds()
    run_all(make_case(T=20))
    after = runtime.seconds()
    assert after["forward"] > before["forward"] and after["backward"] > before["backward"]


def test_packed_bytes_round_trip():
    case = make_case(T=5, format="int4")
    raw = bytearray(case.layer.packed())
    buffer = torch.frombuffer(raw, dtype=torch.uint8)
    aligned = torch.empty(len(raw) + 64, dtype=torch.uint8)
    offset = -aligned.data_ptr() % 64
    aligned[offset : offset + len(raw)] = buffer
    view = aligned[offset : offset + len(raw)].numpy()
    again = Experts.from_packed(4, 64, 96, buffer=view, format="int4")
    out = [e.forward(case.x, case.index, case.weights)[0] for e in (case.layer, again)]
    assert torch.equal(*out)
    with pytest.raises(ValueError, match="bytes"):
        Experts.from_packed(4, 64, 96, buffer=view[:64], format="int4")
