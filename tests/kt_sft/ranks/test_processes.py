"""Waiting for the end of other processes."""

from __future__ import annotations

import os
import subprocess
import time

import pytest

from kt_sft.ranks.processes import Processes


@pytest.fixture
def sleepers():
    """Two processes that live until they are killed."""
    made = [subprocess.Popen(["sleep", "1000"]) for _ in range(2)]
    yield made
    for process in made:
        process.kill()
        process.wait()


def test_the_one_that_ends_is_told(sleepers):
    processes = Processes(p.pid for p in sleepers)
    begun = time.monotonic()
    assert processes.wait(0.1) == set() and time.monotonic() - begun >= 0.1
    sleepers[1].kill()
    assert processes.wait() == {sleepers[1].pid}
    assert processes.wait() == {sleepers[1].pid}  # also when asked again
    processes.close()


def test_one_that_is_gone_already(sleepers):
    sleepers[0].kill()
    sleepers[0].wait()
    processes = Processes(p.pid for p in sleepers)
    assert processes.wait() == {sleepers[0].pid}  # at once
    processes.close()


def test_nobody_to_wait_for():
    assert Processes([]).wait() == set()


def test_waiting_is_given_up_when_asked(sleepers):
    wake, done = os.pipe()
    processes = Processes([sleepers[0].pid])
    os.write(done, b".")
    assert processes.wait(unless=wake) == set()
    processes.close()
    for descriptor in (wake, done):
        os.close(descriptor)
