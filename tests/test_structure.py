"""What must never break about the tree: no torch in C++, no leak of ISA code."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from kt_core import kernels

ROOT = Path(__file__).resolve().parent.parent
CSRC = ROOT / "csrc"
WIDE = re.compile(r"%zmm|%k[0-7]\b|%[xy]mm(1[6-9]|2\d|3[01])")  # EVEX registers
AVX = re.compile(r"%ymm|\bv[a-z0-9]+ .*%xmm")


@pytest.fixture(scope="session")
def objects(tmp_path_factory):
    """The release ISA objects, compiled with exactly the flags of CMakeLists.txt."""
    build = tmp_path_factory.mktemp("isa")
    pybind = subprocess.check_output([sys.executable, "-m", "pybind11", "--cmakedir"], text=True)
    subprocess.run(
        [
            "cmake",
            "-S",
            str(ROOT),
            "-B",
            str(build),
            "-DKT_WERROR=ON",
            f"-DPython_EXECUTABLE={sys.executable}",
            f"-Dpybind11_DIR={pybind.strip()}",
        ],
        check=True,
        capture_output=True,
    )
    tiers = sorted(p.stem for p in (CSRC / "isa").glob("*.h"))
    targets = [a for t in tiers for a in ("--target", f"kt_isa_{t}")]
    subprocess.run(["cmake", "--build", str(build), *targets, "-j2"], check=True)
    found = {t: build / "CMakeFiles" / f"kt_isa_{t}.dir" / "csrc" / "kernel.cpp.o" for t in tiers}
    assert all(p.is_file() for p in found.values())
    return found


def disassembly(path):
    return subprocess.check_output(["objdump", "-d", "--no-show-raw-insn", str(path)], text=True)


def test_isa_objects_emit_no_shared_symbol(objects):
    """A weak or unique symbol of an AVX-512 object could be picked for every tier."""
    for tier, path in objects.items():
        names = subprocess.check_output(["nm", "-C", str(path)], text=True).splitlines()
        shared = [n for n in names if re.match(r"[0-9a-f]+ [uVvWw] ", n)]
        assert not shared, (tier, shared[:5])
        strong = [n for n in names if re.match(r"[0-9a-f]+ [TDRB] ", n)]
        assert len(strong) == 1 and f"kt_kernels_{tier}" in strong[0], (tier, strong)


def test_opcodes_stay_in_their_objects(objects):
    code = {tier: disassembly(path) for tier, path in objects.items()}
    assert not AVX.search(code["scalar"])
    assert not WIDE.search(code["avx2"]) and "%ymm" in code["avx2"]
    for tier, text in code.items():
        bf16 = tier in ("avx512_bf16", "amx")
        assert ("vdpbf16ps" in text) == bf16, tier
        assert ("%zmm" in text) == (tier.startswith("avx512") or tier == "amx"), tier
        assert ("vpdpbusd" in text) == (bf16 or tier == "avx512_vnni"), tier
        for tile in ("tdpbf16ps", "tdpbsud", "ldtilecfg", "tilerelease"):
            assert (tile in text) == (tier == "amx"), (tier, tile)


def test_every_isa_and_format_file_is_registered():
    listed = {(k["isa"], k["format"]) for k in kernels()}
    want = {
        (i.stem, f.stem) for i in (CSRC / "isa").glob("*.h") for f in (CSRC / "format").glob("*.h")
    }
    assert listed == want


def test_no_torch_in_cpp_and_python_only_in_bind():
    for path in CSRC.rglob("*"):
        if path.suffix not in (".h", ".cpp"):
            continue
        includes = re.findall(r"#include\s+[<\"]([^>\"]+)", path.read_text())
        assert not [i for i in includes if "torch" in i or "ATen" in i], path
        if path.name != "bind.cpp":
            assert not [i for i in includes if "pybind11" in i or "Python.h" in i], path


def test_extension_does_not_link_torch():
    import kt_core._kt as ext

    linked = subprocess.check_output(["readelf", "-d", ext.__file__], text=True)
    assert "NEEDED" in linked and "torch" not in linked


def test_core_imports_neither_training_nor_peft():
    code = (
        "import pkgutil, importlib, sys, kt_core\n"
        "for m in pkgutil.walk_packages(kt_core.__path__, 'kt_core.'):\n"
        "    if not m.name.endswith('__main__'): importlib.import_module(m.name)\n"
        "bad = [m for m in sys.modules if m.split('.')[0] == 'peft' or m.startswith('kt_sft.')\n"
        "       and m not in ('kt_sft.bootstrap',)]\n"
        "assert not bad, bad\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)


def test_only_three_environment_variables_are_read():
    """Of our own: KT_ISA, KT_THREADS, KT_LOG. accelerate's launcher announces FSDP in one."""
    allowed = {"KT_ISA", "KT_THREADS", "KT_LOG", "ACCELERATE_USE_FSDP"}
    for package in ("kt_core", "kt_sft"):
        for path in (ROOT / package).rglob("*.py"):
            names = re.findall(r"environ(?:\.get\(|\[)\s*[\"']([A-Z_0-9]+)", path.read_text())
            assert set(names) <= allowed, (path, names)
    for path in CSRC.rglob("*.cpp"):
        assert "getenv" not in path.read_text(), path


def test_readme_commands_exist():
    text = (ROOT / "README.md").read_text()
    make = set(re.findall(r"(?m)(?:`|^ *)make ([a-z][a-z-]*)", text))
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.M))
    assert {"demo", "test"} <= make <= targets, make - targets
    for name in re.findall(r"(?:examples|accelerate_configs|bench|src)/[\w./-]+\w", text):
        assert (ROOT / name).exists(), name
