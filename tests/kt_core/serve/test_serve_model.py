"""The server on a model of ours: base and adapters, sampling, start-up, cancelling in a pass."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import re
import shutil
import signal
import subprocess
import sys
import termios
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import models
import openai
import pytest
import torch
from fastapi import FastAPI
from serve_cases import serving, tokens_of, until
from transformers import AutoTokenizer

from kt_core.adapters import adapter, load_adapter
from kt_core.adapters.factors import Factors
from kt_core.adapters.peft_config import write_adapter
from kt_core.adapters.peft_format import AdapterData
from kt_core.hf import load_model
from kt_core.serve import __main__ as cli
from kt_core.serve import loading
from kt_core.serve.app import Service, create_app
from kt_core.serve.engine import Engine, Finished, Job, Sampling
from kt_core.serve.loading import Loader
from kt_core.serve.text import Detokenizer, StopFilter

E, H, I, R = 8, 64, 40, 3
CONFIG = {"peft_type": "LORA", "r": R, "lora_alpha": 6, "task_type": "CAUSAL_LM"}
CHAT = [{"role": "user", "content": "Hello, who are you?"}]


def write(directory: Path, seed: int, *, size: float = 0.3, hidden: int = H) -> Path:
    """A PEFT adapter of the experts, with B of N(0, size)."""
    g = torch.Generator().manual_seed(seed)
    experts: dict[str, dict[str, Factors]] = {}
    for layer in range(2):
        module = experts[f"model.layers.{layer}.mlp.experts"] = {}
        for p in ("gate", "up", "down"):
            fan_in, fan_out = (I, hidden) if p == "down" else (hidden, I)
            a = torch.randn(E, R, fan_in, generator=g) * 0.3
            module[p] = Factors(a, torch.randn(E, fan_out, R, generator=g) * size, 2.0)
    directory.mkdir()
    write_adapter(
        directory, AdapterData(CONFIG, experts, {}), model_type="qwen3_moe", linear_paths=[]
    )
    return directory


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A base model whose own generation defaults would show, and two adapters."""
    root = tmp_path_factory.mktemp("serve")
    base = models.build("qwen3_moe", root / "base", tokenizer=True)
    defaults = {"do_sample": True, "top_k": 1, "repetition_penalty": 5.0, "eos_token_id": 2}
    (base / "generation_config.json").write_text(json.dumps(defaults))
    write(root / "first", 1)
    write(root / "second", 2)
    return root


def options(folder: Path, *more: str) -> Any:
    every = ["--model", str(folder / "base"), "--format", "bf16", "--threads", "1", *more]
    return cli.parser().parse_args(every)


def built(folder: Path, *more: str) -> FastAPI:
    """The application of a command line, loaded at once."""
    plan = cli.plan(options(folder, *more))
    service = Service(plan.names)
    service.served = plan.load()
    return create_app(service)


@pytest.fixture(scope="module")
def client(folder: Path) -> Iterator[openai.OpenAI]:
    both = ("--adapter", str(folder / "first"), "--adapter", f"other={folder / 'second'}")
    with serving(built(folder, *both)) as url:
        yield openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=60)


def ask(client: openai.OpenAI, model: str, **more: Any) -> str:
    given = {"temperature": 0, "max_tokens": 40} | more
    answer = client.chat.completions.create(model=model, messages=CHAT, **given)
    return answer.choices[0].message.content


# ------------------------------------------------------------------------------- base and adapters


def test_models_lists_base_and_adapters_with_their_parent(client: openai.OpenAI) -> None:
    found = {m.id: m.parent for m in client.models.list()}
    assert found == {"base": None, "first": "base", "other": "base"}
    assert client.models.retrieve("base:other").id == "other"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("second")


