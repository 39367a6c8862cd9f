"""Loading: logits of every family against the stock model, every container, and what is refused.
 Logits are compared twice. With `SlowExperts` in place of the kernels everything is fp32 and the
difference must be exactly 0: whatever is wrong in names, order, orientation or routing shows. With
the kernels the stock model is given the dequantized weights, and what remains is the kernels' bf16
rounding.
"""

from __future__ import annotations

import copy
import io
import json
import logging
import pickle
import re
import sys
import threading

import models
import pytest
import slow_experts
import torch
import transformers
from safetensors.torch import load_file, save_file

from kt_core import experts, hf, patches
from kt_core.loading import checkpoint
from kt_core.loading.experts_contract import find_experts
from kt_core.loading.files import CheckpointFiles
from kt_core.loading.parts import ExpertRequest
from kt_core.module import KTExpertsLinear
from kt_core.settings import ExpertSettings

IDS = torch.randint(3, 120, (2, 48), generator=torch.Generator().manual_seed(1))


@pytest.fixture
def slow(monkeypatch):
    slow_experts.patch(monkeypatch)


def stock(path, **kw):
    return transformers.AutoModelForCausalLM.from_pretrained(
        path, dtype=torch.float32, experts_implementation="eager", **kw
    )


def logits(model):
    with torch.no_grad():
        return model(input_ids=IDS).logits


def kt_modules(model):
    return {n: m for n, m in model.named_modules() if isinstance(m, KTExpertsLinear)}


def rewrite(path, change):
    """Applies `change(tensors)` to a single-file checkpoint, in place."""
    file = path / "model.safetensors"
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file, metadata={"format": "pt"})


def fuse(tensors):
    """Rewrites Qwen names to the fused ones: [E, 2I, H] and [E, H, I]."""
    for layer in (0, 1):
        prefix = f"model.layers.{layer}.mlp.experts."
        take = lambda p: torch.stack([tensors.pop(f"{prefix}{e}.{p}.weight") for e in range(8)])  # noqa: E731, B023
        tensors[prefix + "gate_up_proj"] = torch.cat([take("gate_proj"), take("up_proj")], 1)
        tensors[prefix + "down_proj"] = take("down_proj")


@pytest.mark.parametrize("family", models.FAMILIES)
def test_logits_are_the_stock_models(family, tmp_path, slow):
    path = models.build(family, tmp_path)
    model = hf.load_model(path, dtype=torch.float32)
    assert torch.equal(logits(model), logits(stock(path)))
    modules = kt_modules(model)
    assert len(modules) == 2
    assert [m.layer_index for m in modules.values()] == [int(n.split(".")[2]) for n in modules]
    assert not any(".experts." in name for name in model.state_dict())
    for module in modules.values():
        assert not list(module.parameters()) and not list(module.buffers())


def test_experts_matter_to_the_logits(tmp_path, slow):
    """Guards the comparison above: with one expert weight changed it would fail."""
    path = models.build("mixtral", tmp_path)
    before = logits(hf.load_model(path, dtype=torch.float32))
    name = "model.layers.1.block_sparse_moe.experts.4.w1.weight"
    rewrite(path, lambda t: t.update({name: t[name] * 2}))
    assert (logits(hf.load_model(path, dtype=torch.float32)) - before).abs().max() > 1e-3


