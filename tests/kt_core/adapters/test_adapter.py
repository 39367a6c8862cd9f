"""kt_core.adapters: orientation against hand-built deltas, the fused layouts, use on a loaded
model, merging.
"""

from __future__ import annotations

import json
from pathlib import Path

import models
import pytest
import safetensors.torch
import sft_cases as cases
import torch
from transformers import AutoModelForCausalLM

from kt_core import adapters, hf
from kt_core.adapters.factors import Factors
from kt_core.adapters.peft_config import adapter_config, write_adapter
from kt_core.adapters.peft_format import (
    CONFIG_FILE,
    WEIGHTS_FILE,
    AdapterData,
    expert_names,
    parse_adapter,
    read_adapter,
    standard_tensors,
)

E, H, I, R = 8, 80, 40, 3  # H = 2 I, E != R: every swap of axes has a shape that fits somewhere
SIZES = {"hidden_size": H, "moe_intermediate_size": I}
CONFIG = {"peft_type": "LORA", "r": R, "lora_alpha": 6, "task_type": "CAUSAL_LM"}
PATHS = [f"model.layers.{i}.mlp.experts" for i in range(2)]


@pytest.fixture
def reference(monkeypatch):
    cases.use("reference", monkeypatch)


def _factors(seed, *shape_a, out):
    g = torch.Generator().manual_seed(seed)
    *e, r, i = shape_a
    a = torch.randn(*e, r, i, generator=g) * 0.2
    return Factors(a, torch.randn(*e, out, r, generator=g) * 0.2, 2.0)


def _data(projections=("gate", "up", "down"), dense=True) -> AdapterData:
    experts = {}
    for n, path in enumerate(PATHS):
        experts[path] = {
            p: _factors(10 * n + k, E, R, I if p == "down" else H, out=H if p == "down" else I)
            for k, p in enumerate(("gate", "up", "down"))
            if p in projections
        }
    q = {"model.layers.0.self_attn.q_proj": _factors(99, R, H, out=64)} if dense else {}
    return AdapterData(CONFIG, experts, q)


def _linears() -> list[str]:
    return [f"model.layers.{i}.self_attn.{p}_proj" for i in range(2) for p in "qkvo"]


def _write(directory: Path, data: AdapterData) -> Path:
    directory.mkdir()
    write_adapter(directory, data, model_type="qwen3_moe", linear_paths=_linears())
    return directory


def _dense_by_hand(model, data: AdapterData):
    """The stock model with W + s B A computed expert by expert, with loops and indices."""
    with torch.no_grad():
        for path, module in data.experts.items():
            experts = model.get_submodule(path)
            for p, f in module.items():
                for e in range(E):
                    delta = torch.zeros(f.b.shape[1], f.a.shape[2])
                    for r in range(R):
                        delta += 2.0 * torch.outer(f.b[e, :, r], f.a[e, r, :])
                    if p == "down":
                        experts.down_proj[e] += delta
                    else:
                        rows = slice(0, I) if p == "gate" else slice(I, 2 * I)
                        experts.gate_up_proj[e, rows] += delta
        for path, f in data.dense.items():
            model.get_submodule(path).weight += 2.0 * f.b @ f.a
    return model


def _stock(path):
    return AutoModelForCausalLM.from_pretrained(
        path, dtype=torch.float32, experts_implementation="eager"
    )


PLAIN_PEFT = """
import sys, torch
from peft import PeftModel
from transformers import AutoModelForCausalLM
from sft_cases import token_ids
stock = AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.float32)
with torch.no_grad():
    torch.save(PeftModel.from_pretrained(stock, sys.argv[2])(input_ids=token_ids()).logits,
    sys.argv[3])
"""


