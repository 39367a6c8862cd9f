"""The packed file: made once, mapped read-only, and refused by name when anything differs."""

from __future__ import annotations

import json
import os
import shutil
import struct
import subprocess
import sys
import threading
import zlib
from pathlib import Path

import models
import pytest
import slow_experts
import torch

from kt_core import hf
from kt_core.loading import checkpoint, packed_file

IDS = torch.randint(3, 120, (2, 48), generator=torch.Generator().manual_seed(1))


@pytest.fixture
def model(tmp_path, monkeypatch):
    slow_experts.patch(monkeypatch)
    return models.build("mixtral", tmp_path / "model")


@pytest.fixture
def packed(tmp_path, model):
    hf.load_model(model, packed_dir=tmp_path / "packed")
    return tmp_path / "packed" / "model-int8-g128.kt"


def load(model, packed, **kw):
    return hf.load_model(model, packed_dir=packed.parent, dtype=torch.float32, **kw)


def logits(model):
    with torch.no_grad():
        return model(input_ids=IDS).logits


def header(packed):
    blob = packed.read_bytes()
    length = struct.unpack_from("<I", blob, 12)[0]
    return json.loads(blob[20 : 20 + length])


def set_header(packed, change):
    """Edits header and its checksum; the change must keep its length."""
    blob = bytearray(packed.read_bytes())
    length = struct.unpack_from("<I", blob, 12)[0]
    text = change(blob[20 : 20 + length].decode()).encode()
    assert len(text) == length
    blob[20 : 20 + length] = text
    struct.pack_into("<I", blob, 16, zlib.crc32(text))
    packed.write_bytes(blob)


def test_made_once_then_mapped(model, packed, monkeypatch):
    direct = logits(hf.load_model(model, dtype=torch.float32))
    stamp = packed.stat().st_mtime_ns
    monkeypatch.setattr(checkpoint, "fill", lambda *a: pytest.fail("experts were read"))
    assert torch.equal(logits(load(model, packed)), direct)
    assert packed.stat().st_mtime_ns == stamp
    assert not list(packed.parent.glob("*.tmp")) and not list(packed.parent.glob(".*.tmp"))


@pytest.mark.parametrize("format", ["bf16", "int8", "int4"])
def test_kernels_run_from_the_mapping(format, tmp_path):
    path = models.build("mixtral", tmp_path / "model")
    direct = logits(hf.load_model(path, format=format))
    for _ in range(2):
        mapped = hf.load_model(path, format=format, packed_dir=tmp_path / "packed")
        assert torch.equal(logits(mapped), direct)


