"""Which tier is chosen on which machine, from CPUID, XCR0 and the permission for tiles.

The registers of other machines are put in place of this one's (`_kt.testing.use_cpu`). Bits are
those of Intel's and AMD's manuals (CPUID leaves 1, 7.0 and 7.1; XCR0).
"""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from cpus import MACHINES, NEEDS, sapphire_rapids
from kernel_cases import check_case, make_case

from kt_core import _kt, kernels, runtime

BUILT = list(dict.fromkeys(k["isa"] for k in kernels()))
RUNS_HERE = {k["isa"] for k in kernels() if k["usable"]}


@pytest.fixture(params=MACHINES)
def machine(request):
    fake, best, lacking = MACHINES[request.param]
    _kt.testing.use_cpu(fake)
    yield best, lacking
    _kt.testing.use_cpu(None)
    runtime.force_isa(os.environ.get("KT_ISA"))


def test_the_preferred_tier_comes_last():
    assert [isa for isa in NEEDS if isa in BUILT] == BUILT


def test_registers_can_be_replaced_and_restored():
    real, tier = _kt.cpu_registers(), runtime.isa()
    fake = sapphire_rapids(tiles=1)
    _kt.testing.use_cpu(fake)
    try:
        assert _kt.cpu_registers() == fake
    finally:
        _kt.testing.use_cpu(None)
        runtime.force_isa(os.environ.get("KT_ISA"))
    assert _kt.cpu_registers() == real and runtime.isa() == tier


def test_selection(machine):
    best, lacking = machine
    if best not in BUILT:  # a build without the AMX tier
        best = "avx512_vnni"
    assert runtime.isa() == best
    for k in kernels():
        assert set(k["missing"].split()) == NEEDS[k["isa"]] & lacking, k
        assert k["usable"] == (not k["missing"])


def test_refusal_names_what_is_missing(machine):
    _, lacking = machine
    chosen = runtime.isa()
    for isa in BUILT:
        missing = NEEDS[isa] & lacking
        if not missing:
            runtime.force_isa(isa)
            assert runtime.isa() == isa
            runtime.force_isa(None)
            continue
        with pytest.raises(ValueError, match=f"KT_ISA is {isa} but this CPU .* lacks") as refusal:
            runtime.force_isa(isa)
        listed, rest = str(refusal.value).split(" lacks ")[1].split(";")
        assert set(listed.split()) == missing
        assert rest == f" unset KT_ISA to use {chosen}"
        assert runtime.isa() == chosen


def test_the_chosen_tier_computes(machine):
    """Not only the name: its kernels run, and no other's."""
    chosen = runtime.isa()
    if chosen not in RUNS_HERE:
        pytest.skip(f"this machine cannot run {chosen}")
    before = {k["isa"]: k["calls"] for k in kernels() if k["format"] == "int8"}
    check_case(make_case(E=2, H=64, I=32, T=5, K=1, format="int8"))
    after = {k["isa"]: k["calls"] for k in kernels() if k["format"] == "int8"}
    assert {isa for isa in after if after[isa] > before[isa]} == {chosen}


IMPORT = """
import importlib.machinery, importlib.util, logging, sys
lines = []
class Keep(logging.Handler):
    def emit(self, record):
        lines.append(record.getMessage())
logging.getLogger("kt").addHandler(Keep())
loader = importlib.machinery.ExtensionFileLoader("kt_core._kt", {extension!r})
native = importlib.util.module_from_spec(importlib.util.spec_from_loader("kt_core._kt", loader))
loader.exec_module(native)
native.testing.use_cpu({fake!r})
sys.modules["kt_core._kt"] = native
import kt_core.runtime as runtime
runtime.set_threads(1)
print(runtime.isa(), len(lines), *lines, sep="|")
"""


def imported_on(name):
    """Tier and log lines of a process that starts on that machine."""
    script = IMPORT.format(extension=_kt.__file__, fake=MACHINES[name][0])
    environment = {k: v for k, v in os.environ.items() if not k.startswith("KT_")}
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, env=environment
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip().split("|")


def test_refused_tiles_are_one_log_line():
    tier, count, *lines = imported_on("sapphire_rapids_refused")
    assert (tier, count) == ("avx512_vnni", "1")
    assert "AMX" in lines[0] and "refused" in lines[0] and "avx512_vnni" in lines[0]


@pytest.mark.parametrize(
    "name", ["zen4", "sapphire_rapids", "sapphire_rapids_old_kernel", "nothing"]
)
def test_nothing_is_logged_where_nothing_was_refused(name):
    assert imported_on(name)[1] == "0"


@pytest.mark.parametrize(
    "change, words",
    [
        ("sys.platform = 'darwin'; platform.system = lambda: 'Darwin'", "Darwin on x86_64"),
        ("sys.platform = 'win32'; platform.system = lambda: 'Windows'", "Windows on x86_64"),
        ("platform.machine = lambda: 'aarch64'", "Linux on aarch64"),
        ("platform.machine = lambda: ''", "Linux on an unknown processor"),
    ],
)
def test_other_platforms_get_one_sentence(change, words):
    script = f"import platform, sys; platform.machine(); {change}\nimport kt_core"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    last = done.stderr.strip().splitlines()[-1]
    assert done.returncode != 0
    assert last == (
        f"ImportError: kt_core needs Linux (or WSL2) on an x86-64 processor; this is {words}."
    )
