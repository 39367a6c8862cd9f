"""CPUs, NUMA nodes and quotas of other machines, as trees of files below tmp_path."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from kt_core import _kt, runtime

GIB = 1 << 30


class Machine:
    """A file tree like the one Linux shows below /."""

    def __init__(self, root):
        self.root = root

    def write(self, path, text):
        file = self.root / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"{text}\n")

    def node(self, id, cpus, memory=4 * GIB, distances=None):
        folder = f"sys/devices/system/node/node{id}"
        self.write(f"{folder}/cpulist", cpus)
        self.write(
            f"{folder}/meminfo",
            f"Node {id} MemTotal:       {memory >> 10} kB\nNode {id} MemFree:  12 kB",
        )
        if distances:
            self.write(f"{folder}/distance", " ".join(map(str, distances)))

    def online(self, nodes):
        self.write("sys/devices/system/node/online", nodes)

    def siblings(self, *cores):
        for core in cores:
            for cpu in core:
                self.write(
                    f"sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list",
                    ",".join(map(str, core)),
                )

    def cgroups(self, *lines):
        self.write("proc/self/cgroup", "\n".join(lines))

    def mounts(self, *mounts):
        """(cgroup that the mount shows, mount point, type, options)"""
        lines = ["22 1 8:1 / / rw,relatime shared:1 - ext4 /dev/sda1 rw"]
        for i, (top, point, kind, options) in enumerate(mounts):
            lines.append(
                f"{30 + i} 22 0:{i} {top} {point} rw,nosuid shared:9 - {kind} cg {options}"
            )
        self.write("proc/self/mountinfo", "\n".join(lines))

    def nodes(self, cpus):
        """{id: (cpus, cores)}"""
        return {n[0]: n[1:3] for n in _kt.topology(str(self.root), list(cpus))[1]}

    def threads(self, cpus=8):
        return _kt.topology(str(self.root), list(range(cpus)))[0]


@pytest.fixture
def machine(tmp_path):
    return Machine(tmp_path)


# -- nodes


def test_without_node_directories_there_is_one_node(machine):
    assert machine.nodes([0, 1, 5]) == {0: ([0, 1, 5], 3)}
    assert _kt.topology(str(machine.root), [0])[1] == [(0, [0], 1, 0)]


@pytest.mark.parametrize("count", [1, 2, 3])
def test_nodes_and_their_memory(machine, count):
    machine.online(f"0-{count - 1}" if count > 1 else "0")
    for i in range(count):
        machine.node(i, f"{4 * i}-{4 * i + 3}", memory=(i + 1) * GIB)
    threads, nodes = _kt.topology(str(machine.root), list(range(4 * count)))
    assert threads == 4 * count
    assert nodes == [(i, list(range(4 * i, 4 * i + 4)), 4, (i + 1) * GIB) for i in range(count)]


def test_gaps_in_ids_and_interleaved_cpus(machine):
    machine.online("0,2,8-9")
    for id, cpus in ((0, "0,4"), (2, "1,5"), (8, "2"), (9, "3,6-7")):
        machine.node(id, cpus)
    want = {0: ([0, 4], 2), 2: ([1, 5], 2), 8: ([2], 1), 9: ([3, 6, 7], 3)}
    assert machine.nodes(range(8)) == want


def test_an_offline_node_is_left_out(machine):
    machine.online("0,2")
    machine.node(0, "0-1")
    machine.node(1, "")  # its folder may stay
    machine.node(2, "2-3")
    assert machine.nodes(range(4)) == {0: ([0, 1], 2), 2: ([2, 3], 2)}


def test_cpus_of_no_online_node_go_to_the_first(machine):
    machine.online("1-2")
    machine.node(0, "4")
    machine.node(1, "0-1")
    machine.node(2, "2-3")
    assert machine.nodes(range(6)) == {1: ([0, 1, 4, 5], 4), 2: ([2, 3], 2)}


def test_cpus_of_a_node_without_memory_go_to_the_nearest_with_some(machine):
    machine.online("0-1,4")
    machine.node(0, "0-1", distances=[10, 20, 30])
    machine.node(1, "2-3", memory=0, distances=[20, 10, 15])
    machine.node(4, "4-5", distances=[30, 15, 10])
    assert machine.nodes(range(6)) == {0: ([0, 1], 2), 4: ([2, 3, 4, 5], 4)}
    # also where none of that node's own CPUs are allowed
    assert machine.nodes([2]) == {4: ([2], 1)}


def test_a_node_without_memory_and_no_distances(machine):
    machine.online("0-1")
    machine.node(0, "0-1", memory=0)
    machine.node(1, "2-3")
    assert machine.nodes(range(4)) == {1: ([0, 1, 2, 3], 4)}


def test_no_node_with_memory_is_one_node(machine):
    machine.online("1-2")
    machine.node(1, "0", memory=0)
    machine.node(2, "1", memory=0)
    assert machine.nodes([0, 1]) == {0: ([0, 1], 2)}


def test_a_node_of_memory_alone_gives_no_place_to_compute(machine):
    machine.online("0-1")
    machine.node(0, "0-1")
    machine.node(1, "", memory=64 * GIB)
    assert machine.nodes([0, 1]) == {0: ([0, 1], 2)}


def test_a_node_that_hides_its_memory_counts(machine):
    machine.online("0-1")
    machine.node(0, "0")
    machine.write("sys/devices/system/node/node1/cpulist", "1")
    assert _kt.topology(str(machine.root), [0, 1])[1][1] == (1, [1], 1, 0)


def test_affinity_may_leave_a_node_without_cpus(machine):
    machine.online("0-1")
    machine.node(0, "0-3")
    machine.node(1, "4-7")
    assert machine.nodes([5, 7]) == {1: ([5, 7], 2)}
    assert machine.threads(3) == 3


def test_memory_that_the_cpuset_forbids(machine):
    machine.online("0-1")
    machine.node(0, "0-1", distances=[10, 21])
    machine.node(1, "2-3", distances=[21, 10])
    machine.write(
        "proc/self/status", "Name:\tpython\nMems_allowed:\t1\nMems_allowed_list:\t0\nx:\t1"
    )
    assert machine.nodes(range(4)) == {0: ([0, 1, 2, 3], 4)}


def test_one_cpu_of_every_core_comes_first(machine):
    machine.online("0-1")
    machine.node(0, "0-1,4-5")
    machine.node(1, "2-3,6-7")
    machine.siblings((0, 4), (1, 5), (2, 3), (6, 7))
    assert machine.nodes(range(8)) == {0: ([0, 1, 4, 5], 2), 1: ([2, 6, 3, 7], 2)}
    # a core whose first sibling is not allowed
    assert machine.nodes([4, 5, 1]) == {0: ([4, 5, 1], 2)}


def test_garbage_limits_nothing(machine):
    machine.online("what\x00ever")
    machine.write("proc/self/cgroup", "no colons\n0:\n::")
    machine.write("proc/self/mountinfo", "1 2 3\n- - -\n\n")
    machine.write("sys/fs/cgroup/cpu.max", "fast slow")
    machine.siblings(("", 0))
    assert machine.nodes([0, 1]) == {0: ([0, 1], 2)}
    assert machine.threads(2) == 2


# -- threads and slices over the nodes


def shares(machine, cpus, nodes, threads, slices=8):
    """{id: (threads, slices)} and that slices follow each other."""
    found = _kt.share(str(machine.root), list(range(cpus)), nodes, threads, slices)
    ends = [0, *(end for *_, end in found)]
    assert [first for *_, first, _ in found] == ends[:-1] and ends[-1] == slices
    return {id: (n, end - first) for id, _, n, first, end in found}


def test_without_node_directories_one_node_takes_all(machine):
    assert shares(machine, 4, nodes=1, threads=4, slices=1) == {0: (4, 1)}
    assert shares(machine, 4, nodes=3, threads=3) == {0: (3, 8)}


@pytest.mark.parametrize("threads", [2, 3, 8, 64])
def test_equal_nodes_share_equally(machine, threads):
    machine.online("0-1")
    machine.node(0, "0-31")
    machine.node(1, "32-63")
    half = threads - threads // 2
    found = shares(machine, 64, 2, threads)
    assert found[0][0] == half and found[1][0] == threads - half
    if threads % 2 == 0:
        assert found[0][1] == found[1][1] == 4


def test_three_nodes_with_gaps_share_by_their_cpus(machine):
    machine.online("0,4,9")
    machine.node(0, "0-5")
    machine.node(4, "6-7")
    machine.node(9, "8-11")
    assert shares(machine, 12, 3, 12) == {0: (6, 4), 4: (2, 1), 9: (4, 3)}
    assert shares(machine, 12, 3, 3, slices=3) == {0: (1, 1), 4: (1, 1), 9: (1, 1)}
    assert shares(machine, 12, 3, 4) == {0: (2, 4), 4: (1, 2), 9: (1, 2)}
    assert shares(machine, 12, 2, 5) == {0: (3, 5), 9: (2, 3)}  # the largest two
    assert shares(machine, 12, 1, 5) == {0: (5, 8)}


def test_no_node_gets_more_threads_than_cpus(machine):
    machine.online("0-2")
    machine.node(0, "0")
    machine.node(1, "1-2")
    machine.node(2, "3-15")
    for threads in range(3, 17):
        found = shares(machine, 16, 3, threads)
        assert sum(n for n, _ in found.values()) == threads
        for id, most in ((0, 1), (1, 2), (2, 13)):
            assert 1 <= found[id][0] <= most, threads


def test_offline_and_memoryless_nodes_get_nothing(machine):
    machine.online("0,2-3")
    machine.node(0, "0-3", distances=[10, 20, 20])
    machine.node(1, "")
    machine.node(2, "4-5", memory=0, distances=[20, 10, 12])
    machine.node(3, "6-7", distances=[20, 12, 10])
    assert shares(machine, 8, 2, 8) == {0: (4, 4), 3: (4, 4)}


def test_siblings_count_as_cpus(machine):
    machine.online("0-1")
    machine.node(0, "0-1,4-5")
    machine.node(1, "2-3")
    machine.siblings((0, 4), (1, 5), (2, 3))
    found = _kt.share(str(machine.root), list(range(6)), 2, 6, 3)
    assert found == [(0, [0, 1, 4, 5], 4, 0, 2), (1, [2, 3], 2, 2, 3)]


# -- quotas

V2 = ("/", "/sys/fs/cgroup", "cgroup2", "rw,nsdelegate")
V1 = ("/", "/sys/fs/cgroup/cpu,cpuacct", "cgroup", "rw,cpu,cpuacct")


@pytest.mark.parametrize(
    "limit,threads",
    [
        ("max 100000", 8),
        ("300000 100000", 3),
        ("150000 50000", 3),
        ("240000 100000", 2),
        ("250000 100000", 3),
        ("10000 100000", 1),
        ("6400000 100000", 8),
        ("0 0", 8),
    ],
)
def test_quota_v2(machine, limit, threads):
    machine.cgroups("0::/box")
    machine.mounts(V2)
    machine.write("sys/fs/cgroup/box/cpu.max", limit)
    assert machine.threads() == threads


@pytest.mark.parametrize(
    "quota,period,threads",
    [(-1, 100000, 8), (300000, 100000, 3), (125000, 50000, 3), (1000, 100000, 1)],
)
def test_quota_v1(machine, quota, period, threads):
    machine.cgroups("5:memory:/box/m", "4:cpu,cpuacct:/box", "3:cpuset:/")
    machine.mounts(("/", "/sys/fs/cgroup/cpuset", "cgroup", "rw,cpuset"), V1)
    machine.write("sys/fs/cgroup/cpu,cpuacct/box/cpu.cfs_quota_us", quota)
    machine.write("sys/fs/cgroup/cpu,cpuacct/box/cpu.cfs_period_us", period)
    assert machine.threads() == threads


@pytest.mark.parametrize("limits", [(2, None, None), (None, 2, 5), (7, 5, 2), (None, None, 2)])
def test_the_least_quota_of_all_ancestors_counts(machine, limits):
    machine.mounts(V2, V1)
    text = [f"{n * 100000}" if n else None for n in limits]
    places = ["", "pod/", "pod/box/"]
    machine.cgroups("0::/pod/box")
    for place, quota in zip(places, text, strict=True):
        machine.write(f"sys/fs/cgroup/{place}cpu.max", f"{quota or 'max'} 100000")
    assert machine.threads() == 2
    for place in places:
        machine.write(f"sys/fs/cgroup/{place}cpu.max", "max 100000")
    machine.cgroups("1:cpu,cpuacct:/pod/box")
    for place, quota in zip(places, text, strict=True):
        machine.write(f"sys/fs/cgroup/cpu,cpuacct/{place}cpu.cfs_quota_us", quota or "-1")
        machine.write(f"sys/fs/cgroup/cpu,cpuacct/{place}cpu.cfs_period_us", "100000")
    assert machine.threads() == 2


def test_other_processes_cgroups_do_not_count(machine):
    machine.cgroups("0::/mine")
    machine.mounts(V2)
    machine.write("sys/fs/cgroup/mine/child/cpu.max", "100000 100000")
    machine.write("sys/fs/cgroup/other/cpu.max", "100000 100000")
    machine.write("sys/fs/cgroup/min/cpu.max", "100000 100000")
    assert machine.threads() == 8


def test_a_hybrid_machine_counts_both_versions(machine):
    machine.cgroups("1:cpu:/a", "0::/b")
    machine.mounts(
        ("/", "/sys/fs/cgroup/cpu", "cgroup", "rw,cpu"),
        ("/", "/sys/fs/cgroup/unified", "cgroup2", "rw"),
    )
    machine.write("sys/fs/cgroup/unified/b/cpu.max", "500000 100000")
    assert machine.threads() == 5
    machine.write("sys/fs/cgroup/cpu/a/cpu.cfs_quota_us", "400000")
    machine.write("sys/fs/cgroup/cpu/a/cpu.cfs_period_us", "100000")
    assert machine.threads() == 4


def test_a_container_that_names_its_cgroup_by_the_hosts_path(machine):
    """Docker with version 1: the mount's top is the container's cgroup."""
    machine.cgroups("4:cpu,cpuacct:/docker/1f2e/worker")
    machine.mounts(("/docker/1f2e", *V1[1:]))
    for place, quota in (("", 600000), ("worker/", 300000)):
        machine.write(f"sys/fs/cgroup/cpu,cpuacct/{place}cpu.cfs_quota_us", quota)
        machine.write(f"sys/fs/cgroup/cpu,cpuacct/{place}cpu.cfs_period_us", 100000)
    assert machine.threads() == 3
    machine.cgroups("4:cpu,cpuacct:/docker/1f2e9")  # outside of what is mounted
    assert machine.threads() == 6


def test_a_cgroup_above_its_namespace(machine):
    machine.cgroups("0::/../../outside")
    machine.mounts(V2)
    machine.write("sys/fs/cgroup/cpu.max", "300000 100000")
    machine.write("outside/cpu.max", "100000 100000")
    machine.write("sys/outside/cpu.max", "100000 100000")
    assert machine.threads() == 3


@pytest.mark.parametrize("file", ["cpu.max", "cpu/cpu.cfs_quota_us"])
def test_quota_where_proc_is_hidden(machine, file):
    machine.write("sys/fs/cgroup/cpu/cpu.cfs_period_us", "100000")
    machine.write(f"sys/fs/cgroup/{file}", "300000 100000" if file == "cpu.max" else "300000")
    assert machine.threads() == 3


# -- this machine


def test_this_machine():
    threads, nodes = _kt.topology()
    assert threads == runtime.allowed_cpus() <= len(os.sched_getaffinity(0))
    cpus = sorted(cpu for node in nodes for cpu in node[1])
    assert cpus == sorted(os.sched_getaffinity(0))
    assert all(1 <= cores <= len(cpus) for _, cpus, cores, _ in nodes)


def test_taskset_is_respected():
    cpu = max(os.sched_getaffinity(0))
    code = (
        f"import os; os.sched_setaffinity(0, {{{cpu}}})\n"
        "from kt_core import _kt, runtime\n"
        f"assert [n[1] for n in _kt.topology()[1]] == [[{cpu}]]\n"
        "assert runtime.threads() == runtime.allowed_cpus() == 1\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
