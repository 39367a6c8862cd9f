"""What must never break about the tree: no torch in C++, no leak of ISA code."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import native_build
import pytest

from kt_core import kernels

ROOT = Path(__file__).resolve().parents[2]
CSRC = ROOT / "csrc"
# What each tier's object holds, of: VEX and EVEX encodings, registers, and instructions that a
# CPU of the tier below lacks.
AVX = {"vex", "ymm"}
AVX512 = AVX | {"evex", "zmm"}
HOLDS = {
    "scalar": set(),
    "avx2": AVX,
    "avx_vnni": AVX | {"vpdpbusd"},
    "avx512": AVX512,
    "avx512_vnni": AVX512 | {"vpdpbusd"},
    "avx512_bf16": AVX512 | {"vpdpbusd", "vdpbf16ps"},
    "amx": AVX512 | {"vpdpbusd", "vdpbf16ps", "tile"},
}
# Newest versions that manylinux_2_28 allows.
NEWEST = {"GLIBC": (2, 28), "GLIBCXX": (3, 4, 24), "CXXABI": (1, 3, 11), "GCC": (7, 0, 0)}


def instructions(path):
    """(bytes, text) of every instruction of an object."""
    listing = subprocess.check_output(["objdump", "-dw", str(path)], text=True)
    found = re.findall(r"^ +[0-9a-f]+:\t((?:[0-9a-f]{2} )+) *\t(.*)$", listing, re.M)
    return [(bytes.fromhex(code), text) for code, text in found]


def traits(code, text):
    """Which of HOLDS an instruction shows. In 64-bit code c4, c5 and 62 only open VEX and EVEX."""
    seen = {{0xC4: "vex", 0xC5: "vex", 0x62: "evex"}.get(code[0], "")} - {""}
    seen |= {r for r in ("ymm", "zmm") if f"%{r}" in text}
    if re.search(r"%k[0-7]\b|%[xy]mm(1[6-9]|2\d|3[01])", text):
        seen.add("evex")
    if re.search(r"%tmm|\b(ld|st)tilecfg|\btile|\btdp", text):
        seen.add("tile")
    for name in ("vpdp", "vdp"):
        seen |= set(re.findall(rf"\b{name}(?:busd|bf16ps)\w*", text))
    return seen


def beyond_x86_64(code, text):
    """Whether an instruction is newer than the first x86-64 CPUs: newer than SSE2."""
    if code[0] in (0xC4, 0xC5, 0x62):
        return True
    body = code.lstrip(b"\x66\xf2\xf3\x2e\x3e\x64\x65")  # prefixes
    if body and 0x40 <= body[0] <= 0x4F:  # REX
        body = body[1:]
    if body[:2] in (b"\x0f\x38", b"\x0f\x3a"):  # SSSE3, SSE4, AES, SHA, MOVBE
        return True
    newer = r"(popcnt|lzcnt|fisttp|lddqu|movddup|movs[hl]dup|h?addsubp[sd]|haddp[sd]|hsubp[sd])"
    return bool(re.match(newer + r"[lqw]?\b", text))


@pytest.fixture(scope="session")
def objects():
    return native_build.isa_objects()


def test_isa_objects_emit_no_shared_symbol(objects):
    """A weak or unique symbol of an AVX-512 object could be picked for every tier."""
    for tier, path in objects.items():
        names = subprocess.check_output(["nm", "-C", str(path)], text=True).splitlines()
        shared = [n for n in names if re.match(r"[0-9a-f]+ [uVvWw] ", n)]
        assert not shared, (tier, shared[:5])
        strong = [n for n in names if re.match(r"[0-9a-f]+ [TDRB] ", n)]
        assert len(strong) == 1 and f"kt_kernels_{tier}" in strong[0], (tier, strong)


def test_opcodes_stay_in_their_objects(objects):
    for tier, path in objects.items():
        listed = instructions(path)
        assert len(listed) > 1000, tier
        seen = set().union(*(traits(*i) for i in listed))
        assert seen == HOLDS[tier], tier


def test_code_outside_the_tiers_runs_on_any_x86_64(objects):
    """xgetbv, which cpu.cpp guards by CPUID, is the exception."""
    for name, path in {**native_build.generic_objects(), "scalar": objects["scalar"]}.items():
        listed = instructions(path)
        assert len(listed) > 5, name
        newer = [text for code, text in listed if beyond_x86_64(code, text)]
        assert not newer, (name, newer[:5])
        assert any("xgetbv" in text for _, text in listed) == (name == "cpu.cpp"), name


def test_the_scan_sees_what_it_should():
    """The encodings themselves, so that a change of objdump's format cannot make the gate blind."""
    vex, evex = bytes.fromhex("c5fc58c1"), bytes.fromhex("62f17c4858c1")
    assert traits(vex, "vaddps %ymm1,%ymm0,%ymm0") == {"vex", "ymm"}
    assert traits(evex, "vaddps %zmm1,%zmm0,%zmm0") == {"evex", "zmm"}
    assert traits(bytes.fromhex("c4e27550c2"), "{vex} vpdpbusd %ymm2,%ymm1,%ymm0") == {
        "vex",
        "ymm",
        "vpdpbusd",
    }
    assert traits(bytes.fromhex("c4e26a5cc1"), "tdpbf16ps %tmm2,%tmm1,%tmm0") == {"vex", "tile"}
    assert traits(bytes.fromhex("c4e27849"), "ldtilecfg (%rax)") == {"vex", "tile"}
    for code, text in {
        "f30fb8c0": "popcnt %eax,%eax",
        "660f3800c1": "pshufb %xmm1,%xmm0",
        "66410f3a14c001": "pextrb $0x1,%xmm0,%r8d",
        "f20f12c1": "movddup %xmm1,%xmm0",
        "c4e2f8f2c0": "andn %rax,%rax,%rax",
    }.items():
        assert beyond_x86_64(bytes.fromhex(code), text), text
    for code, text in {"0f58c1": "addps %xmm1,%xmm0", "f30fbcc0": "tzcnt %eax,%eax"}.items():
        assert not beyond_x86_64(bytes.fromhex(code), text), text


