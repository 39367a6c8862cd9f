"""One judge: the server, the merge and a training that continues say the same of an adapter that
another program wrote and that has lost something, fits no module, or changes the base model.
"""

from __future__ import annotations

import json
import re
import typing
from pathlib import Path

import peft
import pytest
import sft_cases as cases
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from kt_core import adapters, hf
from kt_core.adapters.peft_format import CONFIG_FILE, WEIGHTS_FILE, parse_adapter, read_adapter

FAMILIES = ("qwen3_moe", "mixtral", "olmoe", "deepseek_v3")


@pytest.fixture(scope="module", params=FAMILIES)
def family(request, tmp_path_factory):
    """(checkpoint, model for inference, model for training, adapter of another program)."""
    root = tmp_path_factory.mktemp(request.param)
    path = cases.checkpoint(root, request.param)
    tuned = cases.adapted(cases.load(path))
    tuned.save_pretrained(root / "own")
    foreign = root / "foreign"
    foreign.mkdir()
    save_file(load_file(root / "own" / WEIGHTS_FILE), foreign / WEIGHTS_FILE, {"format": "pt"})
    (foreign / CONFIG_FILE).write_text((root / "own" / CONFIG_FILE).read_text())
    return path, hf.load_model(path, format="bf16"), cases.load(path), foreign


def _changed(source: Path, target: Path, lose: str | None = None, **config: object) -> Path:
    """A copy without the tensors whose key matches `lose`, with other settings."""
    target.mkdir()
    tensors = load_file(source / WEIGHTS_FILE)
    kept = {k: v for k, v in tensors.items() if lose is None or not re.search(lose, k)}
    assert lose is None or 0 < len(kept) < len(tensors)
    save_file(kept, target / WEIGHTS_FILE, {"format": "pt"})
    old = json.loads((source / CONFIG_FILE).read_text())
    (target / CONFIG_FILE).write_text(json.dumps(old | config))
    return target


def _sentences(path, model, trained, directory, out) -> list[str]:
    """What each way of using the adapter says against it."""
    said = []
    for act in (
        lambda: adapters.load_adapter(model, directory, "a"),
        lambda: adapters.merge(path, directory, out),
        lambda: PeftModel.from_pretrained(trained, directory),
    ):
        with pytest.raises(ValueError) as caught:
            act()
        said.append(str(caught.value))
    assert adapters.adapters(model) == [] and not out.exists()
    return said


LOST = {
    "a layer's projection": r"layers\.1\.self_attn\.o_proj\.",
    "a projection everywhere": r"\.o_proj\.",
    "a layer's experts": r"layers\.1\..*\.experts\.",
    "the last expert": r"layers\.1\..*\.experts\.7\.",
    "an expert in the middle": r"layers\.1\..*\.experts\.3\.",
    "a projection of the experts": r"\.experts\.\d\.(down_proj|w2)\.",
    "all of a layer": r"layers\.1\.",
}


@pytest.mark.parametrize("lost", LOST)
def test_a_foreign_file_with_a_gap(lost, family, tmp_path):
    path, model, trained, foreign = family
    directory = _changed(foreign, tmp_path / "adapter", LOST[lost])
    said = _sentences(path, model, trained, directory, tmp_path / "merged")
    assert len(set(said)) == 1, said
    assert re.search("incomplete", said[0])


def test_a_whole_foreign_file_is_taken_everywhere(family, tmp_path):
    path, model, _, foreign = family
    adapters.load_adapter(model, foreign, "a")
    adapters.unload_adapter(model, "a")
    adapters.merge(path, foreign, tmp_path / "merged")
    read = read_adapter(foreign)
    assert not read.whole
    PeftModel.from_pretrained(cases.load(path), foreign)


def test_targets_with_limits_are_followed(family, tmp_path):
    """layers_to_transform and exclude_modules say what may be missing, and what may not."""
    path, model, trained, foreign = family
    limited = {
        "one": ({"layers_to_transform": [0]}, r"layers\.[12]\.", "targets"),
        "excluded": ({"exclude_modules": ["layers.1.self_attn.o_proj"]}, r"s\.1\..*o_proj\.", None),
        "excluded elsewhere": (
            {"exclude_modules": ["k_proj"]},
            r"layers\.1\..*o_proj\.",
            "targets",
        ),
    }
    for name, (config, lost, _) in limited.items():
        if name == "one" and path.name == "deepseek_v3":  # its first layer is dense
            continue
        directory = _changed(foreign, tmp_path / name, lost, **config)
        if name == "excluded elsewhere":
            said = _sentences(path, model, trained, directory, tmp_path / "merged")
            assert len(set(said)) == 1 and "o_proj" in said[0]
        else:
            adapters.load_adapter(model, directory, "a")
            adapters.unload_adapter(model, "a")
            adapters.merge(path, directory, tmp_path / f"merged {name}")