def test_layout_of_the_file(packed):
    blob = packed.read_bytes()
    assert (
        blob[:8] == packed_file.MAGIC
        and struct.unpack_from("<I", blob, 8)[0] == packed_file.VERSION
    )
    found = header(packed)
    assert (found["model"], found["format"], found["group"]) == ("model", "int8", 128)
    names = [f"model.layers.{i}.mlp.experts" for i in range(2)]
    assert [layer["name"] for layer in found["layers"]] == names
    size = found["layers"][0]["nbytes"]
    first = packed_file.ALIGN
    assert zlib.crc32(blob[first : first + size]) == int(found["crc"][0], 16)
    assert len(blob) == first + -(-size // packed_file.ALIGN) * packed_file.ALIGN + size


def test_mapping_is_read_only_and_aligned(model, packed):
    module = load(model, packed).model.layers[1].mlp.experts
    view = module.experts.packed()
    assert view.readonly
    assert module.experts.gate_up.data_ptr() % packed_file.ALIGN == 0


def test_moved_checkpoint_is_accepted(model, packed, tmp_path):
    moved = tmp_path / "elsewhere" / "model"
    shutil.copytree(model, moved)
    assert torch.equal(logits(load(moved, packed)), logits(load(model, packed)))


def test_retrained_checkpoint_is_refused(model, packed):
    before = packed.read_bytes()
    models.build("mixtral", model, seed=1)
    match = "was packed from another checkpoint than the one of model; delete it .* packed_dir"
    with pytest.raises(ValueError, match=match):
        load(model, packed)
    assert packed.read_bytes() == before


def test_model_of_another_name_gets_its_own_file(packed, tmp_path):
    other = models.build("mixtral", tmp_path / "other", seed=1)
    hf.load_model(other, packed_dir=packed.parent)
    assert {p.name for p in packed.parent.glob("*.kt")} == {packed.name, "other-int8-g128.kt"}


def test_file_of_another_model_is_refused(packed, tmp_path):
    other = models.build("mixtral", tmp_path / "other", seed=1)
    packed.rename(packed.with_name("other-int8-g128.kt"))
    with pytest.raises(ValueError, match="was packed with model 'model', not 'other'; delete it"):
        hf.load_model(other, packed_dir=packed.parent)


def test_file_of_another_format_is_refused(model, packed):
    packed.rename(packed.with_name("model-int4-g32.kt"))
    with pytest.raises(ValueError, match="was packed with format 'int8', not 'int4'; delete it"):
        load(model, packed, format="int4")


def test_file_of_another_group_is_refused(model, packed):
    packed.rename(packed.with_name("model-int8-g64.kt"))
    with pytest.raises(ValueError, match="was packed with group 128, not 64"):
        load(model, packed, group=64)


def test_other_layers_are_refused(model, packed):
    set_header(packed, lambda text: text.replace('"activation": "silu"', '"activation": "gelu"'))
    with pytest.raises(ValueError, match="holds layers of other names, shapes or activation"):
        load(model, packed)


def test_other_version_is_refused(model, packed):
    blob = bytearray(packed.read_bytes())
    struct.pack_into("<I", blob, 8, 99)
    packed.write_bytes(blob)
    with pytest.raises(ValueError, match=f"{packed} has version 99, this program reads version 2"):
        load(model, packed)


def test_other_file_is_refused(model, packed):
    packed.write_bytes(b"something else entirely")
    with pytest.raises(ValueError, match="is not a packed expert file; delete it"):
        load(model, packed)


@pytest.mark.parametrize("layer", [0, 1])
def test_a_flipped_bit_is_found(layer, model, packed):
    blob = bytearray(packed.read_bytes())
    size = header(packed)["layers"][0]["nbytes"]
    blob[packed_file.ALIGN + layer * -(-size // packed_file.ALIGN) * packed_file.ALIGN + 12345] ^= (
        16
    )
    packed.write_bytes(blob)
    with pytest.raises(ValueError, match=rf"damaged layer model\.layers\.{layer}\.mlp\.experts"):
        load(model, packed)


def test_a_damaged_header_is_found(model, packed):
    blob = bytearray(packed.read_bytes())
    blob[30] ^= 1
    packed.write_bytes(blob)
    with pytest.raises(ValueError, match="has a damaged header"):
        load(model, packed)


@pytest.mark.parametrize("keep", [10, 300, 10_000, -1])
def test_a_truncated_file_is_found(keep, model, packed):
    packed.write_bytes(packed.read_bytes()[:keep])
    with pytest.raises(ValueError, match=f"{packed.name} (is|has) .*delete it"):
        load(model, packed)


def test_nothing_is_left_when_packing_fails(model, tmp_path, monkeypatch):
    put = slow_experts.SlowExperts.put

    def fail_late(self, expert, projection, weight):
        if self.name.startswith("model.layers.1") and expert == 5:
            raise ValueError("NaN")
        put(self, expert, projection, weight)

    monkeypatch.setattr(slow_experts.SlowExperts, "put", fail_late)
    with pytest.raises(ValueError, match="cannot be packed: NaN"):
        hf.load_model(model, packed_dir=tmp_path / "packed")
    assert not [p for p in (tmp_path / "packed").iterdir() if p.suffix != ".lock"]
    monkeypatch.setattr(slow_experts.SlowExperts, "put", put)
    hf.load_model(model, packed_dir=tmp_path / "packed")


def test_leftovers_of_a_killed_writer_are_removed(model, tmp_path):
    leftover = tmp_path / "packed" / ".model-int8-g128.kt.4242.tmp"
    leftover.parent.mkdir()
    leftover.write_bytes(b"half a layer")
    hf.load_model(model, packed_dir=tmp_path / "packed")
    assert not leftover.exists() and (tmp_path / "packed" / "model-int8-g128.kt").exists()


def test_a_full_disk_is_named_before_writing(model, tmp_path, monkeypatch):
    usage = shutil.disk_usage(tmp_path)._replace(free=1000)
    monkeypatch.setattr(packed_file.shutil, "disk_usage", lambda path: usage)
    with pytest.raises(OSError, match=r"packed has 1,000 bytes free but the packed experts need"):
        hf.load_model(model, packed_dir=tmp_path / "packed")
    assert not [p for p in (tmp_path / "packed").iterdir() if p.suffix != ".lock"]


def test_a_read_only_packed_dir_is_enough_once_the_file_exists(model, packed, monkeypatch):
    monkeypatch.setattr(packed_file, "creation_lock", lambda path: pytest.fail("wanted to write"))
    load(model, packed)


def test_a_packed_dir_that_cannot_be_made_is_named(model, tmp_path):
    (tmp_path / "file").write_text("")
    for directory in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(
            OSError, match=f"packed_dir {directory} cannot be written to .*; choose"
        ):
            hf.load_model(model, packed_dir=directory)


def test_processes_that_start_together_make_one_file(tmp_path):
    """Ranks of one host: one packs, the others wait and map; all compute the same."""
    path = models.build("mixtral", tmp_path / "model")
    script = (
        "import sys, torch, models\n"
        "from kt_core import hf\n"
        "from kt_core.loading import checkpoint\n"
        "filled = []\n"
        "fill = checkpoint.fill\n"
        "checkpoint.fill = lambda e, p, b: (filled.append(e.name), fill(e, p, b))\n"
        "model = hf.load_model(sys.argv[1], packed_dir=sys.argv[2])\n"
        "ids = torch.arange(3, 60)[None]\n"
        "print(len(filled), model(input_ids=ids).logits.double().sum().item())\n"
    ).replace("print(", "torch.set_grad_enabled(False); print(")
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", script, path, tmp_path / "packed"],
            stdout=subprocess.PIPE,
            text=True,
            cwd=Path(__file__).resolve().parents[2],
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        for _ in range(2)
    ]
    rows = [p.communicate(timeout=120)[0].split() for p in processes]
    assert [p.returncode for p in processes] == [0, 0]
    assert sorted(int(filled) for filled, _ in rows) == [0, 2]
    assert len({total for _, total in rows}) == 1


def test_a_second_creator_waits(tmp_path):
    path, entered = tmp_path / "a.kt", threading.Event()

    def create():
        with packed_file.creation_lock(path):
            entered.set()

    second = threading.Thread(target=create)
    with packed_file.creation_lock(path):
        second.start()
        assert not entered.wait(0.3)
    second.join(10)
    assert entered.is_set()


def test_writer_refuses_wrong_sizes_and_missing_layers(tmp_path):
    layers = tuple(packed_file.Layer(f"l{i}", 1, 2, 3, "silu", 64) for i in range(2))
    identity = packed_file.Identity("m", "s", "int8", 128, layers)
    with (
        pytest.raises(ValueError, match="l0 packs to 63 bytes, not 64"),
        packed_file.PackedWriter(tmp_path / "a.kt", identity) as writer,
    ):
        writer.add(memoryview(bytes(63)))
    with (
        pytest.raises(ValueError, match="1 of 2 layers were written"),
        packed_file.PackedWriter(tmp_path / "a.kt", identity) as writer,
    ):
        writer.add(memoryview(bytes(64)))
    assert not list(tmp_path.iterdir())


def test_fingerprint_sees_every_region_of_a_large_file(tmp_path):
    """A retrained shard differs everywhere; a file of which 1/64 changed is still told apart."""
    file = tmp_path / "model.safetensors"
    size = 4 << 20
    file.write_bytes(os.urandom(size))
    before = checkpoint.fingerprint([file])
    for start in range(0, size, size // 32):
        blob = bytearray(file.read_bytes())
        blob[start : start + size // 32] = os.urandom(size // 32)
        file.write_bytes(blob)
        after = checkpoint.fingerprint([file])
        assert after != before
        before = after
