"""numa_nodes through the loader: slices, packed files, shared memory, refusals.

This machine's one node counts twice here (`two_nodes`), as in tests/csrc/test_slices.py.
"""

from __future__ import annotations

import logging
from pathlib import Path

import models
import pytest
import torch
from numa_maps import policies

from kt_core import _kt, experts, hf, runtime
from kt_core.loading import numa, packed_file, shared
from kt_core.module import KTExpertsLinear
from kt_core.names import PROJECTIONS

IDS = torch.randint(3, 120, (2, 48), generator=torch.Generator().manual_seed(1))
SLICES = 2  # of the models' intermediate size of 40 in bf16


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return models.build("mixtral", tmp_path_factory.mktemp("numa") / "model")


@pytest.fixture(autouse=True)
def one_node_afterwards():
    yield
    _kt.set_nodes(1)
    _kt.testing.pretend_nodes(0)
    runtime.set_threads(None)


@pytest.fixture
def two_nodes():
    _kt.testing.set_threads(2)
    _kt.testing.pretend_nodes(2)


def load(path, **settings):
    return hf.load_model(path, format="bf16", dtype=torch.float32, **settings)


def slices(model):
    return {m.experts.slices for m in model.modules() if isinstance(m, KTExpertsLinear)}


def logits(model):
    with torch.no_grad():
        return model(input_ids=IDS).logits


def test_one_node_packs_one_slice(path):
    model = load(path)
    assert slices(model) == {1} and runtime.numa_nodes() == runtime.available_numa_nodes()
    assert torch.equal(logits(model), logits(load(path, numa_nodes=1)))


def test_the_default_is_every_node(path, two_nodes, caplog):
    with caplog.at_level(logging.INFO, "kt"):
        model = load(path)
    assert slices(model) == {SLICES} and runtime.numa_nodes() == 2
    assert "on 2 NUMA nodes" in caplog.text
    on_two = logits(model)
    runtime.set_numa_nodes(1)
    assert torch.equal(logits(model), on_two)
    assert slices(load(path, numa_nodes=1)) == {1} and runtime.numa_nodes() == 1
    assert slices(load(path, numa_nodes=2)) == {SLICES} and runtime.numa_nodes() == 2


def test_one_thread_uses_one_node(path, two_nodes):
    assert slices(load(path, threads=1)) == {1} and runtime.numa_nodes() == 1
    with pytest.raises(ValueError, match="numa_nodes is 2 but threads is 1"):
        load(path, threads=1, numa_nodes=2)


def test_a_packed_file_keeps_its_slices(path, two_nodes, tmp_path):
    """Made for two nodes it serves one as well, with the same bits."""
    direct = logits(load(path))
    on_two = load(path, packed_dir=tmp_path)
    assert torch.equal(logits(on_two), direct)
    assert packed_file.slices_in(tmp_path / "model-bf16-g0.kt") == SLICES
    layer = next(m for m in on_two.modules() if isinstance(m, KTExpertsLinear)).experts
    assert not layer.packed().readonly  # copied to where its slices belong
    on_one = load(path, packed_dir=tmp_path, numa_nodes=1)
    assert slices(on_one) == {SLICES} and runtime.numa_nodes() == 1
    assert torch.equal(logits(on_one), direct)
    layer = next(m for m in on_one.modules() if isinstance(m, KTExpertsLinear)).experts
    assert layer.packed().readonly  # the file's mapping


def test_a_packed_file_of_one_slice_on_two_nodes(path, two_nodes, tmp_path, caplog):
    one = logits(load(path, packed_dir=tmp_path, numa_nodes=1))
    file = tmp_path / "model-bf16-g0.kt"
    assert packed_file.slices_in(file) == 1
    match = f"numa_nodes is 2, .* but packed expert file {file} is cut into 1; delete it .* with 2"
    with pytest.raises(ValueError, match=match):
        load(path, packed_dir=tmp_path, numa_nodes=2)
    with caplog.at_level(logging.WARNING, "kt"):
        model = load(path, packed_dir=tmp_path)
    assert f"experts use 1 of 2 NUMA nodes: packed expert file {file} is cut into 1" in caplog.text
    assert slices(model) == {1} and runtime.numa_nodes() == 1
    assert torch.equal(logits(model), one)


def test_more_nodes_than_slices_are_refused(path, caplog):
    _kt.testing.set_threads(3)
    _kt.testing.pretend_nodes(3)
    match = (
        "numa_nodes is 3, and every node needs a slice .* can be cut into 2; set numa_nodes to 2"
    )
    with pytest.raises(ValueError, match=match):
        load(path, numa_nodes=3)
    with caplog.at_level(logging.WARNING, "kt"):
        assert slices(load(path)) == {SLICES}
    assert runtime.numa_nodes() == 2
    assert "experts use 2 of 3 NUMA nodes: experts of this size" in caplog.text


def test_slices_by_setting_and_file(two_nodes):
    assert numa.slices_for(None, 8, None, None) == 8
    assert numa.slices_for(1, 8, None, None) == 1
    file = Path("x.kt")
    assert numa.slices_for(1, 8, file, 6) == numa.slices_for(2, 8, file, 6) == 6
    # a file of other layers, which opening it will say
    assert numa.slices_for(1, 3, file, 6) == 3
    with pytest.raises(
        ValueError, match="numa_nodes is 3 but this process has CPUs and memory on 2"
    ):
        numa.slices_for(3, 8, None, None)


def test_shared_memory_is_bound_too(two_nodes):
    """A memfd takes a policy, which a mapping of an ordinary file would not."""
    runtime.set_numa_nodes(2)
    size = experts.Experts.packed_nbytes(4, 256, 1024, "int8", None, 8)
    memory = shared.SharedLayers([size])
    layer = experts.Experts(4, 256, 1024, slices=8, buffer=memory.writable(0))
    layer.bind_slices()
    for e in range(4):
        for p in PROJECTIONS:
            layer.put(e, p, torch.ones((256, 1024) if p == "down" else (1024, 256)))
    assert f"prefer:{_kt.topology()[1][0][0]}" in {policy for policy, _ in policies(layer)}
    memory.close()


@pytest.mark.parametrize("packed", [False, True])
def test_ranks_share_slices(path, two_ranks, tmp_path, packed):
    if runtime.allowed_cpus() < 2:
        pytest.skip("needs two CPUs")  # a thread per node
    packed_dir = str(tmp_path) if packed else None
    found = two_ranks.run("load_on_two_nodes", path=path, packed_dir=packed_dir)
    for rank in found:
        assert rank["nodes"] == 2 and rank["slices"] == [SLICES, SLICES]
        assert rank["shared mappings"] == 1  # one memory for both, also from a file
        assert torch.equal(rank["logits"], found[0]["logits"])
