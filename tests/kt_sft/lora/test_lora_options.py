"""Every field of the installed LoraConfig: it trains, saves, and stock peft on the stock model
gives the same logits, as we do after a reload; or it is refused before the first step.
"""

from __future__ import annotations

import dataclasses
import warnings

import lf_cases
import options
import peft
import pytest
import sft_cases as cases
import torch
from packaging.version import Version
from peft import IA3Config, LoraConfig, PeftModel, get_peft_model
from peft.tuners.lora import config as lora_config
from transformers import AutoModelForCausalLM

from kt_core import adapters, hf
from kt_sft.lora import adapter_io, dry_run, layer

QV = ["q_proj", "v_proj"]
BOTH = {"modules_to_save": ["embed_tokens", "lm_head"]}
TIE = {"ensure_weight_tying": True}
SEEN = cases.token_ids()[0, :3].tolist()  # tokens that the step meets
TOKENS = {"trainable_token_indices": sorted(SEEN[:2])}
OFFLOAD = peft.LoraRuntimeConfig(ephemeral_gpu_offload=True)

# name: (checkpoint, targets, LoraConfig). Each runs without and with experts beside.
KEPT: dict[str, tuple[str, list[str], dict]] = {
    "plain": ("plain", QV, {"lora_alpha": 5, "lora_dropout": 0.0, "r": 3}),
    "embeddings": ("plain", [*QV, "embed_tokens"], {}),
    "embeddings only": ("plain", ["embed_tokens"], {}),
    "embeddings, tied model": ("tied", [*QV, "embed_tokens"], {}),
    "embeddings, tied adapters": ("tied", [*QV, "embed_tokens"], TIE),
    "embeddings of other rank": (
        "plain", [*QV, "embed_tokens"],
        {"rank_pattern": {"embed_tokens": 2}, "alpha_pattern": {"embed_tokens": 3}},
    ),
    "embeddings and head": ("plain", [*QV, "embed_tokens", "lm_head"], {}),
    "embeddings and head, tied model": ("tied", [*QV, "embed_tokens", "lm_head"], {}),
    "head": ("plain", [*QV, "lm_head"], {}),
    "head, tied model": ("tied", [*QV, "lm_head"], {}),
    "whole embeddings, tied": ("tied", QV, {"modules_to_save": ["embed_tokens"]} | TIE),
    "whole embeddings and head, tied": ("tied", QV, BOTH | TIE),
    "whole embeddings and head": ("plain", QV, BOTH),
    "whole norms": ("plain", QV, {"modules_to_save": ["norm", "input_layernorm"]}),
    "nothing to tie": ("tied", QV, TIE),
    "tokens": ("plain", QV, TOKENS),
    "tokens of embeddings and head": (
        "plain", QV, {"trainable_token_indices": {"embed_tokens": SEEN[:2], "lm_head": SEEN[2:]}},
    ),
    "tokens, tied model": ("tied", QV, TOKENS),
    "tokens, tied": ("tied", QV, TOKENS | TIE),
    "all biases": ("biased", QV, {"bias": "all"}),
    "rslora": ("plain", QV, {"use_rslora": True}),
    "gaussian": ("plain", QV, {"init_lora_weights": "gaussian"}),
    "excluded": ("plain", QV, {"exclude_modules": ["layers.1.self_attn.q_proj"]}),
    "router": ("plain", QV, {"target_parameters": ["mlp.gate.weight"]}),
    "offload": ("plain", QV, {"runtime_config": OFFLOAD}),
}  # fmt: skip
# The same, without experts only.
KEPT_DENSE: dict[str, tuple[str, list[str], dict]] = {
    "DoRA": ("plain", QV, {"use_dora": True}),
    "DoRA, embeddings": ("plain", [*QV, "embed_tokens"], {"use_dora": True}),
    "LoRA biases": ("biased", QV, {"lora_bias": True}),
    "one layer": ("plain", QV, {"layers_to_transform": [1], "layers_pattern": "layers"}),
    "fan in": ("plain", QV, {"fan_in_fan_out": True}),
    "orthogonal": ("plain", QV, {"init_lora_weights": "orthogonal"}),
}
REFUSED = {
    "bias": "lora_only",  # stock peft 0.20 loses the biases
    "init_lora_weights": "pissa",
    "alora_invocation_tokens": [5, 6],
    "use_qalora": True,
    "layer_replication": [[0, 2], [1, 2]],
    "arrow_config": lora_config.ArrowConfig(),
}
# (field, its class, arguments) of variants that only some versions have.
VARIANTS = (
    ("velora_config", "VeloraConfig", {}),
    ("monteclora_config", "MontecloraConfig", {}),
    ("use_bdlora", "BdLoraConfig", {"target_modules_bd_b": QV, "nblocks": 2}),
    ("kasa_config", "KasaConfig", {}),
)
FIELDS = {field.name for field in dataclasses.fields(LoraConfig)}
REFUSED |= {f: vars(lora_config)[c](**kw) for f, c, kw in VARIANTS if f in FIELDS}
if Version(peft.__version__) >= Version("0.21"):
    del REFUSED["bias"]
    KEPT["biases beside LoRA"] = ("biased", QV, {"bias": "lora_only"})
