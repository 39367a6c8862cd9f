"""Processes, threads and interrupts around the engine: fork, exit, errors of tasks, Ctrl-C.

What ends a process runs in one of its own (`run`).
tests/kt_core/test_experts.py has the plain fork, and two threads that use a layer each.
"""

from __future__ import annotations

import threading
import time

import pytest
import torch
from fresh_process import run_kernels as run
from kernel_cases import check_failing_task, everything, forward, make_case, same

from kt_core import _kt, runtime


@pytest.fixture(autouse=True)
def default_threads():
    yield
    _kt.testing.delay_tasks(0)
    _kt.testing.fail_tasks(-1)
    runtime.set_threads(None)


# -- fork


def test_multiprocessing_fork_after_use():
    run("""
want = forward(make_case(T=20))

def child(queue):
    queue.put(torch.equal(forward(make_case(T=20)), want))

if __name__ == "__main__":
    context = multiprocessing.get_context("fork")
    queue = context.SimpleQueue()
    children = [context.Process(target=child, args=(queue,)) for _ in range(2)]
    for c in children:
        c.start()
    assert [queue.get(), queue.get()] == [True, True]
    for c in children:
        c.join()
        assert c.exitcode == 0
    assert torch.equal(forward(make_case(T=20)), want)
""")


def test_dataloader_workers_after_use():
    run("""
class Outputs(torch.utils.data.Dataset):
    def __len__(self):
        return 4
    def __getitem__(self, i):
        return forward(make_case(T=20, seed=i))

want = [forward(make_case(T=20, seed=i)) for i in range(4)]
loader = torch.utils.data.DataLoader(
    Outputs(), batch_size=None, num_workers=2, multiprocessing_context="fork"
)
for _ in range(2):
    for i, out in enumerate(loader):
        assert torch.equal(out, want[i])
        assert torch.equal(forward(make_case(T=20, seed=i)), want[i])
""")


def test_fork_while_another_thread_computes():
    """The child must not wait for a lock that only the parent's thread could release."""
    run("""
case = make_case(T=20)
want = forward(case)
start_calls(case)
pid = os.fork()
if pid == 0:
    os._exit(0 if torch.equal(forward(make_case(T=20)), want) else 3)
assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
assert torch.equal(forward(case), want)
""")


# -- exit


@pytest.mark.parametrize("exit_code", [0, 3])
def test_exit_with_work_in_flight_in_a_daemon_thread(exit_code):
    """The call outlives the interpreter, not the process."""
    run(f"start_calls(make_case(T=20))\nsys.exit({exit_code})", exit_code)


def test_exit_while_daemon_threads_call_without_pause():
    """The interpreter's end falls between and into calls. Native ones: torch's own functions abort
    where they meet it (`a + a` in a loop does, in torch 2.13)."""
    for _ in range(2):
        run("""
def loop(case):
    x, out = case.x.bfloat16(), torch.empty(case.x.shape)
    tokens, top_k = case.index.shape
    at = {k: t.data_ptr() for k, t in (("x", x), ("index", case.index), ("weight", case.weights))}
    batch = _kt.Batch(tokens=tokens, top_k=top_k, **at)
    to = _kt.Output(out.data_ptr(), False)
    while True:
        case.layer._layer.forward(batch, None, 0, to, 0)

_kt.testing.set_threads(2)
for seed in range(3):
    threading.Thread(target=loop, args=(make_case(T=5, seed=seed),), daemon=True).start()
time.sleep(0.1)
""")


def test_a_thread_that_the_interpreter_waits_for():
    assert (
        run("""
case = make_case(T=20)
def late():
    threading.main_thread().join()
    print(tuple(forward(case).shape))
threading.Thread(target=late).start()
""")
        == "(20, 64)\n"
    )


# -- errors


@pytest.mark.parametrize("worker", [0, 1, 2])
def test_an_exception_of_a_task_reaches_python(worker):
    case = make_case(T=40)
    _kt.testing.set_threads(3)
    check_failing_task(case, worker)


