"""One expert copy per host, shared by its ranks; who computes what.

`host_of_run()` tells the ranks of this machine apart from the others, without being told by a
launcher: two ranks share a host if they see the same boot and the same process ids. So containers
on one machine count as hosts of their own, which is what they are: they cannot map one another's
memory. Every rank computes with its share of the CPUs: the experts of its own tokens, or, where
these are few, its share of the experts for the tokens of its host (row_gather.py).
"""

from __future__ import annotations

import os
import pickle
import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

from torch import distributed

from kt_core import runtime
from kt_core.loading.host import Host
from kt_sft.ranks.collective import gather, joined
from kt_sft.ranks.processes import Processes

# Between two waits lies one layer that is packed or one file that is written or checked. A wait
# ends at once when a rank is gone; this is for one that hangs, say on a network drive.
_PATIENCE = timedelta(hours=2)


@dataclass(frozen=True)
class Rank:
    """One rank of the run. host: what it shares with the ranks whose memory it can map. cpus: its
    affinity mask. allowed: CPUs it may use at a time, see `runtime.allowed_cpus`."""

    number: int
    host: str
    name: str
    pid: int
    cpus: frozenset[int]
    allowed: int

    def __str__(self) -> str:
        return f"rank {self.number} (process {self.pid} on {self.name})"


def host_identity() -> str:
    """Equal on two processes exactly if one can reach the other's memory through /proc."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot}/{os.stat('/proc/self/ns/pid').st_ino}"


def this_rank() -> Rank:
    """This process; the number is 0 where torch.distributed is not initialised."""
    return Rank(
        distributed.get_rank() if joined() else 0,
        host_identity(),
        socket.gethostname(),
        os.getpid(),
        frozenset(os.sched_getaffinity(0)),
        runtime.allowed_cpus(),
    )


def share_of_cpus(me: Rank, ranks: Sequence[Rank]) -> int:
    """CPUs for `me`, one of the `ranks` of a host: its part of every CPU that several may run on,
    and of a cgroup's quota. At least 1.
    """
    part = sum(1 / sum(cpu in r.cpus for r in ranks) for cpu in me.cpus)
    if me.allowed < len(me.cpus):  # a quota, which the ranks of a host share
        part = min(part, me.allowed / len(ranks))
    return max(1, int(part + 1e-9))


@contextmanager
def host_of_run() -> Iterator[Host]:
    """The ranks of this machine, for loading a model; one process alone without torch.distributed.

    Collective: every rank of the run enters and leaves it.
    """
    if not joined() or distributed.get_world_size() == 1:
        yield Host()
        return
    everyone = distributed.new_group(backend="gloo", timeout=_PATIENCE)
    me = this_rank()
    ranks = gather(me, everyone)
    local = group_of_host(me, ranks, _PATIENCE)
    try:
        yield _RanksOfHost(me, ranks, everyone, local)
    finally:
        distributed.destroy_process_group(local)
        distributed.destroy_process_group(everyone)


def group_of_host(me: Rank, ranks: Sequence[Rank], timeout: timedelta) -> Any:
    """A new group (gloo) of the ranks of `me`'s host; `ranks`: those of the run.

    Collective over the run. Whoever asks for it destroys it.
    """
    groups: dict[str, list[int]] = {}
    for rank in ranks:
        groups.setdefault(rank.host, []).append(rank.number)
    made = {
        host: distributed.new_group(numbers, backend="gloo", timeout=timeout)
        for host, numbers in groups.items()  # in the same order everywhere
    }
    return made[me.host]


class _RanksOfHost(Host):
    """Several ranks; gloo carries their messages whatever the training uses."""

    def __init__(self, me: Rank, ranks: Sequence[Rank], everyone: Any, local: Any) -> None:
        self._me = me
        self._locals = [r for r in ranks if r.host == me.host]
        self._everyone, self._local = everyone, local
        self.rank = self._locals.index(me)
        self.size = len(self._locals)

    @contextmanager
    def step(self, what: str, *, everywhere: bool = False) -> Iterator[None]:
        error: Exception | None = None
        try:
            yield
        except Exception as caught:
            error = caught
        if isinstance(error, LostRankError):  # nobody to tell
            raise error
        group = self._everyone if everywhere else self._local
        told = self._ask(_portable(error), group, what)
        if error is not None:
            raise error
        if theirs := [e for e in told if e is not None]:
            raise theirs[0]

    def from_first(self, what: str, value: Any) -> Any:
        return self._ask(value if self.rank == 0 else None, self._local, what)[0]

    def all_have(self, what: str, here: bool) -> bool:
        return all(self._ask(here, self._everyone, what))

    def _ask(self, value: Any, group: Any, what: str) -> list[Any]:
        try:
            return gather(value, group)
        except RuntimeError as error:
            peers = [r for r in self._locals if r != self._me]
            gone = ", ".join(str(r) for r in ended(peers)) or "another rank"
            raise LostRankError(
                f"rank {self._me.number} lost {gone} while {what}: it ended or hangs, see its own "
                f"last message ({error})"
            ) from error

    def use_threads(self, asked: int | None) -> None:
        asked = runtime.asked_threads(asked)
        share = share_of_cpus(self._me, self._locals)
        if asked is None:
            runtime.set_threads(share)
        elif asked > share:
            raise ValueError(
                f"threads is {asked} for each of the {self.size} ranks on {self._me.name}, more "
                f"than their share of its CPUs ({share} each); set threads to at most {share}, or "
                "leave it out"
            )
        else:
            runtime.set_threads(asked)


class LostRankError(RuntimeError):
    """Another rank ended or does not answer."""


def ended(peers: Sequence[Rank], patience: float = 2.0) -> list[Rank]:
    """Those of the `peers`, ranks of this host, that have ended; waits for the first to be told."""
    processes = Processes(peer.pid for peer in peers)
    gone = processes.wait(patience)
    processes.close()
    return [peer for peer in peers if peer.pid in gone]


def _portable(error: Exception | None) -> Exception | None:
    """An exception that other processes can unpickle."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return RuntimeError(f"{type(error).__name__}: {error}")
    return error
