"""The LLaMA-Factory seam: `use_kt: true` of a stock installation means our experts.

Four modules are adapted the moment they have been imported (see bootstrap.py); no file is copied or
edited:

- hparams.model_args: ModelArguments gains the keys kt_config, kt_cpu_activation, kt_layer_major.
- hparams.parser: use_kt runs are checked before anything is loaded; the check for KTransformers'
  forks is skipped.
- model.loader: load_model keeps the experts of a use_kt model in CPU memory.
- train.tuner: use_kt runs get our callbacks.

Without use_kt every path is the original's. An adapt_ function raises if its module is not as it is
known. Made for 0.9.5 and for 0.9.6.dev0. What they have for KTransformers' forks differs, so none
of it is reached: use_kt is off while LLaMA-Factory's own code loads a model (stages.as_stock). What
is left of the difference is in `_one_option_each` and in the methods of `adapt_model_args`.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import inspect
import logging
import os
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

from kt_core import hf
from kt_core.loading import quantized
from kt_sft import config as settings
from kt_sft.config import KTConfig
from kt_sft.cpu import dense_ops, loss, precision
from kt_sft.llamafactory import stages
from kt_sft.report import trainer_log
from kt_sft.run import layer_major

# Options of ours in ModelArguments.
_KEYS = ("kt_config", "kt_cpu_activation", "kt_layer_major")
# Parsers of runs that other libraries train, and the variables that choose them.
_OTHER_TRAINERS = {
    "_parse_train_mca_args": "USE_MCA=1",
    "_parse_train_mbridge_args": "USE_MEGATRON_BRIDGE=1",
}


def kt_config_of(model_args: Any) -> KTConfig:
    """The settings of a run; ModelArguments carries them, so a reference model that is copied from
    it has them too.
    """
    return settings.resolve(
        model_args.kt_config, model_args.kt_cpu_activation, model_args.kt_layer_major
    )


def adapt_model_args(module: Any) -> None:
    """Replaces ModelArguments by a subclass of the same name with our keys, and its fork-specific
    methods.
    """
    base = module.ModelArguments
    known = {field.name for field in dataclasses.fields(base)}
    if "use_kt" not in known:
        raise RuntimeError("this LLaMA-Factory has no use_kt; install 0.9.5")

    def apply_kt_config(self: Any, *args: Any, **kw: Any) -> None:
        """Nothing to pass on through the environment: load_model reads the settings from these
        arguments.
        """

    def check_values(self: Any) -> None:
        """0.9.6 refuses kt_cpu_activation without use_kt, also in a copy of arguments that is made
        while use_kt is hidden.
        """
        with stages.use_kt_is(self, self.use_kt or stages.kt_run_is_hidden()):
            base.__post_init__(self)

    keys = ", ".join(field.name for field in dataclasses.fields(KTConfig))
    help_of = {
        "kt_config": f"Settings of experts in CPU memory: {keys}.",
        "kt_cpu_activation": "Another name of kt_config.activation: retain or recompute.",
        "kt_layer_major": "Another name of kt_config.layer_major: true or false.",
    }
    types = {
        "kt_config": dict | str | None,
        "kt_cpu_activation": str | None,
        "kt_layer_major": bool | None,
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
            "__post_init__": check_values,
            "__doc__": base.__doc__,
        },
    )
    replaced.__module__, replaced.__qualname__ = base.__module__, base.__qualname__
    module.ModelArguments = replaced


def adapt_parser(module: Any) -> None:
    """Checks use_kt runs at the first moment their arguments exist."""
    _expect(module._check_extra_dependencies, ["model_args", "finetuning_args"])
    parse_train = module._parse_train_args
    check, get_train_args = module._check_extra_dependencies, module.get_train_args
    _one_option_each(module)

    @functools.wraps(parse_train)
    def parse_train_args(*args: Any, **kw: Any) -> Any:
        parsed = parse_train(*args, **kw)
        model_args, _, training_args, finetuning_args, _ = parsed
        if model_args.use_kt:
            _print_sentences()
            _show_log(training_args)
            check_run(model_args, training_args, finetuning_args)
            _choose_reentrant(model_args, module.read_args(args[0] if args else None))
            if kt_config_of(model_args).layer_major and training_args.do_train:
                layer_major.check(training_args, finetuning_args)
                layer_major.apply(training_args, finetuning_args.stage)
            precision.choose(model_args, training_args, finetuning_args)
        else:
            _check_unused(model_args)
            _leave_cpu_fsdp()
        return parsed

    def checked_load(parse: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(parse)
        def parse_args(*args: Any, **kw: Any) -> Any:
            parsed = parse(*args, **kw)
            model_args = parsed[0]
            if model_args.use_kt:
                stages.check_load(model_args)
                _check_load(model_args, kt_config_of(model_args))
            else:
                _check_unused(model_args)
            return parsed

        return parse_args

    @functools.wraps(check)
    def check_extra_dependencies(model_args: Any, *args: Any, **kw: Any) -> None:
        # skips only the search for the kt-kernel and *-kt distributions
        with stages.use_kt_is(model_args, False):
            check(model_args, *args, **kw)

    @functools.wraps(get_train_args)
    def checked_train_args(*args: Any, **kw: Any) -> Any:
        parsed = get_train_args(*args, **kw)
        if parsed[0].use_kt:
            _check_resume(parsed[0], parsed[2])
        return parsed

    def without_kt(parse: Callable[..., Any], variable: str) -> Callable[..., Any]:
        @functools.wraps(parse)
        def parse_args(*args: Any, **kw: Any) -> Any:
            parsed = parse(*args, **kw)
            if parsed[0].use_kt:
                raise ValueError(
                    f"{variable} trains with a library that knows no experts in CPU memory, so "
                    "use_kt=True would have no effect; unset that variable or remove use_kt"
                )
            _check_unused(parsed[0])
            return parsed

        return parse_args

    for name, variable in _OTHER_TRAINERS.items():
        if name in vars(module):
            setattr(module, name, without_kt(vars(module)[name], variable))
    module._parse_train_args = parse_train_args
    module._parse_infer_args = checked_load(module._parse_infer_args)
    module._parse_eval_args = checked_load(module._parse_eval_args)
    module._check_extra_dependencies = check_extra_dependencies
    module.get_train_args = checked_train_args


def _one_option_each(module: Any) -> None:
    """A parser takes every option once. 0.9.6 has a dataclass of its own with the option kt_config
    in its lists of arguments for inference and evaluation, KTransformers' transformers has one in
    TrainingArguments: beside our ModelArguments the field stays, but is no option any more.
    """
    ours = {name for name in _KEYS if name in {f.name for f in _options(module.ModelArguments)}}
    replaced: dict[Any, Any] = {}
    for kinds in vars(module).values():
        if not isinstance(kinds, list) or module.ModelArguments not in kinds:
            continue
        for at, kind in enumerate(kinds):
            twice = [f for f in _options(kind) if f.name in ours]
            if kind is not module.ModelArguments and twice:
                if kind not in replaced:
                    replaced[kind] = _without_options(kind, twice)
                kinds[at] = replaced[kind]


def _options(kind: Any) -> list[dataclasses.Field[Any]]:
    return [field for field in dataclasses.fields(kind) if field.init]


def _without_options(kind: Any, fields: list[dataclasses.Field[Any]]) -> Any:
    """The dataclass `kind`, under its own name, where `fields` are None."""
    silent = [(f.name, f.type, dataclasses.field(default=None, init=False)) for f in fields]
    replaced = dataclasses.make_dataclass(kind.__name__, silent, bases=(kind,))
    replaced.__module__, replaced.__qualname__ = kind.__module__, kind.__qualname__
    setattr(sys.modules[kind.__module__], kind.__name__, replaced)  # where pickle looks
    return replaced


def adapt_loader(module: Any) -> None:
    """load_model of a use_kt run keeps the experts in CPU memory."""
    original = module.load_model
    _expect(original, ["tokenizer", "model_args", "finetuning_args", "is_trainable"])
    module.init_adapter = _with_kt_adapter(module.init_adapter)

    @functools.wraps(original)
    def load_model(
        tokenizer: Any,
        model_args: Any,
        finetuning_args: Any,
        is_trainable: bool = False,
        *args: Any,
        **kw: Any,
    ) -> Any:
        if not model_args.use_kt and not stages.kt_run_is_hidden():
            return original(tokenizer, model_args, finetuning_args, is_trainable, *args, **kw)
        from transformers import PreTrainedModel

        from kt_sft import plugin

        config = kt_config_of(model_args)
        _check_adapters(model_args)
        hub = {
            "cache_dir": model_args.cache_dir,
            "revision": model_args.model_revision,
            "token": model_args.hf_hub_token,
        }
        hf.refuse_quantized(model_args.model_name_or_path, hub)
        if model_args.device_map == "auto":  # computed as if the experts were on the devices
            model_args.device_map = {"": _device()}
        # `all` picks by class and leaf name, and in some families the router is a Linear
        router = finetuning_args.lora_target != ["all"]
        again = not is_trainable  # a reference or reward model, beside the one that is trained
        with plugin.loading(config, router=router, again=again), stages.as_stock(model_args):
            model = original(tokenizer, model_args, finetuning_args, is_trainable, *args, **kw)
        if config.dense_dtype == "fp32":
            precision.widen(model)
            dense_ops.use(model)
        base = next(m for m in model.modules() if isinstance(m, PreTrainedModel))
        plugin.prepare(base, config)
        loss.in_blocks(base)
        if is_trainable:
            reentrant = config.activation == "recompute" and model_args.use_reentrant_gc
            stages.check_model(model, model_args, finetuning_args, reentrant=reentrant)
        return model

    module.load_model = load_model


def _with_kt_adapter(init_adapter: Callable[..., Any]) -> Callable[..., Any]:
    """The adapter of a model that is not trained stays beside the weights, into which stock merges
    it; it is in fp32 then as it is in training, so a frozen reference equals its policy.
    """
    _expect(init_adapter, ["config", "model", "model_args", "finetuning_args", "is_trainable"])

    @functools.wraps(init_adapter)
    def with_kt_adapter(
        config: Any,
        model: Any,
        model_args: Any,
        finetuning_args: Any,
        is_trainable: bool,
        *args: Any,
        **kw: Any,
    ) -> Any:
        adapters = model_args.adapter_name_or_path
        if is_trainable or not adapters or not stages.kt_run_is_hidden():
            return init_adapter(
                config, model, model_args, finetuning_args, is_trainable, *args, **kw
            )
        from peft import PeftModel

        return PeftModel.from_pretrained(
            model,
            adapters[-1],  # the only one: _check_adapters
            subfolder=model_args.adapter_folder,
            offload_folder=model_args.offload_folder,
            cache_dir=model_args.cache_dir,
            revision=model_args.model_revision,
            token=model_args.hf_hub_token,
        )

    return with_kt_adapter


def adapt_tuner(module: Any) -> None:
    """use_kt runs get our callbacks, and their numbers a place in trainer_log.jsonl."""
    module.LogCallback = trainer_log.with_our_keys(module.LogCallback)
    module.run_sft = stages.without_asking(module.run_sft)
    module.export_model = _with_kt_export(module)
    for stage in stages.STAGES:
        name = f"run_{stage}"
        setattr(module, name, _with_callback(vars(module)[name]))


def _with_kt_export(module: Any) -> Callable[..., None]:
    original = module.export_model

    @functools.wraps(original)
    def export_model(args: dict[str, Any] | None = None) -> None:
        model_args, data_args, finetuning_args, _ = module.get_infer_args(args)
        if not model_args.use_kt:
            return original(args)
        from kt_sft.llamafactory.export import export

        _print_sentences()
        export(model_args, data_args, finetuning_args)

    return export_model


def _with_callback(run: Callable[..., Any]) -> Callable[..., Any]:
    signature = inspect.signature(run)
    if missing := {"data_args", "finetuning_args", "callbacks"} - set(signature.parameters):
        raise RuntimeError(
            f"{run.__name__} of this LLaMA-Factory takes no {min(missing)}; install 0.9.5"
        )

    @functools.wraps(run)
    def with_callback(model_args: Any, *args: Any, **kw: Any) -> Any:
        if model_args.use_kt:
            from kt_sft.ranks.peer_watch import PeerWatch, naming_lost_ranks
            from kt_sft.ranks.row_gather import RowGather
            from kt_sft.report.stats import KTCallback
            from kt_sft.report.step_log import StepLog
            from kt_sft.run.budget import Budget
            from kt_sft.run.interruption import SafeStop

            config = kt_config_of(model_args)
            bound = signature.bind(model_args, *args, **kw)
            given = bound.arguments
            budget = Budget(config, given["data_args"].cutoff_len, given["finetuning_args"])
            ours = [KTCallback(), StepLog(), budget, PeerWatch(), RowGather(config), SafeStop()]
            given["callbacks"] = [*(given.get("callbacks") or ()), *ours]
            with naming_lost_ranks():
                return run(*bound.args, **bound.kwargs)
        return run(model_args, *args, **kw)

    return with_callback


# ------------------------------------------------------------------------------------------ checks


def check_run(model_args: Any, training_args: Any, finetuning_args: Any) -> None:
    """Raises ValueError, in one sentence, for a use_kt training run that would ignore a setting or
    fail later.
    """
    config = kt_config_of(model_args)
    if finetuning_args.finetuning_type != "lora":
        raise ValueError(
            "use_kt keeps the experts frozen, so "
            f"finetuning_type={finetuning_args.finetuning_type} is not possible; "
            "set finetuning_type: lora"
        )
    stages.check(model_args, finetuning_args, training_args)
    _check_adapters(model_args)
    if finetuning_args.stage == "rm" and uses_fsdp(training_args):
        raise ValueError(
            "stage=rm cannot run under FSDP: trl's value head hides the other weights from "
            "accelerate; launch it as DDP, or with DeepSpeed ZeRO-2"
        )
    if config.lora_rank and model_args.adapter_name_or_path is not None:
        raise ValueError(
            f"kt_config: lora_rank={dict(config.lora_rank)} has no effect on the adapter that "
            f"adapter_name_or_path={model_args.adapter_name_or_path[-1]} continues, whose ranks "
            "are given; remove one of them"
        )
    if finetuning_args.create_new_adapter and model_args.adapter_name_or_path is not None:
        raise ValueError(
            "create_new_adapter=True needs the old adapter merged into the packed experts, which "
            "use_kt cannot do; "
            "merge it first with llamafactory-cli export, or continue it without create_new_adapter"
        )
    if config.activation == "retain" and model_args.use_unsloth_gc:
        raise ValueError(
            "use_unsloth_gc=True cannot keep expert activations (activation=retain); remove it or "
            "set kt_config.activation: recompute"
        )
    if model_args.use_unsloth_gc and not torch.cuda.is_available():
        raise ValueError(
            "use_unsloth_gc=True needs a CUDA device, which this machine does not have; remove it"
        )
    if config.check_finite and training_args.fp16:
        raise ValueError(
            "kt_config.check_finite=true would end a run with fp16=True at the first gradients "
            "that its loss scaler makes overflow, which it does on purpose; set bf16: true instead "
            "of fp16, or remove check_finite"
        )
    from transformers.integrations import is_deepspeed_zero3_enabled

    if is_deepspeed_zero3_enabled():
        raise ValueError(
            "use_kt cannot run under DeepSpeed ZeRO-3, which partitions the experts before they "
            "can be packed; use ZeRO-2, or FSDP2 with accelerate_configs/fsdp2.yaml"
        )
    if uses_fsdp(training_args):
        _check_fsdp(training_args)
    _check_load(model_args, config)
    # Several GPUs in one process would be wrapped in nn.DataParallel; the experts serve one replica
    # per process.
    if training_args.n_gpu > 1:
        training_args._n_gpu = 1


def _choose_reentrant(model_args: Any, given: dict[str, Any] | list[str]) -> None:
    """use_reentrant_gc is True by default, but reentrant checkpoints lose the gradient of a router
    loss and cannot `retain`: they are for those who ask for them. `given`: the user's own
    arguments, a mapping or a command line.
    """
    words = given if isinstance(given, dict) else [word.lstrip("-").split("=")[0] for word in given]
    retains = kt_config_of(model_args).activation == "retain"
    if "use_reentrant_gc" not in words:
        if not retains:  # retain_experts switches it off, and says so
            model_args.use_reentrant_gc = False
        return
    checkpoints = not model_args.disable_gradient_checkpointing
    if model_args.use_reentrant_gc and checkpoints and retains:
        raise ValueError(
            "use_reentrant_gc=True cannot keep expert activations (activation=retain); remove it "
            "or set kt_config.activation: recompute"
        )


def _show_log(training_args: Any) -> None:
    """Lines of the "kt" logger appear once per machine, unless logging was set up by somebody."""
    log = logging.getLogger("kt")
    if log.handlers:
        return
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(message)s"))
    log.addHandler(handler)
    log.propagate = False
    if training_args.local_process_index != 0:
        log.setLevel(logging.ERROR)
    elif log.level == logging.NOTSET:  # KT_LOG may have set it
        log.setLevel(logging.INFO)


class _Sentences:
    """An excepthook: an error that this package raised for its user (bad input, not a defect) and
    that nobody caught is printed as its one sentence; KT_LOG=DEBUG brings the traceback back.
    """

    def __init__(self, previous: Callable[..., Any]) -> None:
        self._previous = previous

    def __call__(
        self, kind: type[BaseException], error: BaseException, trace: TracebackType | None
    ) -> None:
        frames = [frame for frame, _ in traceback.walk_tb(trace)]
        package = frames[-1].f_globals["__name__"].partition(".")[0] if frames else ""
        told = isinstance(error, ValueError | OSError | MemoryError)
        debugging = logging.getLogger("kt").level == logging.DEBUG
        if told and package in ("kt_core", "kt_sft") and not debugging:
            print(f"error: {error}", file=sys.stderr, flush=True)
        else:
            self._previous(kind, error, trace)


def _print_sentences() -> None:
    if not isinstance(sys.excepthook, _Sentences):
        sys.excepthook = _Sentences(sys.excepthook)
    importlib.import_module("kt_core.runtime")  # reads KT_LOG


def uses_fsdp(training_args: Any) -> bool:
    """Whether the run is configured for FSDP, in the YAML or by `accelerate launch` (which tells so
    in its variable).
    """
    by_launcher = os.environ.get("ACCELERATE_USE_FSDP", "false").lower() == "true"
    return by_launcher or bool(training_args.fsdp)


def _check_fsdp(training_args: Any) -> None:
    # `fsdp` of the YAML makes transformers read fsdp_config alone, whatever the launcher has set
    if training_args.fsdp:
        version = training_args.fsdp_config.get("version", 1)
        fix = "fsdp_config: {fsdp_version: 2}, or remove fsdp and launch with"
    else:
        version, fix = os.environ.get("FSDP_VERSION", "1"), "fsdp_version: 2, as in"
    if int(version) != 2:
        raise ValueError(
            f"use_kt cannot run under FSDP {version}, which flattens frozen and trained weights "
            f"together; set {fix} accelerate_configs/fsdp2.yaml or fsdp2_cpu.yaml"
        )
    if training_args.world_size == 1 and not torch.accelerator.is_available():
        raise ValueError(
            "FSDP is configured, but this run has one process on the CPU and would go without; "
            "launch more with accelerate_configs/fsdp2_cpu.yaml, or this one with cpu.yaml"
        )


def _leave_cpu_fsdp() -> None:
    from kt_sft.ranks import cpu_fsdp

    cpu_fsdp.want(False)


def _check_adapters(model_args: Any) -> None:
    names = model_args.adapter_name_or_path or []
    if len(names) > 1:
        raise ValueError(
            f"adapter_name_or_path={','.join(names)} names {len(names)} adapters, of which use_kt "
            "loads one; merge the others into the base model first, with llamafactory-cli export"
        )


def _check_load(model_args: Any, config: KTConfig) -> None:
    if model_args.infer_backend != "huggingface":
        raise ValueError(
            f"infer_backend={model_args.infer_backend} does not know experts in CPU memory; set "
            "infer_backend: huggingface"
        )
    from kt_sft import plugin

    plugin.install()
    plugin.load_settings(config)
    if Path(model_args.model_name_or_path).is_dir():  # else when it has been downloaded
        quantized.refuse_directory(model_args.model_name_or_path)


def _check_unused(model_args: Any) -> None:
    for key in _KEYS:
        value = vars(model_args)[key]
        if value is not None:
            raise ValueError(
                f"{key}={value!r} has no effect without use_kt; set use_kt: true or remove it"
            )


def _check_resume(model_args: Any, training_args: Any) -> None:
    import accelerate
    from packaging.version import Version
    from transformers.trainer_utils import get_last_checkpoint

    from kt_sft.run import interruption

    checkpoint = training_args.resume_from_checkpoint
    if not checkpoint:
        return
    if checkpoint is True:  # the last of output_dir
        checkpoint = get_last_checkpoint(training_args.output_dir)
    if checkpoint is None:  # the Trainer refuses that
        return
    interruption.check_resumable(checkpoint, training_args.world_size)
    if not uses_fsdp(training_args):
        return
    if Version(accelerate.__version__) < Version("1.15") and not model_args.adapter_name_or_path:
        raise ValueError(
            f"accelerate {accelerate.__version__} restores only part of a LoRA adapter under FSDP; "
            f"set adapter_name_or_path: {checkpoint} beside resume_from_checkpoint, or install "
            "accelerate >= 1.15"
        )


def _device() -> str:
    return (
        str(torch.accelerator.current_accelerator()) if torch.accelerator.is_available() else "cpu"
    )


def _expect(function: Callable[..., Any], names: list[str]) -> None:
    found = list(inspect.signature(function).parameters)[: len(names)]
    if found != names:
        raise RuntimeError(
            f"{function.__module__}.{function.__name__} takes {found}, not {names}; this "
            "LLaMA-Factory is not supported, install 0.9.5"
        )
