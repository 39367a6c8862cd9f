"""What stock peft makes of an adapter: it is asked, by loading it.

A stock twin of the model is built without weights, the installed peft loads a directory with the
adapter's own adapter_config.json into it, and the factors that arrive there are compared with those
that were written. So neither families nor versions are listed here. Factors are random and of one
layer of each kind, which keeps it fast for large models; names, shapes, ranks and alphas are the
adapter's.
"""

from __future__ import annotations

import copy
import dataclasses
import json
import logging
import math
import re
import tempfile
import warnings
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import peft
import safetensors.torch
import torch
from peft import PeftModel
from peft.tuners.lora.layer import LoraLayer, ParamWrapper
from torch import nn

from kt_core.adapters.factors import Factors
from kt_core.adapters.fused_layout import flattened, fuse
from kt_core.adapters.peft_config import adapter_config, adapter_tensors
from kt_core.adapters.peft_format import CONFIG_FILE, WEIGHTS_FILE, AdapterData, completed

log = logging.getLogger("kt")

LAYOUTS = ("per_expert", "fused")  # the first that is read in full is written
# What is trained beside the factors of Linears and experts, and how factors begin, does not concern
# the ones that are loaded.
_BESIDE = {
    "modules_to_save": None,
    "init_lora_weights": True,
    "trainable_token_indices": None,
    "use_dora": False,
    "lora_bias": False,
}
_answers: dict[str, str | None] = {}


@dataclasses.dataclass(frozen=True)
class Choice:
    """A layout, and what stock peft does not read of it; None if it reads everything."""

    layout: str
    problem: str | None


def choose(
    base: nn.Module,
    data: AdapterData,
    names: Mapping[str, str],
    linear_paths: Sequence[str],
    other_paths: Sequence[str],
    wanted: str,
) -> Choice:
    """The layout to write `data` in: the one `wanted`, or for auto the first that the installed
    peft reads in full on the stock model, per_expert where it reads none.

    Raises ValueError for what no layout can express.
    """
    choices = []
    for layout in LAYOUTS if wanted == "auto" else (wanted,):
        config = adapter_config(data, names, linear_paths, layout, other_paths)
        choices.append(Choice(layout, _problem(base, data, names, config, layout)))
        if choices[-1].problem is None:
            return choices[-1]
    return choices[0]


def say(choice: Choice, model: nn.Module, level: int) -> None:
    """Logs, at `level`, that stock peft does not read the layout of `choice` in full, if so."""
    if choice.problem is None:
        return
    log.log(
        level,
        "kt: the adapter of this run can be used here only: stock peft %s does not apply it in "
        "full to %s (%s layout: %s); kt_core.serve serves it, `llamafactory-cli export` with "
        "use_kt merges it into a checkpoint that everybody reads",
        peft.__version__,
        type(model).__name__,
        choice.layout,
        choice.problem,
    )


def _problem(
    base: nn.Module,
    data: AdapterData,
    names: Mapping[str, str],
    config: Mapping[str, Any],
    layout: str,
) -> str | None:
    sample = _sample(data)
    shapes = {p: {n: list(f.b.shape) for n, f in m.items()} for p, m in sample.experts.items()}
    model_config = vars(base)["config"]
    key = json.dumps(
        [type(base).__name__, model_config.to_json_string(), config, shapes, sorted(data.dense)],
        sort_keys=True,
        default=str,
    )
    if key not in _answers:
        _answers[key] = _load(_twin(base), data, sample, names, config, layout)
    return _answers[key]


def _twin(base: nn.Module) -> nn.Module:
    """The stock model of the same class and configuration; its weights take no memory."""
    config = copy.deepcopy(vars(base)["config"])
    config._attn_implementation = "eager"  # whatever is installed
    with torch.device("meta"):
        twin: nn.Module = type(base)(config)
    for module in twin.modules():
        for name, p in list(module.named_parameters(recurse=False)):
            # One zero for all elements, on the CPU: peft moves factors to where a weight is.
            zero = torch.zeros((), dtype=p.dtype).expand(p.shape)
            module.register_parameter(name, nn.Parameter(zero, requires_grad=False))
    return twin


