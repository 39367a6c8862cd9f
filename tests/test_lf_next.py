"""What LLaMA-Factory's development version (0.9.6.dev0) does differently, on modules that are made
like its own: CI has only what the package index has. `scripts/test_versions.py --llamafactory DIR`
runs the rest of the tests with a checkout.
"""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any

import pytest
from transformers import HfArgumentParser

from kt_sft import llamafactory as seam


@dataclasses.dataclass
class TheirModelArguments:
    use_kt: bool = False
    kt_cpu_activation: str | None = None

    def get_kt_activation_policy(self) -> dict[str, str]:
        return {"cpu": "recompute", "gpu": "recompute"}


@dataclasses.dataclass
class DataArguments:
    template: str | None = None


@dataclasses.dataclass
class RuntimeArguments:
    kt_config: dict[str, Any] | None = dataclasses.field(
        default=None, metadata={"help": "Advanced settings during inference."}
    )

    def kept(self) -> str:
        return "its own method"


def parser_module(model_arguments) -> SimpleNamespace:
    """hparams.parser: both lists hold a class of its own with the option kt_config."""
    lists = {
        name: [model_arguments, DataArguments, RuntimeArguments]
        for name in ("_INFER_ARGS", "_EVAL_ARGS")
    }
    module = SimpleNamespace(ModelArguments=model_arguments, **lists)

    def parse(name):
        def parse_args(args=None):
            model, data, runtime = HfArgumentParser(vars(module)[name]).parse_dict(dict(args))
            model._kt_inference_config = runtime.kt_config
            return model, data

        return parse_args

    module._parse_infer_args, module._parse_eval_args = parse("_INFER_ARGS"), parse("_EVAL_ARGS")
    module._parse_train_args = lambda args=None: None
    module._check_extra_dependencies = lambda model_args, finetuning_args: None
    module.get_train_args = lambda args=None: None
    return module


@pytest.fixture
def model_arguments():
    holder = SimpleNamespace(ModelArguments=TheirModelArguments)
    seam.adapt_model_args(holder)
    return holder.ModelArguments


def test_inference_commands_parse_without_use_kt(model_arguments):
    module = parser_module(model_arguments)
    with pytest.raises(Exception, match="conflicting option"):  # as it was
        module._parse_infer_args({"template": "chatml"})
    seam.adapt_parser(module)
    for parse in (module._parse_infer_args, module._parse_eval_args):
        model, data = parse({"template": "chatml"})
        assert data.template == "chatml" and model.kt_config is None
        assert model._kt_inference_config is None
        with pytest.raises(ValueError, match="kt_config=.* has no effect without use_kt"):
            parse({"kt_config": {"format": "int8"}})
    kind = module._INFER_ARGS[-1]
    assert kind().kept() == "its own method" and kind.__name__ == "RuntimeArguments"


def test_layers_are_checkpointed_without_kt_kernel(model_arguments):
    """Anything but "retain" on the device makes it look for kt-kernel's contexts and warn that the
    installed one "predates" them.
    """
    for activation in ("retain", "recompute"):
        given = model_arguments(use_kt=True, kt_cpu_activation=activation)
        assert given.get_kt_activation_policy() == {"cpu": activation, "gpu": "retain"}


@pytest.mark.parametrize("fp32", [True, False])
@pytest.mark.parametrize("trained", [True, False])
@pytest.mark.parametrize("use_kt", [True, False])
def test_adapters_of_frozen_models_have_the_policys_precision(use_kt, trained, fp32):
    """A DPO reference whose adapter is rounded to bf16 begins with a margin that is not 0."""
    module = SimpleNamespace(_load_kt_inference_adapter_artifacts=pytest.fail)

    def setup(config, model, model_args, finetuning_args, is_trainable, cast):
        if model_args.use_kt and not is_trainable:
            module._load_kt_inference_adapter_artifacts(model, "an adapter")
        return cast

    module._setup_lora_tuning = setup
    seam.adapt_adapter(module)
    arguments = SimpleNamespace(use_kt=use_kt)
    cast = module._setup_lora_tuning(None, None, arguments, None, trained, fp32)
    assert cast == (fp32 or (use_kt and not trained))
