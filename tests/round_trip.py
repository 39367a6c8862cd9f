"""One round trip of one family: train, save, stock peft, our inference, merge, stock transformers.

Every reader gets the same token ids, and its logits are compared with those of the trained model.
The engine is the slow fp32 one (slow_experts), so that what differs is not the kernels.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import families
import models
import peft
import torch
import transformers
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors import safe_open
from transformers import PreTrainedModel

from kt_core import adapters, hf
from kt_core.loading import experts_contract
from kt_sft import session
from kt_sft.config import LORA_GROUPS, KTConfig
from kt_sft.lora import adapter_io, model_parts, stock_peft, targets

LAYOUTS = stock_peft.LAYOUTS
SAME = 1e-5  # fp32 on both sides; a lost part of an adapter is above 1e-2


@dataclass(frozen=True)
class Trained:
    """A family's tiny model after three steps: the checkpoint it began with, what was trained, and
    its logits with and without the adapter.
    """

    family: families.Family
    base: Path
    model: PeftModel
    groups: tuple[str, ...]
    logits: torch.Tensor
    plain: torch.Tensor

    def save(self, layout: str, directory: Path) -> stock_peft.Choice:
        """Saves with an export_layout and returns what the save made of it."""
        self.set_layout(layout)
        self.model.save_pretrained(directory)
        return adapter_io.layout_of(self.model)

    def set_layout(self, layout: str) -> None:
        """As if the model had been loaded with this export_layout."""
        for module in targets.experts_of(self.model).values():
            module.settings = KTConfig(format="bf16", export_layout=layout)


def token_ids() -> torch.Tensor:
    """Fixed random token ids [2, 24]."""
    return torch.randint(3, 120, (2, 24), generator=torch.Generator().manual_seed(7))


def refusal(family: families.Family) -> str | None:
    """Whether and why this family's experts stay where they are; None if we take them over."""
    try:
        with torch.device("meta"):
            model = family.cls(families.tiny(family))
    except Exception as error:
        return f"not tried: its tiny model cannot be built ({type(error).__name__})"
    try:
        found = experts_contract.find_experts(model)
    except ValueError as error:
        return f"refused: {error}"
    return None if found else "refused: it has no experts modules with 3-D weights"


def build(family: families.Family, path: Path, **save: Any) -> None:
    """A random fp32 checkpoint of the family."""
    torch.manual_seed(0)
    model = family.cls(families.tiny(family))
    models.randomize(model)
    model.save_pretrained(path, **save)


def stock_model(family: families.Family, path: Path) -> PreTrainedModel:
    """The checkpoint in stock transformers, fp32."""
    return family.cls.from_pretrained(
        path, dtype=torch.float32, experts_implementation="eager", attn_implementation="eager"
    ).eval()


def logits(model: Any) -> torch.Tensor:
    """Logits of `token_ids`."""
    with torch.no_grad():
        return model(input_ids=token_ids()).logits


def error(a: torch.Tensor, b: torch.Tensor) -> float:
    """||a - b|| / ||b||."""
    return float((a - b).norm() / b.norm())


def train(
    family: families.Family, base: Path, export_layout: str = "auto", vision: bool = False
) -> Trained:
    """Three steps with LoRA on every group that the family has, outside of the text part only with
    `vision`, on the checkpoint `base`, which is built if it is not there.
    """
    if not base.exists():
        build(family, base)
    settings = KTConfig(format="bf16", export_layout=export_layout)
    with session.loading(settings):
        model = family.cls.from_pretrained(base, dtype=torch.float32, attn_implementation="eager")
    session.prepare(model)
    found = tuple(g for g in LORA_GROUPS if _has(model, g))
    torch.manual_seed(3)
    config = LoraConfig(
        target_modules=list(found),
        exclude_modules=None if vision else outside(model) or None,
        r=4,
        lora_alpha=8,
    )
    tuned = get_peft_model(model, config)
    optimizer = torch.optim.AdamW([p for p in tuned.parameters() if p.requires_grad], lr=1e-2)
    ids = token_ids()
    for _ in range(3):
        tuned(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    tuned.eval()
    with tuned.disable_adapter():
        plain = logits(tuned)
    return Trained(family, base, tuned, found, logits(tuned), plain)


def outside(model: PreTrainedModel) -> list[str]:
    """Paths of the Linears that are neither in the text part nor the head, which LLaMA-Factory
    leaves alone (freeze_vision_tower).
    """
    text = {id(m) for m in model.get_decoder().modules()} | {id(model.get_output_embeddings())}
    return [
        name
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.Linear) and id(module) not in text
    ]