def test_release_extension_has_nothing_of_the_tests():
    """No emulator: nobody handles signals. And nothing is exported but the module itself."""
    path = native_build.extension()
    cache = (native_build.BUILD / "CMakeCache.txt").read_text()
    assert "CMAKE_BUILD_TYPE:STRING=Release" in cache
    dynamic = subprocess.check_output(["nm", "-D", str(path)], text=True)
    assert not re.search(r"\b(sigaction|signal|sigaltstack)\b", dynamic)
    assert re.findall(r"[0-9a-f]+ [TDBR] (\w+)", dynamic) == ["PyInit__kt"]
    assert b"emulat" not in path.read_bytes()


def test_extension_asks_for_no_newer_system_than_its_wheel_promises():
    table = subprocess.check_output(["objdump", "-T", str(native_build.extension())], text=True)
    for name, version in re.findall(r"\(([A-Z]+)_([0-9.]+)\)", table):
        assert tuple(map(int, version.split("."))) <= NEWEST[name], (name, version)


def test_every_isa_and_format_file_is_registered():
    listed = {(k["isa"], k["format"]) for k in kernels()}
    want = {(i, f.stem) for i in native_build.TIERS for f in (CSRC / "format").glob("*.h")}
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


# The environment variables that a file reads. Ours are three. Other software's are read only to
# learn what that software was told: accelerate's launcher announces FSDP in one, and glibc's own
# settings of its allocator are left as they are.
VARIABLES = {
    "kt_core/runtime.py": {"KT_ISA", "KT_THREADS", "KT_LOG"},
    "kt_core/loading/memory.py": {
        "MALLOC_MMAP_THRESHOLD_",
        "MALLOC_TRIM_THRESHOLD_",
        "GLIBC_TUNABLES",
    },
    "kt_sft/llamafactory/checks.py": {"ACCELERATE_USE_FSDP", "FSDP_VERSION"},
}


def variables_read(source):
    """Strings that look like a variable's name, in a file that touches the environment at all."""
    nodes = list(ast.walk(ast.parse(source)))
    words = {str(getattr(n, a, "")) for n in nodes for a in ("attr", "id", "name")}
    if not words & {"environ", "environb", "getenv", "getenvb", "putenv", "unsetenv"}:
        return set()
    texts = {str(n.value) for n in nodes if isinstance(n, ast.Constant)}
    return {t for t in texts if re.fullmatch(r"[A-Z][A-Z0-9]*_[A-Z0-9_]*", t)} or {"?"}


def test_only_three_environment_variables_are_read():
    found = {}
    for package in ("kt_core", "kt_sft"):
        for path in (ROOT / package).rglob("*.py"):
            if names := variables_read(path.read_text()):
                found[str(path.relative_to(ROOT))] = names
    assert found == VARIABLES
    for path in CSRC.rglob("*"):
        if path.suffix in (".h", ".cpp"):
            assert not re.search(r"getenv|environ\b", path.read_text()), path
    assert variables_read("from os import environ as e\nx = e['MY_KNOB']") == {"MY_KNOB"}
    assert variables_read("import os\nfor k, v in os.environ.items(): pass") == {"?"}


def test_readme_commands_exist():
    text = (ROOT / "README.md").read_text()
    make = set(re.findall(r"(?m)(?:`|^ *)make ([a-z][a-z-]*)", text))
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.M))
    assert {"demo", "test"} <= make <= targets, make - targets
    for name in re.findall(r"(?:examples|accelerate_configs|bench|src)/[\w./-]+\w", text):
        assert (ROOT / name).exists(), name


def test_the_dispatch_bench_compiles():
    """It calls the kernels from C++ and is built by nobody else."""
    source = ROOT / "bench" / "dispatch.cpp"
    command = ["g++", "-std=gnu++20", "-fsyntax-only", f"-I{ROOT / 'csrc'}", str(source)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
