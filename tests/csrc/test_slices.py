"""Slices of the intermediate dimension over NUMA nodes: the same bits on any number of them.

This machine has one node, so its nodes count several times here (`spread`): each node's workers
are bound to the CPUs and memory that it has. How other machines' nodes would share threads and
slices is in tests/csrc/test_topology.py.
"""

from __future__ import annotations

import errno
import logging
import os
from pathlib import Path

import pytest
import torch
from fresh_process import run_python
from kernel_cases import (
    BATCH_INVARIANT,
    FORMATS,
    GROUPS,
    INT8_BAR,
    INT8_ELEMENT_BAR,
    INT8_FORMATS,
    TIERS,
    check_case,
    check_close,
    check_failing_task,
    choose_tier,
    make_case,
    on_tiles,
    relative,
    same,
)
from numa_maps import policies

from kt_core import _kt, formats, runtime
from kt_core.experts import Experts
from kt_core.names import PROJECTIONS

CALLS = ("mbind", "set_mempolicy", "sched_setaffinity")


@pytest.fixture(autouse=True)
def one_node_afterwards():
    yield
    for call in CALLS:
        _kt.testing.refuse_call(call, 0)
    choose_tier()
    _kt.set_nodes(1)
    _kt.testing.pretend_nodes(0)
    _kt.testing.delay_tasks(0)
    runtime.set_threads(None)


def spread(nodes, threads):
    """This many logical nodes."""
    _kt.set_nodes(1)
    _kt.testing.set_threads(threads)
    _kt.testing.pretend_nodes(nodes)
    _kt.set_nodes(nodes)


def everything(case, int8=False):
    args = case.x.float(), case.index, case.weights, case.lora
    out, saved = case.layer.forward(*args, save=True)
    g = case.layer.backward(args[0].flip(0), *args, saved)
    again = case.layer.backward(args[0].flip(0), *args)
    found = [out, saved, g.dx, g.dw, again.dx, again.dw, *g.a.values(), *g.b.values()]
    if int8:
        found.append(case.layer.forward(*args, compute="int8")[0])
    return found


# -- slices


@pytest.mark.parametrize("slices", [2, 3, 8])
@pytest.mark.parametrize("format", FORMATS)
def test_slices_match_the_reference(format, slices):
    case = make_case(E=3, H=100, I=1000, T=33, K=2, format=format, slices=slices)
    check_case(case)
    if format in INT8_FORMATS:
        ref, _ = case.run_reference()
        out, _ = case.layer.forward(
            case.x.float(), case.index, case.weights, case.lora, compute="int8"
        )
        check_close("int8 forward", out, ref, INT8_BAR, element=INT8_ELEMENT_BAR)


