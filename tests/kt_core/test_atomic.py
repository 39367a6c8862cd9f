"""Files and folders that appear in whole: what is on the disk before a name is."""

from __future__ import annotations

import os

import pytest

from kt_core import atomic


@pytest.fixture
def calls(monkeypatch):
    """What was synced and renamed, in order; a descriptor by the path that it is open on."""
    done = []
    fsync, replace = os.fsync, os.replace

    def synced(descriptor):
        done.append(("sync", os.readlink(f"/proc/self/fd/{descriptor}")))
        fsync(descriptor)

    def renamed(new, final):
        done.append(("rename", str(new), str(final)))
        replace(new, final)

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(os, "replace", renamed)
    return done


def test_a_folder_is_on_the_disk_before_it_has_its_name(tmp_path, calls):
    new, final = tmp_path / "new", tmp_path / "final"
    (new / "deep").mkdir(parents=True)
    (new / "deep" / "file").write_text("text")
    atomic.put_in_place(new, final)
    inside = {("sync", str(p)) for p in (new, new / "deep", new / "deep" / "file")}
    assert set(calls[:3]) == inside
    assert calls[3:] == [("rename", str(new), str(final)), ("sync", str(tmp_path))]
    assert (final / "deep" / "file").read_text() == "text" and not new.exists()


def test_a_file_takes_the_place_of_another(tmp_path, calls):
    new, final = tmp_path / "new", tmp_path / "final"
    new.write_text("new")
    final.write_text("old")
    atomic.put_in_place(new, final)
    assert [c[0] for c in calls] == ["sync", "rename", "sync"]
    assert final.read_text() == "new"


def test_a_folder_with_files_is_not_replaced(tmp_path):
    new, final = tmp_path / "new", tmp_path / "final"
    for folder in (new, final):
        folder.mkdir()
        (folder / "file").write_text(folder.name)
    with pytest.raises(OSError):
        atomic.put_in_place(new, final)
    assert (final / "file").read_text() == "final" and (new / "file").exists()
