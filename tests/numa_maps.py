"""Where the kernel keeps a layer's bytes (/proc/self/numa_maps)."""

from __future__ import annotations

from pathlib import Path

import torch


def policies(layer):
    """(policy, bytes) of the mappings that hold a layer's packed bytes, as the kernel says."""
    address = torch.frombuffer(layer.packed(), dtype=torch.uint8).data_ptr()
    maps = [
        line.split(" ", 1)[0].split("-")
        for line in Path("/proc/self/maps").read_text().splitlines()
    ]
    ends = {int(a, 16): int(b, 16) for a, b in maps}
    out = []
    for line in Path("/proc/self/numa_maps").read_text().splitlines():
        start, policy = line.split()[:2]
        start = int(start, 16)
        if address <= start < address + layer.nbytes:
            out.append((policy, ends[start] - start))
    return out
