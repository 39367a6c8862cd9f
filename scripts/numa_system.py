#!/usr/bin/env python3
"""NUMA binding on machines with several nodes: `make test-numa-system`.

Boots a Linux kernel in virtual machines (qemu-system-x86_64, emulated CPUs, no KVM needed) whose
initramfs holds one program, tests/csrc/numa_check.cpp: it asks the kernel where threads run and
where pages lie. Needs qemu-system-x86_64 (Debian: qemu-system-x86) and a kernel: --kernel, the
newest of /boot, or one that `apt-get download` fetches into build/numa-vm.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests"))
import native_build  # noqa: E402 - the release build that tests use

WORK = ROOT / "build" / "numa-vm"
PATIENCE = 900  # seconds for a machine; about 10 where nothing else runs


@dataclass(frozen=True)
class Machine:
    """nodes: (CPUs, megabytes) of each. expected: what the topology must say, see numa_check."""

    name: str
    nodes: tuple[tuple[str, int], ...]
    expected: tuple[str, ...]
    distances: tuple[tuple[int, int, int], ...] = ()


MACHINES = (
    Machine("two nodes", (("0-1", 256), ("2-3", 256)), ("0:0,1", "1:2,3")),
    Machine("uneven nodes", (("0", 256), ("1-3", 256)), ("0:0", "1:1,2,3")),
    Machine(
        "a node without memory, nearest to the last",
        (("0-1", 256), ("2", 0), ("3", 256)),
        ("0:0,1", "2:2,3"),
        distances=((0, 1, 40), (0, 2, 30), (1, 2, 15)),
    ),
)


def find_kernel(given: Path | None) -> Path | None:
    """A kernel image to boot, or None."""
    if given:
        return given
    for folder in (Path("/boot"), WORK / "kernel" / "boot"):
        images = sorted(folder.glob("vmlinuz-*"))
        if images:
            return images[-1]
    return _download_kernel() if shutil.which("apt-get") and shutil.which("dpkg") else None


def _download_kernel() -> Path | None:
    """Debian's smallest kernel, unpacked without being installed."""
    depends = subprocess.run(
        ["apt-cache", "depends", "linux-image-cloud-amd64"], capture_output=True, text=True
    ).stdout
    package = re.search(r"Depends: (linux-image-\S+)", depends)
    if package is None:
        return None
    WORK.mkdir(parents=True, exist_ok=True)
    done = subprocess.run(["apt-get", "download", package[1]], cwd=WORK, capture_output=True)
    for deb in WORK.glob("linux-image-*.deb"):
        if done.returncode == 0:
            subprocess.run(["dpkg", "-x", str(deb), str(WORK / "kernel")], check=True)
        deb.unlink()
    return next(iter((WORK / "kernel" / "boot").glob("vmlinuz-*")), None)


def initramfs(program: Path) -> Path:
    """A cpio archive (newc) with the program as /init, its shared libraries, and the folders and
    console it needs.

    Not linked statically: old_libs.cpp names symbols of the shared libstdc++.
    """
    chunks: list[bytes] = []

    def add(name: str, mode: int, data: bytes = b"", device: tuple[int, int] = (0, 0)) -> None:
        path = name.encode() + b"\0"
        numbers = (len(chunks), mode, 0, 0, 1, 0, len(data), 0, 0, *device, len(path), 0)
        entry = b"070701" + b"".join(b"%08x" % n for n in numbers) + path
        for part in (entry, data):
            chunks.append(part + b"\0" * (-len(part) % 4))

    listed = subprocess.check_output(["ldd", str(program)], text=True)
    libraries = [Path(path) for path in re.findall(r"(/\S+) \(0x", listed)]
    folders = {parent for path in libraries for parent in path.parents} - {Path("/")}
    for folder in ("dev", "proc", "sys", *sorted(str(f)[1:] for f in folders)):
        add(folder, 0o040755)
    for path in libraries:
        add(str(path)[1:], 0o100755, path.read_bytes())
    add("dev/console", 0o020600, device=(5, 1))
    add("init", 0o100755, program.read_bytes())
    add("TRAILER!!!", 0)
    out = WORK / "initramfs.cpio"
    out.write_bytes(b"".join(chunks))
    return out


def command(machine: Machine, qemu: str, kernel: Path, archive: Path) -> list[str]:
    """The command line that boots it; the console is standard output."""
    cpus = 1 + max(int(c) for nodes, _ in machine.nodes for c in re.findall(r"\d+", nodes))
    words = [qemu, "-machine", "q35,accel=tcg", "-cpu", "max", "-smp", str(cpus)]
    words += ["-m", f"{sum(size for _, size in machine.nodes)}M"]
    for i, (on_node, size) in enumerate(machine.nodes):
        node = f"node,nodeid={i},cpus={on_node}"
        if size:
            words += ["-object", f"memory-backend-ram,id=ram{i},size={size}M"]
            node += f",memdev=ram{i}"
        words += ["-numa", node]
    for a, b, value in machine.distances:
        words += ["-numa", f"dist,src={a},dst={b},val={value}"]
    words += ["-kernel", str(kernel), "-initrd", str(archive), "-no-reboot"]
    words += ["-display", "none", "-serial", "stdio", "-monitor", "none", "-nodefaults"]
    arguments = f"console=ttyS0 quiet panic=-1 -- {' '.join(machine.expected)}"
    return [*words, "-append", arguments]


def run(machine: Machine, qemu: str, kernel: Path, archive: Path) -> str:
    """What the machine printed. Raises RuntimeError unless every check was ok."""
    try:
        done = subprocess.run(
            command(machine, qemu, kernel, archive),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=PATIENCE,
        )
        text = done.stdout + done.stderr
    except subprocess.TimeoutExpired as error:
        text = f"{(error.stdout or b'').decode(errors='replace')}\nno end after {PATIENCE} s"
    if "numa_check: ok" not in text or "FAIL" in text:
        raise RuntimeError(f"{machine.name}:\n{text}")
    return text


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kernel", type=Path, help="a bzImage with NUMA and a serial console")
    options = parser.parse_args()
    qemu = shutil.which("qemu-system-x86_64")
    if qemu is None:
        sys.exit("test-numa-system: no qemu-system-x86_64; `apt-get install qemu-system-x86`")
    kernel = find_kernel(options.kernel)
    if kernel is None:
        sys.exit("test-numa-system: no kernel image in /boot; give one with --kernel")
    WORK.mkdir(parents=True, exist_ok=True)
    archive = initramfs(native_build.build("numa_check") / "numa_check")
    for machine in MACHINES:
        text = run(machine, qemu, kernel, archive)
        print(f"{machine.name}: {len(re.findall('  ok  ', text))} checks ok")


if __name__ == "__main__":
    main()
