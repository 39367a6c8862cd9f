"""Adapter directories: what is written, stock PEFT reading it and writing for us, and files that
must not load.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import peft
import pytest
import safetensors.torch
import sft_cases as cases
import torch
from peft import PeftModel
from safetensors import safe_open

from kt_core import adapters, hf
from kt_core.adapters.peft_format import CONFIG_FILE, WEIGHTS_FILE, read_adapter
from kt_sft.lora import adapter_io

STOCK_LOADS = """
import json, sys, torch
from peft import PeftModel
from transformers import AutoModelForCausalLM
from sft_cases import token_ids
from kt_core import patches
from kt_sft import hooks
hooks.uninstall()  # sft_cases' import installs them
assert not patches.replaced()
for name, (model, adapter) in json.loads(sys.argv[1]).items():
    stock = AutoModelForCausalLM.from_pretrained(
        model, dtype=torch.float32, experts_implementation="eager"
    )
    tuned = PeftModel.from_pretrained(stock, adapter)
    with torch.no_grad():
        applied = tuned(input_ids=token_ids()).logits
        merged = tuned.merge_and_unload()(input_ids=token_ids()).logits
    torch.save((applied, merged), adapter + "/stock.pt")
"""


@pytest.fixture
def reference(monkeypatch):
    cases.use("reference", monkeypatch)


def _saved(tmp_path, family="qwen3_moe", targets="all-linear", layout="per_expert", **lora):
    path = cases.checkpoint(tmp_path, family)
    tuned = cases.adapted(cases.load(path, export_layout=layout), targets, **lora)
    tuned.save_pretrained(tmp_path / "adapter")
    return path, tuned, tmp_path / "adapter"


def _tensors(directory: Path) -> dict[str, torch.Tensor]:
    return safetensors.torch.load_file(directory / WEIGHTS_FILE)


def test_the_standard_layout(reference, tmp_path):
    _, tuned, directory = _saved(tmp_path)
    tensors = _tensors(directory)
    prefix = "base_model.model.model.layers.1."
    layer = tuned.get_base_model().model.layers[1].mlp.experts
    for p in ("gate_proj", "up_proj", "down_proj"):
        for ab, factors in (("A", layer.lora_A), ("B", layer.lora_B)):
            for e in range(8):
                key = f"{prefix}mlp.experts.{e}.{p}.lora_{ab}.weight"
                assert torch.equal(tensors.pop(key), factors["default"].get_parameter(p)[e])
    rest = {k.removeprefix(prefix) for k in tensors if k.startswith(prefix)}
    assert rest == {f"self_attn.{p}_proj.lora_{ab}.weight" for p in "qkvo" for ab in "AB"}
    config = json.loads((directory / CONFIG_FILE).read_text())
    assert config["target_modules"] == sorted(
        ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    )
    assert (config["r"], config["lora_alpha"], config["peft_type"]) == (4, 8, "LORA")
    assert config["inference_mode"] and config["target_parameters"] is None
    assert sorted(os.listdir(directory)) == ["README.md", CONFIG_FILE, WEIGHTS_FILE]


CASES = {
    "qwen3": ("qwen3_moe", "all-linear", {}),
    "mixtral": ("mixtral", "all-linear", {}),
    "shared experts and a dense layer": ("deepseek_v3", "all-linear", {}),
    "experts only": ("olmoe", ["experts"], {}),
    "gate": ("qwen3_moe", ["gate_proj"], {}),
    "up and down": ("mixtral", ["w3", "w2", "q_proj"], {}),
    "gate and up": ("qwen3_moe", ["gate_proj", "up_proj"], {}),
    "down": ("qwen3_moe", ["down_proj", "v_proj"], {}),
    "attention only": ("qwen3_moe", ["q_proj", "v_proj"], {"lora_dropout": 0.1}),
    "shared experts only": ("deepseek_v3", ["shared_experts.up_proj", "o_proj"], {}),
    "attention and experts of other rank": (
        "qwen3_moe",
        "all-linear",
        {
            "rank_pattern": {"experts": 2, "q_proj": 3},
            "alpha_pattern": {"experts": 10, "o_proj": 1},
        },
    ),
    "router": (
        "qwen3_moe",
        ["router", "experts", "q_proj"],
        {"rank_pattern": {r"gate\.weight": 2}},
    ),
    "fused": (
        "qwen3_moe",
        "all-linear",
        {"layout": "fused", "rank_pattern": {"q_proj": 3}, "alpha_pattern": {"experts": 10}},
    ),
    "fused, shared experts, down of other rank": (
        "deepseek_v3",
        "all-linear",
        {"layout": "fused", "rank_pattern": {r"experts\.down_proj": 6}},
    ),
    "fused, gate": ("mixtral", ["w1"], {"layout": "fused"}),
    "fused, up, down and router": (
        "olmoe",
        ["up_proj", "down_proj", "router"],
        {"layout": "fused"},
    ),
    "fused, down": ("qwen3_moe", ["down_proj"], {"layout": "fused"}),
    "down of other rank, rslora, dropout": (
        "deepseek_v3",
        "all-linear",
        {"rank_pattern": {r"experts\.down_proj": 6}, "use_rslora": True, "lora_dropout": 0.2},
    ),
}


@pytest.fixture(scope="module")
def stock_results(tmp_path_factory):
    """By case: our logits, and those of stock peft on the stock model, applied and merged."""
    root, ids = tmp_path_factory.mktemp("stock"), cases.token_ids()
    where, ours = {}, {}
    with pytest.MonkeyPatch.context() as patch:
        cases.use("reference", patch)
        for number, (name, (family, targets, lora)) in enumerate(CASES.items()):
            path, tuned, directory = _saved(root / str(number), family, targets, **lora)
            tuned.eval()
            ours[name] = cases.logits(tuned, ids)
            with tuned.disable_adapter():
                assert (cases.logits(tuned, ids) - ours[name]).abs().max() > 0.01
            where[name] = (str(path), str(directory))
    cases.stock(STOCK_LOADS, json.dumps(where))
    return {name: (ours[name], *torch.load(d + "/stock.pt")) for name, (_, d) in where.items()}


@cases.STOCK_HAS_EXPERTS
@pytest.mark.parametrize("name", CASES)
def test_stock_peft_gives_the_same_logits_and_merges_to_them(name, stock_results):
    want, applied, merged = stock_results[name]
    assert torch.allclose(applied, want, atol=2e-5)
    assert torch.allclose(merged, want, atol=2e-5)


@pytest.mark.parametrize("name", CASES)
def test_our_reload_is_exact_and_restores_what_was_trained(name, reference, tmp_path):
    family, targets, lora = CASES[name]
    path, tuned, directory = _saved(tmp_path, family, targets, **lora)
    tuned.eval()
    base = cases.load(path, export_layout=lora.get("layout", "per_expert"))
    again = PeftModel.from_pretrained(base, directory, is_trainable=True)
    again.eval()
    want, got = cases.trained(tuned), cases.trained(again)
    assert set(got) == set(want)
    assert all(torch.equal(got[n], want[n]) for n in want)
    assert again.peft_config["default"].lora_dropout == lora.get("lora_dropout", 0.0)
    a, b = cases.logits(again, cases.token_ids()), cases.logits(tuned, cases.token_ids())
    # with rslora the scale is written as an ordinary alpha, which may round
    assert torch.allclose(a, b, atol=1e-5) if lora.get("use_rslora") else torch.equal(a, b)
    again.save_pretrained(tmp_path / "second")
    first, second = _tensors(directory), _tensors(tmp_path / "second")
    assert set(first) == set(second) and all(torch.equal(first[k], second[k]) for k in first)


STOCK_WRITES = """
import json, sys, torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM
from sft_cases import token_ids, randomise
for model, adapter, targets in json.loads(sys.argv[1]):
    stock = AutoModelForCausalLM.from_pretrained(
        model, dtype=torch.float32, experts_implementation="eager"
    )
    config = LoraConfig(r=3, lora_alpha=5, task_type="CAUSAL_LM", target_modules=targets)
    tuned = get_peft_model(stock, config)
    randomise(tuned)
    tuned.save_pretrained(adapter)
    with torch.no_grad():
        torch.save(tuned(input_ids=token_ids()).logits, adapter + "/stock.pt")
