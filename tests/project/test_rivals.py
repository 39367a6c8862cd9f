"""bench/rivals.py against a stand-in for kt-kernel's worker: its reports and its refusals."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

BENCH = Path(__file__).resolve().parents[2] / "bench"
SETTINGS = '[{"threads": 1, "direct": false}, {"threads": 2, "direct": true}]'
PREPARED = (
    '{"ok": true, "errors": {"forward": 0.02}, "rss_mb": 300.0, "rss_before_mb": 100.0,'
    ' "layers": 2, "kernel": "K", "variant": "V"}'
)
TIMED = (
    '{"ok": true, "seconds": [[2.0, 3.0], [1.0, 9.0]], "rss_mb": 500.0, "settings": '
    + SETTINGS
    + "}"
)


@pytest.fixture
def rivals(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(BENCH))
    import rivals as module

    return module


@pytest.fixture
def prepared(rivals: Any, tmp_path: Path) -> Callable[[str], Any]:
    """A KtKernel whose worker answers `prepare`, and then runs the lines given."""

    def start(after: str) -> Any:
        script = tmp_path / "worker.py"
        script.write_text(f"import sys\ninput()\nprint('''{PREPARED}''', flush=True)\n{after}\n")
        impl = rivals.KtKernel("int8", threads=2, max_tokens=64)
        impl.command = (sys.executable, str(script))
        impl.prepare(rivals_shape())
        return impl

    return start


def rivals_shape() -> Any:
    from workloads import SHAPES

    return SHAPES["S"]


def test_the_best_setting_is_reported(rivals: Any, prepared: Callable[[str], Any]) -> None:
    impl = prepared(f"input()\nprint('''{TIMED}''', flush=True)")
    assert impl.relative_error() == 0.02
    assert impl.seconds("forward", rivals_shape(), rivals.Spec(8, (0, 1)), 2) == [1.0, 9.0]
    assert impl.setting == {"threads": 2, "direct": True}
    assert impl.layer_mb() == 200.0


def test_errors_of_the_worker_arrive(rivals: Any, prepared: Callable[[str], Any]) -> None:
    impl = prepared("""input()\nprint('{"ok": false, "error": "no such thing"}', flush=True)""")
    with pytest.raises(RuntimeError, match="no such thing"):
        impl.seconds("step", rivals_shape(), rivals.Spec(8, (0,)), 1)


def test_a_dead_worker_is_named_with_its_last_words(
    rivals: Any, prepared: Callable[[str], Any]
) -> None:
    impl = prepared("input()\nsys.stderr.write('illegal instruction')\nsys.exit(3)")
    with pytest.raises(RuntimeError, match=r"ended \(3, [^\n]*\nillegal instruction"):
        impl.seconds("forward", rivals_shape(), rivals.Spec(8, (0,)), 1)


def test_a_silent_worker_is_given_up(
    rivals: Any, prepared: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    impl = prepared("import time\ntime.sleep(60)")
    monkeypatch.setattr(rivals, "TIMEOUT", 0.2)
    with pytest.raises(RuntimeError, match="no reply within"):
        impl.seconds("forward", rivals_shape(), rivals.Spec(8, (0,)), 1)
    assert impl._process.poll() is not None


def test_the_worker_ends_with_its_owner(prepared: Callable[[str], Any]) -> None:
    impl = prepared("input()")
    process: subprocess.Popen[bytes] = impl._process
    assert process.poll() is None
    del impl
    assert process.poll() is not None


def test_more_tokens_than_prepared_are_refused(rivals: Any, prepared: Callable[[str], Any]) -> None:
    impl = prepared("input()")
    with pytest.raises(ValueError, match="raise max_tokens"):
        impl.seconds("forward", rivals_shape(), rivals.Spec(65, (0,)), 1)


def test_no_environment_names_its_setup(rivals: Any, tmp_path: Path) -> None:
    impl = rivals.KtKernel("bf16")
    impl.command = (str(tmp_path / "python"), "worker.py")
    with pytest.raises(FileNotFoundError, match="peers_setup"):
        impl.prepare(rivals_shape())


def test_reference_is_differentiable_and_adds_lora(rivals: Any) -> None:
    """Against the merged weights, whose forward must be the same."""
    import layer_reference
    from impls import lora_factors, seeded_weights
    from workloads import Shape, batch

    shape = Shape("tiny", 4, 2, 16, 8)
    b = batch(shape, 5, seed=0)
    a, factor_b = lora_factors(shape, 2)
    x = b.x.float().requires_grad_()

    def merged(e: int) -> tuple[torch.Tensor, ...]:
        names = ("gate", "up", "down")
        pairs = zip(names, seeded_weights(shape, e), strict=True)
        return tuple(w.float() + factor_b[p][e] @ a[p][e] for p, w in pairs)

    out = layer_reference.forward(x, b, lambda e: seeded_weights(shape, e), (a, factor_b))
    expected = layer_reference.forward(x, b, merged)
    assert layer_reference.relative_error(out, expected) < 1e-5
    assert (
        layer_reference.relative_error(out, layer_reference.forward(b.x, b, lambda e: merged(0)))
        > 0.1
    )
    out.backward(b.dy.float())
    assert x.grad is not None and x.grad.norm() > 0
