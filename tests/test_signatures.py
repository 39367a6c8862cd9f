"""Every function of another library that ours stands in front of, in the version at hand: what a
newer version adds goes on to the original, or is refused in one sentence where there is none.
"""

from __future__ import annotations

import inspect

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model

from kt_core import hf
from kt_sft import plugin, seams

FREE = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


def replaced():
    """(name, original, ours) of everything that install() puts in place."""
    plugin.install()
    for owner, name, _ in plugin._installed:
        found = inspect.getattr_static(owner, name)
        hooked = found.__func__ if isinstance(found, classmethod | staticmethod) else found
        yield f"{owner.__name__}.{name}", hooked.__wrapped__, hooked.kt_replacement


def test_every_replacement_takes_what_its_original_takes():
    """And arguments that neither has yet: of a closed signature a new keyword is a TypeError."""
    found = list(replaced())
    assert len(found) > 15
    for name, original, ours in found:
        parameters = list(inspect.signature(ours).parameters.values())[1:]  # less the original
        assert inspect.Parameter.VAR_KEYWORD in {p.kind for p in parameters}, name
        theirs = [p for p in inspect.signature(original).parameters.values() if p.kind not in FREE]
        named = [p.name for p in parameters if p.kind not in FREE]
        # A parameter that ours names stands where the original has it, under the same name.
        for at, parameter in enumerate(named):
            if parameter in (p.name for p in theirs):
                assert theirs[at].name == parameter, (name, parameter)
        if inspect.Parameter.VAR_POSITIONAL not in {p.kind for p in parameters}:
            positional = [p.name for p in theirs if p.kind is not p.KEYWORD_ONLY]
            free = len(positional) <= len(named)
            assert free or set(positional[len(named) :]) <= KNOWN[name], (name, positional)


# Positional parameters of the newest versions that ours takes by keyword only, as all callers do.
KNOWN = {
    "PeftModel.load_adapter": {"key_mapping"},
    "PeftModel.from_pretrained": {
        *("autocast_adapter_dtype", "ephemeral_gpu_offload", "low_cpu_mem_usage", "key_mapping"),
    },
}


def test_the_loader_hands_on_what_it_does_not_know():
    names = list(inspect.signature(hf._load_pretrained_model).parameters.values())
    assert {p.kind for p in names[-2:]} == set(FREE)


def test_an_argument_that_would_be_ignored_is_refused(base, tmp_path):
    plain = {"low_cpu_mem_usage": False, "token": None, "a_new_switch": False}
    model = plugin.load_for_training(base, dtype=torch.float32)
    tuned = get_peft_model(model, LoraConfig(target_modules=["q_proj", "gate_proj"], r=2))
    tuned.save_pretrained(tmp_path / "adapter", a_new_switch=None)
    with pytest.raises(ValueError, match="save_pretrained: a_new_switch=3 of peft .* leave it out"):
        tuned.save_pretrained(tmp_path / "other", a_new_switch=3)
    assert not (tmp_path / "other").exists()
    tuned.load_adapter(tmp_path / "adapter", "second", **plain)
    with pytest.raises(ValueError, match="load_adapter: key_mapping={'a': 'b'} of peft"):
        tuned.load_adapter(tmp_path / "adapter", "third", key_mapping={"a": "b"})
    fresh = plugin.load_for_training(base, dtype=torch.float32)
    with pytest.raises(ValueError, match="is not known for a model with experts"):
        PeftModel.from_pretrained(fresh, tmp_path / "adapter", a_new_switch="on")


def test_checkpointing_of_every_nth_layer_reaches_transformers(base):
    """transformers from 5.16 on passes `every_n_layers`; older ones checkpoint every layer."""
    model = plugin.load_for_training(base)
    given = {}
    taken = inspect.signature(type(model)._set_gradient_checkpointing).parameters
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            type(model), "_set_gradient_checkpointing", lambda self, *a, **kw: given.update(kw)
        )
        other = plugin.load_for_training(base)
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
