"""Which tier is chosen on which machine, from CPUID, XCR0 and the permission for tiles.

The registers of other machines are put in place of this one's (`_kt.testing.use_cpu`). Bits are
those of Intel's and AMD's manuals (CPUID leaves 1, 7.0 and 7.1; XCR0).
"""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from kernel_cases import check_case, make_case

from kt_core import _kt, kernels, runtime

# leaf 1, ECX
FMA, OSXSAVE, AVX, F16C = 1 << 12, 1 << 27, 1 << 28, 1 << 29
# leaf 7.0, EBX
AVX2, AVX512F, AVX512DQ, AVX512PF, AVX512ER = 1 << 5, 1 << 16, 1 << 17, 1 << 26, 1 << 27
AVX512CD, AVX512BW, AVX512VL = 1 << 28, 1 << 30, 1 << 31
# leaf 7.0, ECX
AVX512_VBMI, AVX512_VNNI = 1 << 1, 1 << 11
# leaf 7.0, EDX
AMX_BF16, AMX_TILE, AMX_INT8 = 1 << 22, 1 << 24, 1 << 25
# leaf 7.1, EAX
AVX_VNNI, AVX512_BF16 = 1 << 4, 1 << 5
# XCR0: state that the operating system saves
X87_SSE, YMM, MASK_ZMM, TILE = 0x3, 0x4, 0xE0, 0x60000

SKYLAKE = AVX2 | AVX512F | AVX512DQ | AVX512CD | AVX512BW | AVX512VL  # Skylake-X and all after it


INTEL, AMD = "GenuineIntel", "AuthenticAMD"


def registers(
    *,
    ecx1=FMA | OSXSAVE | AVX | F16C,
    ebx7=0,
    ecx7=0,
    edx7=0,
    eax71=0,
    xcr0=X87_SSE | YMM,
    tiles=0,
    vendor=INTEL,
):
    return {
        "leaf1_ecx": ecx1,
        "leaf7_ebx": ebx7,
        "leaf7_ecx": ecx7,
        "leaf7_edx": edx7,
        "leaf71_eax": eax71,
        "xcr0": xcr0,
        "tiles": bool(tiles),
        "vendor": vendor,
    }


def with_zmm(ebx7=SKYLAKE, **more):
    return registers(ebx7=ebx7, **{"xcr0": X87_SSE | YMM | MASK_ZMM} | more)


def sapphire_rapids(xcr0=X87_SSE | YMM | MASK_ZMM | TILE, **more):
    return with_zmm(
        ecx7=AVX512_VBMI | AVX512_VNNI,
        edx7=AMX_BF16 | AMX_TILE | AMX_INT8,
        eax71=AVX_VNNI | AVX512_BF16,
        xcr0=xcr0,
        **more,
    )


# What a tier asks for beyond what the rest of its row says is missing.
FMA_AVX2 = {"avx2", "fma"}
F_BW_VL_DQ = {"avx512f", "avx512bw", "avx512vl", "avx512dq"}
VNNI, VBMI, BF16, CLIENT = {"avx512_vnni"}, {"avx512_vbmi"}, {"avx512_bf16"}, {"avx_vnni"}
TILES = {"amx_tile", "amx_int8", "amx_bf16"}
NEEDS = {
    "scalar": set(),
    "avx2": FMA_AVX2,
    "avx_vnni": FMA_AVX2 | CLIENT,
    "avx512": F_BW_VL_DQ | {"fma"},
    "avx512_vnni": F_BW_VL_DQ | {"fma"} | VNNI,
    "avx512_bf16": F_BW_VL_DQ | {"fma"} | VNNI | VBMI | BF16,
    "amx": F_BW_VL_DQ | {"fma"} | VNNI | VBMI | BF16 | TILES,
}
NO_AVX512 = F_BW_VL_DQ | VNNI | VBMI | BF16 | TILES

# name: registers, the tier chosen, every feature that is missing
MACHINES = {
    "haswell": (registers(ebx7=AVX2), "avx2", CLIENT | NO_AVX512),
    "zen3": (registers(ebx7=AVX2, vendor=AMD), "avx2", CLIENT | NO_AVX512),
    "alder_lake": (registers(ebx7=AVX2, eax71=AVX_VNNI), "avx_vnni", NO_AVX512),
    "knights_landing": (
        with_zmm(ebx7=AVX2 | AVX512F | AVX512PF | AVX512ER | AVX512CD),
        "avx2",
        CLIENT | (NO_AVX512 - {"avx512f"}),
    ),
    "skylake_x": (with_zmm(), "avx512", CLIENT | VNNI | VBMI | BF16 | TILES),
    "cascade_lake": (with_zmm(ecx7=AVX512_VNNI), "avx512_vnni", CLIENT | VBMI | BF16 | TILES),
    "cooper_lake": (
        with_zmm(ecx7=AVX512_VNNI, eax71=AVX512_BF16),
        "avx512_vnni",
        CLIENT | VBMI | TILES,
    ),
    "ice_lake": (
        with_zmm(ecx7=AVX512_VNNI | AVX512_VBMI),
        "avx512_vnni",
        CLIENT | BF16 | TILES,
    ),
    "zen5": (
        with_zmm(ecx7=AVX512_VNNI | AVX512_VBMI, eax71=AVX_VNNI | AVX512_BF16, vendor=AMD),
        "avx512_bf16",
        TILES,
    ),
    "zen4": (
        with_zmm(ecx7=AVX512_VNNI | AVX512_VBMI, eax71=AVX512_BF16, vendor=AMD),
        "avx512_bf16",
        CLIENT | TILES,
    ),
    "sapphire_rapids": (sapphire_rapids(tiles=1), "amx", set()),
    # on Intel the bf16 tier is slow and only runs when forced
    "sapphire_rapids_refused": (sapphire_rapids(), "avx512_vnni", {"amx_tile"}),
    # Linux before 5.16 does not know tiles and does not save them
    "sapphire_rapids_old_kernel": (
        sapphire_rapids(xcr0=X87_SSE | YMM | MASK_ZMM),
        "avx512_vnni",
        {"amx_tile"},
    ),
    "hypervisor_without_zmm": (
        sapphire_rapids(xcr0=X87_SSE | YMM),
        "avx_vnni",
        NO_AVX512 - {"amx_int8", "amx_bf16"},
    ),
    "hypervisor_without_upper_zmm": (
        sapphire_rapids(xcr0=X87_SSE | YMM | 0x60),
        "avx_vnni",
        NO_AVX512 - {"amx_int8", "amx_bf16"},
    ),
    "hypervisor_without_ymm": (
        sapphire_rapids(xcr0=X87_SSE),
        "scalar",
        FMA_AVX2 | CLIENT | (NO_AVX512 - {"amx_int8", "amx_bf16"}),
    ),
    "hypervisor_without_xsave": (
        sapphire_rapids(xcr0=0, ecx1=FMA | F16C | AVX),
        "scalar",
        FMA_AVX2 | CLIENT | (NO_AVX512 - {"amx_int8", "amx_bf16"}),
    ),
    "nothing": (registers(ecx1=0, xcr0=0), "scalar", FMA_AVX2 | CLIENT | NO_AVX512),
    "avx2_without_fma": (
        registers(ecx1=OSXSAVE | AVX | F16C, ebx7=AVX2),
        "scalar",
        {"fma"} | CLIENT | NO_AVX512,
    ),
}
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
