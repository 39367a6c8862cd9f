"""The kernels as a program (tests/csrc/tier_check.cpp) on this CPU and on emulated older ones.

qemu's user emulation has no AVX-512: there an instruction of another tier in the wrong place ends
the program, also one that the opcode gate would not know.
"""

from __future__ import annotations

import shutil
import signal
import subprocess

import native_build
import pytest

from kt_core import kernels

QEMU = shutil.which("qemu-x86_64") or shutil.which("qemu-x86_64-static")
emulated = pytest.mark.skipif(
    QEMU is None, reason="no qemu-x86_64: `apt-get install qemu-user` brings it"
)
FORMATS = list(dict.fromkeys(str(k["format"]) for k in kernels()))


def check(*command: str) -> tuple[str, list[str]]:
    """The tier chosen, and the tiers that were checked."""
    program = str(native_build.tier_check())
    done = subprocess.run([*command, program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, (command, done.returncode, done.stdout, done.stderr[-1000:])
    chosen, *cases = (line.split() for line in done.stdout.splitlines())
    tiers = list(dict.fromkeys(c[0] for c in cases))
    assert [c[:3] for c in cases] == [
        [t, f, n] for t in tiers for f in FORMATS for n in ("2", "20")
    ]
    assert all(0 < float(share) <= 1 for c in cases for share in c[3:])
    return chosen[1], tiers


def test_this_cpu():
    chosen, tiers = check()
    assert tiers == list(dict.fromkeys(k["isa"] for k in kernels() if k["usable"]))
    assert chosen in tiers


@emulated
@pytest.mark.parametrize(
    "cpu, tiers",
    [
        ("Nehalem", ["scalar"]),
        ("SandyBridge", ["scalar"]),  # AVX, but neither AVX2 nor FMA
        ("Haswell", ["scalar", "avx2"]),
        ("EPYC", ["scalar", "avx2"]),  # Zen
    ],
)
def test_emulated(cpu, tiers):
    assert check(QEMU, "-cpu", cpu) == (tiers[-1], tiers)


@emulated
@pytest.mark.parametrize("tier", ["avx_vnni", "avx512"])
def test_an_instruction_that_the_emulated_cpu_lacks_ends_the_program(tier):
    """Otherwise the tests above would prove nothing."""
    command = [QEMU, "-cpu", "Haswell", str(native_build.tier_check()), tier]
    done = subprocess.run(command, capture_output=True, check=False)
    assert done.returncode in (-signal.SIGILL, 128 + signal.SIGILL)
