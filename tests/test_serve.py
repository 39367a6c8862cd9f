"""The server over HTTP, with the openai client: one test for each thing that clients trip over."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import openai
import pytest
from serve_cases import Echo, echo_model, serving, until

from kt_core.serve.app import create_app

BASE = "tiny"


@pytest.fixture(scope="module")
def echo() -> Iterator[tuple[str, Echo]]:
    model, tokenizer = echo_model()
    with serving(create_app(model, tokenizer, name=BASE, max_waiting=40)) as url:
        yield url, model


@pytest.fixture
def url(echo: tuple[str, Echo]) -> str:
    return echo[0]


@pytest.fixture
def client(url: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=60)


def say(text: str, **more: Any) -> dict[str, Any]:
    return {"model": BASE, "messages": [{"role": "user", "content": text}], **more}


def post(url: str, body: Any) -> httpx.Response:
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    return httpx.post(f"{url}/v1/chat/completions", content=content, timeout=60)


def streamed(client: openai.OpenAI, text: str, **more: Any) -> list[Any]:
    return list(client.chat.completions.create(**say(text, stream=True, **more)))


def text_of(chunks: list[Any]) -> str:
    return "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)


# ---------------------------------------------------------------------------------------- answers


def test_an_answer_has_text_reason_and_usage(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(**say("Hello"))
    assert answer.choices[0].message.content == "Hello"
    assert answer.choices[0].message.role == "assistant"
    assert answer.choices[0].finish_reason == "stop"
    prompt = len(b"user: Hello\nassistant: ") + 1  # and one end token
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (prompt, 6)
    assert answer.usage.total_tokens == prompt + 6
    assert answer.model == BASE and answer.object == "chat.completion"


def test_a_stream_ends_with_one_reason_and_done(url: str) -> None:
    with httpx.stream("POST", f"{url}/v1/chat/completions", json=say("Hi", stream=True)) as answer:
        assert answer.headers["content-type"].startswith("text/event-stream")
        lines = [line for line in answer.iter_lines() if line]
    assert lines[-1] == "data: [DONE]" and lines.count("data: [DONE]") == 1
    chunks = [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]
    reasons = [c["choices"][0]["finish_reason"] for c in chunks]
    assert reasons == [None] * (len(chunks) - 1) + ["stop"]
    assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert len({c["id"] for c in chunks}) == 1
    assert all("usage" not in c for c in chunks)
    assert "".join(c["choices"][0]["delta"].get("content", "") for c in chunks) == "Hi"


def test_usage_is_streamed_when_asked_for(client: openai.OpenAI) -> None:
    chunks = streamed(client, "Hello", stream_options={"include_usage": True})
    assert chunks[-1].choices == [] and chunks[-1].usage.completion_tokens == 6
    assert all(c.usage is None and len(c.choices) == 1 for c in chunks[:-1])
    chunks = streamed(client, "Hello", stream_options={"include_usage": False})
    assert all(c.usage is None and len(c.choices) == 1 for c in chunks)


@pytest.mark.parametrize("key", ["max_tokens", "max_completion_tokens"])
def test_the_token_limit_cuts_and_says_so(client: openai.OpenAI, key: str) -> None:
    answer = client.chat.completions.create(**say("Hello", **{key: 3}))
    assert answer.choices[0].message.content == "Hel"
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage.completion_tokens == 3


def test_without_a_limit_the_context_is_used_up(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(**say("endless"))
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage.total_tokens == 512


def test_all_messages_and_text_parts_reach_the_model(client: openai.OpenAI) -> None:
    parts = [{"type": "text", "text": "one "}, {"type": "text", "text": "two"}]
    messages = [
        {"role": "system", "content": "S"},
        {"role": "user", "content": "U"},
        {"role": "assistant", "content": "A"},
        {"role": "user", "content": parts},
    ]
    answer = client.chat.completions.create(model=BASE, messages=messages)
    assert answer.choices[0].message.content == "one two"
    expected = len(b"system: S\nuser: U\nassistant: A\nuser: one two\nassistant: ") + 4
    assert answer.usage.prompt_tokens == expected


# ------------------------------------------------------------------------------------------- text


def test_characters_split_over_tokens_arrive_whole(client: openai.OpenAI) -> None:
    text = "é 🙂 日本 👩‍🚀!"
    chunks = streamed(client, text)
    assert text_of(chunks) == text
    assert not any("\ufffd" in c.choices[0].delta.content for c in chunks if text_of([c]))
    assert client.chat.completions.create(**say(text)).choices[0].message.content == text


@pytest.mark.parametrize("limit", [1, 2, 3, 4, 5])
def test_a_character_cut_by_the_limit_is_left_out(client: openai.OpenAI, limit: int) -> None:
    expected = "🙂" if limit >= 4 else ""
    expected += "x" if limit == 5 else ""
    assert text_of(streamed(client, "🙂x", max_tokens=limit)) == expected
    answer = client.chat.completions.create(**say("🙂x", max_tokens=limit))
    assert answer.choices[0].message.content == expected


@pytest.mark.parametrize(
    ("text", "stop", "expected"),
    [
        ("one STOP two", "STOP", "one "),
        ("one STOP two", ["two", "STOP"], "one "),
        ("STOP", ["STOP"], ""),
        ("aab aaab end", "aaab", "aab "),  # a beginning that fails and starts again
        ("ababac", "abac", "ab"),
        ("one STO", "STOP", "one STO"),  # held back, then released
        ("a🙂b", "🙂", "a"),
        ("none of it", "STOP", "none of it"),
    ],
)
def test_stop_strings(client: openai.OpenAI, text: str, stop: Any, expected: str) -> None:
    chunks = streamed(client, text, stop=stop)
    assert text_of(chunks) == expected
    assert [c.choices[0].finish_reason for c in chunks if c.choices[0].finish_reason] == ["stop"]
    answer = client.chat.completions.create(**say(text, stop=stop))
    assert answer.choices[0].message.content == expected


def test_a_stop_string_ends_the_generation(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(**say("endless", stop="sse"))
    assert answer.choices[0].finish_reason == "stop"
    assert answer.choices[0].message.content == "endle"
    assert answer.usage.completion_tokens == 8


# --------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("more", "param"),
    [
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools"),
        ({"tool_choice": "auto"}, "tool_choice"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"logprobs": True}, "logprobs"),
        ({"logprobs": 0}, "logprobs"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"logit_bias": {"5": 1}}, "logit_bias"),
        ({"frequency_penalty": 0.5}, "frequency_penalty"),
        ({"presence_penalty": False}, "presence_penalty"),
        ({"user": "me"}, "user"),
        ({"top_k": 5}, "top_k"),
        ({"typo": 1}, "typo"),
        ({"n": 2}, "n"),
        ({"n": 0}, "n"),
        ({"n": True}, "n"),
        ({"temperature": -0.1}, "temperature"),
        ({"temperature": 2.1}, "temperature"),
        ({"temperature": "0.5"}, "temperature"),
        ({"temperature": True}, "temperature"),
        ({"temperature": float("nan")}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"top_p": 1.5}, "top_p"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": 1.5}, "max_tokens"),
        ({"max_tokens": 5, "max_completion_tokens": 6}, "max_tokens"),
        ({"seed": "x"}, "seed"),
        ({"seed": 2**64}, "seed"),
        ({"stop": ["a", "b", "c", "d", "e"]}, "stop"),
        ({"stop": ""}, "stop[0]"),
        ({"stop": [1]}, "stop[0]"),
        ({"stop": {}}, "stop"),
        ({"stream": "yes"}, "stream"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"stream": True, "stream_options": {"other": 1}}, "stream_options.other"),
        ({"messages": []}, "messages"),
        ({"messages": "hello"}, "messages"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": None}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": "x", "name": "N"}]}, "messages[0].name"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
            "messages[0].content[0].type",
        ),
        ({"model": 5}, "model"),
    ],
)
def test_what_is_not_supported_is_a_400_naming_the_field(url: str, more: Any, param: str) -> None:
    answer = post(url, say("Hi") | more)
    error = answer.json()["error"]
    assert answer.status_code == 400
    assert error["param"] == param and param in error["message"]
    assert error["type"] == "invalid_request_error" and set(error) == {
        "message",
        "type",
        "param",
        "code",
    }


@pytest.mark.parametrize("missing", ["model", "messages"])
def test_a_missing_field_is_named(url: str, missing: str) -> None:
    body = say("Hi")
    del body[missing]
    answer = post(url, body)
    assert answer.status_code == 400 and answer.json()["error"]["param"] == missing


@pytest.mark.parametrize(
    "body", [b"", b"{", b"[]", b'"x"', b"\xff\xfe", b"[" * 100_000, b'{"n": ' + b"1" * 5000 + b"}"]
)
def test_a_body_that_is_no_object_is_a_400(url: str, body: bytes) -> None:
    answer = post(url, body)
    assert answer.status_code == 400 and "body" in answer.json()["error"]["message"]


@pytest.mark.parametrize("more", [{"\ud800": 1}, {"model": "\ud800"}, {"stop": "\udc00"}])
def test_half_a_surrogate_pair_is_a_400(url: str, more: Any) -> None:
    messages = [{"role": "user", "content": "\ud83d"}]
    for body in (say("Hi") | more, say("Hi") | {"messages": messages}):
        answer = post(url, body)
        assert answer.status_code == 400 and "surrogate" in answer.json()["error"]["message"]


def test_a_huge_body_is_refused(url: str) -> None:
    answer = post(url, say("x" * (8 * 2**20)))
    assert answer.status_code == 413 and "8388608" in answer.json()["error"]["message"]


def test_values_that_ask_for_nothing_are_accepted(client: openai.OpenAI) -> None:
    neutral = {
        "n": 1,
        "logprobs": False,
        "presence_penalty": 0,
        "frequency_penalty": 0.0,
        "response_format": {"type": "text"},
        "stop": None,
        "seed": None,
        "max_tokens": None,
    }
    answer = client.chat.completions.create(**say("Hi", **neutral))
    assert answer.choices[0].message.content == "Hi"


def test_too_long_names_both_counts_before_generating(echo: tuple[str, Echo]) -> None:
    url, model = echo
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
    before = model.steps
    prompt = 600 + len(b"user: \nassistant: ") + 1
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(**say("x" * 600))
    assert caught.value.code == "context_length_exceeded"
    assert "512" in caught.value.message and str(prompt) in caught.value.message
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(**say("x", max_tokens=500))
    assert caught.value.code == "context_length_exceeded" and "500" in caught.value.message
    assert model.steps == before
    fits = 512 - (1 + len(b"user: \nassistant: ") + 1)
    answer = client.chat.completions.create(**say("x", max_tokens=fits))
    assert answer.choices[0].finish_reason == "stop"


def test_an_unknown_model_or_route_is_a_404_in_the_same_shape(url: str) -> None:
    answer = post(url, say("Hi") | {"model": "other"})
    assert answer.status_code == 404
    assert answer.json()["error"]["code"] == "model_not_found"
    assert BASE in answer.json()["error"]["message"]
    assert "/v1/other" in httpx.get(f"{url}/v1/other").json()["error"]["message"]
    assert httpx.get(f"{url}/v1/chat/completions").status_code == 405


# ----------------------------------------------------------------------------- queue and cancelling


def health(url: str) -> dict[str, Any]:
    answer = httpx.get(f"{url}/health")
    assert answer.status_code == 200
    return answer.json()


def idle(url: str) -> bool:
    state = health(url)
    return state["running"] == 0 and state["waiting"] == 0


@pytest.fixture
def slow() -> Iterator[tuple[str, Echo]]:
    """A server whose model takes 20 ms a token, with room for two requests to wait."""
    model, tokenizer = echo_model(max_position_embeddings=100_000)
    model.delay = 0.02
    with serving(create_app(model, tokenizer, name=BASE, max_waiting=2)) as url:
        yield url, model


def begin(url: str, text: str = "endless") -> httpx.Client:
    """The client of a streamed answer that has begun; closing it disconnects."""
    client = httpx.Client(timeout=60)
    body = say(text, stream=True)
    request = client.build_request("POST", f"{url}/v1/chat/completions", json=body)
    assert client.send(request, stream=True).status_code == 200
    return client


def test_disconnecting_a_stream_cancels_it(slow: tuple[str, Echo]) -> None:
    url, model = slow
    client = begin(url)
    until(lambda: model.steps > 3, "the generation to run")
    assert health(url)["running"] == 1
    client.close()
    until(lambda: idle(url), "the cancelled stream to end")
    steps = model.steps
    assert post(url, say("Hi")).json()["choices"][0]["message"]["content"] == "Hi"
    assert model.steps == steps + 3


def test_disconnecting_a_whole_answer_cancels_it(slow: tuple[str, Echo]) -> None:
    url, model = slow
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(f"{url}/v1/chat/completions", json=say("endless"), timeout=0.5)
    assert model.steps > 0
    until(lambda: idle(url), "the cancelled answer to end")


@pytest.mark.parametrize("stream", [True, False])
def test_disconnecting_in_the_queue_frees_the_place(slow: tuple[str, Echo], stream: bool) -> None:
    url, _ = slow
    first = begin(url)
    until(lambda: health(url)["running"] == 1, "the first request to run")

    def impatient() -> None:
        target = f"{url}/v1/chat/completions"
        body = say("waits", stream=stream)
        with (
            pytest.raises(httpx.ReadTimeout),
            httpx.stream("POST", target, json=body, timeout=0.7) as waiting,
        ):
            waiting.read()

    thread = threading.Thread(target=impatient)
    thread.start()
    until(lambda: health(url)["waiting"] == 1, "the second request to wait")
    thread.join()
    until(lambda: health(url)["waiting"] == 0, "the place in the queue to be free")
    assert health(url)["running"] == 1
    first.close()
    until(lambda: idle(url), "the first request to end")


def test_a_full_queue_is_a_503_with_retry_after(slow: tuple[str, Echo]) -> None:
    url, _ = slow
    clients = [begin(url) for _ in range(3)]
    until(lambda: health(url)["waiting"] == 2, "two requests to wait")
    answer = post(url, say("Hi"))
    assert answer.status_code == 503 and int(answer.headers["retry-after"]) > 0
    assert answer.json()["error"]["code"] == "queue_full"
    for client in clients:
        client.close()
    until(lambda: idle(url), "all to end")
    assert post(url, say("Hi")).status_code == 200


def test_health_shows_progress(slow: tuple[str, Echo]) -> None:
    url, _ = slow
    assert health(url)["status"] == "ok" and health(url)["seconds_since_progress"] == 0
    client = begin(url)
    until(lambda: health(url)["running"] == 1, "the generation to run")
    assert health(url)["seconds_since_progress"] < 10
    client.close()


def test_parallel_requests_do_not_mix_and_all_end(client: openai.OpenAI, url: str) -> None:
    def ask(index: int) -> None:
        text = f"request {index} 🙂 " + chr(65 + index) * index
        if index % 4 == 3:
            begin(url, f"endless {index}").close()
        elif index % 2:
            assert text_of(streamed(client, text)) == text
        else:
            answer = client.chat.completions.create(**say(text))
            assert answer.choices[0].message.content == text

    with ThreadPoolExecutor(16) as pool:
        list(pool.map(ask, range(32)))
    until(lambda: idle(url), "all requests to end")


def test_a_failing_generation_is_an_error_and_not_an_end(
    echo: tuple[str, Echo], client: openai.OpenAI, monkeypatch
) -> None:
    def broken(*args: Any, **kwargs: Any) -> None:
        raise RuntimeError("secret detail")

    monkeypatch.setattr(echo[1], "forward", broken)
    with pytest.raises(openai.InternalServerError, match="RuntimeError") as caught:
        client.chat.completions.create(**say("Hi"))
    assert "secret" not in str(caught.value)
    with pytest.raises(openai.APIError, match="RuntimeError"):
        streamed(client, "Hi")
    monkeypatch.undo()
    assert text_of(streamed(client, "Hi")) == "Hi"
