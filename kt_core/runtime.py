"""Process-wide settings of the native core: kernel tier, threads, time spent.

Environment variables read here and nowhere else: ``KT_ISA`` (force a tier), ``KT_THREADS``
(number of threads), ``KT_LOG`` (level of the ``kt`` logger). A setting that disagrees raises.
"""

from __future__ import annotations

import logging
import os
import threading
import time

from kt_core import _kt

log = logging.getLogger("kt")

_seconds = {"forward": 0.0, "backward": 0.0}
_seconds_lock = threading.Lock()


def kernels() -> list[_kt.KernelInfo]:
    """Compiled kernels, the preferred tier last.

    Keys: ``isa``, ``format``, ``usable``, CPU features it ``needs`` and those ``missing`` here, the
    CPU vendor it is ``slow_on`` (not chosen there) and whether that is ``slow_here``,
    ``bf16_products`` (it multiplies bf16 with bf16), ``int8_domain`` (it also computes with
    quantized activations), ``int16_pays`` (training in 16-bit rows is faster), ``calls`` so far;
    of the format its ``bits``, whether it is ``scaled``, its ``groups`` and ``default_group`` (see
    kt_core/formats.py).
    """
    return _kt.kernels()


def multiplies_bf16() -> bool:
    """Whether this CPU has units that multiply bf16 faster than fp32."""
    return any(k["usable"] and k["bf16_products"] and not k["slow_here"] for k in kernels())


def isa() -> str:
    """Name of the kernel tier in use."""
    return str(_kt.current_isa())


def force_isa(name: str | None) -> None:
    """Use one tier (None: the best here). Raises ValueError for an unknown or unusable name."""
    _kt.force_isa(name or "")


def allowed_cpus() -> int:
    """CPUs this process may use: affinity mask capped by a cgroup quota."""
    return int(_kt.allowed_cpus())


def threads() -> int:
    """Threads that expert kernels run on, the caller included."""
    return int(_kt.threads())


def set_threads(n: int | None) -> None:
    """Set the number of threads (None: ``KT_THREADS`` or all allowed CPUs).

    Raises:
        ValueError: below 1, above :func:`allowed_cpus`, or different from ``KT_THREADS``.
    """
    _kt.set_threads(asked_threads(n) or 0)


def asked_threads(n: int | None) -> int | None:
    """The number that a setting `n` or ``KT_THREADS`` asks for, None for neither.

    Raises:
        ValueError: below 1, or the two differ.
    """
    env = _env_threads()
    if n is not None and n < 1:
        raise ValueError(
            f"threads is {n}; give a number >= 1, or leave it out for all allowed CPUs"
        )
    if n is not None and env is not None and n != env:
        raise ValueError(
            f"threads is {n} but KT_THREADS is {env}; unset KT_THREADS or make them equal"
        )
    return n or env


def numa_nodes() -> int:
    """NUMA nodes that expert kernels are spread over."""
    return int(_kt.nodes())


def available_numa_nodes() -> int:
    """NUMA nodes whose CPUs and memory this process may use."""
    return int(_kt.available_nodes())


def check_numa_nodes(n: int) -> None:
    """Raises ValueError below 1 or above :func:`available_numa_nodes`."""
    _kt.check_nodes(n)


def set_numa_nodes(n: int) -> None:
    """Spread threads, and the experts that are packed from now on, over this many NUMA nodes.

    Above 1, threads run on the CPUs of their node only; the caller's thread is left alone. It holds
    for all experts of this process: layers with fewer slices run as on one node.

    Raises:
        ValueError: below 1, above :func:`available_numa_nodes`, or above :func:`threads`.
    """
    _kt.set_nodes(n)
    log_refusals()


def release_recycled() -> None:
    """Return memory that gradients of experts left for the next ones to the system."""
    _kt.release_recycled()


def log_refusals() -> None:
    """Warn of calls that bind threads or memory to NUMA nodes and were refused by the system, once
    per kind of call."""
    for refusal in _kt.refusals():
        log.warning("%s", refusal)


def seconds() -> dict[str, float]:
    """Wall seconds this process spent in expert kernels, ``forward`` and ``backward``."""
    with _seconds_lock:
        return dict(_seconds)


class Timed:
    """Add a block's wall time to :func:`seconds` under ``forward`` or ``backward``."""

    def __init__(self, kind: str) -> None:
        self._kind = kind

    def __enter__(self) -> None:
        self._start = time.perf_counter()

    def __exit__(self, *error: object) -> None:
        with _seconds_lock:
            _seconds[self._kind] += time.perf_counter() - self._start


def _env_threads() -> int | None:
    value = os.environ.get("KT_THREADS")
    if not value:
        return None
    if not value.isdigit() or int(value) < 1:
        raise ValueError(f"KT_THREADS is {value!r}; give a number >= 1 or unset it")
    return int(value)


def _apply_environment() -> None:
    level = os.environ.get("KT_LOG")
    if level:
        if level.upper() not in ("DEBUG", "INFO", "WARNING", "ERROR"):
            raise ValueError(f"KT_LOG is {level!r}; give one of DEBUG, INFO, WARNING, ERROR")
        log.setLevel(level.upper())
    force_isa(os.environ.get("KT_ISA"))
    set_threads(None)
    if _kt.tiles_refused():
        log.warning(
            "this CPU has AMX, but the operating system refused this process the use of its tiles; "
            "expert kernels run on %s instead",
            isa(),
        )


_apply_environment()