def _has(model: PreTrainedModel, group: str) -> bool:
    """Whether `group` can be adapted: there may be none, or a router that is not only called."""
    config = LoraConfig(target_modules=[group])
    try:
        model_parts.expand(config, model)
        model_parts.settle_routers(config, model)
    except ValueError:
        return False
    return True


def gradients(model: PreTrainedModel) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """The loss, and its gradients to all weights beside the routed experts: of the routers and, as
    the embeddings' are among them, of the experts' input.
    """
    experts = [m for m in model.modules() if hasattr(m, "gate_up_proj")]
    own = {id(p) for module in experts for p in module.parameters(recurse=False)}
    others = {n: p for n, p in model.named_parameters() if id(p) not in own}
    for parameter in others.values():
        parameter.requires_grad_(parameter.is_floating_point())
    loss = model(input_ids=token_ids(), labels=token_ids()).loss
    loss.backward()
    return loss.detach(), {n: p.grad for n, p in others.items() if p.grad is not None}


def loaded(trained: Trained) -> PreTrainedModel:
    """The checkpoint that training began with, in our hands and without LoRA."""
    with session.loading(KTConfig(format="bf16")):
        model = trained.family.cls.from_pretrained(
            trained.base, dtype=torch.float32, attn_implementation="eager"
        )
    session.prepare(model)
    return model.eval()


def stock_peft(trained: Trained, adapter: Path) -> float | None:
    """The error of stock peft's logits; None if it does not load the adapter."""
    model = stock_model(trained.family, trained.base)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            tuned = PeftModel.from_pretrained(model, adapter)
    except (ValueError, RuntimeError):
        return None
    return error(logits(tuned), trained.logits)


def ours(trained: Trained, directory: Path, base: Path | None = None) -> float:
    """The error of our inference, with the class that `load_model` chooses."""
    model = hf.load_model(
        base or trained.base, format="bf16", dtype=torch.float32, attn_implementation="eager"
    )
    adapters.load_adapter(model, directory, "tuned")
    with adapters.adapter(model, "tuned"):
        return error(logits(model.eval()), trained.logits)


def continued(trained: Trained, directory: Path, base: Path, family: families.Family) -> float:
    """The error of the adapter on the class of `family`, loaded to go on training."""
    settings = KTConfig(format="bf16")
    with session.loading(settings):
        model = family.cls.from_pretrained(base, dtype=torch.float32, attn_implementation="eager")
    session.prepare(model)
    tuned = PeftModel.from_pretrained(model, directory, is_trainable=True)
    return error(logits(tuned.eval()), trained.logits)


def merged(trained: Trained, directory: Path, out: Path, base: Path | None = None) -> float:
    """The error of stock transformers on the merged checkpoint."""
    adapters.merge(base or trained.base, directory, out)
    return error(logits(stock_model(trained.family, out)), trained.logits)


def stored(path: Path) -> dict[str, tuple[int, ...]]:
    """Names and shapes of a checkpoint's tensors."""
    with safe_open(path / "model.safetensors", "pt") as file:
        return {key: tuple(file.get_slice(key).get_shape()) for key in sorted(file.keys())}


# ----------------------------------------------------------------------- the page docs/families.md

_HEAD = """# Families

Written by `scripts/round_trip_table.py`; do not edit. The rows are all classes of transformers
{transformers} whose configuration speaks of experts. Each was tried as a tiny random model. It was
trained for three steps with LoRA on every group that it has, saved, served and merged here; stock
transformers read the merged weights; the logits were the same each time (to 1e-5).

The last three columns say which `kt_config.export_layout` stock peft {peft} applies in full on the
stock model, and which one `auto` takes.

| family | class | here | groups with LoRA | `per_expert` | `fused` | `auto` |
| --- | --- | --- | --- | --- | --- | --- |
"""


def page(rows: list[str]) -> str:
    """docs/families.md with these rows."""
    return _HEAD.format(transformers=transformers.__version__, peft=peft.__version__) + "".join(
        f"{row}\n" for row in rows
    )


def refused_row(family: families.Family, reason: str) -> str:
    """The row of a family that is refused."""
    short = reason.partition(";")[0]
    return f"| {family.model_type} | `{family.class_name}` | {short} | | | | |"


def supported_row(trained: Trained) -> str:
    """The row of a family that goes the whole way."""
    choices = {}
    for wanted in (*LAYOUTS, "auto"):
        trained.set_layout(wanted)
        choices[wanted] = adapter_io.layout_of(trained.model)
    read = ["yes" if choices[layout].problem is None else "no" for layout in LAYOUTS]
    cells = [
        trained.family.model_type,
        f"`{trained.family.class_name}`",
        "yes",
        ", ".join(trained.groups),
        *read,
        f"`{choices['auto'].layout}`",
    ]
    return f"| {' | '.join(cells)} |"