def greedy(model: Any, tokenizer: Any, name: str | None) -> str:
    """Token by token, without generate or server."""
    text = tokenizer.apply_chat_template(CHAT, tokenize=False, add_generation_prompt=True)
    step = tokenizer(text, add_special_tokens=False, return_tensors="pt").input_ids
    tokens: list[int] = []
    cache = None
    with torch.inference_mode(), adapter(model, name):
        while len(tokens) < 40:
            out = model(step, past_key_values=cache, use_cache=True)
            cache, step = out.past_key_values, out.logits[:, -1:].float().argmax(-1)
            if step.item() == tokenizer.eos_token_id:
                break
            tokens.append(int(step.item()))
    return tokenizer.decode(tokens, skip_special_tokens=True).rstrip("\ufffd")


def test_model_selects_the_base_or_an_adapter(client: openai.OpenAI, folder: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(folder / "base")
    model = load_model(folder / "base", format="bf16")
    expected = {"base": greedy(model, tokenizer, None)}
    load_adapter(model, folder / "first", "first")
    load_adapter(model, folder / "second", "other")
    expected |= {name: greedy(model, tokenizer, name) for name in ("first", "other")}
    assert len(set(expected.values())) == 3
    for name in ("first", "base", "other", "base", "first"):
        assert ask(client, name) == expected[name]
    assert ask(client, "base:first") == expected["first"]


def test_the_base_is_the_same_to_the_bit_with_adapters_loaded(folder: Path) -> None:
    ids = torch.arange(4, 40)[None]
    model = load_model(folder / "base", format="bf16")
    with torch.inference_mode():
        alone = model(ids).logits
        load_adapter(model, folder / "first", "first")
        with adapter(model, None):
            assert torch.equal(model(ids).logits, alone)
        with adapter(model, "first"):
            assert not torch.equal(model(ids).logits, alone)


# ---------------------------------------------------------------------------------------- sampling


def test_a_seed_repeats_an_answer(client: openai.OpenAI) -> None:
    first = ask(client, "base", temperature=1, seed=7)
    assert ask(client, "base", temperature=1, seed=7) == first
    assert ask(client, "base", temperature=1, seed=8) != first
    assert ask(client, "base", temperature=1, seed=-(2**63)) != first


def test_without_a_seed_answers_differ(client: openai.OpenAI) -> None:
    """Also: the checkpoint's own top_k of 1 must have no effect."""
    assert len({ask(client, "base", temperature=1) for _ in range(3)}) > 1


def test_temperature_and_top_p_narrow_the_choice(client: openai.OpenAI) -> None:
    """On three tokens: the logits of the fourth tie, and a tie may be broken in any way."""

    def few(**more: Any) -> str:
        return ask(client, "base", max_tokens=3, seed=3, **more)

    certain = few(temperature=0)
    assert few(temperature=1, top_p=1e-6) == certain
    assert few(temperature=1e-9) == certain
    assert few(temperature=1e-4) == certain
    assert few(temperature=2) != certain
    wide = {ask(client, "base", temperature=1, top_p=p, seed=3) for p in (0.2, 0.5, 1)}
    assert len(wide) == 3


# ------------------------------------------------------------------------- the adapter's tokenizer

TURN = {  # LLaMA-Factory's templates, and the token that ends a turn in each
    "chatml": "<|im_end|>",
    "llama3": "<|eot_id|>",
    "gemma": "<end_of_turn>",
    "phi4": "<|im_end|>",
}
MARKS = ["<|im_start|>", "<|im_sep|>", "<|start_header_id|>", "<|end_header_id|>", "<|eom_id|>"]
MARKS += ["<start_of_turn>", "<|begin_of_text|>", *sorted(set(TURN.values()))]


@pytest.fixture(scope="module")
def bare(tmp_path_factory) -> Path:
    """A base whose tokenizer knows the marks of chat templates and has no chat template."""
    base = tmp_path_factory.mktemp("bare") / "base"
    models.build("qwen3_moe", base, tokenizer=True, vocab_size=260 + len(MARKS))
    tokenizer = AutoTokenizer.from_pretrained(base)
    tokenizer.add_special_tokens({"additional_special_tokens": MARKS})
    tokenizer.chat_template = None
    (base / "chat_template.jinja").unlink()
    tokenizer.save_pretrained(base)
    return base


def scripted(model: Any, tokens: list[int]) -> None:
    """`model` says `tokens`, again and again, whatever it is asked."""
    forward, said = model.forward, [0]

    def fixed(input_ids: Any = None, **more: Any) -> Any:
        out = forward(input_ids=input_ids, **more)
        said[0] = 0 if input_ids.shape[1] > 1 else said[0] + 1
        out.logits = torch.full_like(out.logits, -50.0)
        out.logits[..., tokens[said[0] % len(tokens)]] = 50.0
        return out

    model.forward = fixed


@pytest.mark.parametrize("template", TURN)
def test_what_llamafactory_wrote_beside_the_adapter_wins(
    bare: Path, tmp_path: Path, template: str
) -> None:
    """The prompt that it trained with, and the end of the turn that it taught."""
    from llamafactory.data.template import get_template_and_fix_tokenizer
    from llamafactory.hparams import DataArguments

    tokenizer = AutoTokenizer.from_pretrained(bare)
    own = get_template_and_fix_tokenizer(tokenizer, DataArguments(template=template))
    expected, _ = own.encode_oneturn(tokenizer, [*CHAT, {"role": "assistant", "content": ""}])
    stop = tokenizer.convert_tokens_to_ids(TURN[template])
    assert tokenizer.eos_token_id == stop != AutoTokenizer.from_pretrained(bare).eos_token_id
    tokenizer.save_pretrained(write(tmp_path / "tuned", 1))
    write(tmp_path / "plain", 2)

    names = ("--adapter", str(tmp_path / "tuned"), "--adapter", str(tmp_path / "plain"))
    plan = cli.plan(cli.parser().parse_args(["--model", str(bare), "--format", "bf16", *names]))
    service = Service(plan.names)
    service.served = plan.load()
    model = service.served.engine._model
    hi = tokenizer("Hi", add_special_tokens=False).input_ids
    scripted(model, [*hi, stop, *hi])
    prompts: list[list[int]] = []
    model.register_forward_pre_hook(
        lambda _, args, kw: prompts.append(kw["input_ids"][0].tolist()), with_kwargs=True
    )
    with serving(create_app(service)) as url:
        client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
        answer = client.chat.completions.create(model="tuned", messages=CHAT, temperature=0)
        assert answer.choices[0].message.content == "Hi"
        assert answer.choices[0].finish_reason == "stop" and answer.usage.completion_tokens == 3
        assert prompts[0] == expected and len(prompts) == 3
        for name in ("base", "plain"):
            with pytest.raises(openai.BadRequestError, match=r"no chat template.*one of tuned"):
                client.chat.completions.create(model=name, messages=CHAT)


def test_one_adapters_tokenizer_does_not_touch_the_others(folder: Path, tmp_path: Path) -> None:
    """The base and another adapter keep their template and their end; files one by one."""
    base = cli.plan(options(folder)).tokens[None]
    colon = base.tokenizer.convert_tokens_to_ids(":")
    template = "{% for m in messages %}[{{ m.content }}]{% endfor %}"
    own_files = ("all", "template", "generation", "untemplated")
    for name in own_files:
        write(tmp_path / name, 1)
    other = AutoTokenizer.from_pretrained(folder / "base")
    other.eos_token, other.chat_template = ":", template
    other.save_pretrained(tmp_path / "all")
    (tmp_path / "template" / "chat_template.jinja").write_text(template)
    (tmp_path / "generation" / "generation_config.json").write_text('{"eos_token_id": [7, 2]}')
    other.chat_template = None
    other.save_pretrained(tmp_path / "untemplated")

    given = [w for name in own_files for w in ("--adapter", str(tmp_path / name))]
    tokens = cli.plan(options(folder, *given, "--adapter", str(folder / "first"))).tokens
    assert tokens["first"] is tokens[None]
    assert {name: own.ends for name, own in tokens.items()} == {
        None: {2},
        "first": {2},
        "all": {2, colon},
        "template": {2},
        "generation": {2, 7},
        "untemplated": {2, colon},
    }
    texts = {name: own.tokenizer.decode(own.encode(CHAT)) for name, own in tokens.items()}
    assert texts["all"] == texts["template"] == "[Hello, who are you?]"
    usual = "user: Hello, who are you?</s>\nassistant: "
    for name in (None, "first", "generation", "untemplated"):  # of which the last says nothing
        assert texts[name] == usual


def test_a_base_without_end_token_needs_an_adapter_that_has_one(
    folder: Path, tmp_path: Path
) -> None:
    base = tmp_path / "base"
    shutil.copytree(folder / "base", base)
    (base / "generation_config.json").unlink()
    config = json.loads((base / "config.json").read_text())
    (base / "config.json").write_text(json.dumps(config | {"eos_token_id": None}))
    tokenizer = AutoTokenizer.from_pretrained(base)
    tokenizer.save_pretrained(write(tmp_path / "tuned", 1))
    tokenizer.eos_token = None
    tokenizer.save_pretrained(base)
    with pytest.raises(ValueError, match=r"base has no end token; put one into tokenizer_config"):
        cli.plan(options(tmp_path))
    tokens = cli.plan(options(tmp_path, "--adapter", str(tmp_path / "tuned"))).tokens
    assert (tokens[None].lack, tokens["tuned"].lack) == ("end token", None)


def test_tokens_without_an_embedding_are_refused(folder: Path, tmp_path: Path, capsys) -> None:
    """At the start where the adapter brings them, in a request where the base has them."""
    tokenizer = AutoTokenizer.from_pretrained(folder / "base")
    tokenizer.add_special_tokens({"additional_special_tokens": ["<new>", "<newer>"]})
    tokenizer.save_pretrained(write(tmp_path / "resized", 1))
    arguments = ["--model", str(folder / "base"), "--port", "0", "--adapter"]
    assert cli.main([*arguments, str(tmp_path / "resized")]) == 1
    last = capsys.readouterr().err.splitlines()[-1]
    assert re.search(r"resized has 2 tokens, such as '<new(er)?>', .* \(it has 260\)", last)

    shutil.copytree(folder / "base", tmp_path / "base")
    tokenizer.save_pretrained(tmp_path / "base")  # not only the adapter has them
    with serving(built(tmp_path, "--adapter", str(tmp_path / "resized"))) as url:
        client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=60)
        assert ask(client, "resized", max_tokens=3)
        with pytest.raises(openai.BadRequestError, match=r"'<newer>'.*no\s+embedding"):
            client.chat.completions.create(
                model="base", messages=[{"role": "user", "content": "a <newer> b"}]
            )


