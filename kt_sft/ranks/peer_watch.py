"""A rank that ends takes the others with it, with a message that says which and where.

torch leaves the survivors of a killed rank in a collective: gloo breaks with an error that names an
address, NCCL waits until its timeout. Each rank therefore watches the other ranks of its host
through the kernel (pidfd), which tells of an end at once, whatever the main thread is doing.
"""

from __future__ import annotations

import os
import select
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import distributed
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from kt_sft.op import position
from kt_sft.ranks.collective import gather, joined
from kt_sft.ranks.host import Rank, this_rank
from kt_sft.ranks.processes import Processes

# Time for the main thread to end by its own error, as under gloo, before it is ended.
GRACE_SECONDS = 10.0


class PeerWatch(TrainerCallback):
    """Added by the LLaMA-Factory seam; may be given to any transformers Trainer of a model with CPU
    experts. Watches while training runs; ends the process (exit code 1) after another rank ended.
    """

    def __init__(self) -> None:
        self._thread: _Watcher | None = None

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kw: Any
    ) -> None:
        """Starts watching. A collective."""
        if not joined() or distributed.get_world_size() == 1:
            return
        me = this_rank()
        peers = [r for r in gather(me) if r.host == me.host and r != me]
        self._thread = _Watcher(me, peers, state)
        self._thread.start()

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kw: Any
    ) -> None:
        """Stops watching, once every rank has come here and may end. A collective."""
        if self._thread is not None:
            distributed.barrier()
            self._thread.stop()
            self._thread = None


class _Watcher(threading.Thread):
    def __init__(self, me: Rank, peers: Sequence[Rank], state: TrainerState) -> None:
        super().__init__(name="kt-peers", daemon=True)
        self._me, self._state = me, state
        self._wake, self._done = os.pipe()
        self._peers = {peer.pid: peer for peer in peers}
        self._processes = Processes(self._peers)

    def run(self) -> None:
        ended = self._processes.wait(unless=self._wake)
        if not ended:
            return
        gone = next(peer for pid, peer in self._peers.items() if pid in ended)
        text = lost(self._me, str(gone), self._state.global_step)
        os.write(2, f"error: {text}\n".encode())
        only_end = select.poll()
        only_end.register(self._wake, select.POLLIN)
        if not only_end.poll(GRACE_SECONDS * 1000):
            sys.stdout.flush()
            os._exit(1)

    def stop(self) -> None:
        """Ends the thread."""
        os.write(self._done, b".")
        self.join()
        self._processes.close()
        os.close(self._wake)
        os.close(self._done)


def lost(me: Rank, whom: str, steps: int) -> str:
    """The message about a rank that is gone."""
    return (
        f"{whom} ended while rank {me.number} was {position.where()}, {steps} optimizer steps "
        "done; this run cannot go on without it: see its own last message, then resume from the "
        "last checkpoint"
    )


@contextmanager
def naming_lost_ranks() -> Iterator[None]:
    """Errors of communication say where this rank was."""
    try:
        yield
    except RuntimeError as error:
        if not joined() or not _of_communication(error):
            raise
        raise RuntimeError(
            f"rank {distributed.get_rank()} waited in vain for another rank, {position.where()}: "
            f"that rank ended or hangs ({error})"
        ) from error


def _of_communication(error: RuntimeError) -> bool:
    return isinstance(error, distributed.DistError) or "gloo" in str(error)
