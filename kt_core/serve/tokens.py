"""Tokenizer, chat template and end tokens of the base model and of each adapter.

LLaMA-Factory writes the tokenizer that it trained with into the adapter's directory, because its
template may have replaced the chat template and the token that ends a turn. So an adapter's own
files win.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer, GenerationConfig, PreTrainedTokenizerBase

from kt_core.serve.text import Detokenizer

TOKENIZER = "tokenizer_config.json"
TEMPLATE = "chat_template.jinja"
GENERATION = "generation_config.json"


class Tokens:
    """How one model name turns messages into token ids, and ids into text.

    `ends` are the ids that end an answer. Without any, or with a tokenizer that has no chat
    template, there is no chat with this name: `lack` says what is missing.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, ends: frozenset[int]) -> None:
        self.tokenizer = tokenizer
        self.ends = ends
        # Fast tokenizers may not be used by two threads at once: requests share one under a lock,
        # and the thread that generates has its own.
        self._lock = threading.Lock()
        self._decoder = copy.deepcopy(tokenizer)

    @property
    def lack(self) -> str | None:
        """What chatting would need and is not there."""
        if self.tokenizer.chat_template is None:
            return "chat template"
        return None if self.ends else "end token"

    def encode(self, chat: Sequence[Mapping[str, Any]]) -> list[int]:
        """Ids of `chat` and of the beginning of an answer. Raises jinja2.TemplateError."""
        with self._lock:
            text = self.tokenizer.apply_chat_template(
                list(chat), tokenize=False, add_generation_prompt=True
            )
            return list(self.tokenizer(text, add_special_tokens=False).input_ids)

    def token(self, id: int) -> str:
        with self._lock:
            return str(self.tokenizer.convert_ids_to_tokens(id))

    def detokenizer(self) -> Detokenizer:
        """For one answer, on the thread that generates."""
        return Detokenizer(self._decoder)


def of_base(tokenizer: PreTrainedTokenizerBase, generation: GenerationConfig | None) -> Tokens:
    """`generation` is the checkpoint's own generation_config."""
    return Tokens(tokenizer, _ids(tokenizer.eos_token_id) | _end_ids(generation))


def of_adapter(directory: Path, base: Tokens) -> Tokens:
    """The base's, with what lies in the adapter's directory in its place.

    An answer ends at the end token of the adapter's tokenizer, as in LLaMA-Factory's chat, and at
    those of a generation_config beside it. The base's own end it too, as in vLLM: a model that says
    "end of text" has nothing to add. Raises ValueError for files that cannot be read.
    """
    tokenizer = base.tokenizer
    if (directory / TOKENIZER).is_file():
        try:
            tokenizer = AutoTokenizer.from_pretrained(directory)
        except Exception as error:  # of whatever kind the class named in the file raises
            raise ValueError(
                f"the tokenizer in {directory} cannot be read ({_first_line(error)}); copy all "
                f"files of the tokenizer that it was trained with there, or remove {TOKENIZER} to "
                "use the base's"
            ) from error
        if tokenizer.chat_template is None:
            tokenizer.chat_template = base.tokenizer.chat_template
    elif (directory / TEMPLATE).is_file():
        tokenizer = copy.deepcopy(tokenizer)
        tokenizer.chat_template = (directory / TEMPLATE).read_text(encoding="utf-8")
    generation = None
    if (directory / GENERATION).is_file():
        generation = GenerationConfig.from_pretrained(directory)
    ends = base.ends | _ids(tokenizer.eos_token_id) | _end_ids(generation)
    if tokenizer is base.tokenizer and ends == base.ends:
        return base
    return Tokens(tokenizer, ends)


def check_rows(directory: Path, adapter: Tokens, base: Tokens, rows: int) -> None:
    """Raises ValueError if the adapter's tokenizer adds tokens beyond the `rows` of the model's
    embedding.
    """
    known = base.tokenizer.get_vocab()
    vocabulary = adapter.tokenizer.get_vocab()
    beyond = sorted(t for t, id in vocabulary.items() if id >= rows and known.get(t) != id)
    if beyond:
        raise ValueError(
            f"the tokenizer in {directory} has {len(beyond)} tokens, such as {beyond[0]!r}, for "
            f"which the model has no embedding (it has {rows}); the adapter was trained on a model "
            "whose embeddings had been resized: merge it into that model and serve the result"
        )


def _end_ids(generation: GenerationConfig | None) -> frozenset[int]:
    return frozenset() if generation is None else _ids(generation.eos_token_id)


def _ids(given: int | Sequence[int] | None) -> frozenset[int]:
    if given is None:
        return frozenset()
    return frozenset([given] if isinstance(given, int) else given)


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0].rstrip(".")