def test_an_adapters_tokenizer_that_cannot_be_read_is_named(folder: Path, tmp_path: Path) -> None:
    write(tmp_path / "half", 1)
    (tmp_path / "half" / "tokenizer_config.json").write_text('{"tokenizer_class": "Absent"}')
    with pytest.raises(ValueError, match=r"the tokenizer in .*half cannot be read"):
        cli.plan(options(folder, "--adapter", str(tmp_path / "half")))


# ---------------------------------------------------------------------------------------- start-up


AT_ONCE = [  # before the port is opened
    (["--adapter", "{}/absent"], "absent has no adapter_config.json"),
    (["--adapter", "{}/first", "--adapter", "first={}/second"], "'first' is used twice"),
    (["--adapter", "base={}/first"], "'base' is used twice"),
    (["--adapter", "={}/first"], "has no name before '='"),
    (["--format", "int3"], "int3"),
    (["--model", "{}/absent"], "absent does not exist"),
    (["--model", "{}/first"], "first has no config.json"),
]
WHILE_LOADING = [
    (["--adapter", "{}/untrained"], "untrained does not change the model's output"),
    (["--adapter", "{}/wide"], "trained on another model"),
    (["--numa-nodes", "99"], "numa_nodes is 99"),
]


@pytest.mark.parametrize(("more", "sentence"), AT_ONCE + WHILE_LOADING)
def test_a_start_that_cannot_work_is_one_sentence(
    folder: Path, tmp_path: Path, capsys, more: list[str], sentence: str
) -> None:
    write(tmp_path / "untrained", 1, size=0.0)
    write(tmp_path / "wide", 1, hidden=96)
    (tmp_path / "first").symlink_to(folder / "first")
    (tmp_path / "second").symlink_to(folder / "second")
    arguments = ["--model", str(folder / "base"), "--port", "0"]
    assert cli.main([*arguments, *(m.format(tmp_path) for m in more)]) == 1
    lines = capsys.readouterr().err.splitlines()
    assert lines[-1].startswith("error: ") and re.search(sentence, lines[-1])
    assert not any("%|" in line for line in lines)  # no progress bars in a log
    opened = sum("Uvicorn running" in line for line in lines)
    begun = sum(line.startswith("loading ") for line in lines)
    assert opened == begun == (0 if (more, sentence) in AT_ONCE else 1)