@cases.STOCK_HAS_EXPERTS
def test_f3_orientation_against_a_hand_built_delta(reference, tmp_path):
    """F3: plain PEFT, our engine and our merge all equal loops over experts and ranks."""
    path = cases.checkpoint(tmp_path, **SIZES)
    data, ids = _data(), cases.token_ids()
    directory = _write(tmp_path / "adapter", data)
    want = cases.logits(_dense_by_hand(_stock(path), data), ids)
    assert (want - cases.logits(_stock(path), ids)).abs().max() > 0.1
    cases.stock(PLAIN_PEFT, path, directory, tmp_path / "plain.pt")
    assert torch.allclose(torch.load(tmp_path / "plain.pt"), want, atol=5e-5)
    model = hf.load_model(path, format="bf16", dtype=torch.float32)
    adapters.load_adapter(model, directory, "a")
    with adapters.adapter(model, "a"):
        assert torch.allclose(cases.logits(model, ids), want, atol=5e-5)
    adapters.merge(path, directory, tmp_path / "merged")
    assert torch.allclose(cases.logits(_stock(tmp_path / "merged"), ids), want, atol=5e-5)


def test_reading_gives_back_what_was_written(tmp_path):
    data = _data()
    got = read_adapter(_write(tmp_path / "adapter", data))
    assert got.projections == ["gate", "up", "down"]
    for path in PATHS:
        for p, f in data.experts[path].items():
            g = got.experts[path][p]
            assert torch.equal(g.a, f.a) and torch.equal(g.b, f.b) and g.scaling == f.scaling
    assert torch.equal(got.dense["model.layers.0.self_attn.q_proj"].a, _factors(99, R, H, out=64).a)


@pytest.mark.parametrize("engine", cases.ENGINES)
@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral", "deepseek_v3"])
def test_switching_per_call_equals_the_training_side(engine, family, tmp_path, monkeypatch):
    cases.use(engine, monkeypatch)
    path, ids = cases.checkpoint(tmp_path, family), cases.token_ids()
    tuned = cases.adapted(cases.load(path))
    tuned.save_pretrained(tmp_path / "one")
    one = cases.logits(tuned, ids)
    cases.randomise(tuned, 0.1)
    tuned.save_pretrained(tmp_path / "two")
    two = cases.logits(tuned, ids)
    with tuned.disable_adapter():
        base = cases.logits(tuned, ids)
    model = hf.load_model(path, format="bf16", dtype=torch.float32)
    assert adapters.adapters(model) == []
    with adapters.adapter(model, None):
        assert torch.equal(cases.logits(model, ids), base)
    adapters.load_adapter(model, tmp_path / "one", "one")
    adapters.load_adapter(model, tmp_path / "two", "two")
    assert adapters.adapters(model) == ["one", "two"]
    assert torch.equal(cases.logits(model, ids), base)
    with adapters.adapter(model, "two"):
        assert torch.equal(cases.logits(model, ids), two)
        with adapters.adapter(model, "one"):
            assert torch.equal(cases.logits(model, ids), one)
        with adapters.adapter(model, None):
            assert torch.equal(cases.logits(model, ids), base)
        assert torch.equal(cases.logits(model, ids), two)
    adapters.unload_adapter(model, "two")
    with pytest.raises(KeyError, match="no adapter 'two'; this model has one"):
        adapters.unload_adapter(model, "two")
    with pytest.raises(KeyError, match="no adapter 'two'"), adapters.adapter(model, "two"):
        pass
    with pytest.raises(ValueError, match="adapter 'one' is loaded already"):
        adapters.load_adapter(model, tmp_path / "one", "one")


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_files_of_any_dtype_are_served(dtype, tmp_path):
    """Foreign files are often fp16: the logits of the same values in fp32, for the experts."""
    path, ids = cases.checkpoint(tmp_path, **SIZES), cases.token_ids()
    model = hf.load_model(path, format="bf16", dtype=torch.float32)
    folder = _write(tmp_path / "adapter", _data(dense=False))
    tensors = safetensors.torch.load_file(folder / WEIGHTS_FILE)
    found = []
    for name, kind in (("a", torch.float32), ("b", dtype)):
        values = {key: t.half().bfloat16().to(kind) for key, t in tensors.items()}
        safetensors.torch.save_file(values, folder / WEIGHTS_FILE, {"format": "pt"})
        adapters.load_adapter(model, folder, name)
        with adapters.adapter(model, name):
            found.append(cases.logits(model, ids))
    assert torch.equal(*found)


