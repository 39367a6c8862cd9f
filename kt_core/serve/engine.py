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
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor
from transformers import (
    GenerationConfig,
    PreTrainedModel,
    StoppingCriteria,
    StoppingCriteriaList,
)

from kt_core.adapters import adapter
from kt_core.module import KTExpertsLinear
from kt_core.serve.text import StopFilter
from kt_core.serve.tokens import Tokens

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

    `tokens` has the base under None and each adapter under its name; a job may name those that have
    end tokens.
    """

    def __init__(
        self, model: PreTrainedModel, tokens: Mapping[str | None, Tokens], *, max_waiting: int
    ) -> None:
        self._model = model.eval()
        self._tokens = tokens
        model.generation_config = GenerationConfig()
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
        tokens = self._tokens[job.adapter]
        progress = _Progress(job, tokens, self._tick)
        ids = torch.tensor([job.prompt], device=self._model.device)
        with adapter(self._model, job.adapter):
            self._model.generate(
                input_ids=ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=sampling.max_tokens,
                eos_token_id=sorted(tokens.ends),
                pad_token_id=min(tokens.ends),
                stopping_criteria=StoppingCriteriaList([progress]),
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


class _Progress(StoppingCriteria):
    """Turns each token that `generate` has chosen into text for the job, and says when to end.

    As a criterion and not a streamer: from transformers 5.24 on a streamer is told of a token only
    after the criteria were asked, so that a stop string would end the answer one token late.
    """

    def __init__(self, job: Job, tokens: Tokens, tick: Callable[[], None]) -> None:
        self._job = job
        self._text = tokens.detokenizer()
        self._filter = StopFilter(job.sampling.stops)
        self._ends = tokens.ends
        self._tick = tick
        self._tokens = 0
        self._ended = False  # by an end token

    @property
    def _done(self) -> bool:
        full = self._tokens >= self._job.sampling.max_tokens
        return self._ended or self._filter.stopped or full or self._job.cancelled

    def __call__(self, input_ids: Tensor, scores: Tensor, **kwargs: Any) -> Tensor:
        """`input_ids` [1, T]: the prompt and all tokens chosen so far."""
        self._tick()
        for token in input_ids[0, len(self._job.prompt) + self._tokens :].tolist():
            if not self._done:  # on a GPU newer versions go on for a token before they look
                self._take(token)
        return torch.full((1,), self._done, device=input_ids.device)

    def _take(self, token: int) -> None:
        self._tokens += 1
        self._ended = token in self._ends
        if not self._ended:
            self._emit(self._filter.push(self._text.push(token)))

    def finish(self) -> Finished:
        """Emits what was held back."""
        self._emit(self._filter.flush())
        stopped = self._ended or self._filter.stopped
        return Finished("stop" if stopped else "length", self._tokens)

    def _emit(self, text: str) -> None:
        if text and not self._job.cancelled:
            self._job.emit(Delta(text))
