"""The HTTP routes, which answer before there is a model.

/v1/chat/completions, /v1/models, /health.
"""

from __future__ import annotations

import asyncio
import json
import time
import uuid
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import jinja2
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.types import Receive, Scope, Send
from transformers import PreTrainedModel

from kt_core.serve.engine import Delta, Engine, Event, Failed, Job, QueueFullError, Sampling
from kt_core.serve.errors import ApiError
from kt_core.serve.schemas import ChatRequest, parse
from kt_core.serve.tokens import Tokens

MAX_BODY_BYTES = 8 * 2**20  # far more text than any context holds; keeps memory bounded
RETRY_AFTER_SECONDS = 5  # an answer of some hundred tokens on a CPU


@dataclass(frozen=True)
class Names:
    """What clients may put in `model`: the base, each adapter, and `base:adapter`."""

    base: str
    adapters: tuple[str, ...]

    def __post_init__(self) -> None:
        every = [self.base, *self.adapters]
        twice = next((name for name in every if every.count(name) > 1), None)
        if twice is not None:
            raise ValueError(f"the name {twice!r} is used twice; give --name or name=DIR")

    def adapter(self, model: str) -> str | None:
        """The adapter to use for a request, None for the base model. Raises ApiError 404."""
        if model == self.base:
            return None
        if model in self.adapters:
            return model
        prefix = f"{self.base}:"
        if model.startswith(prefix) and model[len(prefix) :] in self.adapters:
            return model[len(prefix) :]
        known = ", ".join([self.base, *self.adapters])
        raise ApiError(
            404,
            f"The model '{model}' does not exist; this server has {known}.",
            param="model",
            code="model_not_found",
        )


class Served:
    """A model that answers: `tokens` has the base under None and each adapter, put on `model` by
    `kt_core.adapters.load_adapter`, under its name.

    `context_length` is by default what the model's config says. At most `max_waiting` requests wait
    behind the running one.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokens: Mapping[str | None, Tokens],
        *,
        context_length: int | None = None,
        max_waiting: int = 8,
    ) -> None:
        self.tokens = tokens
        self.context_length = (
            context_length or model.config.get_text_config().max_position_embeddings
        )
        self.max_waiting = max_waiting
        self.engine = Engine(model, tokens, max_waiting=max_waiting)
        self._rows = model.get_input_embeddings().num_embeddings

    def encode(self, request: ChatRequest, name: str | None) -> tuple[list[int], int]:
        """The prompt's ids and the number of tokens to generate at most. Raises ApiError."""
        tokens = self.tokens[name]
        if tokens.lack:
            able = ", ".join(str(other) for other, own in self.tokens.items() if not own.lack)
            raise ApiError(
                400,
                f"The model '{request.model}' has no {tokens.lack}, so it cannot chat; ask for one "
                f"of {able}.",
                param="model",
            )
        try:
            ids = tokens.encode([message.for_template() for message in request.messages])
        except jinja2.TemplateError as error:
            raise ApiError(
                400, f"The chat template refuses 'messages': {error}.", param="messages"
            ) from None
        if max(ids, default=0) >= self._rows:
            raise ApiError(
                400,
                f"'messages' hold the token {tokens.token(max(ids))!r}, for which the model has no "
                "embedding; leave it out.",
                param="messages",
            )
        wanted = request.token_limit
        if len(ids) + (wanted or 1) > self.context_length:
            asked = "" if wanted is None else f" and {wanted} tokens to generate were asked for"
            raise ApiError(
                400,
                f"This model's context length is {self.context_length} tokens, but the messages "
                f"have {len(ids)} tokens{asked}; shorten them.",
                param="messages",
                code="context_length_exceeded",
            )
        return ids, wanted or self.context_length - len(ids)