@pytest.mark.parametrize("projections", [("gate",), ("up",), ("down",), ("gate", "down")])
def test_f2_experts_only_subsets_change_the_logits(projections, reference, tmp_path):
    path, ids = cases.checkpoint(tmp_path, **SIZES), cases.token_ids()
    data = _data(projections, dense=False)
    model = hf.load_model(path, format="bf16", dtype=torch.float32)
    base = cases.logits(model, ids)
    adapters.load_adapter(model, _write(tmp_path / "adapter", data), "a")
    with adapters.adapter(model, "a"):
        got = cases.logits(model, ids)
    assert not torch.equal(got, base)
    assert torch.allclose(got, cases.logits(_dense_by_hand(_stock(path), data), ids), atol=5e-5)


def test_an_adapter_of_another_model_changes_nothing(reference, tmp_path):
    directory = _write(tmp_path / "adapter", _data())
    ids = cases.token_ids()
    for name, sizes, message in (
        ("hidden", {"moe_intermediate_size": I}, "trained on another model"),
        (
            "layers",
            SIZES | {"num_hidden_layers": 1},
            "layers.1.mlp.experts, where .* has no experts",
        ),
        ("experts", SIZES | {"num_experts": 4}, r"has shape \(8, .*but this model needs \(4, "),
    ):
        path = cases.checkpoint(tmp_path / name, **sizes)
        model = hf.load_model(path, format="bf16", dtype=torch.float32)
        base = cases.logits(model, ids)
        with pytest.raises(ValueError, match=message):
            adapters.load_adapter(model, directory, "a")
        assert adapters.adapters(model) == []
        assert torch.equal(cases.logits(model, ids), base)
    with pytest.raises(ValueError, match="where Qwen3MoeForCausalLM has no experts"):
        adapters.load_adapter(_stock(path), directory, "a")
    dense = AdapterData(CONFIG, {}, {"model.layers.0.input_layernorm": _factors(1, R, H, out=E)})
    with pytest.raises(ValueError, match=r"layernorm, where Qwen3MoeForCausalLM has no matrix"):
        adapters.load_adapter(_stock(path), _write(tmp_path / "norm", dense), "a")


# ------------------------------------------------------------------------------------ fused layouts


def _fused(data: AdapterData, version: str, parameters=("gate_up_proj", "down_proj")):
    """Tensors and config as peft's target_parameters stores them: gate and up share A, rank R."""
    swapped = version.startswith("0.18")
    tensors, meant = {}, {}
    for n, path in enumerate(PATHS):
        module = data.experts[path]
        gate, up = module["gate"], module["up"]
        pairs = {
            "gate_up_proj": (gate.a, torch.cat([gate.b, up.b], 1)),
            "down_proj": (module["down"].a, module["down"].b),
        }
        meant[path] = {}
        if "gate_up_proj" in parameters:
            meant[path] |= {"gate": gate, "up": Factors(gate.a, up.b, 2.0)}
        if "down_proj" in parameters:
            meant[path] |= {"down": module["down"]}
        for name in parameters:
            a, b = pairs[name]
            if swapped:  # the LoRA of the transposed weight
                a, b = b.transpose(1, 2), a.transpose(1, 2)
            inner = ".base_layer" if name == "gate_up_proj" and len(parameters) == 2 else ""
            key = f"base_model.model.{path}{inner}"
            tensors[f"{key}.lora_A.weight"] = a.reshape(E * R, -1)
            tensors[f"{key}.lora_B.weight"] = b.permute(1, 2, 0).reshape(b.shape[1], R * E)
        assert n < 2
    config = CONFIG | {"target_parameters": [f"mlp.experts.{p}" for p in parameters]}
    return tensors, config, AdapterData(config, meant, {})


def _same(got: AdapterData, want: AdapterData) -> bool:
    return all(
        set(got.experts[path]) == set(module)
        and all(
            torch.equal(got.experts[path][p].a, f.a)
            and torch.equal(got.experts[path][p].b, f.b)
            and got.experts[path][p].scaling == f.scaling
            for p, f in module.items()
        )
        for path, module in want.experts.items()
    )


