"""What a use_kt run of LLaMA-Factory prints: lines of the "kt" logger, and our errors."""

from __future__ import annotations

import importlib
import logging
import sys
import traceback
from collections.abc import Callable
from types import TracebackType
from typing import Any

from kt_core import patches


def show_log(training_args: Any) -> None:
    """Lines of the "kt" logger appear once per machine, unless logging was set up by somebody."""
    log = logging.getLogger("kt")
    if log.handlers:
        return
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(message)s"))
    log.addHandler(handler)
    log.propagate = False
    if training_args.local_process_index != 0:
        log.setLevel(logging.ERROR)
    elif log.level == logging.NOTSET:  # KT_LOG may have set it
        log.setLevel(logging.INFO)


class _Sentences:
    """An excepthook: an error that this package raised for its user (bad input, not a defect) and
    that nobody caught is printed as its one sentence; KT_LOG=DEBUG brings the traceback back.
    """

    def __init__(self, previous: Callable[..., Any]) -> None:
        self._previous = previous

    def __call__(
        self, kind: type[BaseException], error: BaseException, trace: TracebackType | None
    ) -> None:
        frames = [frame for frame, _ in traceback.walk_tb(trace)]
        package = frames[-1].f_globals["__name__"].partition(".")[0] if frames else ""
        told = isinstance(error, ValueError | OSError | MemoryError)
        debugging = logging.getLogger("kt").level == logging.DEBUG
        if told and package in ("kt_core", "kt_sft") and not debugging:
            print(f"error: {error}", file=sys.stderr, flush=True)
        else:
            self._previous(kind, error, trace)


def print_sentences() -> None:
    """Has errors that were raised for the user printed as their sentence; again is harmless."""
    if not isinstance(sys.excepthook, _Sentences):
        patches.replace(
            *(sys, "excepthook", _Sentences(sys.excepthook)),
            by=__name__,
            why="errors for the user are their one sentence",
        )
    importlib.import_module("kt_core.runtime")  # reads KT_LOG
