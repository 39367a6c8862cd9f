"""From the command line to a model that answers: what is checked before the port is opened, and
what is loaded behind it.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import AutoConfig, AutoTokenizer, GenerationConfig, PreTrainedModel

from kt_core import hf
from kt_core.adapters import adapter, load_adapter
from kt_core.loading import prequantized
from kt_core.serve.app import Names, Served, Service
from kt_core.serve.tokens import TEMPLATE, TOKENIZER, Tokens, check_rows, of_adapter, of_base
from kt_core.settings import ExpertSettings


@dataclass(frozen=True)
class ServePlan:
    """What to serve, checked as far as that goes without reading a weight."""

    model: str
    names: Names
    adapters: dict[str, Path]
    tokens: dict[str | None, Tokens]
    settings: ExpertSettings
    context_length: int | None
    max_waiting: int

    def load(self) -> Served:
        """Reads the weights. Raises ValueError, OSError or MemoryError, in one sentence."""
        model = hf.load(self.model, self.settings)
        rows = model.get_input_embeddings().num_embeddings
        for name, directory in self.adapters.items():
            load_adapter(model, directory, name)
            check_rows(directory, self.tokens[name], self.tokens[None], rows)
            check_effect(model, name, directory)
        return Served(
            model,
            self.tokens,
            context_length=self.context_length,
            max_waiting=self.max_waiting,
        )


def check(
    model: str,
    name: str | None,
    adapters: list[str],
    settings: ExpertSettings,
    *,
    context_length: int | None = None,
    max_waiting: int = 8,
) -> ServePlan:
    """`adapters` are `[name=]DIR`. Raises ValueError or OSError, in one sentence."""
    directories = [named_adapter(text) for text in adapters]
    names = Names(name or Path(model).resolve().name, tuple(own for own, _ in directories))
    if Path(model).is_dir():
        prequantized.refuse_directory(model)
    if Path(model).is_dir() and not (Path(model) / "config.json").is_file():
        raise FileNotFoundError(f"{model} has no config.json; give the directory of a model")
    if not Path(model).is_dir() and (Path(model).is_absolute() or model.startswith(".")):
        raise FileNotFoundError(f"{model} does not exist; give the directory of a model")
    for _, directory in directories:
        if not (directory / "adapter_config.json").is_file():
            raise FileNotFoundError(
                f"{directory} has no adapter_config.json; give the directory of a PEFT adapter"
            )
    base = of_base(AutoTokenizer.from_pretrained(model), _generation(model))
    tokens: dict[str | None, Tokens] = {None: base}
    tokens |= {own: of_adapter(directory, base) for own, directory in directories}
    if all(own.lack for own in tokens.values()):
        raise ValueError(
            f"the tokenizer in {model} has no {base.lack}; put one into "
            f"{TOKENIZER if base.tokenizer.chat_template else TEMPLATE} beside it"
        )
    return ServePlan(model, names, dict(directories), tokens, settings, context_length, max_waiting)


def named_adapter(text: str) -> tuple[str, Path]:
    """(name, directory) of `name=DIR` or `DIR`, which is named after itself."""
    name, equals, directory = text.partition("=")
    if not equals or Path(text).is_dir():
        return Path(text).resolve().name, Path(text)
    if not name:
        raise ValueError(f"--adapter {text} has no name before '='; write name=DIR")
    return name, Path(directory)


def _generation(model: str) -> GenerationConfig:
    """The checkpoint's generation defaults, from where transformers takes them."""
    config = AutoConfig.from_pretrained(model)
    try:
        return GenerationConfig.from_pretrained(model)
    except OSError:
        return GenerationConfig.from_model_config(config)


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


class Loader:
    """Loads on a thread of its own, so that the server answers meanwhile.

    Where stderr is no terminal, one line says that it begins and one that it is done; on a terminal
    the progress bars of packing and of transformers show bytes, rate and time left besides.
    """

    def __init__(self, plan: ServePlan, service: Service, failed: Callable[[], None]) -> None:
        self._plan = plan
        self._service = service
        self._failed = failed
        self.error: BaseException | None = None
        self._thread = threading.Thread(target=self._load, name="kt-load", daemon=True)

    @property
    def running(self) -> bool:
        return self._thread.is_alive()

    def start(self) -> None:
        self._thread.start()

    def _load(self) -> None:
        plan, begun = self._plan, time.monotonic()
        size = sum(file.stat().st_size for file in Path(plan.model).glob("*.safetensors"))
        _say(f"loading {plan.model}, {size / 1e9:.2f} GB; /health says when it is ready")
        try:
            served = plan.load()
        except BaseException as error:  # the thread that waits on the port tells it
            self.error = error
            self._failed()
            return
        seconds = time.monotonic() - begun
        adapters = ", ".join(plan.names.adapters) or "none"
        _say(
            f"loaded {plan.model} in {seconds:.1f} s, {size / seconds / 1e6:.0f} MB/s; adapters: "
            f"{adapters}; ready"
        )
        self._service.served = served


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
