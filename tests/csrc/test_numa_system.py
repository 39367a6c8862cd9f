"""`make test-numa-system` as a test: binding on virtual machines with two and three nodes."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts"))
import numa_system as system


@pytest.fixture(scope="module")
def machine_parts():
    """(qemu, kernel, initramfs)"""
    qemu = shutil.which("qemu-system-x86_64")
    if qemu is None:
        pytest.skip("no qemu-system-x86_64: `apt-get install qemu-system-x86` brings it")
    kernel = system.find_kernel(None)
    if kernel is None:
        pytest.skip("no kernel image in /boot, and none can be downloaded")
    system.WORK.mkdir(parents=True, exist_ok=True)
    program = system.native_build.build("numa_check") / "numa_check"
    return qemu, kernel, system.initramfs(program)


@pytest.mark.slow
@pytest.mark.parametrize("machine", system.MACHINES, ids=lambda m: m.name)
def test_threads_and_memory_are_where_they_should_be(machine, machine_parts):
    text = system.run(machine, *machine_parts)
    assert "no call was refused" in text and "in a memfd" in text


@pytest.mark.slow
def test_a_machine_that_is_not_as_expected_fails(machine_parts):
    wrong = system.Machine("wrong", (("0-1", 256), ("2-3", 256)), ("0:0,1,2", "1:3"))
    with pytest.raises(RuntimeError, match="FAIL node 0 has CPUs 0,1 and"):
        system.run(wrong, *machine_parts)
