"""Our keys in LLaMA-Factory's ModelArguments, and the settings that a run's arguments carry.

0.9.5 and 0.9.6.dev0 have other keys for KTransformers' forks; what is left of their difference is
in `with_our_keys` and `one_option_each`.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from kt_sft import config
from kt_sft.config import KTConfig

KEYS = ("kt_config", "kt_cpu_activation")
"""Options of ours in ModelArguments."""


def settings_of(model_args: Any) -> KTConfig:
    """The settings of a use_kt run. The first call resolves what the user gave and leaves the
    frozen result in `kt_config`, so every copy of the arguments, such as a reference model's, has
    it too. Raises ValueError for what the user cannot have.
    """
    if not isinstance(model_args.kt_config, KTConfig):
        model_args.kt_config = config.resolve(model_args.kt_config, model_args.kt_cpu_activation)
        model_args.kt_cpu_activation = None  # said in kt_config now
    resolved: KTConfig = model_args.kt_config
    return resolved


def is_kt_run(model_args: Any) -> bool:
    """Whether these are the arguments of a use_kt run, also inside `as_stock`."""
    return model_args.use_kt or isinstance(model_args.kt_config, KTConfig)


@contextmanager
def as_stock(model_args: Any) -> Iterator[None]:
    """Inside it, LLaMA-Factory's code takes the paths of a run without use_kt; ours knows the run
    by its settings.
    """
    before = model_args.use_kt
    if before:
        settings_of(model_args)
    model_args.use_kt = False
    try:
        yield
    finally:
        model_args.use_kt = before


def with_our_keys(base: Any) -> Any:
    """A subclass of ModelArguments of the same name with our keys, and without its fork-specific
    methods.
    """
    known = {field.name for field in dataclasses.fields(base)}
    if "use_kt" not in known:
        raise RuntimeError("this LLaMA-Factory has no use_kt; install 0.9.5")

    def apply_kt_config(self: Any, *args: Any, **kw: Any) -> None:
        """Nothing to pass on through the environment: load_model reads the settings from these
        arguments.
        """

    keys = ", ".join(field.name for field in dataclasses.fields(KTConfig))
    help_of = {
        "kt_config": f"Settings of experts in CPU memory: {keys}.",
        # a key of 0.9.6's own ModelArguments, so YAML files of stock LLaMA-Factory may have it
        "kt_cpu_activation": "Another name of kt_config.activation: retain or recompute.",
    }
    types = {
        "kt_config": dict | str | None,  # until it is resolved, see settings_of
        "kt_cpu_activation": str | None,
    }
    new = [
        (name, types[name], dataclasses.field(default=None, metadata={"help": text}))
        for name, text in help_of.items()
    ]
    replaced = dataclasses.make_dataclass(
        base.__name__,
        new,
        bases=(base,),
        namespace={
            "apply_kt_config": apply_kt_config,
            "configure_kt_loading": apply_kt_config,
            "__doc__": base.__doc__,
        },
    )
    replaced.__module__, replaced.__qualname__ = base.__module__, base.__qualname__
    return replaced


def one_option_each(module: Any, replace: Callable[[Any, str, Any], None]) -> None:
    """A parser takes every option once. 0.9.6 has a dataclass of its own with the option kt_config
    in its lists of arguments for inference and evaluation, KTransformers' transformers has one in
    TrainingArguments: beside our ModelArguments the field stays, but is no option any more.
    """
    ours = {name for name in KEYS if name in {f.name for f in _options(module.ModelArguments)}}
    replaced: dict[Any, Any] = {}
    for kinds in vars(module).values():
        if not isinstance(kinds, list) or module.ModelArguments not in kinds:
            continue
        for at, kind in enumerate(kinds):
            twice = [f for f in _options(kind) if f.name in ours]
            if kind is not module.ModelArguments and twice:
                if kind not in replaced:
                    replaced[kind] = _without_options(kind, twice)
                    # where pickle looks; restoring it there restores the lists
                    replace(sys.modules[kind.__module__], kind.__name__, replaced[kind])
                kinds[at] = replaced[kind]


def _options(kind: Any) -> list[dataclasses.Field[Any]]:
    return [field for field in dataclasses.fields(kind) if field.init]


def _without_options(kind: Any, fields: list[dataclasses.Field[Any]]) -> Any:
    """The dataclass `kind`, under its own name, where `fields` are None."""
    silent = [(f.name, f.type, dataclasses.field(default=None, init=False)) for f in fields]
    replaced = dataclasses.make_dataclass(kind.__name__, silent, bases=(kind,))
    replaced.__module__, replaced.__qualname__ = kind.__module__, kind.__qualname__
    return replaced
