"""Files and folders that are there in whole or not at all, also after a crash: they are written
under another name, brought to the disk, and renamed.
"""

from __future__ import annotations

import os
from pathlib import Path


def put_in_place(new: Path, final: Path) -> None:
    """Gives `new`, a complete file or folder, its final name on the same disk. A file of that name
    is replaced; a folder of that name must be empty.
    """
    sync(new)
    rename(new, final)


def sync(path: Path) -> None:
    """Brings a file, or a folder with all in it, to the disk."""
    for entry in (*path.rglob("*"), path):
        _sync_one(entry)


def rename(new: Path, final: Path) -> None:
    """`put_in_place` of what is on the disk already."""
    os.replace(new, final)
    _sync_one(final.parent)


def _sync_one(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