def test_until_the_model_is_there_health_says_loading_and_all_else_503(folder: Path) -> None:
    plan = cli.plan(options(folder, "--adapter", str(folder / "first")))
    service, go = Service(plan.names), threading.Event()

    class Held:
        """The plan, which waits for `go` before it loads."""

        def __getattr__(self, name: str) -> Any:
            return getattr(plan, name)

        def load(self) -> Any:
            assert go.wait(60)
            return plan.load()

    loader = Loader(Held(), service, failed=lambda: None)
    with serving(create_app(service), cli.Server, loader=loader) as url:
        health = httpx.get(f"{url}/health")
        assert health.status_code == 503 and health.json()["status"] == "loading"
        assert health.json()["seconds"] >= 0
        body = {"model": "first", "messages": CHAT, "max_tokens": 3}
        for answer in (
            httpx.get(f"{url}/v1/models"),
            httpx.get(f"{url}/v1/models/first"),
            httpx.post(f"{url}/v1/chat/completions", json=body),
        ):
            assert answer.status_code == 503 and int(answer.headers["retry-after"]) > 0
            assert answer.json()["error"]["code"] == "model_loading"
        wrong = httpx.post(f"{url}/v1/chat/completions", json=body | {"model": "third"})
        assert wrong.status_code == 404  # is wrong whenever it is asked
        go.set()
        until(lambda: httpx.get(f"{url}/health").status_code == 200, "the model", seconds=60)
        assert httpx.get(f"{url}/health").json()["status"] == "ok"
        assert httpx.post(f"{url}/v1/chat/completions", json=body, timeout=60).status_code == 200


