"""What differs between LLaMA-Factory's versions never reaches a use_kt run, and our installation
never breaks a stock one. 0.9.6 is played by what it has more than 0.9.5; `make test-versions` runs
the real one.
"""

from __future__ import annotations

import copy
import dataclasses
import pickle
import sys
from types import ModuleType, SimpleNamespace

import lf_cases
import pytest
import torch
from transformers import HfArgumentParser

from kt_core.module import KTExpertsLinear
from kt_sft.config import KTConfig
from kt_sft.llamafactory import arguments, seam, stages
from kt_sft.lora.layer import KTExpertsLoraLinear


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return lf_cases.workspace(tmp_path_factory.mktemp("seam"))


def _infer(root, **changes):
    train = ("stage", "do_train", "dataset", "dataset_dir", "cutoff_len", "use_cpu", "output_dir")
    train += ("per_device_train_batch_size", "gradient_accumulation_steps", "max_steps")
    train += ("learning_rate", "logging_steps", "save_strategy", "overwrite_output_dir")
    train += ("report_to", "disable_tqdm", "seed", "lora_target", "lora_rank")
    return lf_cases.arguments(root, **dict.fromkeys(train), **changes)


# --------------------------------------------------------------------------------- the options


@pytest.mark.parametrize("as_words", [False, True], ids=["mapping", "command line"])
def test_inference_is_parsed_with_and_without_use_kt(as_words, root):
    from llamafactory.hparams import get_infer_args

    for use_kt, config in ((None, None), (True, '{"format": "bf16"}')):
        args = _infer(root, use_kt=use_kt, kt_config=config)
        words = [word for k, v in args.items() for word in (f"--{k}", str(v))]
        model_args = get_infer_args(words if as_words else args)[0]
        settings = None if config is None else KTConfig(format="bf16")
        assert (model_args.use_kt, model_args.kt_config) == (bool(use_kt), settings)


@dataclasses.dataclass
class Theirs:
    """0.9.6's _KTransformersRuntimeArguments, or TrainingArguments of KTransformers' fork."""

    kt_config: dict | None = dataclasses.field(default=None, metadata={"help": "theirs"})
    warmup: int = 3


@pytest.fixture
def theirs():
    """`Theirs`, put back under its name afterwards."""
    module = sys.modules[__name__]
    before = module.Theirs
    yield before
    module.Theirs = before


def _parser_module(theirs):
    from llamafactory.hparams import parser

    module = ModuleType("parser")
    module.ModelArguments = parser.ModelArguments
    module._INFER_ARGS = [parser.ModelArguments, theirs]
    module._TRAIN_ARGS = [theirs, parser.ModelArguments]
    module._OTHER = [theirs]
    return module


def test_an_option_that_theirs_has_too_is_parsed_once(root, theirs):
    module = _parser_module(theirs)
    with pytest.raises(Exception, match="conflicting option string"):  # what users saw
        HfArgumentParser(module._INFER_ARGS)
    arguments.one_option_each(module, setattr)
    words = ["--model_name_or_path", str(root / "model"), "--warmup", "5"]
    for kinds in (module._INFER_ARGS, module._TRAIN_ARGS):
        for given, expected in (([], None), (["--kt_config", "{}"], "{}")):
            parsed = HfArgumentParser(kinds).parse_args_into_dataclasses([*words, *given])
            model_args, other = sorted(parsed, key=lambda p: not isinstance(p, kinds[0]))
            if kinds is module._TRAIN_ARGS:
                model_args, other = other, model_args
            assert model_args.kt_config == expected
            assert isinstance(other, theirs) and (other.kt_config, other.warmup) == (None, 5)
            assert pickle.loads(pickle.dumps(other)) == other  # torch.save of training arguments
    assert [theirs] == module._OTHER  # no ModelArguments beside it: nothing in its way


@dataclasses.dataclass
class _Arguments:
    """0.9.6 refuses kt_cpu_activation without use_kt."""

    use_kt: bool = False
    kt_cpu_activation: str | None = None

    def __post_init__(self):
        if self.kt_cpu_activation is not None and not self.use_kt:
            raise ValueError("only valid when use_kt: true")


@pytest.mark.parametrize("copied", [dataclasses.replace, copy.deepcopy])
def test_a_copy_of_the_arguments_has_the_settings_of_the_run(copied):
    """LLaMA-Factory makes a reference model's arguments so, while use_kt is hidden from it."""
    kind = arguments.with_our_keys(_Arguments)
    args = kind(use_kt=True, kt_config={"format": "bf16"}, kt_cpu_activation="recompute")
    settings = arguments.settings_of(args)
    assert settings == KTConfig(format="bf16", activation="recompute")
    args.kt_config = dataclasses.replace(settings, dense_dtype="fp32")  # decided after parsing
    with arguments.as_stock(args):
        twin = copied(args)
        assert not args.use_kt and not twin.use_kt
        assert arguments.is_kt_run(args) and arguments.is_kt_run(twin)
        assert arguments.settings_of(twin) == args.kt_config != settings
    assert args.use_kt and arguments.settings_of(args) is args.kt_config
    assert arguments.settings_of(kind(**dataclasses.asdict(args))) == args.kt_config
    with pytest.raises(ValueError, match="only valid when use_kt"):
        kind(kt_cpu_activation="retain")
    assert not arguments.is_kt_run(kind())