def test_an_adapter_of_some_experts(family, tmp_path):
    """Targets that name experts: the others stay as they are."""
    path, _, _, foreign = family
    ids = cases.token_ids()
    directory = _changed(
        foreign,
        tmp_path / "adapter",
        r"\.experts\.[0124567]\.|self_attn|shared|layers\.0\.mlp\.(gate|up|down)_proj",
        target_modules=r".*\.experts\.3\.\w+",
        target_parameters=None,
        rank_pattern={},
        alpha_pattern={},
    )
    data = read_adapter(directory)
    stock = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    with torch.no_grad():
        for name, module in data.experts.items():
            experts = stock.get_submodule(name)
            for p, f in module.items():
                rows = {"gate": slice(0, 40), "up": slice(40, 80)}
                weight = experts.down_proj[3] if p == "down" else experts.gate_up_proj[3, rows[p]]
                weight += f.scaling * (f.b[3] @ f.a[3])
    want = cases.logits(stock, ids)
    with pytest.MonkeyPatch.context() as patch:
        cases.use("reference", patch)
        model = hf.load_model(path, format="bf16", dtype=torch.float32)
        assert (cases.logits(model, ids) - want).norm() > 1e-3 * want.norm()
        adapters.load_adapter(model, directory, "a")
        with adapters.adapter(model, "a"):
            assert (cases.logits(model, ids) - want).norm() < 2e-6 * want.norm()
        tuned = PeftModel.from_pretrained(cases.load(path), directory)
        assert (cases.logits(tuned, ids) - want).norm() < 2e-6 * want.norm()
    adapters.merge(path, directory, tmp_path / "merged")
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float32)
    assert (cases.logits(merged, ids) - want).norm() < 2e-6 * want.norm()


# ------------------------------------------------------------------------ changed base weights

# What peft's init_lora_weights takes, and whether it leaves the base weights as they are.
INITS = {
    True: True,
    False: True,
    None: True,
    "gaussian": True,
    "eva": True,
    "orthogonal": True,
    "mica": True,
    "pissa": False,
    "pissa_niter_[number of iters]": False,
    "olora": False,
    "corda": False,
    "loftq": False,
    "lora_ga": False,
}


def test_the_table_of_initialisations_is_that_of_the_installed_peft():
    hint = typing.get_type_hints(LoraConfig)["init_lora_weights"]
    literals = {v for part in typing.get_args(hint) for v in typing.get_args(part)}
    assert len(literals) > 5 and literals <= INITS.keys(), literals - INITS.keys()


@pytest.mark.parametrize("init", INITS)
def test_what_an_initialisation_does_to_the_base(init, tmp_path):
    """Those that leave it are read; the others, and whatever comes next, are refused by name."""
    name = init.replace("[number of iters]", "4") if isinstance(init, str) else init
    for value in (name, name.upper()) if name in ("gaussian", "olora") else (name,):
        if INITS[init]:
            adapter_of = parse_adapter({}, {"peft_type": "LORA", "init_lora_weights": value}, {})
            assert adapter_of.config["init_lora_weights"] == value
        else:
            with pytest.raises(ValueError, match=f"init_lora_weights='{value}' is not known"):
                parse_adapter({}, {"peft_type": "LORA", "init_lora_weights": value}, {})
    if name in ("corda", "loftq", "lora_ga"):  # need data, scipy or gradients of the base
        return
    linear = torch.nn.Sequential(torch.nn.Linear(16, 16))
    before = linear[0].weight.detach().clone()
    get_peft_model(linear, LoraConfig(r=2, target_modules=["0"], init_lora_weights=name))
    after = next(p for n, p in linear.named_parameters() if n.endswith("base_layer.weight"))
    assert torch.equal(before, after) is INITS[init]


def test_an_initialisation_nobody_knows_is_refused():
    for config, message in (
        ({"init_lora_weights": "tomorrow"}, "init_lora_weights='tomorrow' is not known"),
        ({"use_tomorrow": True}, "use_tomorrow=True is not supported"),
        ({"tomorrow_config": {"a": 1}}, "tomorrow_config=.* is not supported"),
    ):
        with pytest.raises(ValueError, match=message):
            parse_adapter({}, {"peft_type": "LORA"} | config, {})
    parse_adapter({}, {"peft_type": "LORA", "tomorrow_config": None, "tomorrow_size": 16}, {})


def test_settings_of_the_installed_peft_at_their_defaults():
    parse_adapter({}, json.loads(json.dumps(_plain(LoraConfig(r=4)))), {})


def _plain(config: peft.PeftConfig) -> dict[str, object]:
    return {k: v for k, v in config.to_dict().items() if k != "runtime_config"}


def test_pissa_end_to_end(tmp_path):
    """Refused as it is saved; converted back by peft it serves and merges to stock's logits."""
    path, ids = cases.checkpoint(tmp_path), cases.token_ids()
    stock = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    lora = LoraConfig(
        r=4, target_modules=["q_proj", "o_proj"], init_lora_weights="pissa", task_type="CAUSAL_LM"
    )
    tuned = get_peft_model(stock, lora)
    tuned.peft_config["default"].init_lora_weights = True
    tuned.save_pretrained(tmp_path / "start")
    tuned.peft_config["default"].init_lora_weights = "pissa"
    cases.randomise(tuned, 0.1)
    want = cases.logits(tuned, ids)
    tuned.save_pretrained(tmp_path / "pissa")
    trained = cases.load(path)
    with pytest.MonkeyPatch.context() as patch:
        cases.use("reference", patch)
        model = hf.load_model(path, format="bf16", dtype=torch.float32)
    said = _sentences(path, model, trained, tmp_path / "pissa", tmp_path / "merged")
    assert len(set(said)) == 1 and "init_lora_weights='pissa'" in said[0]
    tuned.save_pretrained(
        tmp_path / "converted", path_initial_model_for_weight_conversion=str(tmp_path / "start")
    )
    adapters.load_adapter(model, tmp_path / "converted", "a")
    with adapters.adapter(model, "a"):
        assert (cases.logits(model, ids) - want).norm() < 1e-5 * want.norm()
    adapters.merge(path, tmp_path / "converted", tmp_path / "merged")
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float32)
    assert (cases.logits(merged, ids) - want).norm() < 1e-5 * want.norm()