@pytest.mark.parametrize("format", ["bf16", "int8", "int4"])
@pytest.mark.parametrize("family", models.FAMILIES)
def test_kernels_against_the_stock_model_on_dequantized_weights(family, format, tmp_path):
    path = models.build(family, tmp_path)
    model = hf.load_model(path, format=format, dtype=torch.float32)
    reference = stock(path)
    calls = {}
    for name, module in kt_modules(model).items():
        layer, fused = module.experts, reference.get_submodule(name)
        for e in range(layer.num_experts):
            gate_up = torch.cat([layer.get(e, "gate"), layer.get(e, "up")])
            original = fused.gate_up_proj[e].detach()
            bar = {"bf16": 0.0, "int8": 0.01, "int4": 0.12}[format]
            assert (gate_up - original).norm() <= bar * original.norm()
            fused.gate_up_proj.data[e] = gate_up
            fused.down_proj.data[e] = layer.get(e, "down")
        fused.register_forward_hook(lambda m, i, o, name=name: calls.update({name: i}))
    ours, theirs = logits(model), logits(reference)
    assert len(calls) == 2
    # Each layer on the very input it gets in the model, at the kernels' bar.
    for name, (x, index, weights) in list(calls.items()):
        x = x.bfloat16().float()
        with torch.no_grad():
            got = model.get_submodule(name)(x, index, weights)
            expected = reference.get_submodule(name)(x, index, weights)
        assert (got - expected).norm() <= 4e-3 * expected.norm()
    # Rounding may tip a near-tie of the router for a few tokens, so the whole is judged by the
    # median token.
    error = (ours - theirs).norm(dim=-1) / theirs.norm(dim=-1)
    assert error.median() <= 1e-2


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("container", ["single", "sharded", "fused"])
def test_containers(container, dtype, tmp_path, slow):
    shards = "40KB" if container == "sharded" else "5GB"
    path = models.build("qwen3_moe", tmp_path, dtype=dtype, max_shard_size=shards)
    if container == "fused":
        rewrite(path, fuse)
    index = path / "model.safetensors.index.json"
    assert index.exists() == (container == "sharded")
    if container == "sharded":
        assert len(set(json.loads(index.read_text())["weight_map"].values())) > 4
    model = hf.load_model(path, dtype=torch.float32)
    assert torch.equal(logits(model), logits(stock(path)))


def test_transposed_fused_tensors(tmp_path, slow):
    """Published Qwen3-VL-MoE files hold [E, H, 2I]; its loader transposes, and so do we."""
    config = transformers.Qwen3VLMoeConfig(
        text_config=models.config("qwen3_moe").to_dict()
        | {"num_experts": 8}  # as older versions call it
        | {"model_type": "qwen3_vl_moe_text", "rope_scaling": {"mrope_section": [3, 3, 2]}},
        vision_config={
            "depth": 1,
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_heads": 2,
            "out_hidden_size": 64,
            "deepstack_visual_indexes": [0],
        },
    )
    cls = transformers.Qwen3VLMoeForConditionalGeneration
    torch.manual_seed(0)
    cls(config).save_pretrained(tmp_path)

    def transpose(tensors):
        for name in [n for n in tensors if ".experts." in n]:
            tensors[name] = tensors[name].transpose(1, 2).contiguous()
            assert tensors[name].shape in ((8, 64, 80), (8, 40, 64))

    rewrite(tmp_path, transpose)
    reference = cls.from_pretrained(tmp_path, dtype=torch.float32, experts_implementation="eager")
    with hf.experts_on_cpu(ExpertSettings()):
        model = cls.from_pretrained(tmp_path, dtype=torch.float32)
    assert len(kt_modules(model)) == 2
    assert torch.equal(logits(model), logits(reference))


def test_a_square_fused_tensor_is_taken_as_transformers_takes_it(tmp_path):
    """H = 2I: both orientations have one shape; transformers then does not transpose."""
    weights = torch.randn(2, 8, 8)
    down = torch.randn(2, 8, 4)
    file = tmp_path / "model.safetensors"
    save_file({"layers.0.experts.gate_up_proj": weights, "layers.0.experts.down_proj": down}, file)
    want = ExpertRequest({"layers.0.experts": (2, 8, 4)}, transposed=True)  # names as stored
    parts = checkpoint.collect(CheckpointFiles([file]), want)["layers.0.experts"]
    got = {(p.expert, p.projection): p.read() for p in parts}
    assert torch.equal(got[1, "gate"], weights[1, :4]) and torch.equal(got[1, "up"], weights[1, 4:])
    assert torch.equal(got[1, "down"], down[1])


