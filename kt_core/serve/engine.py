"""One generation at a time on a thread of its own; others wait in a bounded queue.

A request becomes a Job. The worker thread runs transformers' `generate` and calls `job.emit` with
text as it becomes certain and at last with how it ended. Cancelling is checked before a job is
begun, at every token, and within a forward pass at every layer with experts of ours.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor
from transformers import (
    GenerationConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    StoppingCriteria,
    StoppingCriteriaList,
)
from transformers.generation.streamers import BaseStreamer

from kt_core.adapter import adapter
from kt_core.module import KTExpertsLinear
from kt_core.serve.text import Detokenizer, StopFilter

# Below this temperature logits overflow fp32 or nearly so; it is greedy decoding in effect.
GREEDY_BELOW = 1e-4

log = logging.getLogger("kt")


@dataclass(frozen=True)
class Sampling:
    """How to choose tokens. `max_tokens` >= 1; temperature 0 is greedy."""

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    seed: int | None = None
    stops: tuple[str, ...] = ()


@dataclass(frozen=True)
class Delta:
    """Text that became certain, never empty."""

    text: str


@dataclass(frozen=True)
class Finished:
    """The end of a job: `reason` as the API has it and the number of tokens generated."""

    reason: Literal["stop", "length"]
    tokens: int


@dataclass(frozen=True)
class Failed:
    """The end of a job that raised."""

    error: BaseException


Event = Delta | Finished | Failed


@dataclass
class Job:
    """One generation. `adapter` None is the base model. `emit` is called on the worker thread, and
    not at all any more once the job is cancelled.
    """

    prompt: list[int]
    adapter: str | None
    sampling: Sampling
    emit: Callable[[Event], None]
    _cancelled: threading.Event = field(default_factory=threading.Event)

    def cancel(self) -> None:
        self._cancelled.set()

    @property
    def cancelled(self) -> bool:
        return self._cancelled.is_set()


class QueueFullError(Exception):
    """As many jobs wait as may wait."""


class Engine:
    """Runs jobs on `model`, which is the engine's own from now on (its generation defaults are
    cleared, so that only what a request asks for has an effect).
    """

    def __init__(
        self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, *, max_waiting: int
    ) -> None:
        self._model = model.eval()
        self._tokenizer = tokenizer
        self._ends = _end_tokens(model, tokenizer)
        model.generation_config = GenerationConfig(
            eos_token_id=sorted(self._ends), pad_token_id=min(self._ends)
        )
        for module in model.modules():
            if isinstance(module, KTExpertsLinear):
                module.register_forward_pre_hook(self._interrupt)
        self._jobs: queue.Queue[Job | None] = queue.Queue()
        self._max_waiting = max_waiting
        self._lock = threading.Lock()  # of what follows
        self._running: Job | None = None
        self._waiting: list[Job] = []
        self._progress = time.monotonic()
        self._closed = False
        self._thread = threading.Thread(target=self._work, name="kt-generate", daemon=True)
        self._thread.start()

    @property
    def alive(self) -> bool:
        return self._thread.is_alive()

    def state(self) -> dict[str, object]:
        """Jobs running and waiting, and how long ago the running one made its last step."""
        with self._lock:
            running = self._running is not None
            quiet = time.monotonic() - self._progress if running else 0.0
            waiting = sum(not job.cancelled for job in self._waiting)
            return {
                "running": int(running),
                "waiting": waiting,
                "seconds_since_progress": round(quiet, 3),
            }

    def submit(self, job: Job) -> None:
        """Queues `job`. Raises QueueFullError."""
        with self._lock:
            self._waiting = [other for other in self._waiting if not other.cancelled]
            if self._closed or len(self._waiting) >= self._max_waiting + (self._running is None):
                raise QueueFullError
            self._waiting.append(job)
        self._jobs.put(job)

    def close(self) -> None:
        """Cancels everything and waits for the worker, at most for one step of generation."""
        with self._lock:
            self._closed = True
            jobs = [*self._waiting, *([self._running] if self._running else [])]
        for job in jobs:
            job.cancel()
        self._jobs.put(None)
        self._thread.join()

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            with self._lock:
                self._waiting = [other for other in self._waiting if other is not job]
                if job.cancelled:
                    continue
                self._running, self._progress = job, time.monotonic()
            event: Event | None = None
            try:
                event = self._generate(job)
            except _CancelledError:
                pass
            except Exception as error:
                log.exception("generation failed")
                event = Failed(error)
            with self._lock:
                self._running = None
            if event is not None and not job.cancelled:
                job.emit(event)

    @torch.inference_mode()
    def _generate(self, job: Job) -> Finished:
        sampling = job.sampling
        options: dict[str, Any] = {"do_sample": False}
        if sampling.temperature >= GREEDY_BELOW:
            options = {
                "do_sample": True,
                "temperature": sampling.temperature,
                "top_p": sampling.top_p,
                "top_k": 0,  # transformers' default would be 50
            }
            if sampling.seed is None:
                torch.seed()
            else:
                torch.manual_seed(sampling.seed)
        progress = _Progress(job, self._tokenizer, self._ends, self._tick)
        ids = torch.tensor([job.prompt], device=self._model.device)
        with adapter(self._model, job.adapter):
            self._model.generate(
                input_ids=ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=sampling.max_tokens,
                streamer=progress,
                stopping_criteria=StoppingCriteriaList([progress.criterion]),
                **options,
            )
        return progress.finish()

    def _tick(self) -> None:
        self._progress = time.monotonic()

    def _interrupt(self, *_: object) -> None:
        job = self._running
        if job is not None and job.cancelled:
            raise _CancelledError


class _CancelledError(Exception):
    """Unwinds a forward pass whose result nobody wants any more."""


class _Progress(BaseStreamer):
    """Receives each token from `generate`, turns it into text for the job, and says when to end."""

    def __init__(
        self,
        job: Job,
        tokenizer: PreTrainedTokenizerBase,
        ends: set[int],
        tick: Callable[[], None],
    ) -> None:
        self._job = job
        self._text = Detokenizer(tokenizer)
        self._filter = StopFilter(job.sampling.stops)
        self._ends = ends
        self._tick = tick
        self._tokens = 0
        self._prompt_seen = False
        self._ended = False  # by an end token
        self.criterion = _Criterion(lambda: job.cancelled or self._filter.stopped)

    def put(self, value: Tensor) -> None:
        self._tick()
        if not self._prompt_seen:  # transformers sends the prompt first
            self._prompt_seen = True
            return
        (token,) = value.flatten().tolist()
        self._tokens += 1
        self._ended = token in self._ends
        if not self._ended:
            self._emit(self._filter.push(self._text.push(token)))

    def end(self) -> None:
        self._emit(self._filter.flush())

    def finish(self) -> Finished:
        stopped = self._ended or self._filter.stopped
        return Finished("stop" if stopped else "length", self._tokens)

    def _emit(self, text: str) -> None:
        if text and not self._job.cancelled:
            self._job.emit(Delta(text))


class _Criterion(StoppingCriteria):
    def __init__(self, done: Callable[[], bool]) -> None:
        self._done = done

    def __call__(self, input_ids: Tensor, scores: Tensor, **kwargs: Any) -> Tensor:
        return torch.full((len(input_ids),), self._done(), device=input_ids.device)


def _end_tokens(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> set[int]:
    """The ids that end an answer. Raises ValueError if neither names any."""
    ends: set[int] = set()
    for given in (model.generation_config.eos_token_id, tokenizer.eos_token_id):
        if isinstance(given, int):
            ends.add(given)
        elif given is not None:
            ends.update(given)
    if not ends:
        raise ValueError(
            f"{type(model).__name__} and its tokenizer name no end token; set eos_token in "
            "tokenizer_config.json"
        )
    return ends
