"""The header of a safetensors file: eight bytes with the length of the JSON that follows.

Reading it so does not map the file, which a limit of the address space may forbid.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def read_header(file: Path) -> dict[str, Any]:
    """dtype, shape and data_offsets by tensor name. Raises ValueError for a damaged file."""
    with open(file, "rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        if length > file.stat().st_size:
            raise ValueError(f"{file} is shorter than its header says; copy it again")
        header = json.loads(stream.read(length))
    if not isinstance(header, dict):
        raise ValueError(f"{file} has no safetensors header; copy it again")
    header.pop("__metadata__", None)
    return header