def test_no_warning_about_expert_keys(tmp_path, slow, caplog):
    path = models.build("mixtral", tmp_path)
    transformers.logging.enable_propagation()
    try:
        with caplog.at_level(logging.WARNING):
            _, info = hf.load_model(path, output_loading_info=True)
    finally:
        transformers.logging.disable_propagation()
    assert not info["unexpected_keys"] and not info["missing_keys"]
    assert not [r for r in caplog.records if "experts" in r.getMessage()]


def test_an_unexpected_key_that_is_not_ours_is_still_reported(tmp_path, slow):
    path = models.build("qwen3_moe", tmp_path)
    rewrite(path, lambda t: t.update({"model.layers.0.mlp.shared.weight": torch.zeros(2)}))
    _, info = hf.load_model(path, output_loading_info=True)
    assert info["unexpected_keys"] == {"model.layers.0.mlp.shared.weight"}


def test_experts_of_another_part_of_the_checkpoint_are_left_alone(tmp_path, slow):
    """Multi-token-prediction layers carry experts with the same layer numbers (Qwen3-Next)."""
    path = models.build("qwen3_moe", tmp_path)
    before = logits(hf.load_model(path, dtype=torch.float32))

    def add(tensors):
        for name in [n for n in tensors if ".layers.0.mlp.experts." in n]:
            tensors[name.replace("model.", "mtp.")] = torch.ones_like(tensors[name])

    rewrite(path, add)
    model, info = hf.load_model(path, dtype=torch.float32, output_loading_info=True)
    assert torch.equal(logits(model), before)
    assert info["unexpected_keys"] == {
        f"mtp.layers.0.mlp.experts.{name}" for name in ("gate_up_proj", "down_proj")
    }


@pytest.mark.parametrize("family", ["mixtral", "deepseek_v3"])
def test_base_model_of_a_causal_checkpoint_and_the_reverse(family, tmp_path, slow):
    """The `model.` prefix comes and goes, as in stock loading."""
    path = models.build(family, tmp_path / "causal")
    with hf.experts_on_cpu(ExpertSettings()):
        base = transformers.AutoModel.from_pretrained(path, dtype=torch.float32)
    whole = stock(path)
    with torch.no_grad():
        expected = whole.model(input_ids=IDS).last_hidden_state
        assert torch.equal(base(input_ids=IDS).last_hidden_state, expected)
    whole.model.save_pretrained(tmp_path / "base")
    with pytest.raises(ValueError, match=r"base lacks lm_head\.weight \(1 weights"):
        hf.load_model(tmp_path / "base", dtype=torch.float32)
    causal = hf.load_model(tmp_path / "base", dtype=torch.float32, tie_word_embeddings=True)
    with torch.no_grad():
        assert torch.equal(causal.model(input_ids=IDS).last_hidden_state, expected)


def test_weights_that_exist_already_are_refused():
    """DeepSpeed ZeRO-3 materialises and partitions parameters before loading."""
    model = transformers.AutoModelForCausalLM.from_config(models.config("mixtral"))
    with pytest.raises(ValueError, match=r"model\.layers\.0\.mlp\.experts exist .* use ZeRO-2"):
        find_experts(model)


def test_progress_is_shown_on_a_terminal_only(tmp_path, slow, monkeypatch):
    path = models.build("mixtral", tmp_path)
    for terminal in (True, False):
        stream = io.StringIO()
        stream.isatty = lambda terminal=terminal: terminal
        monkeypatch.setattr(sys, "stderr", stream)
        hf.load_model(path)
        shown = re.search(r"Packing experts: 100%.*240k/240k .*<00:00, .*B/s", stream.getvalue())
        assert bool(shown) == terminal, stream.getvalue()


def test_tied_embeddings_stay_tied(tmp_path, slow):
    path = models.build("mixtral", tmp_path, tie_word_embeddings=True)
    model = hf.load_model(path, dtype=torch.float32)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert torch.equal(logits(model), logits(stock(path)))