@pytest.mark.parametrize("version", ["0.18.1", "0.20.0"])
def test_fused_layouts_are_told_apart_by_shape(version):
    """With both parameters adapted, H = 2 I fits one reading only, whatever the config says."""
    tensors, config, want = _fused(_data(dense=False), version)
    for claimed in (None, "0.18.1", "0.20.0"):
        assert _same(parse_adapter(tensors, config | {"peft_version": claimed}, {}), want)
    assert _same(parse_adapter(tensors, config, {}, hidden=H), want)
    with pytest.raises(ValueError, match="fit no layout of peft 0.18 or 0.20 with hidden size 96"):
        parse_adapter(tensors, config, {}, hidden=96)


@pytest.mark.parametrize("version", ["0.18.1", "0.20.0"])
def test_a_single_fused_parameter_needs_more_than_its_shape(version):
    """gate_up of H = 2 I is square: version decides, and without one nobody does."""
    tensors, config, want = _fused(_data(dense=False), version, ("gate_up_proj",))
    with pytest.raises(ValueError, match=r"fit the layouts of peft 0.18 and of peft 0.20 and"):
        parse_adapter(tensors, config, {}, hidden=H)
    assert _same(parse_adapter(tensors, config | {"peft_version": version}, {}), want)
    tensors, config, want = _fused(_data(dense=False), version, ("down_proj",))
    assert _same(parse_adapter(tensors, config, {}, hidden=H), want)


def test_the_fused_layout_of_peft_018_gives_its_own_delta():
    """Against peft 0.18's formula, written out: delta[e, i, o] = s sum_r B[o, r, e] A[e, r, i]."""
    tensors, config, _ = _fused(_data(dense=False), "0.18.1", ("gate_up_proj", "down_proj"))
    got = parse_adapter(tensors, config, {})
    key = f"base_model.model.{PATHS[0]}"
    for name, inner in (("gate_up_proj", ".base_layer"), ("down_proj", "")):
        a = tensors[f"{key}{inner}.lora_A.weight"].reshape(E, R, -1)
        b = tensors[f"{key}{inner}.lora_B.weight"]
        b = b.reshape(b.shape[0], R, E)
        delta = 2.0 * torch.einsum("ore,eri->eio", b, a)
        module = got.experts[PATHS[0]]
        parts = ["down"] if name == "down_proj" else ["gate", "up"]
        ours = torch.cat([module[p].scaling * module[p].b @ module[p].a for p in parts], 1)
        assert torch.allclose(ours, delta, atol=1e-5)


# ------------------------------------------------------------------------------------- bad contents


def test_configs_that_are_not_plain_lora(tmp_path):
    tensors = standard_tensors(_data(), expert_names("qwen3_moe"))
    for change, message in (
        ({"peft_type": "IA3"}, "peft_type='IA3' is not supported; only LORA is"),
        ({"use_dora": True}, "use_dora=True but .* has no lora_magnitude_vector; the file is"),
        ({"lora_bias": True}, "lora_bias=True but .* has no lora_B.bias; the file is incomplete"),
        ({"use_qalora": True}, "use_qalora=True is not supported"),
        ({"r": 4}, "the config says rank 4; config and weights belong to different adapters"),
    ):
        with pytest.raises(ValueError, match=message):
            parse_adapter(tensors, CONFIG | change, {})


def test_incomplete_and_damaged_files(tmp_path):
    directory = _write(tmp_path / "adapter", _data())
    whole = (directory / WEIGHTS_FILE).read_bytes()
    (directory / WEIGHTS_FILE).write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ValueError, match=f"{WEIGHTS_FILE} is damaged"):
        read_adapter(directory)
    (directory / CONFIG_FILE).unlink()
    with pytest.raises(FileNotFoundError, match=f"has no {CONFIG_FILE}"):
        read_adapter(directory)


