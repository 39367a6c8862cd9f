"""What a load needs: limits read from fake /proc and /sys, refusals before a weight is read, and
real peaks.

Peaks are measured in a process of their own, sampling RssAnon: pages of mapped files are the page
cache's.
"""

from __future__ import annotations

import functools
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import models
import pytest
import slow_experts

from kt_core import hf
from kt_core.loading import memory

GIB = 1 << 30


@pytest.fixture
def machine(tmp_path):
    """A fake machine with 8 GiB available; `machine(name, text)` writes a file below it."""

    def write(name, text):
        file = tmp_path / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)

    write("proc/meminfo", f"MemTotal: 99999999 kB\nMemAvailable: {8 * GIB // 1024} kB\n")
    write("proc/self/statm", "1000 500 100 1 0 300 0\n")
    return write


def available(tmp_path):
    found = memory.limits(tmp_path)
    return {limit.name: limit.available for limit in found}


def test_mem_available(tmp_path, machine):
    assert available(tmp_path) == {"the machine's MemAvailable": 8 * GIB}


def test_cgroup_v2_and_its_parents(tmp_path, machine):
    machine("proc/self/cgroup", "0::/user/job\n")
    machine("sys/fs/cgroup/user/job/memory.max", "max\n")
    machine("sys/fs/cgroup/user/job/memory.current", "123\n")
    machine("sys/fs/cgroup/user/memory.max", f"{4 * GIB}\n")
    machine("sys/fs/cgroup/user/memory.current", f"{3 * GIB}\n")
    stat = f"anon 5\ninactive_file {GIB // 2}\nactive_file {GIB // 4}\n"
    machine("sys/fs/cgroup/user/memory.stat", stat)
    found = available(tmp_path)
    (name,) = [n for n in found if "cgroup" in n]
    assert name.endswith("sys/fs/cgroup/user/memory.max")
    assert found[name] == GIB + GIB // 2 + GIB // 4  # the page cache is given back first


def test_cgroup_v2_inside_a_container(tmp_path, machine):
    """The group's path is that of the host; the container sees its own group as the root."""
    machine("proc/self/cgroup", "0::/../../docker/abc\n")
    machine("sys/fs/cgroup/memory.max", f"{2 * GIB}\n")
    machine("sys/fs/cgroup/memory.current", f"{GIB}\n")
    assert [v for n, v in available(tmp_path).items() if "cgroup" in n] == [GIB]