def _kind(path: str) -> str:
    return re.sub(r"\d+", "*", path)


def _first_of_kind(paths: Iterable[str]) -> list[str]:
    kinds: dict[str, str] = {}
    for path in paths:
        kinds.setdefault(_kind(path), path)
    return list(kinds.values())


def _sample(data: AdapterData) -> AdapterData:
    """One module of each kind, with random factors; shapes and scales are those of `data`."""
    generator = torch.Generator().manual_seed(0)

    def drawn(f: Factors) -> Factors:
        a, b = (torch.randn(t.shape, generator=generator) for t in (f.a, f.b))
        return dataclasses.replace(f, a=a, b=b)

    experts = {
        path: {p: drawn(f) for p, f in data.experts[path].items()}
        for path in _first_of_kind(data.experts)
    }
    dense = {path: drawn(data.dense[path]) for path in _first_of_kind(data.dense)}
    none: dict[str, Any] = {"extra": {}, "embeddings": {}, "variant": {}}
    return dataclasses.replace(data, experts=experts, dense=dense, **none)


def _load(
    twin: nn.Module,
    data: AdapterData,
    sample: AdapterData,
    names: Mapping[str, str],
    config: Mapping[str, Any],
    layout: str,
) -> str | None:
    """What goes wrong when peft loads `sample` with `config` on `twin`; None if nothing."""
    with tempfile.TemporaryDirectory(prefix="kt-stock-") as name:
        directory = Path(name)
        tensors = adapter_tensors(sample, names, layout)
        safetensors.torch.save_file(tensors, directory / WEIGHTS_FILE, metadata={"format": "pt"})
        own = dict(config) | _BESIDE
        (directory / CONFIG_FILE).write_text(json.dumps(own))
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of the layers that the sample leaves out
                tuned = PeftModel.from_pretrained(
                    twin, directory, torch_device="cpu", low_cpu_mem_usage=True
                )
        except Exception as error:  # whatever peft of whatever version raises
            return f"loading raises {type(error).__name__}: {_first_sentence(error)}"
    found = _applied(tuned.get_base_model())
    for path, module in sample.experts.items():
        parts = fuse(completed(module) if layout == "per_expert" else module)
        for parameter, factors in parts.items():
            if lost := _difference(found.get((path, parameter)), flattened(factors)):
                return f"{path}.{parameter} {lost}"
    for path, factors in sample.dense.items():
        if lost := _difference(found.get((path, None), found.get((path, "weight"))), factors):
            return f"{path} {lost}"
    beyond = sorted({path for path, _ in found} - {*data.experts, *data.dense, *data.embeddings})
    return f"{beyond[0]} is adapted too" if beyond else None


def _applied(base: nn.Module) -> dict[tuple[str, str | None], Factors]:
    """The factors that peft has put in place, by module path and name of the parameter (None for
    those of a module).
    """
    found = {}
    for name, module in base.named_modules():
        if not isinstance(module, LoraLayer):
            continue
        parameter = module.parameter_name if isinstance(module, ParamWrapper) else None
        for adapter, a in module.lora_A.items():
            factors = Factors(a.weight, module.lora_B[adapter].weight, module.scaling[adapter])
            found[name.replace(".base_layer", ""), parameter] = factors
    return found


def _difference(found: Factors | None, wanted: Factors) -> str | None:
    if found is None or found.a.is_meta or found.b.is_meta:
        return "gets no factors"
    shapes = tuple(found.a.shape), tuple(found.b.shape)
    if shapes != (tuple(wanted.a.shape), tuple(wanted.b.shape)):
        return f"gets factors of other shapes, {shapes[0]} and {shapes[1]}"
    if not (torch.equal(found.a.cpu(), wanted.a) and torch.equal(found.b.cpu(), wanted.b)):
        return "gets the factors in another order"
    if not math.isclose(found.scaling, wanted.scaling, rel_tol=1e-6):
        return f"is scaled by {found.scaling:g} instead of {wanted.scaling:g}"
    return None


def _first_sentence(error: Exception) -> str:
    return str(error).strip().partition("\n")[0].partition(". ")[0][:300]