@pytest.mark.parametrize("isa", TIERS)
@pytest.mark.parametrize("intermediate", [72, 96, 100, 136])
def test_uneven_slices_of_odd_sizes(isa, intermediate):
    choose_tier(isa)
    for format, group in GROUPS:
        most = Experts.max_slices(intermediate, format, group)
        kept = formats.of(format)
        least = 128 if kept.zeros or kept.factor else 64
        unit = (max(least, group) if group else 128) if kept.scaled else 32
        assert most == -(-intermediate // unit)
        shape = dict(H=96, I=intermediate, T=25, format=format, group=group, r=3)
        case, sliced = make_case(**shape), make_case(**shape, slices=most)
        check_case(sliced)
        for n in (2, 25):
            args = case.x[:n].float(), case.index[:n], case.weights[:n], case.lora
            (out, saved), (cut, kept) = (c.layer.forward(*args, save=True) for c in (case, sliced))
            assert torch.equal(saved, kept)  # gate and up reduce over H
            # formats with scales fold them at the same places, and some tiers round so
            if not formats.of(format).scaled:
                assert relative(cut, out) < 1e-6
                assert on_tiles(isa) or not torch.equal(cut, out)  # it was cut


def test_slices_hold_the_same_weights():
    """A scale belongs to a group, and groups are not cut: dequantized values do not change. (A
    whole channel is cut: every slice has a scale or factor of its own.)"""
    for format, group in GROUPS:
        kept = formats.of(format)
        for slices in (2, 3) if not kept.factor and (group or not kept.scaled) else ():
            a, b = (
                make_case(E=2, H=64, I=456, T=1, format=format, group=group, slices=n).dense
                for n in (1, slices)
            )
            assert all(torch.equal(a[p], b[p]) for p in PROJECTIONS), (format, slices)


@pytest.mark.parametrize("intermediate", [128, 256, 384, 768, 1024, 4096])
def test_slices_keep_the_packed_size(intermediate):
    for format, group in GROUPS:
        kept = formats.of(format)  # how many values share a scale may be known
        known = (group or not kept.scaled) and not kept.zeros and not kept.factor
        bits = kept.bits + (kept.scale_bits / group if group else 0) if known else None
        slices = Experts.max_slices(intermediate, format, group)
        assert slices == 8 or intermediate < 1024
        n = Experts.packed_nbytes(4, 256, intermediate, format, group, slices)
        whole = Experts.packed_nbytes(4, 256, intermediate, format, group)
        bar = 4 * 3 * 256 * intermediate * bits / 8 if bits else whole
        assert n <= 1.02 * bar, (format, group, slices)


def test_slices_out_of_range_are_refused():
    with pytest.raises(ValueError, match="slices is 3; an intermediate size of 96 in format int4"):
        Experts(2, 64, 96, format="int4", slices=3)
    with pytest.raises(ValueError, match="slices is 0; .* can be cut into 1 to 2"):
        Experts(2, 64, 96, format="int4", slices=0)
    with pytest.raises(ValueError, match="slices is 9; .* can be cut into 1 to 8"):
        Experts(2, 64, 4096, slices=9)


# -- the same bits


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("tokens", [1, 33, 300])
@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_same_bits_on_any_number_of_nodes(format, tokens, dropout):
    case = make_case(
        E=5, H=160, I=456, T=tokens, K=3, format=format, group=None, dropout=dropout, slices=4
    )
    _kt.set_threads(1)
    want = everything(case, int8=format in INT8_FORMATS)
    for nodes, threads in ((1, 3), (2, 2), (2, 7), (3, 3), (3, 8), (4, 4)):
        spread(nodes, threads)
        _kt.testing.delay_tasks(100)  # all get a turn: on every node, others must steal
        _kt.testing.workers_seen()
        assert same(everything(case, int8=format in INT8_FORMATS), want), (nodes, threads)
        assert _kt.testing.workers_seen() == threads
        _kt.testing.delay_tasks(0)


@pytest.mark.parametrize("isa", TIERS)
def test_same_bits_with_eight_slices_on_every_tier(isa):
    """Several waves of experts, each in several turns of the buffer between the nodes."""
    choose_tier(isa)
    few = make_case(E=3, H=100, I=1000, T=3, K=2, slices=8)
    many = make_case(E=5, H=288, I=256, T=1200, K=4, r=3, format="bf16", slices=8)
    for case in (few, many):
        _kt.set_nodes(1)
        _kt.set_threads(1)
        want = everything(case)
        spread(3, 4)
        assert same(everything(case), want)


@pytest.mark.parametrize("isa", BATCH_INVARIANT)
def test_few_and_many_rows_give_the_same_bits_on_nodes(isa):
    choose_tier(isa)
    case = make_case(E=3, H=96, I=136, T=130, K=2, format="int4", slices=3)
    spread(2, 3)
    out, saved = case.layer.forward(case.x, case.index, case.weights, case.lora, save=True)
    grad = case.layer.backward(case.x, case.x, case.index, case.weights, case.lora, saved)
    for n in (1, 3, 17, 129):
        cut = case.x[:n], case.index[:n], case.weights[:n], case.lora
        assert torch.equal(case.layer.forward(*cut)[0], out[:n])
        part = case.layer.backward(case.x[:n], *cut)
        assert torch.equal(part.dx, grad.dx[:n]) and torch.equal(part.dw, grad.dw[:n])


def test_outputs_are_fully_written_on_nodes(monkeypatch):
    case = make_case(E=6, T=5, H=100, I=72, format="bf16", slices=2)
    args = case.x.float(), case.index, case.weights, case.lora
    want, saved = case.layer.forward(*args, save=True)
    grads = case.layer.backward(args[0], *args, saved)
    spread(2, 2)
    empty = torch.empty
    monkeypatch.setattr(
        torch,
        "empty",
        lambda *a, **k: t.fill_(float("nan")) if (t := empty(*a, **k)).is_floating_point() else t,
    )
    out, again = case.layer.forward(*args, save=True)
    got = case.layer.backward(args[0], *args, again)
    assert same([out, again, got.dx, got.dw], [want, saved, grads.dx, grads.dw])


def test_fewer_slices_than_nodes_run_as_on_one():
    case = make_case(E=3, H=96, I=256, T=30, format="bf16", slices=2)
    want = everything(case)
    spread(3, 3)
    assert same(everything(case), want)
    assert same(everything(make_case(E=3, H=96, I=256, T=30, format="bf16", slices=2)), want)


# -- settings


def test_more_nodes_than_there_are_is_refused():
    have = runtime.available_numa_nodes()
    with pytest.raises(
        ValueError,
        match=f"numa_nodes is {have + 1} but this process has CPUs and memory on {have}; lower",
    ):
        runtime.set_numa_nodes(have + 1)
    with pytest.raises(ValueError, match="numa_nodes is 0"):
        runtime.set_numa_nodes(0)
    runtime.set_numa_nodes(1)
    assert runtime.numa_nodes() == 1


def test_every_node_needs_a_thread():
    _kt.set_threads(1)
    _kt.testing.pretend_nodes(2)
    with pytest.raises(ValueError, match="numa_nodes is 2 but threads is 1; every node needs one"):
        _kt.set_nodes(2)
    spread(3, 4)
    with pytest.raises(ValueError, match="numa_nodes is 3 but threads is 2"):
        _kt.testing.set_threads(2)
    assert (_kt.nodes(), _kt.threads()) == (3, 4)


def test_threads_default_to_the_nodes_cpus():
    runtime.set_threads(None)
    if runtime.allowed_cpus() < 2:
        pytest.skip("needs two CPUs")
    _kt.testing.pretend_nodes(2)
    _kt.set_nodes(2)
    assert runtime.threads() == runtime.allowed_cpus()


# -- binding


def test_workers_are_bound_and_the_caller_is_not():
    mine = os.sched_getaffinity(0)
    spread(2, 5)
    crews = _kt.testing.node_workers()
    id, cpus = _kt.topology()[1][0][:2]
    assert [c[:2] for c in crews] == [(id, 3), (id, 2)]  # the caller is one of node 0's
    assert [len(c[2]) for c in crews] == [2, 2]
    assert all(found == sorted(cpus) for c in crews for found in c[2])
    make_case(E=2, I=256, T=20, format="bf16", slices=2)
    assert os.sched_getaffinity(0) == mine
    _kt.set_nodes(1)
    assert _kt.testing.node_workers() == [(0, 5, [[], [], [], []])]  # nothing bound


def test_nothing_is_bound_on_one_node():
    for call in CALLS:
        _kt.testing.refuse_call(call, errno.EPERM)
    runtime.set_numa_nodes(1)
    check_case(make_case(I=256, format="bf16", slices=4))
    assert _kt.refusals() == []


@pytest.mark.parametrize("error", [errno.EPERM, errno.EINVAL])
@pytest.mark.parametrize("call", CALLS)
def test_a_refused_call_is_one_warning(call, error, caplog):
    shape = dict(E=3, H=96, I=256, T=30, format="bf16", slices=2)
    want = everything(make_case(**shape))
    _kt.testing.refuse_call(call, error)
    with caplog.at_level(logging.WARNING, "kt"):
        spread(2, 3)
        runtime.log_refusals()
        for _ in range(2):
            assert same(everything(make_case(**shape)), want)
    (message,) = (r.getMessage() for r in caplog.records)
    assert message.startswith(f"the system refused {call} ({os.strerror(error)}): ")


def test_all_calls_refused_at_once(caplog):
    """As in a container without CAP_SYS_NICE and with a strict seccomp profile."""
    for call in CALLS:
        _kt.testing.refuse_call(call, errno.EPERM)
    with caplog.at_level(logging.WARNING, "kt"):
        spread(3, 3)
        check_case(make_case(E=3, H=96, I=256, T=30, format="bf16", slices=3))
    assert len(caplog.records) == 3 and _kt.refusals() == []
    with pytest.raises(ValueError, match="no such call: mlock"):
        _kt.testing.refuse_call("mlock", 1)


@pytest.mark.skipif(not Path("/proc/self/numa_maps").exists(), reason="a kernel without NUMA")
def test_slices_prefer_their_nodes():
    spread(2, 2)
    layer = Experts(4, 256, 1024, format="int8", slices=8)
    for e in range(4):
        for p in PROJECTIONS:
            layer.put(e, p, torch.ones((256, 1024) if p == "down" else (1024, 256)))
    id = _kt.topology()[1][0][0]
    assert f"prefer:{id}" in {policy for policy, _ in policies(layer)}
    _kt.set_nodes(1)
    plain = Experts(4, 256, 1024, format="int8", slices=8)
    plain.put(0, "gate", torch.ones(1024, 256))
    assert {policy for policy, _ in policies(plain)} == {"default"}


# -- lifecycle


@pytest.mark.parametrize("worker", [0, 1, 2, 3])
def test_an_exception_of_a_task_reaches_python(worker):
    case = make_case(E=3, H=96, I=256, T=40, format="bf16", slices=4)
    spread(2, 4)
    check_failing_task(case, worker)


PRELUDE = """
import os, sys, threading, time
import torch
from kernel_cases import make_case
from kt_core import _kt

def forward():
    return case.layer.forward(case.x, case.index, case.weights, case.lora)[0]

def new():
    return make_case(E=3, H=96, I=256, T=20, format="bf16", slices=4)

_kt.testing.set_threads(3)
_kt.testing.pretend_nodes(2)
_kt.set_nodes(2)
case = new()
want = forward()
"""


def run(code, exit_code=0):
    run_python(PRELUDE + code, exit_code)


def test_fork_keeps_the_nodes():
    run("""
pid = os.fork()
if pid == 0:
    assert _kt.nodes() == 2
    case = new()
    same = torch.equal(forward(), want)
    os._exit(0 if same and [c[1] for c in _kt.testing.node_workers()] == [2, 1] else 3)
assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
assert torch.equal(forward(), want)
""")


def test_exit_with_work_in_flight():
    run(
        """
_kt.testing.delay_tasks(10_000)
started = threading.Event()
def loop():
    while True:
        started.set()
        forward()
threading.Thread(target=loop, daemon=True).start()
started.wait()
time.sleep(0.1)
sys.exit(3)
""",
        3,
    )