def test_cgroup_v1(tmp_path, machine):
    machine("proc/self/cgroup", "5:cpu,cpuacct:/x\n4:memory:/docker/abc\n0::/\n")
    machine("sys/fs/cgroup/memory/memory.limit_in_bytes", f"{3 * GIB}\n")
    machine("sys/fs/cgroup/memory/memory.usage_in_bytes", f"{GIB}\n")
    stat = f"inactive_file 7\ntotal_inactive_file {GIB // 2}\ntotal_active_file 0\n"
    machine("sys/fs/cgroup/memory/memory.stat", stat)
    assert [v for n, v in available(tmp_path).items() if "cgroup" in n] == [2 * GIB + GIB // 2]


def test_cgroup_v1_without_a_limit(tmp_path, machine):
    machine("proc/self/cgroup", "4:memory:/\n")
    machine("sys/fs/cgroup/memory/memory.limit_in_bytes", "9223372036854771712\n")
    machine("sys/fs/cgroup/memory/memory.usage_in_bytes", f"{GIB}\n")
    assert not [n for n in available(tmp_path) if "cgroup" in n]


def test_a_group_over_its_limit_has_nothing_left(tmp_path, machine):
    machine("proc/self/cgroup", "0::/\n")
    machine("sys/fs/cgroup/memory.max", "1000\n")
    machine("sys/fs/cgroup/memory.current", "2000\n")
    assert [v for n, v in available(tmp_path).items() if "cgroup" in n] == [0]


def test_no_proc_at_all(tmp_path):
    assert memory.limits(tmp_path / "none") == []


def test_plan_at_and_above_a_bound():
    need = memory.MemoryNeed(experts=1000, other=200, staging=34, mapped=10_000)
    memory.check(need, [memory.Limit("the limit", 1234)], "model")
    with pytest.raises(MemoryError) as refusal:
        memory.check(need, [memory.Limit("the limit", 1233)], "model")
    text = str(refusal.value)
    assert "model needs 1,234 bytes (1,000 packed experts, 200 other" in text
    assert "the limit leaves 1,233; choose a smaller format" in text


def test_address_space_counts_mapped_files():
    need = memory.MemoryNeed(experts=1000, other=0, staging=0, mapped=500)
    memory.check(need, [memory.Limit("as", 1500, address_space=True)], "model")
    with pytest.raises(MemoryError, match="needs 1,500 bytes .*, 500 mapped files"):
        memory.check(need, [memory.Limit("as", 1499, address_space=True)], "model")


@pytest.mark.parametrize("packed", [False, True])
def test_a_cgroup_too_small_is_refused_before_a_weight_is_read(
    packed, tmp_path, machine, monkeypatch
):
    slow_experts.patch(monkeypatch)
    monkeypatch.setattr(
        slow_experts.SlowExperts, "put", lambda *a: pytest.fail("a weight was packed")
    )
    path = models.build("mixtral", tmp_path / "model")
    machine("proc/self/cgroup", "0::/\n")
    machine("sys/fs/cgroup/memory.max", "500000\n")
    machine("sys/fs/cgroup/memory.current", "1000\n")
    fake = functools.partial(memory.limits, tmp_path)
    monkeypatch.setattr(memory, "limits", fake)
    packed_dir = tmp_path / "packed" if packed else None
    with pytest.raises(MemoryError) as refusal:
        hf.load_model(path, packed_dir=packed_dir)
    sentence = re.search(r"needs ([\d,]+) bytes .* leaves ([\d,]+);", str(refusal.value))
    needed, left = sentence.groups()
    experts = 2 * 4 * 3 * 8 * 64 * 40  # layers x fp32 x projections x E x H x I
    staging = 64 * 40 * 4 + (experts // 2 if packed else 0)
    # embedding, head, 2 x (q, o, k, v, router, 2 norms), norm; bf16
    other = 2 * (2 * 128 * 64 + 2 * (2 * 64 * 64 + 2 * 32 * 64 + 8 * 64 + 2 * 64) + 64)
    assert int(needed.replace(",", "")) == experts + staging + other
    assert left == "499,000"
    assert not (tmp_path / "packed").exists()


def run(script, *args):
    """Runs a script in a fresh process on one thread; returns the JSON of its last line."""
    result = subprocess.run(
        [sys.executable, "-c", script, *map(str, args)],
        capture_output=True,
        text=True,
        cwd=Path(__file__).resolve().parents[2],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        timeout=600,
    )
    assert result.returncode == 0, result.stderr[-2000:]
    return json.loads(result.stdout.splitlines()[-1])


RLIMIT = """
import json, resource, sys
import models, torch
from kt_core import hf
import transformers.models.mixtral.modeling_mixtral
pages = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (pages + int(sys.argv[2]),) * 2)
try:
    hf.load_model(sys.argv[1], format="bf16")
    print(json.dumps("loaded"))
except MemoryError as error:
    print(json.dumps(str(error)))
"""


def test_address_space_limit(tmp_path):
    """RLIMIT_AS: refused before it begins, with its numbers, never a bad_alloc half way."""
    path = models.build("mixtral", tmp_path, hidden_size=512, intermediate_size=512)
    assert "RLIMIT_AS (ulimit -v) leaves" in run(RLIMIT, path, 16 << 20)
    assert run(RLIMIT, path, 4 * GIB) == "loaded"


PEAK = """
import ctypes, gc, json, sys, threading, time
import torch, transformers
from kt_core import hf
import transformers.models.mixtral.modeling_mixtral

def anonymous():
    for line in open("/proc/self/status"):
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024

path, warm, packed_dir, format = sys.argv[1:]
if format == "stock":
    load = lambda p: transformers.AutoModelForCausalLM.from_pretrained(p, dtype=torch.bfloat16)
else:
    load = lambda p: hf.load_model(p, format=format, packed_dir=packed_dir or None)
load(warm)  # imports, thread pools, allocator arenas
gc.collect()
ctypes.CDLL("libc.so.6").malloc_trim(0)
base, peak, stop = anonymous(), [0], threading.Event()

def watch():
    while not stop.wait(0.001):
        peak[0] = max(peak[0], anonymous())

thread = threading.Thread(target=watch)
thread.start()
model = load(path)
stop.set()
thread.join()
peak[0] = max(peak[0], anonymous())
other = sum(p.numel() * p.element_size() for p in model.parameters())
layers = [m.experts.nbytes for m in model.modules() if type(m).__name__ == "KTExpertsLinear"]
print(json.dumps({"peak": peak[0] - base, "other": other, "layers": layers}))
"""

# Allocator slack and Python objects of a load, beside the weights themselves.
SLACK = 12 << 20


def peaks(tmp_path, format, packed_dir="", **sizes):
    warm = models.build("mixtral", tmp_path / "warm")
    path = models.build("mixtral", tmp_path / "model", max_shard_size="100MB", **sizes)
    return run(PEAK, path, warm, packed_dir, format)


def test_peak_of_anonymous_memory(tmp_path):
    """60 MB of bf16 experts in 4 layers: the packed bytes, the other weights and one layer; stock
    needs all.
    """
    sizes = {"num_hidden_layers": 4, "hidden_size": 512, "intermediate_size": 1280}
    found = peaks(tmp_path, "int8", **sizes)
    experts = sum(found["layers"])
    assert experts > 60 << 20
    assert found["peak"] < experts + found["other"] + max(found["layers"]) + SLACK
    assert found["peak"] > experts  # the sampling sees what is there


def test_peak_with_a_packed_file(tmp_path):
    """A packed file is made with one layer in memory, and then mapped with none."""
    sizes = {"num_hidden_layers": 4, "hidden_size": 512, "intermediate_size": 1280}
    packed = tmp_path / "packed"
    made = peaks(tmp_path, "int8", packed, **sizes)
    assert made["peak"] < made["other"] + 2 * max(made["layers"]) + SLACK
    mapped = run(PEAK, tmp_path / "model", tmp_path / "warm", packed, "int8")
    assert mapped["peak"] < mapped["other"] + SLACK


@pytest.mark.slow
@pytest.mark.parametrize("format", ["int8", "int4"])
def test_peak_of_anonymous_memory_at_600_mb(format, tmp_path):
    sizes = {"num_hidden_layers": 6, "hidden_size": 1024, "intermediate_size": 2048}
    found = peaks(tmp_path, format, **sizes)
    layer = max(found["layers"])
    assert found["peak"] < sum(found["layers"]) + found["other"] + layer + SLACK
    stock = run(PEAK, tmp_path / "model", tmp_path / "warm", "", "stock")
    assert stock["peak"] > 600e6 > 1.5 * found["peak"] or format == "int8"


_HEAP = """
import ctypes, sys
from pathlib import Path
from kt_core.loading import memory
c = ctypes.CDLL(None)
c.malloc.restype, c.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
c.free.argtypes = [ctypes.c_void_p]
def anonymous():
    fields = (line.split() for line in Path("/proc/self/status").read_text().splitlines())
    return next(int(f[1]) for f in fields if f[0] == "RssAnon:") * 1024
if sys.argv[1] == "kept":
    assert memory.keep_freed_tensors()
blocks = [c.malloc(400_000) for _ in range(256)]
large = c.malloc(40 << 20)
for block, size in [*((b, 400_000) for b in blocks), (large, 40 << 20)]:
    ctypes.memset(block, 1, size)
before = anonymous()
for block in blocks[:-1]:  # the last lives, above them all in the heap
    c.free(block)
kept = before - anonymous()
c.free(large)
at_once = before - kept - anonymous()
memory.return_freed_tensors()
print(kept, at_once, before - anonymous())
"""


@pytest.mark.parametrize("mode", ["kept", "left"])
def test_freed_tensors_are_kept_and_returned_when_asked(mode):
    """100 MB of freed blocks; glibc's own threshold returns the first of them at once."""
    out = subprocess.run(
        [sys.executable, "-c", _HEAP, mode], check=True, capture_output=True, text=True
    )
    first, large, all_of_it = map(int, out.stdout.split())
    assert (first < 4_000_000) == (mode == "kept")
    assert large > 40_000_000 or mode == "left"  # above 32 MiB nothing is kept
    assert all_of_it > 100_000_000


def test_a_chosen_malloc_setting_is_kept(monkeypatch):
    monkeypatch.setenv("MALLOC_MMAP_THRESHOLD_", "4194304")
    assert not memory.keep_freed_tensors()
