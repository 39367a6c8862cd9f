"""Adding a weight format or a tier is one file: two toys, compiled from outside of csrc/ with no
other file touched, pass the kernel cases forward and backward, the format on every tier and the
tier with every format.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
TOYS = Path(__file__).parent / "toys"
BUILD = ROOT / "build" / "toys"  # kept, so that a second run compiles what changed

# In a process of its own, whose kt_core._kt is the extension with the toys in it.
CHECK = """
import importlib.machinery, importlib.util, json, sys
extension, tests = sys.argv[1:]
loader = importlib.machinery.ExtensionFileLoader("kt_core._kt", extension)
native = importlib.util.module_from_spec(importlib.util.spec_from_loader("kt_core._kt", loader))
loader.exec_module(native)
sys.modules["kt_core._kt"] = native
sys.path.insert(0, tests)
import kernel_cases
from kt_core import formats, runtime

toy = formats.of("toy4")
assert toy.default_group == 16 and toy.groups == (16, 32, 64, 0) and toy.domains == ("bf16",)
usable = {k["isa"] for k in runtime.kernels() if k["usable"]}
errors = {}
for isa in sorted(usable):
    runtime.force_isa(isa)
    for name in formats.names() if isa == "toy_isa" else ["toy4"]:
        for group in formats.of(name).groups:
            # Not one token: its LoRA gradients are single products, which may nearly cancel.
            for shape in ({"T": 2, "H": 72, "I": 40}, {"T": 37}, {"T": 130, "E": 2, "I": 100}):
                case = kernel_cases.make_case(format=name, group=group, **shape)
                found = kernel_cases.check_case(case)
                errors[f"{isa} {name} {group} {shape}"] = max(found.values())
print(json.dumps(errors))
"""


def build(**extra: Path) -> Path:
    """The extension with these files added to it."""
    pybind = subprocess.check_output([sys.executable, "-m", "pybind11", "--cmakedir"], text=True)
    configure = [
        *("cmake", "-S", str(ROOT), "-B", str(BUILD), "-DCMAKE_BUILD_TYPE=Release"),
        *("-DKT_WERROR=ON", "-DKT_OPTIMIZE=-O1", f"-Dpybind11_DIR={pybind.strip()}"),
        f"-DPython_EXECUTABLE={sys.executable}",
        *(f"-DKT_EXTRA_{kind.upper()}={file}" for kind, file in extra.items()),
    ]
    for command in (configure, ["cmake", "--build", str(BUILD), "--target", "_kt", "-j2"]):
        done = subprocess.run(command, text=True, capture_output=True, check=False)
        assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    (found,) = BUILD.glob("_kt.*.so")
    return found


@pytest.fixture(scope="module")
def extension(tmp_path_factory):
    outside = tmp_path_factory.mktemp("outside")
    for toy in TOYS.glob("*.h"):
        shutil.copy(toy, outside)
    return build(formats=outside / "toy4.h", isas=outside / "toy_isa.h")


def test_a_format_and_a_tier_are_one_file_each(extension):
    done = subprocess.run(
        [sys.executable, "-c", CHECK, str(extension), str(ROOT / "tests")],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        text=True,
        capture_output=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    errors = json.loads(done.stdout.splitlines()[-1])
    tiers = {key.split()[0] for key in errors if " toy4 " in key}
    assert {"scalar", "toy_isa"} <= tiers  # and whatever else this CPU has
    assert {key.split()[1] for key in errors if key.startswith("toy_isa ")} >= {
        "bf16",
        "int8",
        "toy4",
    }


def test_a_file_that_misses_something_is_refused_by_name(tmp_path):
    """The contract, not a page of template errors, says what a file lacks."""
    text = (TOYS / "toy4.h").read_text()
    broken = tmp_path / "toy4.h"
    broken.write_text(text.replace("  KT_OP uint32_t dword(", "  KT_OP uint32_t wrong_name("))
    source = tmp_path / "one.cpp"
    source.write_text(
        '#include "isa/scalar.h"\n#include "toy4.h"\n'
        "static_assert(kt::Isa<kt::Isa_scalar>);\n"
        "static_assert(kt::Format<kt::Format_toy4, kt::Isa_scalar>);\n"
    )
    command = ["g++", "-std=gnu++20", "-fsyntax-only", "-w", f"-I{ROOT / 'csrc'}", str(source)]
    done = subprocess.run(command, text=True, capture_output=True, check=False)
    assert done.returncode != 0 and "F::dword(codes)" in done.stderr
    broken.write_text(text)
    assert subprocess.run(command, check=False).returncode == 0
