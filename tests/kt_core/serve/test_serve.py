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
import torch
from openai.types import chat as openai_chat
from openai.types.chat import completion_create_params
from serve_cases import Echo, app_of, echo_model, serving, tokens_of, until

from kt_core.serve import schemas
from kt_core.serve.engine import Delta, Engine, Finished, Job, Sampling, _Progress
from kt_core.serve.errors import ApiError
from kt_core.serve.schemas import ChatRequest, Message, StreamOptions, TextPart, parse

BASE = "tiny"


@pytest.fixture(scope="module")
def echo() -> Iterator[tuple[str, Echo]]:
    model, tokenizer = echo_model()
    with serving(app_of(model, tokenizer, BASE, max_waiting=40)) as url:
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
        ("none of it", "", "none of it"),
        ("none of it", ["", ""], "none of it"),
        ("one STOP two", ["", "STOP"], "one "),
        ("one STOP two", ["a", "b", "c", "STOP", "d"], "one "),
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


class Late(Echo):
    """Tells a streamer of a token after the criteria were asked, as transformers 5.24 does."""

    def generate(self, *args: Any, streamer: Any = None, **more: Any) -> Any:
        if streamer is not None:
            put, held = streamer.put, []
            streamer.put = lambda value: (
                held.append(value),
                put(held.pop(0)) if held[1:] else None,
            )
        return super().generate(*args, **({"streamer": streamer} if streamer else {}), **more)


@pytest.mark.parametrize("kind", [Echo, Late])
def test_stops_and_cancelling_act_at_the_token_that_brings_them(kind: type[Echo]) -> None:
    """In every transformers, whenever it tells a streamer."""
    model, tokenizer = echo_model(kind)
    engine = Engine(model, {None: tokens_of(model, tokenizer)}, max_waiting=1)
    prompt = tokenizer("user: endless</s>\nassistant: ").input_ids
    events: list[Any] = []
    engine.submit(Job(prompt, None, Sampling(100, stops=("sse",)), events.append))
    until(lambda: events and isinstance(events[-1], Finished), "the stop string")
    assert "".join(e.text for e in events if isinstance(e, Delta)) == "endle"
    assert events[-1] == Finished("stop", 8) and model.steps == 8

    model.steps = 0
    seen: list[Any] = []
    job = Job(prompt, None, Sampling(100), lambda e: (seen.append(e), job.cancel()))
    engine.submit(job)
    until(lambda: seen and engine.state()["running"] == 0, "the cancelled job to end")
    assert seen == [Delta("e")] and model.steps == 1
    engine.close()


def test_tokens_after_the_end_do_not_count() -> None:
    """On a GPU transformers 5.24 chooses one more before it looks at what the criteria said."""
    model, tokenizer = echo_model()
    for limit, last, reason in ((9, "</s>", "stop"), (9, "x", "stop"), (2, "c", "length")):
        events: list[Any] = []
        job = Job([5, 6], None, Sampling(limit, stops=("x",)), events.append)
        progress = _Progress(job, tokens_of(model, tokenizer), lambda: None)
        ids = [5, 6, *tokenizer(f"a{last}").input_ids]
        assert progress(torch.tensor([ids[:3]]), None).tolist() == [False]
        assert progress(torch.tensor([ids]), None).tolist() == [True]
        assert progress(torch.tensor([[*ids, 70]]), None).tolist() == [True]
        assert progress.finish() == Finished(reason, 2)
        assert "".join(e.text for e in events) == ("ac" if last == "c" else "a")


# --------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("more", "param"),
    [
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"logprobs": True}, "logprobs"),
        ({"logprobs": 0}, "logprobs"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"logit_bias": {"5": 1}}, "logit_bias"),
        ({"frequency_penalty": 0.5}, "frequency_penalty"),
        ({"presence_penalty": False}, "presence_penalty"),
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
        ({"stop": ["a"] * 101}, "stop"),
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
        ({"messages": [{"role": "user", "content": "x", "name": 1}]}, "messages[0].name"),
        ({"messages": [{"role": "assistant", "content": "x", "typo": 1}]}, "messages[0].typo"),
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


# What asks for nothing: by the model of the request in which a field stands.
TABLES = [ChatRequest, Message, TextPart, StreamOptions]
ANY = {str: "anything", bool: True, dict: {"key": "value"}}  # a value of a type, any of which does


