"""How the routed experts of a model are kept: one frozen record, made where a model is asked for
(load_model, the server's command line, the training YAML) and handed down as it is.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from kt_core import formats


@dataclass(frozen=True)
class ExpertSettings:
    """How experts are kept in CPU memory; ValueError for a format or group that does not exist.

    format      how weights are stored: a name of kt_core.formats; None: formats.DEFAULT
    group       weights that share one scale along the reduction; None: the format's default
    threads     worker threads of the kernels; None: the CPUs that this process may use
    numa_nodes  NUMA nodes that weights and threads are spread over; None: as found
    packed_dir  directory of packed files, reused by the next load; None: packed in memory
    """

    format: str | None = None
    group: int | None = None
    threads: int | None = None
    numa_nodes: int | None = None
    packed_dir: str | Path | None = None

    def __post_init__(self) -> None:
        formats.of(self.known_format).check_group(self.group)

    @property
    def weights_per_scale(self) -> int:
        """The group that is used: the one given or the format's default, 0 for none."""
        return formats.of(self.known_format).check_group(self.group)

    @property
    def known_format(self) -> str:
        """The format that is used."""
        return self.format or formats.DEFAULT