@pytest.mark.parametrize("first", ["stock", "kt"])
def test_stock_and_kt_models_in_one_process(first, tmp_path, slow):
    path = models.build("qwen3_moe", tmp_path)
    loaders = {"stock": stock, "kt": lambda p: hf.load_model(p, dtype=torch.float32)}
    order = [first, "kt" if first == "stock" else "stock"]
    loaded = {name: loaders[name](path) for name in order}
    assert len(kt_modules(loaded["kt"])) == 2 and not kt_modules(loaded["stock"])
    assert any(n.endswith("gate_up_proj") for n, _ in loaded["stock"].named_parameters())
    assert torch.equal(logits(loaded["kt"]), logits(loaded["stock"]))


def test_other_threads_load_stock_models(tmp_path, slow):
    path = models.build("qwen3_moe", tmp_path)
    seen = []
    with hf.experts_on_cpu(ExpertSettings()):
        thread = threading.Thread(target=lambda: seen.append(stock(path)))
        thread.start()
        thread.join()
    assert not kt_modules(seen[0])


def test_install_is_idempotent_and_uninstall_restores():
    cls = transformers.PreTrainedModel
    patches.restore("kt_core.hf")
    original = cls._load_pretrained_model
    hf.install()
    wrapped = cls._load_pretrained_model
    hf.install()
    assert cls._load_pretrained_model is wrapped is not original
    patches.restore("kt_core.hf")
    assert cls._load_pretrained_model is original


def test_an_unknown_transformers_is_named(monkeypatch):
    patches.restore("kt_core.hf")
    monkeypatch.setattr(
        transformers.PreTrainedModel, "_load_pretrained_model", staticmethod(lambda files: None)
    )
    with pytest.raises(ImportError, match=f"transformers {transformers.__version__} loads"):
        hf.install()


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe", "olmoe"])
def test_router_aux_loss_is_unchanged(family, tmp_path, slow):
    path = models.build(family, tmp_path)
    ours, theirs = hf.load_model(path, dtype=torch.float32), stock(path)
    with torch.no_grad():
        a, b = (m(input_ids=IDS, labels=IDS, output_router_logits=True) for m in (ours, theirs))
    assert len(a.router_logits) == len(b.router_logits) == 2
    for mine, stocks in zip(a.router_logits, b.router_logits, strict=True):
        assert torch.equal(mine, stocks)
    assert torch.equal(a.aux_loss, b.aux_loss) and torch.equal(a.loss, b.loss)
    with torch.no_grad():
        plain = ours(input_ids=IDS, labels=IDS)
    assert plain.loss < a.loss  # the auxiliary term is in it


# --- the module -----------------------------------------------------------------------------------
# --------------------


@pytest.fixture
def module(slow):
    layer = experts.Experts(4, 16, 12, name="layer")
    generator = torch.Generator().manual_seed(0)
    for e in range(4):
        for p, shape in {"gate": (12, 16), "up": (12, 16), "down": (16, 12)}.items():
            layer.put(e, p, torch.randn(shape, generator=generator))
    return KTExpertsLinear(layer, layer_index=0)


def call(module, x):
    tokens = x.numel() // 16
    index = torch.stack([torch.arange(tokens) % 4, (torch.arange(tokens) + 1) % 4], 1)
    return module(x, index, torch.full((tokens, 2), 0.5))


def test_module_flattens_leading_dimensions(module):
    x = torch.randn(2, 3, 16)
    assert torch.equal(call(module, x), call(module, x.view(6, 16)).view(2, 3, 16))


def test_module_keeps_the_dtype_of_its_input(module):
    x = torch.randn(5, 16)
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        assert call(module, x.to(dtype)).dtype == dtype


def test_moving_and_casting_do_not_touch_it(module):
    before = call(module, torch.ones(3, 16))
    module.half().to("meta").double()
    assert torch.equal(call(module, torch.ones(3, 16)), before)
    assert module.weight.device.type == "cpu" and module.weight.numel() == 0


def test_copies_share_the_weights(module):
    outer = torch.nn.ModuleList([module]).eval()
    twin = copy.deepcopy(outer)[0]
    assert twin is not module and twin.experts is module.experts and not twin.training
    assert torch.equal(call(twin, torch.ones(3, 16)), call(module, torch.ones(3, 16)))