def test_threads_that_the_system_refuses():
    """Stacks are 8 MB: 200 do not fit into 128 MB, nor at 2 MB each."""
    run("""
import resource
case = make_case(T=20)
want = forward(case)
pages = int(open("/proc/self/statm").read().split()[0])
limit = pages * resource.getpagesize() + (128 << 20)
resource.setrlimit(resource.RLIMIT_AS, (limit, resource.RLIM_INFINITY))
_kt.testing.set_threads(200)
try:
    forward(case)
    raise SystemExit("200 threads fitted")
except RuntimeError as e:
    assert "the system refused thread" in str(e) and "of 200; lower threads" in str(e), e
_kt.testing.set_threads(2)
assert torch.equal(forward(case), want)
""")


def test_ctrl_c_arrives_after_the_call():
    """Python raises it when the native call returns: at most one layer's forward or backward later,
    however many calls were to follow."""
    run("""
signal.signal(signal.SIGINT, signal.default_int_handler)  # a background job begins without
case = make_case(T=20)
want = forward(case)
_kt.testing.set_threads(2)
_kt.testing.delay_tasks(20_000)
inside = threading.Event()
calls = sent = 0
def interrupt():
    global sent
    inside.wait()
    time.sleep(0.1)
    sent = calls
    os.kill(os.getpid(), signal.SIGINT)
threading.Thread(target=interrupt).start()
try:
    while True:
        inside.set()
        forward(case)
        calls += 1
except KeyboardInterrupt:
    pass
assert calls <= sent + 1, (calls, sent)
_kt.testing.delay_tasks(0)
assert torch.equal(forward(case), want)
""")


# -- several users


def test_layers_used_alternately():
    """Sizes, formats and routing differ, so what one leaves in the scratch would show."""
    cases = [
        make_case(T=50, seed=1),
        make_case(E=6, H=160, I=136, T=300, K=3, format="int4", dropout=0.2, seed=2),
        make_case(H=32, I=32, T=1, format="bf16", lora=None, seed=3),
    ]
    want = [everything(c) for c in cases]
    for i in (0, 1, 0, 2, 1, 1, 2, 0):
        assert same(everything(cases[i]), want[i]), i


def test_one_layer_from_two_python_threads():
    case = make_case(T=50)
    want = everything(case)
    bad = []

    def loop():
        for _ in range(10):
            if not same(everything(case), want):
                bad.append(1)

    threads = [threading.Thread(target=loop) for _ in range(2)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not bad


def test_alternating_with_torch_matmul():
    """torch's bf16 product may use AMX tiles on this thread: neither may see the other's state."""
    g = torch.Generator().manual_seed(5)
    a, b = (torch.randn(256, 256, generator=g).bfloat16() for _ in range(2))
    case = make_case(E=2, H=128, I=128, T=200)
    product, ours = a @ b, everything(case)
    for _ in range(5):
        assert torch.equal(a @ b, product)
        assert same(everything(case), ours)


def test_set_threads_while_another_thread_computes():
    """It waits for the call in flight, and other Python threads run meanwhile."""
    case = make_case(T=50)
    want = everything(case)
    bad = []
    stop = threading.Event()

    def loop():
        while not stop.is_set():
            if not same(everything(case), want):
                bad.append(1)

    thread = threading.Thread(target=loop)
    thread.start()
    for n in (2, 1, 3, 2, 8, 1) * 3:
        _kt.testing.set_threads(n)
        assert _kt.threads() == n
        assert same(everything(case), want)
    stop.set()
    thread.join()
    assert not bad


def test_set_threads_lets_other_python_threads_run():
    case = make_case(T=20)
    _kt.testing.set_threads(2)
    _kt.testing.delay_tasks(50_000)
    computing, order = threading.Event(), []

    def compute():
        computing.set()
        forward(case)  # a second or more
        order.append("call")

    def change():
        order.append("change")
        _kt.set_threads(1)
        order.append("changed")

    threads = [threading.Thread(target=f) for f in (compute, change)]
    threads[0].start()
    computing.wait()
    time.sleep(0.05)
    threads[1].start()
    while "change" not in order:
        time.sleep(0.01)
    order.append("python")
    for t in threads:
        t.join()
    assert order[:2] == ["change", "python"] and _kt.threads() == 1
