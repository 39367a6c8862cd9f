"""`make wheel`: one wheel with every tier, which works where there is no compiler."""

from __future__ import annotations

import email
import shutil
import subprocess
import sys
import tarfile
import zipfile
from dataclasses import dataclass
from importlib.metadata import distribution
from pathlib import Path

import pytest
from native_build import ROOT, TIERS

FORMATS = sorted(p.stem for p in (ROOT / "csrc" / "format").glob("*.h"))
NOTICES = ["LICENSE", "LICENSES/pybind11.txt"]  # ours, and that of what is compiled in


@dataclass(frozen=True)
class Installed:
    """A fresh virtual environment with the wheel; torch and pytest come from this one's folder."""

    wheel: Path
    folder: Path

    def python(self, *arguments: str) -> str:
        """Output of that Python, with nothing on PATH but the environment's own bin."""
        bin = self.folder / "bin"
        for compiler in ("g++", "c++", "gcc", "cc", "clang"):
            assert shutil.which(compiler, path=str(bin)) is None
        done = subprocess.run(
            [bin / "python", *arguments],
            cwd=self.folder,
            env={"PATH": str(bin), "OMP_NUM_THREADS": "1"},
            text=True,
            capture_output=True,
            check=False,
        )
        assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
        return done.stdout


def run(*command: str | Path) -> str:
    done = subprocess.run(command, cwd=ROOT, text=True, capture_output=True, check=False)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    return done.stdout + done.stderr


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Installed:
    dist, folder = tmp_path_factory.mktemp("dist"), tmp_path_factory.mktemp("venv")
    # the Makefile's own recipe, in the Python that runs this; `-o setup`: which is set up already
    run("make", "-o", "setup", "wheel", f"BIN={Path(sys.executable).parent}", f"DIST={dist}")
    (wheel,) = dist.iterdir()
    run(sys.executable, "-m", "venv", "--without-pip", folder)
    python = folder / "bin" / "python"
    (site,) = folder.glob("lib/python*/site-packages")
    run(sys.executable, "-m", "pip", "--python", python, "install", "--no-deps", wheel)
    # a .pth inside a folder that a .pth names is not read: no editable install can win
    outer = [p for p in sys.path if p.endswith("site-packages")]
    (site / "outer.pth").write_text("\n".join(outer) + "\n")
    return Installed(wheel, folder)


def check_licences(metadata: str) -> None:
    fields = email.message_from_string(metadata)
    assert fields["License-Expression"] == "Apache-2.0" and fields["License"] is None
    assert fields.get_all("License-File") == NOTICES


def test_wheel_and_source_carry_every_licence(tmp_path: Path) -> None:
    """Without compiling: the metadata that a wheel would have, and the source distribution."""
    run(
        sys.executable,
        "-c",
        "import sys; from scikit_build_core import build\n"
        "build.prepare_metadata_for_build_wheel(sys.argv[1]); build.build_sdist(sys.argv[1])",
        tmp_path,
    )
    (info,) = tmp_path.glob("*.dist-info")
    check_licences((info / "METADATA").read_text())
    pybind11 = distribution("pybind11")
    (notice,) = [f for f in pybind11.files or () if f.name == "LICENSE"]
    texts = [(ROOT / "LICENSE").read_text(), notice.read_text()]
    assert [(info / "licenses" / name).read_text() for name in NOTICES] == texts
    (source,) = tmp_path.glob("*.tar.gz")
    with tarfile.open(source) as archive:
        names = {n.partition("/")[2] for n in archive.getnames()}
        check_licences(archive.extractfile(f"{source.name[:-7]}/PKG-INFO").read().decode())
    assert {*NOTICES, "csrc/bind.cpp", "kt_core/serve/app.py"} <= names


@pytest.mark.slow
def test_is_a_manylinux_wheel_of_the_package_alone(installed: Installed) -> None:
    name = installed.wheel.name
    assert "manylinux_2_28_x86_64" in name
    assert f"-cp{sys.version_info[0]}{sys.version_info[1]}-" in name
    shown = " ".join(run(sys.executable, "-m", "auditwheel", "show", installed.wheel).split())
    assert 'is consistent with the following platform tag: "manylinux_2_2' in shown
    with zipfile.ZipFile(installed.wheel) as archive:
        names = archive.namelist()
        (metadata,) = [n for n in names if n.endswith(".dist-info/METADATA")]
        check_licences(archive.read(metadata).decode())
        assert {f"{Path(metadata).parent}/licenses/{name}" for name in NOTICES} <= set(names)
    assert {n.split("/")[0].split("-")[0] for n in names} == {"kt_core", "kt_sft"}
    (extension,) = [n for n in names if ".so" in n]
    assert extension.startswith("kt_core/_kt.")


@pytest.mark.slow
def test_imports_with_every_tier(installed: Installed) -> None:
    printed = installed.python(
        "-c",
        "import kt_core\nprint(kt_core.__file__)\n"
        "for k in kt_core.kernels(): print(k['isa'], k['format'])",
    )
    where, *listed = printed.splitlines()
    assert Path(where).is_relative_to(installed.folder)
    assert sorted(listed) == sorted(f"{t} {f}" for t in TIERS for f in FORMATS)


@pytest.mark.slow
def test_selftest_passes(installed: Installed) -> None:
    lines = installed.python("-m", "kt_core.selftest").splitlines()
    assert len(lines) == len(TIERS) and any("ok:" in line for line in lines)


@pytest.mark.slow
def test_kernel_tests_pass(installed: Installed) -> None:
    script = (
        "import sys, kt_core, pytest\n"
        "assert kt_core.__file__.startswith(sys.prefix), kt_core.__file__\n"
        "sys.exit(pytest.main(sys.argv[1:]))\n"
    )
    options = ("-q", "-p", "no:cacheprovider", "-c", str(ROOT / "pyproject.toml"))
    tests = str(ROOT / "tests" / "csrc/test_kernels.py")
    printed = installed.python("-c", script, *options, "--rootdir", str(installed.folder), tests)
    assert " passed" in printed and " failed" not in printed