class Service:
    """What the routes stand on: names from the start, and a model once it has been loaded."""

    def __init__(self, names: Names) -> None:
        self.names = names
        self.served: Served | None = None  # set once, by the thread that loads
        self._begun = time.monotonic()

    def health(self) -> tuple[int, dict[str, Any]]:
        """Status code and body; 503 keeps a load balancer away, as in llama.cpp's server."""
        if self.served is None:
            seconds = round(time.monotonic() - self._begun, 1)
            return 503, {"status": "loading", "seconds": seconds}
        engine = self.served.engine
        if not engine.alive:
            return 503, {"status": "the generation thread has ended", **engine.state()}
        return 200, {"status": "ok", **engine.state()}

    def ready(self) -> Served:
        """Raises ApiError 503 while the model is loading."""
        if self.served is None:
            raise ApiError(
                503,
                "The model is loading; try again later, or watch /health.",
                code="model_loading",
                headers={"retry-after": str(RETRY_AFTER_SECONDS)},
            )
        return self.served


@dataclass(frozen=True)
class Reply:
    """What is the same in every object of one answer."""

    id: str
    created: int
    model: str
    prompt_tokens: int
    include_usage: bool

    def body(self, object: str, choices: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": object,
            "created": self.created,
            "model": self.model,
            "choices": choices,
            **more,
        }

    def usage(self, tokens: int) -> dict[str, int]:
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": tokens,
            "total_tokens": self.prompt_tokens + tokens,
        }

    def chunk(self, delta: dict[str, str], finish: str | None = None) -> str:
        """One server-sent event; with include_usage all but one carry a null usage."""
        choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish}
        more = {"usage": None} if self.include_usage else {}
        return sse(self.body("chat.completion.chunk", [choice], **more))

    def completion(self, text: str, finish: str, tokens: int) -> dict[str, Any]:
        message = {"role": "assistant", "content": text}
        choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": finish}
        return self.body("chat.completion", [choice], usage=self.usage(tokens))


def sse(content: dict[str, Any]) -> str:
    return f"data: {json.dumps(content, ensure_ascii=False)}\n\n"


class Events:
    """The events of one job, carried from the worker thread to the event loop."""

    def __init__(self) -> None:
        self._queue: asyncio.Queue[Event] = asyncio.Queue()
        self._loop = asyncio.get_running_loop()

    def emit(self, event: Event) -> None:
        self._loop.call_soon_threadsafe(self._queue.put_nowait, event)

    async def next(self) -> Event:
        return await self._queue.get()


class JobStream(StreamingResponse):
    """A streamed answer that cancels its job when it ends for whatever reason, also unstarted."""

    def __init__(self, job: Job, content: AsyncIterator[str]) -> None:
        super().__init__(content, media_type="text/event-stream")
        self.headers["cache-control"] = "no-cache"
        self._job = job

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._job.cancel()


def create_app(service: Service) -> FastAPI:
    """The application; every route but /health is a 503 until `service` has a model."""
    names = service.names
    started = int(time.time())

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        yield
        if service.served is not None:
            await run_in_threadpool(service.served.engine.close)

    app = FastAPI(title="kt_core.serve", lifespan=lifespan, docs_url=None, redoc_url=None)
    _answer_errors(app)

    @app.get("/health")
    async def health() -> JSONResponse:
        status, body = service.health()
        return JSONResponse(body, status_code=status)

    def card(id: str) -> dict[str, Any]:
        parent = None if id == names.base else names.base
        return {
            "id": id,
            "object": "model",
            "created": started,
            "owned_by": "kt",
            "parent": parent,
        }

    @app.get("/v1/models")
    async def models() -> JSONResponse:
        service.ready()
        data = [card(id) for id in (names.base, *names.adapters)]
        return JSONResponse({"object": "list", "data": data})

    @app.get("/v1/models/{id:path}")
    async def one_model(id: str) -> JSONResponse:
        service.ready()
        return JSONResponse(card(names.adapter(id) or names.base))

    @app.post("/v1/chat/completions")
    async def chat(request: Request) -> Response:
        asked = parse(await _json(request))
        adapter = names.adapter(asked.model)
        served = service.ready()
        ids, limit = await run_in_threadpool(served.encode, asked, adapter)
        sampling = Sampling(
            max_tokens=limit,
            temperature=asked.temperature,
            top_p=asked.top_p,
            seed=asked.seed,
            stops=tuple(asked.stop),
        )
        events = Events()
        job = Job(ids, adapter, sampling, events.emit)
        try:
            served.engine.submit(job)
        except QueueFullError:
            raise ApiError(
                503,
                f"{served.max_waiting} requests are waiting already; try again later.",
                code="queue_full",
                headers={"retry-after": str(RETRY_AFTER_SECONDS)},
            ) from None
        options = asked.stream_options
        reply = Reply(
            id=f"chatcmpl-{uuid.uuid4().hex}",
            created=int(time.time()),
            model=adapter or names.base,
            prompt_tokens=len(ids),
            include_usage=options is not None and options.include_usage,
        )
        if asked.stream:
            return JobStream(job, _stream(reply, events))
        return await _whole(reply, events, job, request)

    return app