def test_pickling_is_refused(module):
    with pytest.raises(TypeError, match=r"layer holds packed experts .* save the adapter"):
        pickle.dumps(module)


def test_inference_runner_refuses_gradients(module):
    x = torch.randn(3, 16, requires_grad=True)
    with pytest.raises(RuntimeError, match=r"loaded for inference; .*no_grad"):
        call(module, x)
    with torch.no_grad():
        call(module, x)


def test_saving_the_base_model_is_refused(tmp_path, slow):
    model = hf.load_model(models.build("mixtral", tmp_path / "model"))
    with pytest.raises(ValueError, match="without them; save the adapter"):
        model.save_pretrained(tmp_path / "out")
    assert not (tmp_path / "out").exists()


# --- bad input ------------------------------------------------------------------------------------
# --------------------


@pytest.fixture
def nothing_packed(monkeypatch, slow):
    """Fails the test if a weight is packed: refusals come before."""

    def put(self, expert, projection, weight):
        pytest.fail(f"{projection} of expert {expert} was packed")

    monkeypatch.setattr(slow_experts.SlowExperts, "put", put)


def test_truncated_shard(tmp_path, nothing_packed):
    path = models.build("qwen3_moe", tmp_path, max_shard_size="40KB")
    file = sorted(path.glob("model-*.safetensors"))[2]
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(ValueError, match=f"{file.name} is truncated .* copy it again"):
        hf.load_model(path)


def test_missing_shard(tmp_path, nothing_packed):
    path = models.build("qwen3_moe", tmp_path, max_shard_size="40KB")
    file = sorted(path.glob("model-*.safetensors"))[2]
    file.unlink()
    with pytest.raises((OSError, ValueError), match=file.name):
        hf.load_model(path)


def test_missing_expert(tmp_path, nothing_packed):
    path = models.build("mixtral", tmp_path)
    rewrite(path, lambda t: t.pop("model.layers.1.block_sparse_moe.experts.5.w3.weight"))
    match = "model.safetensors lacks the up projection of expert 5 of model.layers.1.mlp.experts"
    with pytest.raises(ValueError, match=match):
        hf.load_model(path)


def test_expert_too_many(tmp_path, nothing_packed):
    path = models.build("mixtral", tmp_path)
    name = "model.layers.1.block_sparse_moe.experts.{}.w3.weight"
    rewrite(path, lambda t: t.update({name.format(8): t[name.format(0)].clone()}))
    with pytest.raises(ValueError, match="belongs to expert 8, but the model has 8 experts"):
        hf.load_model(path)


def test_expert_stored_twice(tmp_path, nothing_packed):
    path = models.build("qwen3_moe", tmp_path)
    prefix = "model.layers.0.mlp.experts."
    rewrite(path, lambda t: t.update({prefix + "down_proj": torch.zeros(8, 64, 40)}))
    with pytest.raises(ValueError, match=f"stored twice, as .*{prefix}.* remove one"):
        hf.load_model(path)


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn, torch.float64])
def test_wrong_dtype(dtype, tmp_path, nothing_packed):
    path = models.build("mixtral", tmp_path)
    name = "model.layers.0.block_sparse_moe.experts.2.w2.weight"
    rewrite(path, lambda t: t.update({name: t[name].to(dtype)}))
    with pytest.raises(ValueError, match=f"{name} in .*model.safetensors has dtype .* to bf16"):
        hf.load_model(path)


def test_wrong_shape(tmp_path, nothing_packed):
    path = models.build("mixtral", tmp_path)
    name = "model.layers.0.block_sparse_moe.experts.2.w2.weight"
    rewrite(path, lambda t: t.update({name: t[name].T.contiguous()}))
    with pytest.raises(ValueError, match=rf"{name} in .* has shape \[40, 64\] .* \[64, 40\]"):
        hf.load_model(path)


def test_wrong_fused_shape(tmp_path, nothing_packed):
    path = models.build("qwen3_moe", tmp_path)
    name = "model.layers.0.mlp.experts.gate_up_proj"

    def transpose(tensors):
        fuse(tensors)
        tensors[name] = tensors[name].transpose(1, 2).contiguous()

    rewrite(path, transpose)
    with pytest.raises(ValueError, match=rf"{name} in .* \[8, 64, 80\] .* \[8, 80, 64\]"):
        hf.load_model(path)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("engine", ["reference", "kernels"])
