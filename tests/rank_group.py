"""Ranks that live as long as the tests need them: `group.run(case, ...)` runs a function of
rank_cases.py on every rank and returns what each gave back, in order.

A rank is a process of rank_worker.py with the variables a launcher would set. Every case gets a
process group (gloo) of its own, so that one that fails leaves nothing for the next.
"""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import tempfile
from multiprocessing import Pipe
from pathlib import Path
from typing import Any

TESTS = Path(__file__).parent
PATIENCE = 300  # seconds a case may take on a machine that others use too


class RankGroup:
    """`size` ranks; used as a context manager."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._folder = tempfile.TemporaryDirectory()
        self._pipes, self.processes = [], []
        for rank in range(size):
            ours, theirs = Pipe()
            number = str(rank)
            environment = {
                "RANK": number,
                "LOCAL_RANK": number,
                "WORLD_SIZE": str(size),
                "LOCAL_WORLD_SIZE": str(size),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": "29400",  # never used: the process groups meet in a file
                "OMP_NUM_THREADS": "1",
                "PYTHONPATH": str(TESTS),
            }
            self._log(rank).touch()
            with open(self._log(rank), "wb") as log:
                self.processes.append(
                    subprocess.Popen(
                        [sys.executable, TESTS / "rank_worker.py", str(theirs.fileno())],
                        env={k: v for k, v in os.environ.items() if k != "KT_THREADS"}
                        | environment
                        | {"RANK_FOLDER": self._folder.name},
                        pass_fds=[theirs.fileno()],
                        stdout=log,
                        stderr=log,
                    )
                )
            theirs.close()
            self._pipes.append(ours)

    def __enter__(self) -> RankGroup:
        return self

    def __exit__(self, *error: object) -> None:
        for pipe in self._pipes:
            pipe.close()  # the worker ends at the end of its pipe
        for process in self.processes:
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        self._folder.cleanup()

    def start(self, case: str, *each: dict[str, Any], **same: Any) -> None:
        """Starts a case: keywords for all ranks, and one dict of keywords per rank."""
        for rank, pipe in enumerate(self._pipes):
            pipe.send_bytes(pickle.dumps((case, same | (each[rank] if each else {}))))

    def answer(self, rank: int, patience: float = PATIENCE) -> Any:
        """What the case returned on one rank."""
        pipe = self._pipes[rank]
        if not pipe.poll(patience):
            raise AssertionError(f"rank {rank} does not answer\n{self.log(rank)}")
        try:
            done, value = pickle.loads(pipe.recv_bytes())
        except EOFError:
            raise AssertionError(f"rank {rank} ended\n{self.log(rank)}") from None
        if not done:
            raise AssertionError(f"rank {rank}: {value}\n{self.log(rank)}")
        return value

    def run(self, case: str, *each: dict[str, Any], **same: Any) -> list[Any]:
        """A whole case; every rank's answer is read, also after one that failed."""
        self.start(case, *each, **same)
        answers, failed = [], []
        for rank in range(self.size):
            try:
                answers.append(self.answer(rank))
            except AssertionError as error:
                failed.append(error)
        if failed:
            raise failed[0]
        return answers

    def log(self, rank: int) -> str:
        """The end of what a rank has printed."""
        return self._log(rank).read_text(errors="replace")[-4000:]

    def _log(self, rank: int) -> Path:
        return Path(self._folder.name) / f"rank{rank}.log"