# Fields that say where an adapter comes from or goes, or set up what is refused above.
OTHER = {
    "task_type", "peft_type", "auto_mapping", "peft_version", "base_model_name_or_path", "revision",
    "inference_mode", "target_modules", "megatron_config", "megatron_core", "loftq_config",
    "eva_config", "corda_config", "lora_ga_config", "qalora_group_size",
}  # fmt: skip


@pytest.fixture(scope="module")
def paths(tmp_path_factory):
    root = tmp_path_factory.mktemp("options")
    return {
        "plain": cases.checkpoint(root / "plain"),
        "tied": cases.checkpoint(root / "tied", tie_word_embeddings=True),
        "biased": cases.checkpoint(root / "biased", attention_bias=True),
    }


@pytest.fixture(autouse=True)
def _reference(monkeypatch):
    cases.use("reference", monkeypatch)


def _stock(path):
    return AutoModelForCausalLM.from_pretrained(
        path, dtype=torch.float32, experts_implementation="eager"
    )


def _step(model) -> None:
    """One step that changes everything that is trained."""
    cases.randomise(model)
    with torch.no_grad():
        for n, p in cases.trained(model).items():
            if "lora_embedding_A" in n:  # it begins with zeros, as B of a Linear does
                p.normal_(0, 0.05)
    model.train()
    before = {n: p.detach().clone() for n, p in cases.trained(model).items()}
    cases.gradients(model, cases.token_ids())
    torch.optim.SGD(cases.trained(model).values(), lr=0.5).step()
    assert not [n for n, p in cases.trained(model).items() if torch.equal(p, before[n])]
    model.eval()


def test_every_field_of_the_installed_loraconfig_is_looked_at():
    seen = {
        key for table in (KEPT, KEPT_DENSE) for _, _, options in table.values() for key in options
    }
    unknown = FIELDS - seen - set(REFUSED) - OTHER
    assert not unknown, f"unknown option {unknown}: supported, refused or no effect?"
    checked = {*layer._KNOWN, *layer._DENSE_ONLY, *layer._REFUSED}
    variants = {f.name for f in dataclasses.fields(LoraConfig) if "is_lora_variant" in f.metadata}
    assert checked | variants >= FIELDS


def test_the_table_of_options_says_refused_where_these_tests_do():
    rows = [o for o in options.OPTIONS if o.of == options.LORA]
    refused = {o.name for o in rows if o.verdict == options.REFUSED}
    assert refused <= set(REFUSED)
    for name in set(REFUSED) - refused:  # some values of it are
        (row,) = (o for o in rows if o.name == name)
        assert "refused" in row.note or "not those" in row.note


@pytest.mark.parametrize("experts", [True, False])
def test_an_option_of_a_later_peft_is_refused_where_it_is_set(experts):
    @dataclasses.dataclass
    class Later(LoraConfig):
        a_later_option: int = 3

    layer.check_supported(Later(), experts=experts)
    with pytest.raises(ValueError, match="a_later_option=4 of peft .* is not known beside experts"):
        layer.check_supported(Later(a_later_option=4), experts=experts)