def test_a_fault_of_ours_while_loading_ends_the_process_too(
    folder: Path, capsys, monkeypatch
) -> None:
    """With its traceback; else the server would say "loading" for ever."""

    def broken(*args: Any, **more: Any) -> None:
        raise KeyError("a fault")

    monkeypatch.setattr(loading.hf, "load", broken)
    assert cli.main(["--model", str(folder / "base"), "--port", "0"]) == 1
    lines = capsys.readouterr().err.splitlines()
    assert lines[-1] == "KeyError: 'a fault'" and any("in broken" in line for line in lines)


def test_the_command_serves_and_ends_on_sigterm(folder: Path, tmp_path: Path) -> None:
    """On a terminal, where it shows how far loading is."""
    command = [sys.executable, "-m", "kt_core.serve", "--model", str(folder / "base")]
    command += ["--port", "0", "--threads", "1", "--name", "mine"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    terminal, theirs = pty.openpty()
    termios.tcsetwinsize(theirs, (40, 120))
    server = subprocess.Popen(command, stdout=theirs, stderr=theirs, env=environment)
    os.close(theirs)
    shown = bytearray()

    def read() -> None:
        with contextlib.suppress(OSError):  # the other end is closed
            while piece := os.read(terminal, 4096):
                shown.extend(piece)

    threading.Thread(target=read, daemon=True).start()

    def log() -> str:
        return re.sub(r"\x1b\[[0-9;]*m", "", bytes(shown).decode())

    try:
        until(lambda: "ready" in log() or server.poll() is not None, "a start", seconds=120)
        found = re.search(r"http://127\.0\.0\.1:(\d+)", log())
        assert found, log()
        until(lambda: httpx.get(f"{found[0]}/health").status_code == 200, "the model", seconds=60)
        client = openai.OpenAI(base_url=f"{found[0]}/v1", api_key="none", max_retries=0)
        assert [m.id for m in client.models.list()] == ["mine"]
        assert ask(client, "mine", max_tokens=5)
        assert re.search(r"loading .*base, 0.00 GB", log())
        assert re.search(r"Packing experts: 100%.*B/s\]", log()), log()
        assert re.search(r"loaded .*base in [0-9.]+ s, .*; adapters: none; ready", log())
        server.send_signal(signal.SIGTERM)
        assert server.wait(30) in (0, -signal.SIGTERM), log()
    finally:
        server.kill()
        server.wait()


# ------------------------------------------------------------------------------- engine and text


def test_cancelling_stops_within_a_forward_pass(folder: Path) -> None:
    model = load_model(folder / "base", format="bf16")
    tokenizer = AutoTokenizer.from_pretrained(folder / "base")
    engine = Engine(model, {None: tokens_of(model, tokenizer)}, max_waiting=2)
    events: list[Any] = []
    calls: list[int] = []
    job = Job(list(range(4, 60)), None, Sampling(max_tokens=8), events.append)
    layers = [layer.mlp.experts for layer in model.model.layers]
    for index, module in enumerate(layers):
        module.register_forward_hook(lambda *_, i=index: calls.append(i))
    layers[0].register_forward_hook(lambda *_: job.cancel() if not later else None)
    later: list[Job] = []
    engine.submit(job)
    until(lambda: engine.state()["running"] == 0 and calls, "the job to end")
    assert calls == [0] and events == []
    later.append(Job([5, 6], None, Sampling(max_tokens=3, temperature=0), events.append))
    engine.submit(later[0])
    until(lambda: events and isinstance(events[-1], Finished), "the next job to end")
    engine.close()
    assert not engine.alive


def test_detokenizer_equals_decoding_at_once() -> None:
    tokenizer = models.byte_tokenizer()
    g = torch.Generator().manual_seed(0)
    for _ in range(50):
        ids = torch.randint(4, 260, (60,), generator=g).tolist()
        detokenizer = Detokenizer(tokenizer)
        pieces = [detokenizer.push(i) for i in ids]
        assert "".join(pieces) == tokenizer.decode(ids).rstrip("\ufffd")
        assert not any(piece.endswith("\ufffd") for piece in pieces)


def test_stop_filter_equals_searching_at_once() -> None:
    """Over every way to cut a text into two or three pieces."""
    text, stops = "abcabcabdab", ["abd", "cabd", "zz"]
    expected = text[: text.index("cabd")]
    for first in range(len(text) + 1):
        for second in range(first, len(text) + 1):
            stop = StopFilter(stops)
            pieces = (text[:first], text[first:second], text[second:])
            out = "".join(stop.push(piece) for piece in pieces) + stop.flush()
            assert out == expected and stop.stopped


def test_more_numa_nodes_than_there_are_are_refused(folder: Path) -> None:
    with pytest.raises(ValueError, match="numa_nodes is 99 but this process has CPUs and memory"):
        cli.plan(options(folder, "--numa-nodes", "99")).load()
