"""The LLaMA-Factory seam: `use_kt: true` of a stock installation means our experts.

Four modules are adapted the moment they have been imported (see bootstrap.py); no file is copied or
edited:

- hparams.model_args: ModelArguments gains the keys kt_config and kt_cpu_activation.
- hparams.parser: use_kt runs are checked before anything is loaded; the check for KTransformers'
  forks is skipped.
- model.loader: load_model keeps the experts of a use_kt model in CPU memory.
- train.tuner: use_kt runs get our callbacks.

Without use_kt every path is the original's. An adapt_ function raises if its module is not as it is
known. Made for 0.9.5 and for 0.9.6.dev0. What they have for KTransformers' forks differs, so none
of it is reached: use_kt is off while LLaMA-Factory's own code loads a model (arguments.as_stock).
What is left of the difference is in arguments.py.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch

from kt_core import hf, patches
from kt_sft import seams, session
from kt_sft.cpu import dense_ops, loss, precision
from kt_sft.llamafactory import arguments, checks, messages, stages
from kt_sft.llamafactory.arguments import as_stock, is_kt_run, settings_of
from kt_sft.report import trainer_log
from kt_sft.run import layer_major

_replace = functools.partial(patches.replace, by=__name__, why="`use_kt` of a stock installation")

# Parsers of runs that other libraries train, and the variables that choose them.
_OTHER_TRAINERS = {
    "_parse_train_mca_args": "USE_MCA=1",
    "_parse_train_mbridge_args": "USE_MEGATRON_BRIDGE=1",
}


def adapt_model_args(module: Any) -> None:
    """ModelArguments gains our keys."""
    _replace(module, "ModelArguments", arguments.with_our_keys(module.ModelArguments))


def adapt_parser(module: Any) -> None:
    """Checks use_kt runs at the first moment their arguments exist."""
    seams.expect(module._check_extra_dependencies, "model_args finetuning_args")
    parse_train = module._parse_train_args
    check, get_train_args = module._check_extra_dependencies, module.get_train_args
    arguments.one_option_each(module, _replace)

    @functools.wraps(parse_train)
    def parse_train_args(*args: Any, **kw: Any) -> Any:
        parsed = parse_train(*args, **kw)
        model_args, _, training_args, finetuning_args, _ = parsed
        if model_args.use_kt:
            messages.print_sentences()
            messages.show_log(training_args)
            checks.check_run(model_args, training_args, finetuning_args)
            checks.choose_reentrant(model_args, module.read_args(args[0] if args else None))
            config = settings_of(model_args)
            if config.layer_major and training_args.do_train:
                layer_major.check(training_args, finetuning_args)
                layer_major.apply(training_args, finetuning_args.stage)
            model_args.kt_config = precision.choose(
                config, model_args, training_args, finetuning_args
            )
        else:
            checks.check_unused(model_args)
            _leave_cpu_fsdp()
        return parsed

    def checked_load(parse: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(parse)
        def parse_args(*args: Any, **kw: Any) -> Any:
            parsed = parse(*args, **kw)
            model_args = parsed[0]
            if model_args.use_kt:
                stages.check_load(model_args)
                checks.check_load(model_args)
            else:
                checks.check_unused(model_args)
            return parsed

        return parse_args

    @functools.wraps(check)
    def check_extra_dependencies(model_args: Any, *args: Any, **kw: Any) -> None:
        # skips only the search for the kt-kernel and *-kt distributions
        with as_stock(model_args):
            check(model_args, *args, **kw)

    @functools.wraps(get_train_args)
    def checked_train_args(*args: Any, **kw: Any) -> Any:
        parsed = get_train_args(*args, **kw)
        if parsed[0].use_kt:
            checks.check_resume(parsed[0], parsed[2])
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
            checks.check_unused(parsed[0])
            return parsed

        return parse_args

    for name, variable in _OTHER_TRAINERS.items():
        if name in vars(module):
            _replace(module, name, without_kt(vars(module)[name], variable))
    _replace(module, "_parse_train_args", parse_train_args)
    _replace(module, "_parse_infer_args", checked_load(module._parse_infer_args))
    _replace(module, "_parse_eval_args", checked_load(module._parse_eval_args))
    _replace(module, "_check_extra_dependencies", check_extra_dependencies)
    _replace(module, "get_train_args", checked_train_args)


def adapt_loader(module: Any) -> None:
    """load_model of a use_kt run keeps the experts in CPU memory."""
    original = module.load_model
    seams.expect(original, "tokenizer model_args finetuning_args is_trainable")
    _replace(module, "init_adapter", _with_kt_adapter(module.init_adapter))

    @functools.wraps(original)
    def load_model(
        tokenizer: Any,
        model_args: Any,
        finetuning_args: Any,
        is_trainable: bool = False,
        *args: Any,
        **kw: Any,
    ) -> Any:
        if not is_kt_run(model_args):
            return original(tokenizer, model_args, finetuning_args, is_trainable, *args, **kw)
        from transformers import PreTrainedModel

        config = settings_of(model_args)
        checks.check_adapters(model_args)
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
        with session.loading(config, router=router, again=again), as_stock(model_args):
            model = original(tokenizer, model_args, finetuning_args, is_trainable, *args, **kw)
        if config.dense_dtype == "fp32":
            precision.widen(model)
            dense_ops.use(model)
        base = next(m for m in model.modules() if isinstance(m, PreTrainedModel))
        session.prepare(base)
        loss.in_blocks(base)
        if is_trainable:
            reentrant = config.activation == "recompute" and model_args.use_reentrant_gc
            stages.check_model(model, model_args, finetuning_args, reentrant=reentrant)
        return model

    _replace(module, "load_model", load_model)


def _with_kt_adapter(init_adapter: Callable[..., Any]) -> Callable[..., Any]:
    """The adapter of a model that is not trained stays beside the weights, into which stock merges
    it; it is in fp32 then as it is in training, so a frozen reference equals its policy.
    """
    seams.expect(init_adapter, "config model model_args finetuning_args is_trainable")

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
        if is_trainable or not adapters or not is_kt_run(model_args):
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
    _replace(module, "LogCallback", trainer_log.with_our_keys(module.LogCallback))
    _replace(module, "export_model", _with_kt_export(module))
    for stage in stages.STAGES:
        name = f"run_{stage}"
        run = vars(module)[name]
        _replace(
            module, name, _with_callback(stages.without_asking(run) if name == "run_sft" else run)
        )


def _with_kt_export(module: Any) -> Callable[..., None]:
    original = module.export_model

    @functools.wraps(original)
    def export_model(args: dict[str, Any] | None = None) -> None:
        model_args, data_args, finetuning_args, _ = module.get_infer_args(args)
        if not model_args.use_kt:
            return original(args)
        from kt_sft.llamafactory.export import export

        messages.print_sentences()
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

            config = settings_of(model_args)
            bound = signature.bind(model_args, *args, **kw)
            given = bound.arguments
            budget = Budget(config, given["data_args"].cutoff_len, given["finetuning_args"])
            ours = [KTCallback(), StepLog(), budget, PeerWatch(), RowGather(config), SafeStop()]
            given["callbacks"] = [*(given.get("callbacks") or ()), *ours]
            with naming_lost_ranks():
                return run(*bound.args, **bound.kwargs)
        return run(model_args, *args, **kw)

    return with_callback


def _leave_cpu_fsdp() -> None:
    from kt_sft.ranks import cpu_fsdp

    cpu_fsdp.want(False)


def _device() -> str:
    return (
        str(torch.accelerator.current_accelerator()) if torch.accelerator.is_available() else "cpu"
    )
