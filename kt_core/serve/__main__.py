"""`python -m kt_core.serve --model BASE [--adapter [name=]DIR ...]`"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch
import uvicorn
from fastapi import FastAPI
from transformers import AutoTokenizer, PreTrainedModel

from kt_core.adapter import adapter, load_adapter
from kt_core.hf import load_model
from kt_core.serve.app import Names, create_app

SHUTDOWN_SECONDS = 10  # for running answers to end after Ctrl-C or SIGTERM


def named_adapter(text: str) -> tuple[str, Path]:
    """(name, directory) of `name=DIR` or `DIR`, which is named after itself."""
    name, equals, directory = text.partition("=")
    if not equals or Path(text).is_dir():
        return Path(text).resolve().name, Path(text)
    if not name:
        raise ValueError(f"--adapter {text} has no name before '='; write name=DIR")
    return name, Path(directory)


def check_effect(model: PreTrainedModel, name: str, directory: Path) -> None:
    """Raises ValueError unless the adapter changes the model's logits on a short prompt."""
    ids = torch.arange(16, device=model.device)[None] % model.config.get_text_config().vocab_size
    with torch.inference_mode():
        with adapter(model, None):
            base = model(ids).logits
        with adapter(model, name):
            tuned = model(ids).logits
    if torch.equal(base, tuned):
        raise ValueError(
            f"the adapter in {directory} does not change the model's output; it was never trained "
            "or belongs to another model"
        )


def build(options: argparse.Namespace) -> FastAPI:
    """Loads what the command line names. Raises ValueError, OSError or MemoryError."""
    name = options.name or Path(options.model).resolve().name
    adapters = [named_adapter(text) for text in options.adapter]
    Names(name, tuple(adapter_name for adapter_name, _ in adapters))
    for _, directory in adapters:
        if not (directory / "adapter_config.json").is_file():
            raise FileNotFoundError(
                f"{directory} has no adapter_config.json; give the directory of a PEFT adapter"
            )
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    model = load_model(
        options.model,
        format=options.format,
        group=options.group,
        threads=options.threads,
        numa_nodes=options.numa_nodes,
        packed_dir=options.packed_dir,
    )
    for adapter_name, directory in adapters:
        load_adapter(model, directory, adapter_name)
        check_effect(model, adapter_name, directory)
    return create_app(
        model,
        tokenizer,
        name=name,
        adapters=[adapter_name for adapter_name, _ in adapters],
        context_length=options.context_length,
        max_waiting=options.max_waiting,
    )


def parser() -> argparse.ArgumentParser:
    out = argparse.ArgumentParser(
        prog="python -m kt_core.serve", description="OpenAI-compatible chat server."
    )
    out.add_argument("--model", required=True, help="directory of the base model")
    out.add_argument("--name", help="its name for clients (default: the directory's)")
    out.add_argument(
        "--adapter",
        action="append",
        default=[],
        metavar="[NAME=]DIR",
        help="PEFT adapter, chosen by clients through `model`; may be repeated",
    )
    out.add_argument("--host", default="127.0.0.1")
    out.add_argument("--port", type=int, default=8000)
    out.add_argument("--format", default="int8", help="of the expert weights (default: int8)")
    out.add_argument("--group", type=int, help="weights per scale (default: the format's)")
    out.add_argument("--threads", type=int, help="for the experts (default: all allowed CPUs)")
    out.add_argument("--numa-nodes", type=int, help="to spread over (default: those there are)")
    out.add_argument("--packed-dir", type=Path, help="keep packed experts here for the next start")
    out.add_argument("--context-length", type=int, help="in tokens (default: the model's)")
    out.add_argument("--max-waiting", type=int, default=8, help="queued requests (default: 8)")
    return out


def main(arguments: list[str] | None = None) -> int:
    options = parser().parse_args(arguments)
    try:
        app = build(options)
    except (ValueError, OSError, MemoryError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    uvicorn.run(
        app, host=options.host, port=options.port, timeout_graceful_shutdown=SHUTDOWN_SECONDS
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
