"""The amx tier on any CPU with AVX-512 BF16: its compiled code runs with AMX instructions emulated
(tests/csrc/amx/trap.cpp), or as it is where the CPU has AMX.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from kt_core import kernels

HERE = Path(__file__).resolve().parent
REPORT = HERE.parents[1] / "build" / "amx-report.json"
BUDGET = 1_000_000  # emulated AMX instructions: 5 seconds
MISSING = {str(k["isa"]): str(k["missing"]) for k in kernels()}
LACKS = MISSING.get("avx512_bf16", "everything that is x86")

pytestmark = pytest.mark.skipif(
    LACKS != "",
    reason=f"the amx tier needs avx512_bf16 too, and this CPU lacks {LACKS}",
)
REAL = MISSING.get("amx") == ""


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """trap.so, probe.so and selftest; nothing of them is part of a release."""
    out = tmp_path_factory.mktemp("amx")
    compile_ = [os.environ.get("CXX", "c++"), "-std=c++20", "-Wall", "-Wextra", "-Werror"]
    shared = ["-fPIC", "-shared"]
    flags = {
        "trap.so": ["-O3", "-mavx2", "-mfma", *shared, "trap.cpp", "-ldl"],
        "probe.so": ["-O2", *shared, "probe.cpp"],
        "selftest": ["-O2", "-ffp-contract=off", "selftest.cpp"],
    }
    for name, args in flags.items():
        subprocess.run([*compile_, *args, "-o", str(out / name)], check=True, cwd=HERE / "amx")
    return out


# What these assume of a tier holds on tiles too, or they say of which tiers they ask it.
ASSUMING = {
    "csrc/test_share.py": "rows_keep",
    "csrc/test_slices.py": "uneven_slices and amx or few_and_many and nodes",
    "csrc/test_kernels.py": "few_and_many and amx and int4",
}


def environment(built) -> dict[str, str]:
    paths = [str(HERE), str(HERE / "amx"), *filter(None, [os.environ.get("PYTHONPATH")])]
    env = {**os.environ, "TILE_PROBE": str(built / "probe.so"), "TILE_REPORT": str(REPORT)}
    env["PYTHONPATH"] = os.pathsep.join(paths)
    env.pop("KT_ISA", None)
    return env if REAL else {**env, "LD_PRELOAD": str(built / "trap.so")}


def pytest_on_tiles(built, *args: str) -> subprocess.CompletedProcess[str]:
    options = ["-p", "emulated_cpu", "-p", "no:cacheprovider", "-q"]
    command = [sys.executable, "-m", "pytest", "-o", "markers=products: tdp* it must run"]
    env = environment(built)
    return subprocess.run([*command, *options, *args], env=env, capture_output=True, text=True)


def test_instructions_match_a_scalar_model(built):
    args = [str(built / "selftest"), "1500", *(["real"] if REAL else [])]
    done = subprocess.run(args, env=environment(built), capture_output=True, text=True)
    found = dict(line.split() for line in done.stdout.splitlines())
    assert len(found) == 7 and set(found.values()) == {"0"}, done
    assert done.returncode == 0, done


def test_amx_tier(built):
    """Runs tests/csrc/amx/amx_kernels.py; build/amx-report.json says what was counted."""
    REPORT.parent.mkdir(exist_ok=True)
    REPORT.unlink(missing_ok=True)
    done = pytest_on_tiles(built, str(HERE / "amx" / "amx_kernels.py"))
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    report = json.loads(REPORT.read_text())
    assert report["mode"] == ("real" if REAL else "emulated")
    if not REAL:
        ran = report["instructions"]
        assert ran["tdpbf16ps"] > 0 and ran["tdpbsud"] > 0
        assert ran["ldtilecfg"] >= ran["tilerelease"] > 0
        assert sum(ran.values()) < BUDGET, ran
    assert report["largest_relative_errors"]


def test_what_other_tests_assume_of_a_tier(built):
    files = [str(HERE.parent / name) for name in ASSUMING]
    done = pytest_on_tiles(built, *files, "-k", " or ".join(f"({k})" for k in ASSUMING.values()))
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert " passed" in done.stdout and "skipped" not in done.stdout


def test_release_has_none_of_the_emulator():
    import kt_core._kt as ext

    names = subprocess.check_output(["nm", "-D", ext.__file__], text=True)
    assert "amx_count" not in names and "tiles_configured_here" not in names
