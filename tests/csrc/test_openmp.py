"""Expert kernels on torch's OpenMP threads: used when the numbers agree, the same bits, and nothing
is lost of what tests/csrc/test_lifecycle.py asks of our own threads.

The number of OpenMP threads is fixed when torch starts, so each case runs in a process of its own.
"""

from __future__ import annotations

import pytest
import torch
from fresh_process import run_kernels as run

from kt_core import _kt, openmp

START = """
torch.set_num_threads(2)
_kt.testing.set_threads(2)
"""


def test_the_same_bits_on_either_threads():
    run(
        START
        + """
from kt_core import openmp
case = make_case(T=70)
shared = everything(case)
assert _kt.in_openmp() and openmp.share_threads()
_kt.testing.delay_tasks(2000)  # each must steal from the other
_kt.testing.workers_seen()
assert same(everything(case), shared)
assert _kt.testing.workers_seen() == 2
_kt.testing.delay_tasks(0)
openmp.keep_apart()
assert same(everything(case), shared) and not _kt.in_openmp()
torch.set_num_threads(1)
assert openmp.share_threads() and same(everything(case), shared) and not _kt.in_openmp()
"""
    )


def test_fewer_threads_than_asked_for_do_all_tasks():
    """Inside a parallel region of somebody else the runtime gives one thread."""
    run(
        START
        + """
case = make_case(T=70)
want = everything(case)
import ctypes
real = []
@ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint)
def one_thread(fn, data, threads, flags):
    real.append(threads)
    ctypes.CFUNCTYPE(None, ctypes.c_void_p)(fn)(data)
@ctypes.CFUNCTYPE(ctypes.c_int)
def two():
    return 2
_kt.use_openmp(*(ctypes.cast(f, ctypes.c_void_p).value for f in (one_thread, two)))
assert same(everything(case), want)
assert set(real) == {2} and _kt.in_openmp()
"""
    )


def test_between_operators_of_torch_in_two_python_threads():
    run(
        START
        + """
cases = [make_case(T=40, seed=s) for s in range(2)]
want = [everything(c) for c in cases]
wrong = []
def work(i):
    torch.set_num_threads(2)
    a = torch.randn(300, 300, generator=torch.Generator().manual_seed(i))
    product = a @ a
    for _ in range(15):
        if not (same(everything(cases[i]), want[i]) and torch.equal(a @ a, product)):
            wrong.append(i)
threads = [threading.Thread(target=work, args=(i,)) for i in range(2)]
for t in threads:
    t.start()
for t in threads:
    t.join()
assert not wrong and _kt.in_openmp()
"""
    )


def test_backward_on_the_thread_of_autograd():
    run(
        START
        + """
case = make_case(T=40)
want = everything(case)
seen = []
class Call(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.sum()
    @staticmethod
    def backward(ctx, g):
        seen.append((same(everything(case), want), _kt.in_openmp()))
        return g.expand(3)
Call.apply(torch.ones(3, requires_grad=True)).backward()
assert seen == [(True, True)], seen
"""
    )


@pytest.mark.parametrize("worker", [0, 1])
def test_an_exception_of_a_task_reaches_python(worker):
    run(
        START
        + f"""
case = make_case(T=70)
want = forward(case)
_kt.testing.delay_tasks(2000)
_kt.testing.fail_tasks({worker})
try:
    forward(case)
    raise SystemExit("no error")
except RuntimeError as error:
    assert "task failed on worker {worker}" in str(error), error
assert _kt.in_openmp()
_kt.testing.fail_tasks(-1)
_kt.testing.delay_tasks(0)
assert torch.equal(forward(case), want)
"""
    )


def test_a_forked_child_computes_on_its_own_threads():
    run(
        START
        + """
case = make_case(T=40)
want = forward(case)
assert _kt.in_openmp()
pid = os.fork()
if pid == 0:
    os._exit(0 if torch.equal(forward(make_case(T=40)), want) and not _kt.in_openmp() else 3)
assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
assert torch.equal(forward(case), want) and _kt.in_openmp()
"""
    )


def test_exit_with_a_call_in_flight():
    """Native calls: see test_exit_while_daemon_threads_call_without_pause."""
    run(
        START
        + """
case = make_case(T=20)
forward(case)
_kt.testing.delay_tasks(10_000)
def loop(case):  # its own tensors: the interpreter's end frees those of modules
    torch.set_num_threads(2)
    x, out = case.x.bfloat16(), torch.empty(case.x.shape)
    tokens, top_k = case.index.shape
    at = {k: t.data_ptr() for k, t in (("x", x), ("index", case.index), ("weight", case.weights))}
    batch = _kt.Batch(tokens=tokens, top_k=top_k, **at)
    to = _kt.Output(out.data_ptr(), False)
    while True:
        case.layer._layer.forward(batch, None, 0, to, 0)
threading.Thread(target=loop, args=(case,), daemon=True).start()
time.sleep(0.2)
assert _kt.in_openmp()
"""
    )


def test_which_library_is_taken():
    lib = torch.__file__.replace("__init__.py", "lib/libgomp-a34b.so.1")
    line = "7f00-7f01 r-xp 00000000 fe:00 1   {}\n"
    other = line.format("/usr/lib/x86_64-linux-gnu/libgomp.so.1")
    assert openmp.loaded_runtime("7f00-7f01 rw-p 00000000 00:00 0 \n") is None
    assert openmp.loaded_runtime(other) == "/usr/lib/x86_64-linux-gnu/libgomp.so.1"
    assert openmp.loaded_runtime(other + line.format(lib) * 2) == lib
    assert openmp.share_threads() and not _kt.in_openmp()