def test_what_the_standard_layout_cannot_hold():
    data = _data()
    gate, up = data.experts[PATHS[0]]["gate"], data.experts[PATHS[0]]["up"]
    names = expert_names("qwen3_moe")
    mixed = {path: {"gate": gate, "up": Factors(up.a, up.b, 1.0)} for path in PATHS}
    with pytest.raises(ValueError, match=r"gate_proj and up_proj differ in \(rank, alpha\)"):
        adapter_config(AdapterData(CONFIG, mixed, {}), names, [], "per_expert")
    layers = {
        PATHS[0]: {"gate": gate, "up": up},
        PATHS[1]: {"down": data.experts[PATHS[1]]["down"]},
    }
    with pytest.raises(ValueError, match="differs in rank, alpha or projections between layers"):
        adapter_config(AdapterData(CONFIG, layers, {}), names, [], "per_expert")
    with pytest.raises(ValueError, match="holds no LoRA tensor"):
        adapter_config(AdapterData(CONFIG, {}, {}), names, [], "per_expert")


# ------------------------------------------------------------------------------------------- merge


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral"])
def test_merge_over_shards(family, dtype, reference, tmp_path):
    path = models.build(
        family, tmp_path / "base", dtype=dtype, max_shard_size="60KB", tokenizer=True
    )
    assert len(list(path.glob("*.safetensors"))) > 3
    ids, tuned = cases.token_ids(), cases.adapted(cases.load(path))
    tuned.save_pretrained(tmp_path / "adapter")
    want = cases.logits(tuned, ids)
    adapters.merge(path, tmp_path / "adapter", tmp_path / "merged")
    got = cases.logits(_stock(tmp_path / "merged"), ids)
    assert (got - want).norm() / want.norm() < (1e-5 if dtype == torch.float32 else 2e-2)
    for file in path.iterdir():
        copied = tmp_path / "merged" / file.name
        if file.suffix != ".safetensors":
            assert copied.read_bytes() == file.read_bytes()
            continue
        a, b = safetensors.torch.load_file(file), safetensors.torch.load_file(copied)
        assert {k: (v.shape, v.dtype) for k, v in a.items()} == {
            k: (v.shape, v.dtype) for k, v in b.items()
        }
        changed = {k for k in a if not torch.equal(a[k], b[k])}
        assert all(".experts." in k or "self_attn" in k for k in changed)


def test_merge_uses_every_delta_or_writes_nothing(reference, tmp_path):
    path = cases.checkpoint(tmp_path, **SIZES)
    directory = _write(tmp_path / "adapter", _data())
    other = cases.checkpoint(tmp_path / "other", **SIZES | {"num_hidden_layers": 1})
    with pytest.raises(ValueError, match=r"layers\.1\..*where Qwen3Moe.* has no experts"):
        adapters.merge(other, directory, tmp_path / "merged")
    sizes = cases.checkpoint(tmp_path / "sizes", moe_intermediate_size=I)
    with pytest.raises(ValueError, match="trained on another model"):
        adapters.merge(sizes, directory, tmp_path / "merged")
    assert not (tmp_path / "merged").exists()
    (tmp_path / "merged").mkdir()
    with pytest.raises(ValueError, match="exists; give a directory that does not"):
        adapters.merge(path, directory, tmp_path / "merged")
    with pytest.raises(FileNotFoundError, match=r"has no model.safetensors and no"):
        adapters.merge(directory.parent / "merged", directory, tmp_path / "m2")


def test_merge_into_fused_checkpoints(reference, tmp_path):
    """Checkpoints that store gate_up_proj [E, 2I, H] and down_proj [E, H, I]."""
    path, data = cases.checkpoint(tmp_path, **SIZES), _data(("up", "down"))
    stock = _stock(path)
    fused = tmp_path / "fused"
    fused.mkdir()
    state = {k: v.contiguous().clone() for k, v in stock.state_dict().items()}
    safetensors.torch.save_file(state, fused / "model.safetensors", metadata={"format": "pt"})
    (fused / "config.json").write_text((path / "config.json").read_text())
    adapters.merge(fused, _write(tmp_path / "adapter", data), tmp_path / "merged")
    merged = safetensors.torch.load_file(tmp_path / "merged" / "model.safetensors")
    want = _dense_by_hand(stock, data).state_dict()
    assert all(torch.allclose(merged[k], want[k], atol=1e-5) for k in want)
    assert json.loads((tmp_path / "merged" / "config.json").read_text())["hidden_size"] == H
