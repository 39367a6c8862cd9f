"""`llamafactory-cli export` of a use_kt run: the adapter merged into the base checkpoint.

Packed experts cannot take a delta, so the merge works on the checkpoint's own files, shard by shard
(kt_core.adapter.merge); no model is loaded.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import torch

from kt_core import adapter
from kt_sft import value_head

# (key, default of LLaMA-Factory, fix) of export options that this way of exporting cannot honour
_REFUSED = (
    ("export_quantization_bit", None, "export without it and quantize the result"),
    ("export_legacy_format", False, "remove it: safetensors are written"),
    ("export_hub_model_id", None, "remove it and upload export_dir with `hf upload`"),
    ("export_size", 5, "remove it: the base checkpoint's shards are kept"),
)
_VALUE_HEADS = (value_head.FILE, "value_head.bin")


def export(model_args: Any, data_args: Any, finetuning_args: Any) -> None:
    """Writes export_dir: weights (bf16 unless infer_dtype says otherwise), config, tokenizer, an
    Ollama Modelfile, and of a reward model its value head. Raises ValueError in one sentence.
    """
    adapters = model_args.adapter_name_or_path
    if model_args.export_dir is None:
        raise ValueError("export_dir is missing; give a new directory for the merged model")
    if not adapters or len(adapters) != 1:
        raise ValueError(
            f"adapter_name_or_path={adapters} does not name one adapter to merge; give one, and "
            "merge further ones into the result"
        )
    for key, default, fix in _REFUSED:
        value = vars(model_args)[key]
        if value != default:
            raise ValueError(f"{key}={value!r} is not supported with use_kt; {fix}")
    base = local_checkpoint(model_args)
    out = Path(model_args.export_dir)
    adapter.merge(base, adapters[0], out, dtype=_dtype(model_args.infer_dtype))
    _save_tokenizer(model_args, data_args, out)
    for name in _VALUE_HEADS:
        if finetuning_args.stage == "rm" and (Path(adapters[0]) / name).is_file():
            shutil.copy(Path(adapters[0]) / name, out / name)


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


def _dtype(infer_dtype: str) -> torch.dtype:
    # As LLaMA-Factory does: half precision unless asked otherwise, and of those bf16.
    dtype = torch.bfloat16 if infer_dtype == "auto" else getattr(torch, infer_dtype)
    assert isinstance(dtype, torch.dtype)
    return dtype


def _save_tokenizer(model_args: Any, data_args: Any, out: Path) -> None:
    from llamafactory.data import get_template_and_fix_tokenizer
    from llamafactory.model import load_tokenizer

    loaded = load_tokenizer(model_args)
    tokenizer = loaded["tokenizer"]
    template = get_template_and_fix_tokenizer(tokenizer, data_args)
    tokenizer.padding_side = "left"
    tokenizer.init_kwargs["padding_side"] = "left"
    tokenizer.save_pretrained(out)
    if loaded["processor"] is not None:
        loaded["processor"].save_pretrained(out)
    (out / "Modelfile").write_text(template.get_ollama_modelfile(tokenizer), encoding="utf-8")