def test_nan_weights(engine, bad, tmp_path, monkeypatch):
    if engine == "reference":
        slow_experts.patch(monkeypatch)
    path = models.build("mixtral", tmp_path)
    name = "model.layers.0.block_sparse_moe.experts.2.w2.weight"
    rewrite(path, lambda t: t[name].view(-1)[7:8].fill_(bad))
    with pytest.raises(ValueError, match=f"{name} in .*model.safetensors .*expert 2, down.* again"):
        hf.load_model(path)


@pytest.mark.parametrize("name", ["model.layers.1.self_attn.q_proj.weight", "lm_head.weight"])
def test_missing_weight_that_is_no_expert(name, tmp_path, slow):
    """transformers would warn and go on with random values."""
    path = models.build("qwen3_moe", tmp_path)
    rewrite(path, lambda t: t.pop(name))
    with pytest.raises(ValueError, match=f"lacks {name} .* random values; .* download it again"):
        hf.load_model(path)


def test_a_new_head_of_another_task_is_allowed(tmp_path, slow):
    path = models.build("mixtral", tmp_path)
    with hf.experts_on_cpu(ExpertSettings()):
        kind = transformers.AutoModelForSequenceClassification
        assert kind.from_pretrained(path).score.weight.isfinite().all()


@pytest.mark.parametrize("bad", [float("nan"), float("-inf")])
def test_nan_in_a_weight_that_is_no_expert(bad, tmp_path, slow):
    path = models.build("mixtral", tmp_path)
    name = "model.layers.1.self_attn.k_proj.weight"
    rewrite(path, lambda t: t[name].view(-1)[7:8].fill_(bad))
    with pytest.raises(ValueError, match=f"{name} in checkpoint .* holds NaN or Inf; .* again"):
        hf.load_model(path)


def test_pickled_checkpoint(tmp_path, nothing_packed):
    path = models.build("mixtral", tmp_path)
    file = path / "model.safetensors"
    torch.save(load_file(file), path / "pytorch_model.bin")
    file.unlink()
    with pytest.raises(ValueError, match=r"pytorch_model\.bin is a pickle.*as safetensors"):
        hf.load_model(path)


def test_gpt_oss_is_refused_by_name(tmp_path, nothing_packed):
    path = models.build("gpt_oss", tmp_path)
    with pytest.raises(
        ValueError, match=r"is a GptOssExperts, whose experts have the parameters .*bias"
    ):
        hf.load_model(path)


@pytest.mark.parametrize(
    ("name", "value", "match"),
    [
        ("is_transposed", True, "trait is_transposed=True"),
        ("has_bias", True, "trait has_bias=True"),
        ("has_gate", False, "trait has_gate=False"),
        ("is_concatenated", False, "trait is_concatenated=False"),
        ("has_future_trick", True, "trait has_future_trick=True"),
    ],
)
def test_unknown_expert_traits_are_refused_by_name(
    name, value, match, tmp_path, nothing_packed, monkeypatch
):
    from transformers.models.mixtral import modeling_mixtral as mixtral

    path = models.build("mixtral", tmp_path)
    init = mixtral.MixtralExperts.__init__

    def changed(self, config):
        init(self, config)
        setattr(self, name, value)

    monkeypatch.setattr(mixtral.MixtralExperts, "__init__", changed)
    with pytest.raises(ValueError, match=f"is a MixtralExperts, whose experts have the {match}"):
        hf.load_model(path)


def test_a_gate_of_its_own_is_refused_by_name(tmp_path, nothing_packed, monkeypatch):
    from transformers.models.mixtral import modeling_mixtral as mixtral

    path = models.build("mixtral", tmp_path)
    interleaved = lambda self, x: self.act_fn(x[..., ::2]) * x[..., 1::2]  # noqa: E731
    monkeypatch.setattr(mixtral.MixtralExperts, "_apply_gate", interleaved)
    with pytest.raises(
        ValueError, match="MixtralExperts, whose experts gate in a way of their own"
    ):
        hf.load_model(path)


