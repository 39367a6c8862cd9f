"""The files beside the weights of a merged checkpoint: those that describe the merged model."""

from __future__ import annotations

import json
import math
import shutil
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import torch

from kt_core.loading.headers import read_header

INDEX = "model.safetensors.index.json"

# What transformers reads beside the weights, and the terms under which the base is given. Weights
# in other containers and the base's README describe another model.
_KEPT = (
    "generation_config.json",
    # tokenizers
    "tokenizer*.json",
    "tokenizer*.model*",
    "sentencepiece*.model",
    "spiece.model",
    "tekken.json",
    "*.tiktoken",
    "tiktoken.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "vocab.txt",
    "vocab.bpe",
    "merges.txt",
    "normalizer.json",
    "chat_template.json",
    "*.jinja",
    # processors of images, sound and video
    "*processor_config.json",
    "audio_tokenizer_config.json",
    # terms
    "LICENSE*",
    "LICENCE*",
    "COPYING*",
    "NOTICE*",
    "*USE_POLICY*",
)
_KEPT_FOLDERS = ("additional_chat_templates",)


def copy(source: Path, target: Path) -> None:
    """Copies what describes the merged model, config.json excepted; code only where a config names
    it (auto_map).
    """
    code = any(
        "auto_map" in json.loads(file.read_text())
        for file in source.glob("*config.json")
        if file.is_file()
    )
    for entry in source.iterdir():
        if entry.is_dir():
            if entry.name in _KEPT_FOLDERS:
                shutil.copytree(entry, target / entry.name)
        elif any(fnmatch(entry.name, kept) for kept in _KEPT) or (code and entry.suffix == ".py"):
            shutil.copy2(entry, target / entry.name)


def describe(
    config: dict[str, Any], *, rows: int | None, untied: bool, dtype: torch.dtype | None
) -> None:
    """Makes a config.json say what the merged weights are: rows of embeddings, whether the head is
    a weight of its own, dtype. None leaves what it says.
    """
    text = config.get("text_config", config)
    if rows is not None:
        text["vocab_size"] = rows
    for part in {id(config): config, id(text): text}.values():
        if untied:
            part["tie_word_embeddings"] = False
        for key in ("dtype", "torch_dtype"):
            if dtype is not None and key in part:
                part[key] = str(dtype).removeprefix("torch.")


def write_index(source: Path, target: Path) -> None:
    """The index of the shards in `target`, made from that of `source`."""
    weight_map: dict[str, str] = {}
    total = {"total_size": 0, "total_parameters": 0}
    for shard in sorted(target.glob("*.safetensors")):
        for key, entry in read_header(shard).items():
            weight_map[key] = shard.name
            begin, end = entry["data_offsets"]
            total["total_size"] += end - begin
            total["total_parameters"] += math.prod(entry["shape"])
    index = json.loads((source / INDEX).read_text())
    known = index.get("metadata", {})
    index["metadata"] = known | {key: n for key, n in total.items() if key in known}
    index["weight_map"] = dict(sorted(weight_map.items()))
    (target / INDEX).write_text(json.dumps(index, indent=2) + "\n")