async def _json(request: Request) -> Any:
    body = bytearray()
    async for part in request.stream():
        body += part
        if len(body) > MAX_BODY_BYTES:
            raise ApiError(413, f"The request body is larger than {MAX_BODY_BYTES} bytes.")
    try:
        value = json.loads(bytes(body))
        json.dumps(value, ensure_ascii=False).encode()  # fails for half of a surrogate pair
    except UnicodeEncodeError:
        raise ApiError(400, "The request body holds half of a surrogate pair.") from None
    except (ValueError, RecursionError):
        raise ApiError(400, "The request body is not valid JSON.") from None
    return value


async def _stream(reply: Reply, events: Events) -> AsyncIterator[str]:
    yield reply.chunk({"role": "assistant", "content": ""})
    while isinstance(event := await events.next(), Delta):
        yield reply.chunk({"content": event.text})
    if isinstance(event, Failed):  # the status line is long gone
        yield sse(_failure(event).body())
        return
    yield reply.chunk({}, event.reason)
    if reply.include_usage:
        yield sse(reply.body("chat.completion.chunk", [], usage=reply.usage(event.tokens)))
    yield "data: [DONE]\n\n"


async def _whole(reply: Reply, events: Events, job: Job, request: Request) -> Response:
    async def gone() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    collect = asyncio.create_task(_collect(events))
    watch = asyncio.create_task(gone())
    try:
        await asyncio.wait({collect, watch}, return_when=asyncio.FIRST_COMPLETED)
        if not collect.done():
            return Response(status_code=499)  # nobody reads it
        texts, event = collect.result()
    finally:
        job.cancel()
        collect.cancel()
        watch.cancel()
    if isinstance(event, Failed):
        raise _failure(event)
    return JSONResponse(reply.completion("".join(texts), event.reason, event.tokens))


async def _collect(events: Events) -> tuple[list[str], Any]:
    texts = []
    while isinstance(event := await events.next(), Delta):
        texts.append(event.text)
    return texts, event


def _failure(event: Failed) -> ApiError:
    return ApiError(500, f"Generation failed: {type(event.error).__name__}; see the server's log.")


def _answer_errors(app: FastAPI) -> None:
    """Every error has the OpenAI shape, also those that fastapi makes."""

    @app.exception_handler(ApiError)
    async def api(_: Request, error: ApiError) -> JSONResponse:
        return error.response()

    @app.exception_handler(HTTPException)
    async def http(request: Request, error: HTTPException) -> JSONResponse:
        message = f"{request.method} {request.url.path}: {error.detail}."
        return ApiError(error.status_code, message, headers=error.headers).response()

    @app.exception_handler(Exception)
    async def unforeseen(_: Request, error: Exception) -> JSONResponse:
        return ApiError(500, f"The server failed: {type(error).__name__}.").response()
