"""The processes of one host that load the same model together, as far as loading must know them.

`Host` is this process alone, which is what inference uses. `kt_sft.ranks.host` has the one for
the ranks of a training run. Every method of a host of several processes is collective: all of them
call it, in the same order.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from kt_core import runtime


class Host:
    """One process that has the machine for itself.

    rank: this process among those of its host, 0 .. size - 1; rank 0 packs, the others map.
    """

    rank = 0
    size = 1

    @contextmanager
    def step(self, what: str, *, everywhere: bool = False) -> Iterator[None]:
        """Runs its body on every process and waits for all of them: an exception of one is raised
        by all of the host (everywhere: of the run). `what` says what is being done, for messages.
        """
        yield

    def from_first(self, what: str, value: Any) -> Any:
        """The value that the host's first process passed; `what` as in `step`."""
        return value

    def all_have(self, what: str, here: bool) -> bool:
        """Whether something is so on every process of the run; `what` as in `step`."""
        return here

    def use_threads(self, asked: int | None) -> None:
        """Sets the kernels' threads: as many as asked, or (None) this process's share of the CPUs.

        Raises ValueError for a number that cannot be had.
        """
        if asked is not None:
            runtime.set_threads(asked)