"""


@cases.STOCK_HAS_EXPERTS
def test_adapters_that_stock_peft_wrote(reference, tmp_path):
    """Stock peft adapts fused parameters (gate and up share A) and writes its fused layout."""
    written = []
    for family, targets in (
        ("qwen3_moe", ["q_proj", "gate_proj", "up_proj", "down_proj"]),
        ("mixtral", ["w1", "w2", "w3"]),
        ("olmoe", ["down_proj"]),
    ):
        path = cases.checkpoint(tmp_path, family)
        written.append((str(path), str(tmp_path / f"{family}-adapter"), targets))
    cases.stock(STOCK_WRITES, json.dumps(written))
    for path, directory, _ in written:
        assert any(k.endswith("experts.lora_A.weight") for k in _tensors(Path(directory)))
        model = cases.load(Path(path))  # installs the hooks, so before from_pretrained is named
        tuned = PeftModel.from_pretrained(model, directory)
        got = cases.logits(tuned, cases.token_ids())
        assert torch.allclose(got, torch.load(directory + "/stock.pt"), atol=2e-5)


@pytest.mark.parametrize("other", ["q", "lora", "proj", "default2"])
def test_a_name_that_lies_in_others_keys_saves_its_own_tensors(other, reference, tmp_path):
    """peft 0.18 looks for the adapter's name anywhere in a key."""
    _, tuned, _ = _saved(tmp_path)
    tuned.add_adapter(other, peft.LoraConfig(r=2, target_modules=["o_proj", "experts"]))
    tuned.save_pretrained(tmp_path / "both")
    data = read_adapter(tmp_path / "both" / other)
    assert {path.rpartition(".")[2] for path in data.dense} == {"o_proj"}
    assert {f.a.shape[1] for m in data.experts.values() for f in m.values()} == {2}
    assert "model.layers.0.self_attn.q_proj" in read_adapter(tmp_path / "both").dense