def test_settings_are_resolved_before_use_kt_is_hidden():
    args = arguments.with_our_keys(_Arguments)(use_kt=True, kt_config='{"format": "bf16"}')
    with arguments.as_stock(args):
        assert arguments.is_kt_run(args) and args.kt_config == KTConfig(format="bf16")


OTHERS = {"_parse_train_mca_args": "USE_MCA", "_parse_train_mbridge_args": "USE_MEGATRON_BRIDGE"}


@pytest.mark.parametrize("name", OTHERS)
def test_runs_that_another_library_trains_are_refused(name, monkeypatch):
    """They have parsers of their own, so none of our checks would see them."""
    from llamafactory.hparams import parser

    module = ModuleType("parser")
    vars(module).update({k: v for k, v in vars(parser).items() if k[:2] != "__"})
    model_args = SimpleNamespace(use_kt=True, kt_config=None, kt_cpu_activation=None)
    setattr(module, name, lambda args=None: (model_args, "rest"))
    seam.adapt_parser(module)
    parse = vars(module)[name]
    with pytest.raises(ValueError, match=f"{OTHERS[name]}=1 trains with .* unset that variable"):
        parse()
    model_args.use_kt = False
    assert parse() == (model_args, "rest")
    model_args.kt_config = {}
    with pytest.raises(ValueError, match="kt_config={} has no effect without use_kt"):
        parse()


REFUSED = {
    "kt_weight_path": "/x",
    "kt_expert_checkpoint_path": "/x",
    "kt_use_lora_experts": True,
    "kt_lora_expert_num": 2,
    "quantization_bit": 4,
    "use_unsloth": True,
    "mixture_of_depths": "load",
}


@pytest.mark.parametrize("key", REFUSED)
def test_an_option_that_has_no_effect_is_refused_at_inference_too(key, root):
    from llamafactory.hparams import get_infer_args

    with pytest.raises(ValueError, match=f"{key}=.* is not supported with use_kt; "):
        get_infer_args(_infer(root, **{key: REFUSED[key]}))


def test_options_of_later_versions_are_refused():
    later = {"kt_non_expert_weight_path": ("/x", None)}
    for key, (value, default) in later.items():
        stages.check_load(SimpleNamespace(**{key: default}))
        with pytest.raises(ValueError, match=f"{key}='/x' is not supported with use_kt"):
            stages.check_load(SimpleNamespace(**{key: value}))
    for key in ("use_mca", "use_megatron_bridge", "use_hyper_parallel"):
        finetuning = SimpleNamespace(stage="sft", additional_target=None, **{key: True})
        with pytest.raises(ValueError, match=f"{key}=True is not supported with use_kt; remove it"):
            stages.check(SimpleNamespace(), finetuning, SimpleNamespace())


# ------------------------------------------------------------------------------------- loading


@pytest.fixture(scope="module")
def tuned(root):
    args = lf_cases.arguments(root, "tuned", max_steps=1)
    lf_cases.run(args)
    return args["output_dir"]


@pytest.mark.parametrize("trained", [True, False], ids=["trained", "not trained"])
def test_llamafactory_loads_as_stock(trained, root, tuned, monkeypatch):
    """Its code for KTransformers' forks is not reached: in 0.9.6 it looks for kt-kernel's artifacts
    and warns that kt-kernel is too old. The adapter of a frozen model is in fp32 like that of a
    trained one and stays beside the weights.
    """
    import llamafactory.model.loader as loader
    from llamafactory.hparams import ModelArguments, get_infer_args

    seen = []

    def spy_on(name):
        stock = vars(loader)[name]

        def spy(*args, **kw):
            seen.extend(a.use_kt for a in args if isinstance(a, ModelArguments))
            return stock(*args, **kw)

        monkeypatch.setattr(loader, name, spy)

    spy_on("patch_config")
    spy_on("patch_model")
    args = _infer(root, adapter_name_or_path=tuned)
    model_args, _, finetuning_args, _ = get_infer_args(args)
    tokenizer = loader.load_tokenizer(model_args)["tokenizer"]
    model = loader.load_model(tokenizer, model_args, finetuning_args, is_trainable=trained)
    assert seen and not any(seen) and model_args.use_kt
    factors = [p for n, p in model.named_parameters() if "lora_" in n]
    assert factors and {p.dtype for p in factors} == {torch.float32}
    assert {p.requires_grad for p in factors} == {trained} and model.training == trained
    assert sum(isinstance(m, KTExpertsLoraLinear) for m in model.modules()) == 2
    assert sum(isinstance(m, KTExpertsLinear) for m in model.modules()) == 2
    assert next(m for m in model.modules() if "RMSNorm" in type(m).__name__).weight.dtype in (
        torch.bfloat16,
        torch.float32,  # dense_dtype: where the CPU has no bf16 units
    )
