"""`python -m kt_core.selftest`: one line per tier, and it can fail."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from cpus import MACHINES

from kt_core import _kt, kernels, runtime, selftest
from kt_core.experts import Experts

TIERS = list(dict.fromkeys(str(k["isa"]) for k in kernels()))


def test_passes_here():
    done = subprocess.run(
        [sys.executable, "-m", "kt_core.selftest"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    lines = done.stdout.splitlines()
    assert [line.split()[0] for line in lines] == TIERS
    usable = {k["isa"] for k in kernels() if k["usable"]}
    for isa, line in zip(TIERS, lines, strict=True):
        assert (" ok: bf16 " in line) == (isa in usable), line
    assert len([line for line in lines if line.endswith("(in use)")]) == 1


@pytest.mark.parametrize("part", ["forward", "backward", "int8 domain"])
def test_a_wrong_kernel_is_a_failure(monkeypatch, capsys, part):
    forward, backward = Experts.forward, Experts.backward

    def wrong_forward(self, *args, compute="bf16", **more):
        out, saved = forward(self, *args, compute=compute, **more)
        hit = runtime.isa() == "scalar" and self.format == "int8"
        if hit and part == ("int8 domain" if compute == "int8" else "forward"):
            out = out * 1.03
        return out, saved

    def wrong_backward(self, *args, **more):
        grads = backward(self, *args, **more)
        if part == "backward" and runtime.isa() == "scalar" and self.format == "int8":
            grads.b["down"][1, 3, 1] = torch.nan
        return grads

    monkeypatch.setattr(Experts, "forward", wrong_forward)
    monkeypatch.setattr(Experts, "backward", wrong_backward)
    assert selftest.main() == 1
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines if "FAILED" in line] == ["scalar"]
    culprit = "b.down" if part == "backward" else part
    assert f"({culprit})" in lines[TIERS.index("scalar")].split("int8 ", 1)[1]


def test_tiers_this_cpu_lacks_are_named(capsys):
    _kt.testing.use_cpu(MACHINES["nothing"][0])
    try:
        assert selftest.main() == 0
    finally:
        _kt.testing.use_cpu(None)
    lines = capsys.readouterr().out.splitlines()
    assert " ok: " in lines[0] and lines[0].endswith("(in use)")
    assert all("not on this machine, which lacks" in line for line in lines[1:])
    assert "avx2 fma" in lines[1]