def test_several_adapters_save_each_to_its_directory(reference, tmp_path):
    _, tuned, _ = _saved(tmp_path)
    tuned.add_adapter("other", peft.LoraConfig(r=2, target_modules=["experts"]))
    tuned.save_pretrained(tmp_path / "both")
    assert read_adapter(tmp_path / "both" / "other").projections == ["gate", "up", "down"]
    assert read_adapter(tmp_path / "both").experts["model.layers.0.mlp.experts"]["up"].rank == 4
    tuned.load_adapter(tmp_path / "both" / "other", "third")
    layer = tuned.get_base_model().model.layers[0].mlp.experts
    assert torch.equal(layer.lora_A["third"].up_proj, layer.lora_A["other"].up_proj)
    with pytest.raises(ValueError, match="adapter 'x' does not exist; this model has default"):
        tuned.save_pretrained(tmp_path / "x", selected_adapters=["x"])


# ------------------------------------------------------------------------- F1: nothing half-written


def test_a_missing_or_partial_tensor_stops_the_save_and_keeps_the_old_files(reference, tmp_path):
    _, tuned, directory = _saved(tmp_path)
    before = {f: (directory / f).read_bytes() for f in (WEIGHTS_FILE, CONFIG_FILE)}
    state = tuned.state_dict()
    name = "base_model.model.model.layers.0.mlp.experts.lora_B.default.up_proj"
    for broken, message in (
        ({k: v for k, v in state.items() if k != name}, "lora_B.up_proj was trained but is not"),
        (
            state | {name: state[name][:4]},
            r"has shape \(4, 40, 4\) .* but \(8, 40, 4\) in the model",
        ),
        ({}, "was trained but is not in the state dict to be saved .0 tensors"),
    ):
        with pytest.raises(RuntimeError, match=message):
            tuned.save_pretrained(directory, state_dict=broken)
        assert {f: (directory / f).read_bytes() for f in before} == before
    assert sorted(os.listdir(directory)) == ["README.md", CONFIG_FILE, WEIGHTS_FILE]


def test_what_the_disk_gives_back_is_compared(reference, tmp_path, monkeypatch):
    _, tuned, directory = _saved(tmp_path)
    before = (directory / WEIGHTS_FILE).read_bytes()
    write = adapter_io.write_adapter

    def faulty(where, *args, **kw):
        write(where, *args, **kw)
        data = bytearray((where / WEIGHTS_FILE).read_bytes())
        data[-3] ^= 1
        (where / WEIGHTS_FILE).write_bytes(data)

    monkeypatch.setattr(adapter_io, "write_adapter", faulty)
    with pytest.raises(RuntimeError, match="was not written as it is in memory"):
        tuned.save_pretrained(directory)
    assert (directory / WEIGHTS_FILE).read_bytes() == before
    monkeypatch.setattr(
        adapter_io, "write_adapter", lambda *a, **k: (_ for _ in ()).throw(OSError(28, "full"))
    )
    with pytest.raises(OSError, match="full"):
        tuned.save_pretrained(directory)
    assert sorted(os.listdir(directory)) == ["README.md", CONFIG_FILE, WEIGHTS_FILE]


def test_only_the_main_process_writes(reference, tmp_path):
    _, tuned, _ = _saved(tmp_path)
    tuned.save_pretrained(tmp_path / "rank1", is_main_process=False)
    assert not (tmp_path / "rank1").exists()


def test_options_that_would_be_ignored(reference, tmp_path):
    _, tuned, _ = _saved(tmp_path)
    with pytest.raises(ValueError, match="safe_serialization is not supported"):
        tuned.save_pretrained(tmp_path / "x", safe_serialization=False)


# ------------------------------------------------------------------------------ F2: all or nothing


def _rewrite(directory: Path, change, *, own: bool = True) -> None:
    """Changes the tensors; own=False leaves our metadata out, as other programs do."""
    with safe_open(directory / WEIGHTS_FILE, "pt") as file:
        metadata = file.metadata() if own else {"format": "pt"}
    tensors = _tensors(directory)
    change(tensors)
    safetensors.torch.save_file(tensors, directory / WEIGHTS_FILE, metadata=metadata)


