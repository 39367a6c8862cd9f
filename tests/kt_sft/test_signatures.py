"""Every function of another library that ours stands in front of, in the version at hand: what a
newer version adds goes on to the original, or is refused in one sentence where there is none.
"""

from __future__ import annotations

import inspect
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model

from kt_core import hf, patches
from kt_sft import hooks, seams, session
from kt_sft.llamafactory import seam, stages

FREE = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


def replaced():
    """(name, original, ours) of everything that install() puts in place."""
    hooks.install()
    for patch in patches.replaced("kt_sft.hooks"):
        hooked = patch.ours.__func__ if isinstance(patch.ours, classmethod) else patch.ours
        yield patch.what, hooked.__wrapped__, hooked.kt_replacement


class Spy:
    """Stands for an original: keeps what it is called with, under the original's signature and one
    argument that a later version may have.
    """

    def __init__(self, original):
        self.__signature__ = inspect.signature(original)
        parameters = list(self.__signature__.parameters.values())
        later = inspect.Parameter("a_later_one", inspect.Parameter.KEYWORD_ONLY, default=None)
        at = len(parameters) - any(p.kind is p.VAR_KEYWORD for p in parameters)
        parameters.insert(at, later)
        self.__signature__ = self.__signature__.replace(parameters=parameters)
        self.given = []

    def __call__(self, *args, **kw):
        self.given.append(self.__signature__.bind(*args, **kw).arguments)


def _positional(function):
    kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.POSITIONAL_ONLY)
    return [p for p in inspect.signature(function).parameters.values() if p.kind in kinds]


def test_every_replacement_hands_on_what_it_does_not_know():
    """For a model of somebody else: everything by position, and an argument that neither has yet.
    The mocks are such models: they have no modules, callbacks or settings.
    """
    found = list(replaced())
    assert len(found) > 15
    for name, original, ours in found:
        spy = Spy(original)
        hooked = seams.by_name(spy, ours)
        names = [p.name for p in _positional(original)]
        values = [mock.MagicMock(name=n) for n in names]
        hooked(*values, a_later_one="later")
        given = dict(zip(names, values, strict=True))
        assert [dict(g) for g in spy.given] == [{**given, "a_later_one": "later"}], name
        required = [p for p in _positional(original) if p.default is p.empty]
        spy.given.clear()
        hooked(*values[: len(required)], **{n: given[n] for n in names[len(required) :]})
        assert [{n: g[n] for n in given} for g in spy.given] == [given], name


def test_every_parameter_that_ours_names_stands_where_theirs_does():
    for name, original, ours in replaced():
        theirs = [p.name for p in _positional(original)]
        for at, parameter in enumerate(_positional(ours)[1:]):
            if parameter.name in theirs:
                assert theirs[at] == parameter.name, (name, parameter.name)


def test_wrong_arguments_are_named_by_the_original():
    def original(a, b=0, c=0):
        return a, b, c

    call = seams.by_name(original, lambda original, a, **kw: ("ours", original(a, **kw)))
    assert call(1, 2, 3) == call(1, 2, c=3) == call(1, b=2, c=3) == ("ours", (1, 2, 3))
    with pytest.raises(TypeError, match="takes from 1 to 3 positional arguments but 4 were given"):
        call(1, 2, 3, 4)
    with pytest.raises(TypeError, match="got multiple values for argument 'b'"):
        call(1, 2, b=3)
    with pytest.raises(TypeError, match="unexpected keyword argument 'd'"):
        call(1, d=3)


def test_peft_is_called_by_position(base, tmp_path):
    """As its own documentation lists the arguments; autocast_adapter_dtype is the sixth."""
    model = session.load_for_training(base, dtype=torch.bfloat16)
    get_peft_model(model, LoraConfig(target_modules=["q_proj"], r=2)).save_pretrained(tmp_path)
    for autocast, dtype in ((True, torch.float32), (False, torch.bfloat16)):
        fresh = session.load_for_training(base, dtype=torch.bfloat16)
        tuned = PeftModel.from_pretrained(fresh, tmp_path, "default", True, None, autocast)
        assert {p.dtype for p in tuned.parameters() if p.requires_grad} == {dtype}


