"""How many NUMA nodes a model's experts are spread over, and into how many slices they are cut.

Slices are fixed when experts are packed (the file records them), because results round by them:
the same slices give the same bits on any number of nodes. On one node there is one slice; on
several as many as there may be, so that a file packed here serves any larger machine as well.
"""

from __future__ import annotations

import logging
from pathlib import Path

from kt_core import runtime

log = logging.getLogger("kt")


def slices_for(numa_nodes: int | None, most: int, file: Path | None, in_file: int | None) -> int:
    """Slices for a setting of numa_nodes (None: the nodes there are).

    most: slices that all layers can be cut into. file, in_file: the packed file that exists and its
    slices, or None for both.

    Raises ValueError for more nodes than there are, or than slices.
    """
    wanted = _wanted(numa_nodes)
    # A file of more slices than these layers allow is of other layers: opening it will say so.
    limit = most if in_file is None else min(in_file, most)
    if wanted > limit:
        if in_file is not None and most > in_file:
            why = f"packed expert file {file} is cut into {in_file}"
            fix = f"delete it (it is created again with {most}) or set numa_nodes to {limit}"
        else:
            why = f"experts of this size and format can be cut into {most}"
            fix = f"set numa_nodes to {limit}"
        if numa_nodes is not None:
            raise ValueError(
                f"numa_nodes is {numa_nodes}, and every node needs a slice of the experts, but "
                f"{why}; {fix}"
            )
        log.warning("experts use %d of %d NUMA nodes: %s; %s", limit, wanted, why, fix)
    if in_file is not None:
        return limit
    return 1 if wanted == 1 else most


def spread(numa_nodes: int | None, slices: int) -> None:
    """Has this process's threads, and the experts it packs, use the nodes of the setting."""
    runtime.set_numa_nodes(min(_wanted(numa_nodes), slices))


def _wanted(numa_nodes: int | None) -> int:
    if numa_nodes is None:
        return min(runtime.available_numa_nodes(), runtime.threads())
    runtime.check_numa_nodes(numa_nodes)
    return numa_nodes