@pytest.mark.parametrize(
    ("name", "experts"),
    [
        *((n, False) for n in [*KEPT, *KEPT_DENSE]),
        *(pytest.param(n, True, marks=cases.STOCK_HAS_EXPERTS) for n in KEPT),
    ],
)
def test_what_is_trained_is_saved_for_stock_peft_and_for_us(name, experts, paths, tmp_path):
    checkpoint, targets, lora = (KEPT | KEPT_DENSE)[name]
    path, ids = paths[checkpoint], cases.token_ids()
    targets = [*targets, "experts"] if experts else targets
    kw = {"r": 4, "lora_alpha": 8, "task_type": "CAUSAL_LM"} | lora
    base = cases.load(path)
    before = cases.logits(base, ids)
    tuned = get_peft_model(base, LoraConfig(target_modules=targets, **kw))
    _step(tuned)
    want = cases.logits(tuned, ids)
    assert (want - before).abs().max() > 0.01
    tuned.save_pretrained(tmp_path)
    stock = PeftModel.from_pretrained(_stock(path), tmp_path)
    assert torch.allclose(cases.logits(stock, ids), want, atol=1e-5)
    again = PeftModel.from_pretrained(cases.load(path), tmp_path, is_trainable=True)
    again.eval()
    assert set(cases.trained(again)) == set(cases.trained(tuned))
    assert torch.allclose(cases.logits(again, ids), want, atol=1e-5)
    _step(again)
    again.save_pretrained(tmp_path / "more")
    stock = PeftModel.from_pretrained(_stock(path), tmp_path / "more")
    assert torch.allclose(cases.logits(stock, ids), cases.logits(again, ids), atol=1e-5)


@pytest.mark.parametrize("experts", [False, True])
@pytest.mark.parametrize("field", REFUSED)
def test_what_cannot_be_saved_is_refused_before_the_first_step(field, experts, paths):
    targets = [*QV, "experts"] if experts else QV
    config = LoraConfig(target_modules=targets, **{field: REFUSED[field]})
    with pytest.raises(ValueError, match=rf"{field}=.*(remove|train with|set it to|use True)"):
        get_peft_model(cases.load(paths["biased"]), config)


@pytest.mark.parametrize("name", ["DoRA", "LoRA biases", "fan in"])
def test_options_of_dense_modules_alone_are_refused_on_experts(name, paths):
    checkpoint, targets, lora = KEPT_DENSE[name]
    with pytest.raises(ValueError, match="take the experts out of the LoRA targets"):
        get_peft_model(
            cases.load(paths[checkpoint]), LoraConfig(target_modules=[*targets, "experts"], **lora)
        )


@pytest.mark.parametrize("name", ["DoRA", "LoRA biases"])
def test_what_only_stock_peft_applies_is_neither_served_nor_merged(name, paths, tmp_path):
    checkpoint, targets, lora = KEPT_DENSE[name]
    path = paths[checkpoint]
    tuned = get_peft_model(cases.load(path), LoraConfig(target_modules=targets, **lora))
    tuned.save_pretrained(tmp_path / "adapter")
    message = f"was trained with {next(iter(lora))}=True, which only stock PEFT applies"
    with pytest.raises(ValueError, match=message):
        adapters.load_adapter(hf.load_model(path), tmp_path / "adapter", "a")
    with pytest.raises(ValueError, match=message):
        adapters.merge(path, tmp_path / "adapter", tmp_path / "merged")


# ------------------------------------------------------------------------------------- the dry run


def _made(path, targets=("q_proj", "experts"), **lora):
    return get_peft_model(cases.load(path), LoraConfig(target_modules=list(targets), **lora))


def _with(monkeypatch, change) -> None:
    """peft of a later version, whose state dict of an adapter is changed by `change`."""
    original = adapter_io.get_peft_model_state_dict

    def later(model, *args, **kw):
        return change(original(model, *args, **kw))

    monkeypatch.setattr(adapter_io, "get_peft_model_state_dict", later)


def test_a_kind_of_tensor_that_nobody_knows_ends_the_run_at_once(paths, monkeypatch):
    key = "base_model.model.model.layers.0.self_attn.q_proj.lora_gate.weight"
    _with(monkeypatch, lambda state: state | {key: torch.zeros(2)})
    with pytest.raises(ValueError, match="lora_gate.weight cannot be expressed in a standard"):
        _made(paths["plain"])