def _move(old, new):
    def change(tensors):
        key = next(k for k in tensors if old in k)
        tensors[key.replace(old, new)] = tensors.pop(key)

    return change


def _drop(part):
    return lambda tensors: [tensors.pop(k) for k in list(tensors) if part in k]


def _cut(part):
    return lambda tensors: tensors.update({k: t[:2] for k, t in tensors.items() if part in k})


def _poison(tensors):
    next(iter(tensors.values())).fill_(float("nan"))


CHANGES = {
    "an expert too many": (
        _move("experts.7.up_proj.lora_B", "experts.8.up_proj.lora_B"),
        "lora_A of expert 8 is missing|lora_B of expert 7 is missing",
    ),
    "a renamed projection": (
        _move("experts.0.up_proj.lora_A", "experts.0.upp_proj.lora_A"),
        "lora_A of expert 0 is missing",
    ),
    "a renamed layer": (
        _move("layers.1.self_attn.q_proj.lora_A", "layers.1.self_attn.qq_proj.lora_A"),
        "has lora_B but not the other factor|has lora_A but not the other factor",
    ),
    "another kind": (_move("lora_A.weight", "lora_C.weight"), "tensor that is not supported"),
    "a layer less": (
        _drop("layers.1.self_attn.k_proj"),
        r"model\.layers\.1\.self_attn\.k_proj was trained with shapes .* but is not there",
    ),
    "a cut factor": (_cut("q_proj.lora_A"), "the config says rank 4"),
    "not a number": (_poison, "holds NaN or Inf"),
}


@pytest.mark.parametrize("name", CHANGES)
def test_f2_every_tensor_is_used_or_loading_fails(name, reference, tmp_path):
    change, message = CHANGES[name]
    path, _, directory = _saved(tmp_path)
    _rewrite(directory, change)
    fresh = cases.adapted(cases.load(path))
    with pytest.raises(ValueError, match=message):
        fresh.load_adapter(directory, "default")


@pytest.mark.parametrize("own", [True, False], ids=["manifest", "foreign"])
def test_f2_a_fresh_load_and_the_server_refuse_an_adapter_without_a_layer(own, reference, tmp_path):
    """Nothing in the model asks for the lost tensors: our manifest does, or the adapter's own
    targets where another program wrote the file."""
    for lost, name in (
        ("layers.1.self_attn.k_proj", "model.layers.1.self_attn.k_proj"),
        ("layers.1.mlp.experts", "model.layers.1.mlp.experts"),
    ):
        path, _, directory = _saved(tmp_path / lost)
        _rewrite(directory, _drop(lost), own=own)
        message = f"{name}.* was trained" if own else name
        with pytest.raises(ValueError, match=message):
            PeftModel.from_pretrained(cases.load(path), directory)
        with pytest.raises(ValueError, match=message):
            adapters.load_adapter(hf.load_model(path), directory, "a")


def test_an_adapter_of_another_model(reference, tmp_path):
    _, _, directory = _saved(tmp_path)
    for name, overrides, message in (
        ("layers", {"num_hidden_layers": 1}, "layers.1.* where Qwen3MoeForCausalLM has no experts"),
        (
            "sizes",
            {"moe_intermediate_size": 48},
            r"has shape \(8, 4, 40\) but this model needs \(8, 4, 48\)",
        ),
        (
            "experts",
            {"num_experts": 4},
            r"has shape \(8, 4, 40\) but this model needs \(4, 4, 40\)",
        ),
    ):
        other = cases.checkpoint(tmp_path / name, **overrides)
        with pytest.raises(ValueError, match=message):
            PeftModel.from_pretrained(cases.load(other), directory)


def test_a_rank_that_differs_from_the_model_that_continues(reference, tmp_path):
    path, _, directory = _saved(tmp_path)
    fresh = cases.adapted(cases.load(path), r=2)
    with pytest.raises(ValueError, match="rank or base model differ"):
        fresh.load_adapter(directory, "default")


def test_missing_files_are_named(reference, tmp_path):
    path, _, directory = _saved(tmp_path)
    (directory / WEIGHTS_FILE).unlink()
    with pytest.raises(FileNotFoundError, match=f"has no {WEIGHTS_FILE}"):
        PeftModel.from_pretrained(cases.load(path), directory)


def test_zeros_that_complete_a_subset_must_be_zero(reference, tmp_path):
    path, _, directory = _saved(tmp_path, targets=["gate_proj"])

    def change(tensors):
        next(v for k, v in tensors.items() if "up_proj.lora_A" in k).fill_(1.0)

    _rewrite(directory, change)
    with pytest.raises(ValueError, match=r"up_proj is not zero although only gate were trained"):
        PeftModel.from_pretrained(cases.load(path), directory)