def _run(model_args, data_args, training_args, finetuning_args, callbacks=None, later=None):
    return callbacks, later


@pytest.mark.parametrize("by_keyword", [True, False])
def test_runs_of_llamafactory_by_position_and_by_keyword(by_keyword):
    args = {n: mock.MagicMock(name=n) for n in ("data_args", "training_args", "finetuning_args")}
    args["data_args"].cutoff_len = 8
    model_args = SimpleNamespace(use_kt=True, kt_config=None, kt_cpu_activation=None)
    run = seam._with_callback(stages.without_asking(_run))
    if by_keyword:
        callbacks, later = run(model_args, **args, callbacks=["theirs"], later=1)
    else:
        callbacks, later = run(model_args, *args.values(), ["theirs"], 1)
    assert callbacks[0] == "theirs" and len(callbacks) == 7 and later == 1
    assert len(run(model_args, *args.values())[0]) == 6
    model_args.use_kt = False
    assert run(model_args, **args, callbacks=["theirs"]) == (["theirs"], None)
    with pytest.raises(RuntimeError, match="lambda.* of this LLaMA-Factory takes no callbacks"):
        seam._with_callback(lambda model_args, data_args, finetuning_args: None)


def test_the_loader_hands_on_what_it_does_not_know():
    names = list(inspect.signature(hf._load_pretrained_model).parameters.values())
    assert {p.kind for p in names[-2:]} == set(FREE)


def test_an_argument_that_would_be_ignored_is_refused(base, tmp_path):
    plain = {"low_cpu_mem_usage": False, "token": None, "a_new_switch": False}
    model = session.load_for_training(base, dtype=torch.float32)
    tuned = get_peft_model(model, LoraConfig(target_modules=["q_proj", "gate_proj"], r=2))
    tuned.save_pretrained(tmp_path / "adapter", a_new_switch=None)
    with pytest.raises(ValueError, match="save_pretrained: a_new_switch=3 of peft .* leave it out"):
        tuned.save_pretrained(tmp_path / "other", a_new_switch=3)
    assert not (tmp_path / "other").exists()
    tuned.load_adapter(tmp_path / "adapter", "second", **plain)
    with pytest.raises(ValueError, match="load_adapter: key_mapping={'a': 'b'} of peft"):
        tuned.load_adapter(tmp_path / "adapter", "third", key_mapping={"a": "b"})
    fresh = session.load_for_training(base, dtype=torch.float32)
    with pytest.raises(ValueError, match="is not known for a model with experts"):
        PeftModel.from_pretrained(fresh, tmp_path / "adapter", a_new_switch="on")


def test_checkpointing_of_every_nth_layer_reaches_transformers(base):
    """transformers from 5.16 on passes `every_n_layers`; older ones checkpoint every layer."""
    model = session.load_for_training(base)
    given = {}
    taken = inspect.signature(type(model)._set_gradient_checkpointing).parameters
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            type(model), "_set_gradient_checkpointing", lambda self, *a, **kw: given.update(kw)
        )
        other = session.load_for_training(base)
        other._set_gradient_checkpointing(enable=True, every_n_layers=2)
    assert given == {"every_n_layers": 2}
    model.gradient_checkpointing_enable()  # as this version calls it
    assert model.is_gradient_checkpointing and {"enable", "gradient_checkpointing_func"} <= set(
        taken
    )


def test_the_sentence_names_library_version_and_argument():
    import peft

    with pytest.raises(ValueError, match=f"f: x=1 of peft {peft.__version__} is not known"):
        seams.refuse_unknown({"x": 1}, (), "f", "peft")
    seams.refuse_unknown({"x": 1, "y": None, "z": False, "m": {}}, ("x",), "f", "peft")


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    import models

    path = tmp_path_factory.mktemp("base") / "model"
    models.build("qwen3_moe", path)
    return str(path)