def test_a_parameter_that_would_be_trained_and_not_saved_ends_the_run_at_once(paths, monkeypatch):
    def without(state):
        return {k: t for k, t in state.items() if "layernorm" not in k}

    _with(monkeypatch, without)
    with pytest.raises(ValueError, match=r"layernorm.* would be trained, but peft .* not save"):
        _made(paths["plain"], modules_to_save=["input_layernorm"])


def test_an_error_inside_of_the_save_ends_the_run_at_once(paths, monkeypatch):
    def fails(*_args, **_kw):
        raise TypeError("unhashable")

    monkeypatch.setattr(dry_run, "file_contents", fails)
    with pytest.raises(ValueError, match=r"could not be saved \(TypeError: unhashable\)"):
        _made(paths["plain"])
    base = cases.load(paths["plain"])
    monkeypatch.undo()
    tuned = get_peft_model(base, LoraConfig(target_modules=["q_proj"]))
    monkeypatch.setattr(dry_run, "file_contents", fails)
    with pytest.raises(ValueError, match="could not be saved"):
        tuned.add_adapter("second", LoraConfig(target_modules=["q_proj"]))


def test_an_adapter_that_reads_back_as_another_ends_the_run_at_once(paths, monkeypatch):
    original = dry_run.file_contents

    def loses(*args, **kw):
        tensors, config, metadata = original(*args, **kw)
        tensors.pop(next(k for k in tensors if "q_proj.lora_B" in k))
        return tensors, config, metadata

    monkeypatch.setattr(dry_run, "file_contents", loses)
    with pytest.raises(ValueError, match="q_proj has lora_A but not the other factor"):
        _made(paths["plain"])


def test_other_kinds_of_adapters_are_refused(paths):
    config = IA3Config(target_modules=["k_proj"], feedforward_modules=[])
    with pytest.raises(ValueError, match="peft_type=IA3 is not supported beside experts"):
        get_peft_model(cases.load(paths["plain"]), config)


def test_a_dry_run_writes_and_copies_nothing(paths, monkeypatch):
    """Whatever it makes is on the meta device: an adapter of gigabytes costs as little."""
    made = []
    original = dry_run.file_contents
    monkeypatch.setattr(
        dry_run, "file_contents", lambda *a, **k: made.append(original(*a, **k)) or made[-1]
    )
    with warnings.catch_warnings():
        warnings.simplefilter("error", ResourceWarning)
        _made(paths["plain"], modules_to_save=["embed_tokens"])
    assert len(made) == 1 and len(made[0][0]) > 100
    assert all(t.is_meta for t in made[0][0].values())


@pytest.mark.parametrize("layout", ["per_expert", "fused"])
@pytest.mark.parametrize("targets", [["gate_proj"], ["down_proj"], ["up_proj", "down_proj"]])
def test_a_dry_run_knows_every_layout_and_subset(layout, targets, paths, monkeypatch):
    seen = []
    original = dry_run.manifest
    monkeypatch.setattr(dry_run, "manifest", lambda data: seen.append(data) or original(data))
    base = cases.load(paths["plain"], export_layout=layout)
    get_peft_model(base, LoraConfig(target_modules=targets))
    assert seen[0].projections == seen[1].projections == [t.split("_")[0] for t in targets]


# -------------------------------------------------------------------------------- in LLaMA-Factory


def test_llamafactory_trains_dora_on_attention_and_embeddings(tmp_path):
    root = lf_cases.workspace(tmp_path, dtype=torch.float32)
    for changes in (
        {"lora_target": "attention", "use_dora": True},
        {"lora_target": "q_proj,embed_tokens,experts"},
    ):
        args = lf_cases.arguments(root, "out", max_steps=1, **changes)
        lf_cases.run(args)
        stock = PeftModel.from_pretrained(_stock(root / "model"), args["output_dir"])
        ids = cases.token_ids()
        tuned, base = cases.logits(stock, ids), cases.logits(_stock(root / "model"), ids)
        assert torch.isfinite(tuned).all() and not torch.equal(tuned, base)
