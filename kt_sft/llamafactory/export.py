"""`llamafactory-cli export` of a use_kt run: the adapter merged into the base checkpoint.

Packed experts cannot take a delta, so the merge works on the checkpoint's own files, shard by shard
(kt_core.adapters.merge); no model is loaded.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from kt_core.adapters import merge
from kt_sft.run import value_head

# (key, default of LLaMA-Factory, fix) of export options that this way of exporting cannot honour
_REFUSED = (
    ("export_quantization_bit", None, "export without it and quantize the result"),
    ("export_legacy_format", False, "remove it: safetensors are written"),
    ("export_hub_model_id", None, "remove it and upload export_dir with `hf upload`"),
    ("export_size", 5, "remove it: the base checkpoint's shards are kept"),
    ("rope_scaling", None, "remove it and set rope_scaling in the config.json of the result"),
    ("use_kv_cache", True, "remove it and set use_cache in the config.json of the result"),
)
_VALUE_HEADS = (value_head.FILE, "value_head.bin")


def export(model_args: Any, data_args: Any, finetuning_args: Any) -> None:
    """Writes export_dir: weights (bf16 unless infer_dtype or an fp16 checkpoint says otherwise),
    config, tokenizer, an Ollama Modelfile, and of a reward model its value head. Several adapters
    are merged one after the other, as LLaMA-Factory does. Raises ValueError in one sentence.
    """
    if model_args.export_dir is None:
        raise ValueError("export_dir is missing; give a new directory for the merged model")
    if not model_args.adapter_name_or_path:
        raise ValueError("adapter_name_or_path is missing; give the adapter to merge")
    for key, default, fix in _REFUSED:
        value = vars(model_args)[key]
        if value != default:
            raise ValueError(f"{key}={value!r} is not supported with use_kt; {fix}")
    base = local_checkpoint(model_args)
    adapters = [local_adapter(name, model_args) for name in model_args.adapter_name_or_path]
    out = Path(model_args.export_dir)
    if out.exists():
        raise ValueError(f"{out} exists; give a directory that does not")
    save_tokenizer, tokens = _tokenizer(model_args, data_args)
    _merge(base, adapters, out, tokens, model_args)
    save_tokenizer(out)
    folder = Path(model_args.adapter_name_or_path[-1])  # LLaMA-Factory looks there, too
    for name in _VALUE_HEADS:
        if finetuning_args.stage == "rm" and (folder / name).is_file():
            shutil.copy(folder / name, out / name)


def _merge(base: Path, adapters: list[Path], out: Path, tokens: int, model_args: Any) -> None:
    """The adapters into `base`, one after the other."""
    steps = [out.with_name(f".{out.name}.merging-{n}") for n in range(1, len(adapters))]
    dtype = _dtype(model_args.infer_dtype, base)
    before = base
    try:
        for directory, target in zip(adapters, [*steps, out], strict=True):
            merge(
                before,
                directory,
                target,
                dtype=dtype,
                tokens=tokens if target is out else None,
                trust_remote_code=model_args.trust_remote_code,
            )
            before = target
    finally:
        for step in steps:
            shutil.rmtree(step, ignore_errors=True)


def local_adapter(name: str, model_args: Any) -> Path:
    """The directory of an adapter, below adapter_folder where that is given; of one on the hub, its
    snapshot.
    """
    folder = model_args.adapter_folder
    path = Path(name)
    if not path.is_dir():
        from huggingface_hub import snapshot_download

        path = Path(
            snapshot_download(
                name,
                revision=model_args.model_revision,
                cache_dir=model_args.cache_dir,
                token=model_args.hf_hub_token,
                allow_patterns=f"{folder}/*" if folder else None,
            )
        )
    return path / folder if folder else path


def local_checkpoint(model_args: Any) -> Path:
    """The directory of model_name_or_path; of a hub model that training has downloaded, its
    snapshot.
    """
    path = Path(model_args.model_name_or_path)
    if path.is_dir():
        return path
    from huggingface_hub import snapshot_download

    return Path(
        snapshot_download(
            model_args.model_name_or_path,
            revision=model_args.model_revision,
            cache_dir=model_args.cache_dir,
            token=model_args.hf_hub_token,
        )
    )


def _dtype(infer_dtype: str, base: Path) -> torch.dtype:
    # As LLaMA-Factory does: half precision unless asked otherwise, bf16 unless stored as fp16.
    if infer_dtype != "auto":
        dtype = getattr(torch, infer_dtype)
        assert isinstance(dtype, torch.dtype)
        return dtype
    config = json.loads((base / "config.json").read_text())
    text = config.get("text_config", {})
    names = [
        part[key] for part in (text, config) for key in ("dtype", "torch_dtype") if key in part
    ]
    return torch.float16 if names and names[0] == "float16" else torch.bfloat16


def _tokenizer(model_args: Any, data_args: Any) -> tuple[Callable[[Path], None], int]:
    """What writes tokenizer, processor and Modelfile, and the number of tokens."""
    from llamafactory.data import get_template_and_fix_tokenizer
    from llamafactory.model import load_tokenizer

    loaded = load_tokenizer(model_args)
    tokenizer = loaded["tokenizer"]
    template = get_template_and_fix_tokenizer(tokenizer, data_args)
    tokenizer.padding_side = "left"
    tokenizer.init_kwargs["padding_side"] = "left"

    def save(out: Path) -> None:
        tokenizer.save_pretrained(out)
        if loaded["processor"] is not None:
            loaded["processor"].save_pretrained(out)
        (out / "Modelfile").write_text(template.get_ollama_modelfile(tokenizer), encoding="utf-8")

    return save, len(tokenizer)
