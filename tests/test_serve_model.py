"""The server on a model of ours: base and adapters, sampling, start-up, cancelling in a pass."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import models
import openai
import pytest
import torch
from serve_cases import serving, until
from transformers import AutoTokenizer

from kt_core.adapter import adapter, load_adapter
from kt_core.adapter_config import write_adapter
from kt_core.adapter_format import AdapterData, Factors
from kt_core.hf import load_model
from kt_core.serve import __main__ as cli
from kt_core.serve.engine import Engine, Finished, Job, Sampling
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


@pytest.fixture(scope="module")
def client(folder: Path) -> Iterator[openai.OpenAI]:
    both = ("--adapter", str(folder / "first"), "--adapter", f"other={folder / 'second'}")
    with serving(cli.build(options(folder, *both))) as url:
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


# ---------------------------------------------------------------------------------------- start-up


@pytest.mark.parametrize(
    ("more", "sentence"),
    [
        (["--adapter", "{}/absent"], "absent has no adapter_config.json"),
        (["--adapter", "{}/first", "--adapter", "first={}/second"], "'first' is used twice"),
        (["--adapter", "base={}/first"], "'base' is used twice"),
        (["--adapter", "={}/first"], "has no name before '='"),
        (["--adapter", "{}/untrained"], "untrained does not change the model's output"),
        (["--adapter", "{}/wide"], "trained on another model"),
        (["--format", "int3"], "int3"),
    ],
)
def test_a_start_that_cannot_work_is_one_sentence(
    folder: Path, tmp_path: Path, capsys, more: list[str], sentence: str
) -> None:
    write(tmp_path / "untrained", 1, size=0.0)
    write(tmp_path / "wide", 1, hidden=96)
    (tmp_path / "first").symlink_to(folder / "first")
    (tmp_path / "second").symlink_to(folder / "second")
    arguments = ["--model", str(folder / "base"), *(m.format(tmp_path) for m in more)]
    assert cli.main(arguments) == 1
    last = capsys.readouterr().err.splitlines()[-1]  # after transformers' own progress bar
    assert last.startswith("error: ") and re.search(sentence, last)


def test_the_command_serves_and_ends_on_sigterm(folder: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "kt_core.serve", "--model", str(folder / "base")]
    command += ["--port", "0", "--threads", "1", "--name", "mine"]
    log = tmp_path / "log"
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with log.open("w") as out:
        server = subprocess.Popen(command, stdout=out, stderr=out, env=environment)
    try:
        until(
            lambda: "Uvicorn running" in log.read_text() or server.poll() is not None,
            "the server to start",
            seconds=120,
        )
        found = re.search(r"http://127\.0\.0\.1:(\d+)", log.read_text())
        assert found, log.read_text()
        client = openai.OpenAI(base_url=f"{found[0]}/v1", api_key="none", max_retries=0)
        assert [m.id for m in client.models.list()] == ["mine"]
        assert ask(client, "mine", max_tokens=5)
        server.send_signal(signal.SIGTERM)
        assert server.wait(30) in (0, -signal.SIGTERM), log.read_text()
    finally:
        server.kill()
        server.wait()


# ------------------------------------------------------------------------------- engine and text


def test_cancelling_stops_within_a_forward_pass(folder: Path) -> None:
    model = load_model(folder / "base", format="bf16")
    tokenizer = AutoTokenizer.from_pretrained(folder / "base")
    engine = Engine(model, tokenizer, max_waiting=2)
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
        cli.build(options(folder, "--numa-nodes", "99"))