def test_experts_outside_the_interface_are_refused_by_name(tmp_path, nothing_packed, monkeypatch):
    """As LongCat-Flash's, whose experts module is not decorated and has identity experts."""
    from transformers.models.mixtral import modeling_mixtral as mixtral

    path = models.build("mixtral", tmp_path)
    init = mixtral.MixtralExperts.__init__

    def changed(self, config):
        init(self, config)
        del self.is_transposed

    monkeypatch.setattr(mixtral.MixtralExperts, "__init__", changed)
    with pytest.raises(ValueError, match="do not follow transformers' experts interface"):
        hf.load_model(path)


def test_other_activations(tmp_path, slow):
    path = models.build("mixtral", tmp_path / "gelu", hidden_act="gelu")
    assert torch.equal(logits(hf.load_model(path, dtype=torch.float32)), logits(stock(path)))
    path = models.build("mixtral", tmp_path / "relu2", hidden_act="relu2")
    with pytest.raises(ValueError, match="use the activation ReLUSquaredActivation"):
        hf.load_model(path)


def test_a_model_without_experts_is_refused(tmp_path, slow):
    config = transformers.LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=1,
        num_attention_heads=2,
    )
    transformers.LlamaForCausalLM(config).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="LlamaForCausalLM has no routed experts"):
        hf.load_model(tmp_path)
    assert transformers.AutoModelForCausalLM.from_pretrained(tmp_path) is not None


@pytest.mark.parametrize(
    ("settings", "match"),
    [
        ({"format": "int3"}, r"format 'int3' is not known; choose one of bf16"),
        ({"format": "bf16", "group": 32}, "group 32 has no meaning for format bf16"),
        ({"numa_nodes": 99}, "numa_nodes is 99 but this process has CPUs and memory on"),
        ({"device_map": "auto"}, "device_map='auto' is computed as if"),
    ],
)
def test_settings_that_cannot_be_kept(settings, match, tmp_path, nothing_packed):
    path = models.build("mixtral", tmp_path)
    with pytest.raises(ValueError, match=match):
        hf.load_model(path, **settings)


def test_a_map_that_was_computed_with_the_experts_is_refused(tmp_path, nothing_packed):
    path = models.build("mixtral", tmp_path)
    device_map = {"model": "cpu", "lm_head": "disk"}
    with pytest.raises(ValueError, match=r"spreads the model over \['cpu', 'disk'\]"):
        hf.load_model(path, device_map=device_map, offload_folder=str(tmp_path / "offload"))


def test_an_explicit_device_works(tmp_path, slow):
    path = models.build("mixtral", tmp_path)
    model = hf.load_model(path, dtype=torch.float32, device_map="cpu")
    assert torch.equal(logits(model), logits(stock(path)))


def test_a_state_dict_is_refused(tmp_path, slow):
    path = models.build("mixtral", tmp_path)
    tensors = load_file(path / "model.safetensors")
    config = models.config("mixtral")
    with (
        hf.experts_on_cpu(ExpertSettings()),
        pytest.raises(ValueError, match="loaded from a state_dict"),
    ):
        transformers.MixtralForCausalLM.from_pretrained(None, config=config, state_dict=tensors)


def test_threads_reach_the_runtime(tmp_path, slow, monkeypatch):
    seen = []
    monkeypatch.setattr(hf.runtime, "set_threads", seen.append)
    hf.load_model(models.build("mixtral", tmp_path), threads=1)
    assert seen == [1]


def test_group_reaches_the_packer(tmp_path, slow):
    path = models.build("mixtral", tmp_path)
    groups = {
        key: {m.experts.group for m in kt_modules(hf.load_model(path, **dict(key))).values()}
        for key in [(("format", "int8"),), (("format", "int4"),), (("group", 64),)]
    }
    assert list(groups.values()) == [{128}, {32}, {64}]