def body_with(kind: type, field: str, value: Any) -> Any:
    """A request with `field` where a `kind` stands."""
    part: dict[str, Any] = {"type": "text", "text": "Hi"}
    message: dict[str, Any] = {"role": "user", "content": [part]}
    options: dict[str, Any] = {}
    body = {"model": BASE, "messages": [message], "stream": True, "stream_options": options}
    {ChatRequest: body, Message: message, TextPart: part, StreamOptions: options}[kind][field] = (
        value
    )
    return body


def neutral_values(values: tuple[object, ...]) -> list[Any]:
    return [None, *(ANY[v] if isinstance(v, type) else v for v in values)]


@pytest.mark.parametrize("kind", TABLES)
def test_what_asks_for_nothing_is_accepted_and_changes_nothing(kind: type) -> None:
    plain = parse(body_with(StreamOptions, "include_usage", False))
    for field, values in kind.neutral.items():
        for value in neutral_values(values):
            assert parse(body_with(kind, field, value)) == plain, (field, value)


@pytest.mark.parametrize("kind", TABLES)
def test_what_would_be_ignored_is_refused_by_name(kind: type) -> None:
    """Every field of the tables with a value that asks for something, whatever its type."""
    for field, values in kind.neutral.items():
        for value in ("", "x", 7, 0.5, True, [{"a": 1}], {"type": "json_object"}):
            if any(schemas._asks_for_nothing(value, (one,)) for one in values):
                continue
            with pytest.raises(ApiError) as caught:
                parse(body_with(kind, field, value))
            assert caught.value.status == 400
            assert str(caught.value.param).split(".")[-1] == field
            assert field in caught.value.message


def test_every_field_of_the_openai_client_is_known() -> None:
    """One that a newer client brings is named here: is it supported, or when does it ask for
    nothing?
    """
    message = [
        openai_chat.ChatCompletionSystemMessageParam,
        openai_chat.ChatCompletionDeveloperMessageParam,
        openai_chat.ChatCompletionUserMessageParam,
        openai_chat.ChatCompletionAssistantMessageParam,
    ]
    theirs = {
        ChatRequest: {*completion_create_params.CompletionCreateParamsStreaming.__annotations__},
        # what comes back is sent again
        Message: {*openai_chat.ChatCompletionMessage.model_fields}.union(
            *(one.__annotations__ for one in message)
        ),
        TextPart: {*openai_chat.ChatCompletionContentPartTextParam.__annotations__},
        StreamOptions: {*openai_chat.ChatCompletionStreamOptionsParam.__annotations__},
    }
    assert len(theirs[ChatRequest]) > 30 and "name" in theirs[Message]
    for kind, fields in theirs.items():
        assert fields <= set(kind.model_fields) | set(kind.neutral), kind


def test_a_client_may_send_all_of_it_and_its_own_answers(client: openai.OpenAI) -> None:
    """The defaults of the OpenAI API and of vLLM together, and a chat that goes on."""
    own = {field: neutral_values(values)[-1] for field, values in schemas._OPENAI.items()}
    vllm = {field: neutral_values(values)[-1] for field, values in schemas._VLLM.items()}
    answer = client.chat.completions.create(**say("Hello", stop="", **own), extra_body=vllm)
    assert answer.choices[0].message.content == "Hello"
    first = {"role": "user", "content": "Hello", "name": "Ann"}
    back = answer.choices[0].message.model_dump()
    assert {"refusal", "tool_calls", "function_call", "audio", "annotations"} <= set(back)
    messages = [first, back, {"role": "user", "content": "Bye", "id": "m1"}]
    again = client.chat.completions.create(model=BASE, messages=messages)
    assert again.choices[0].message.content == "Bye"


def test_developer_is_the_newer_word_for_system(client: openai.OpenAI) -> None:
    def size(role: str) -> int:
        messages = [{"role": role, "content": "S"}, {"role": "user", "content": "U"}]
        return client.chat.completions.create(model=BASE, messages=messages).usage.prompt_tokens

    assert size("developer") == size("system") != size("assistant")


def test_the_chat_template_sees_names_and_earlier_reasoning() -> None:
    model, tokenizer = echo_model()
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m.role }}/{{ m.name }}/{{ m.reasoning_content }}|{% endfor %}"
    )
    messages = [
        {"role": "user", "content": "a", "name": "Ann", "reasoning_content": ""},
        {"role": "assistant", "content": "b", "reasoning_content": "so"},
    ]
    request = parse({"model": BASE, "messages": messages})
    ids = tokens_of(model, tokenizer).encode([m.for_template() for m in request.messages])
    assert tokenizer.decode(ids) == "user/Ann/|assistant//so|"


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
    with serving(app_of(model, tokenizer, BASE, max_waiting=2)) as url:
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
