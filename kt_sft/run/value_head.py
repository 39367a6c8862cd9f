"""Reward models from a checkpoint: LLaMA-Factory keeps the value head beside the adapter, where
transformers does not look for it when it resumes.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from peft import PeftModel
from safetensors.torch import load_file

from kt_sft.lora.adapter_io import has_experts

FILE, _PREFIX = "value_head.safetensors", "v_head."


def load_from_checkpoint(
    original: Callable[..., None],
    self: Any,
    resume_from_checkpoint: str,
    model: Any = None,
    *args: Any,
    **kw: Any,
) -> None:
    """Trainer._load_from_checkpoint: adapter and value head of a reward model with CPU experts.

    Raises ValueError if the file holds something else than the model's head.
    """
    whole = self.model if model is None else model
    file = Path(resume_from_checkpoint) / FILE
    if not file.is_file() or not has_experts(whole):
        return original(self, resume_from_checkpoint, model, *args, **kw)
    head = {k.removeprefix(_PREFIX): t for k, t in load_file(file).items()}
    wanted = {k: t.shape for k, t in whole.v_head.state_dict().items()}
    if {k: t.shape for k, t in head.items()} != wanted:
        raise ValueError(
            f"{file} holds {sorted(head)}, which is not the value head of this model "
            f"({sorted(wanted)}); resume with the model and stage it was trained with"
        )
    tuned = next(m for m in whole.modules() if isinstance(m, PeftModel))
    tuned.load_adapter(resume_from_checkpoint, tuned.active_adapter, is_trainable=True)
    whole.v_head.load_state_dict(head)
