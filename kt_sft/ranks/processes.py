"""Waiting for the end of other processes of this machine, which the kernel tells through pidfd."""

from __future__ import annotations

import os
import select
from collections.abc import Iterable


class Processes:
    """Processes by their ids, for as long as it is not closed."""

    def __init__(self, pids: Iterable[int]) -> None:
        self._ended: set[int] = set()
        self._pid_of: dict[int, int] = {}  # by descriptor
        for pid in pids:
            try:
                self._pid_of[os.pidfd_open(pid)] = pid
            except ProcessLookupError:
                self._ended.add(pid)

    def wait(self, seconds: float | None = None, *, unless: int | None = None) -> set[int]:
        """Those that have ended, once there is one; none after so many seconds, or when the
        descriptor `unless` has something to read.
        """
        poller = select.poll()
        for descriptor in self._pid_of:
            poller.register(descriptor, select.POLLIN)
        if unless is not None:
            poller.register(unless, select.POLLIN)
        elif not self._pid_of:
            return self._ended  # there is nothing to wait for
        if self._ended:
            seconds = 0
        ready = {d for d, _ in poller.poll(None if seconds is None else seconds * 1000)}
        if unless in ready:
            return set()
        self._ended |= {self._pid_of[d] for d in ready}
        return self._ended

    def close(self) -> None:
        """Stops watching."""
        for descriptor in self._pid_of:
            os.close(descriptor)
        self._pid_of = {}
