"""For the server tests: a model that says what it is told, and a server on a thread."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import models
import torch
import transformers
import uvicorn
from fastapi import FastAPI
from transformers.modeling_outputs import CausalLMOutputWithPast

from kt_core.serve.app import Names, Served, Service, create_app
from kt_core.serve.tokens import Tokens, of_base

END = "</s>"


class Echo(transformers.MixtralForCausalLM):
    """Answers with the last message of the chat, one byte a token, then the end token.

    A message that starts with "endless" is repeated for ever. `delay` seconds pass at each step.
    """

    delay = 0.0
    steps = 0

    def forward(self, input_ids: Any = None, **kwargs: Any) -> CausalLMOutputWithPast:
        self.steps += 1
        time.sleep(self.delay)
        if input_ids.shape[1] > 1:
            self._script, self._at = self._last_message(input_ids[0].tolist()), 0
        out = super().forward(input_ids=input_ids, **kwargs)
        endless = bytes(self._codes[i] for i in self._script[:7]) == b"endless"
        if self._at < len(self._script):
            token = self._script[self._at]
        else:
            token = self._script[self._at % len(self._script)] if endless else self._end
        self._at += 1
        out.logits = torch.full_like(out.logits, -50.0)
        out.logits[..., token] = 50.0
        return out

    def prepare(self, tokenizer: transformers.PreTrainedTokenizerFast) -> None:
        self._end = tokenizer.eos_token_id
        table = {
            tokenizer.convert_tokens_to_ids(c): b for c, b in _byte_of_symbol(tokenizer).items()
        }
        self._codes = table

    def _last_message(self, ids: list[int]) -> list[int]:
        """The ids between ": " and the last end token of the prompt."""
        last = len(ids) - 1 - ids[::-1].index(self._end)
        earlier = [i for i in range(last) if ids[i] == self._end]
        segment = ids[earlier[-1] + 1 if earlier else 0 : last]
        text = [self._codes[i] for i in segment]
        return segment[bytes(text).index(b": ") + 2 :]


def _byte_of_symbol(tokenizer: transformers.PreTrainedTokenizerFast) -> dict[str, int]:
    """Byte-level BPE writes each byte as one printable symbol; this is that table."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [b for b in range(256) if b not in printable]
    table = {chr(b): b for b in printable} | {chr(256 + n): b for n, b in enumerate(others)}
    assert set(table) <= set(tokenizer.get_vocab())
    return table


def echo_model(
    kind: type[Echo] = Echo, **overrides: Any
) -> tuple[Echo, transformers.PreTrainedTokenizerFast]:
    """A tiny stock model with the byte tokenizer of tests/models.py."""
    tokenizer = models.byte_tokenizer()
    cfg = models.config("mixtral", vocab_size=260, num_hidden_layers=1, **overrides)
    model = kind(cfg)
    model.prepare(tokenizer)
    return model, tokenizer


def tokens_of(model: Any, tokenizer: Any) -> Tokens:
    return of_base(tokenizer, model.generation_config)


def app_of(model: Any, tokenizer: Any, name: str, **options: Any) -> FastAPI:
    """The application with a model that is there already and has no adapters."""
    service = Service(Names(name, ()))
    service.served = Served(model, {None: tokens_of(model, tokenizer)}, **options)
    return create_app(service)


@contextmanager
def serving(
    app: FastAPI, kind: type[uvicorn.Server] = uvicorn.Server, **more: Any
) -> Iterator[str]:
    """Runs `app` on a free port of this machine, on a thread; yields the base URL. `more` are
    attributes of the server.
    """
    config = uvicorn.Config(
        app, host="127.0.0.1", port=0, log_level="warning", timeout_graceful_shutdown=2
    )
    server = kind(config)
    for name, value in more.items():
        setattr(server, name, value)
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        deadline = time.monotonic() + 30
        while not server.started:
            assert thread.is_alive() and time.monotonic() < deadline, "the server did not start"
            time.sleep(0.01)
        port = server.servers[0].sockets[0].getsockname()[1]
        yield f"http://127.0.0.1:{port}"
    finally:
        server.should_exit = True
        thread.join()


def until(condition: Any, what: str, seconds: float = 20) -> None:
    """Waits until `condition()` is true; fails naming `what`."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"waited {seconds} s for {what}"
        time.sleep(0.02)
