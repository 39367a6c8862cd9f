"""What use_kt refuses, in one sentence, before a model is loaded."""

from __future__ import annotations

import lf_cases
import pytest
import torch

from kt_sft.report import stats


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return lf_cases.workspace(tmp_path_factory.mktemp("lf"))


@pytest.fixture
def unloaded(monkeypatch):
    """Fails the test if a model is loaded."""
    import llamafactory.train.sft.workflow as workflow

    def load_model(*args, **kw):
        raise AssertionError("a model was loaded")

    monkeypatch.setattr(workflow, "load_model", load_model)


REFUSED = {
    "full": ({"finetuning_type": "full"}, "finetuning_type=full is not possible; set .*: lora"),
    "freeze": ({"finetuning_type": "freeze"}, "finetuning_type=freeze is not possible"),
    "stage": (
        {"stage": "ppo", "reward_model": "x"},
        "stage=ppo is not supported with use_kt: .* needs trl <= 0.9.6",
    ),
    "unknown key": ({"kt_config": {"fromat": "int8"}}, "unknown key fromat='int8'; .* format"),
    "bad value": ({"kt_config": {"format": "int3"}}, "format='int3' is not known; use one of"),
    "conflict": (
        {"kt_config": {"activation": "retain"}, "kt_cpu_activation": "recompute"},
        "contradict each other; keep one",
    ),
    "not a mapping": ({"kt_config": "int8"}, "is not JSON"),
    "quantization": ({"quantization_bit": 4}, "quantization_bit=4 is not supported with use_kt"),
    "stock kt key": ({"kt_weight_path": "/x"}, "kt_weight_path='/x' .* use kt_config.packed_dir"),
    "dora": ({"use_dora": True}, "use_dora=True is not supported on experts .*; remove it"),
    "pissa": ({"pissa_init": True}, "pissa_init=True is not supported with use_kt"),
    "unsloth": ({"use_unsloth": True}, "use_unsloth=True is not supported with use_kt"),
    "unsloth checkpoints": ({"use_unsloth_gc": True}, "cannot keep expert activations"),
    "a new adapter on an old one": (
        {"create_new_adapter": True, "adapter_name_or_path": "x"},
        "merge it first with llamafactory-cli export",
    ),
    "fsdp of one process without a GPU": (
        {"fsdp": "full_shard", "fsdp_config": {"version": 2}},
        "one process on the CPU and would go without; .*fsdp2_cpu.yaml, or this one with cpu.yaml",
    ),
    "a check of overflows that a loss scaler makes": (
        {"fp16": True, "kt_config": {"check_finite": True}},
        "check_finite=true would end a run with fp16=True .* set bf16: true instead",
    ),
    "the first fsdp": (
        {"fsdp": "full_shard"},
        "cannot run under FSDP 1, .* set fsdp_config: {fsdp_version: 2}, or remove fsdp and launch",
    ),
    "a reward model under fsdp": (
        {"fsdp": "full_shard", "stage": "rm", "dataset": "dpo"},
        "stage=rm cannot run under FSDP: .* launch it as DDP, or with DeepSpeed ZeRO-2",
    ),
    "kt_config alone": ({"use_kt": False}, "kt_config=.* has no effect without use_kt"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused_before_loading(name, root, unloaded, monkeypatch):
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    changes, message = REFUSED[name]
    with pytest.raises(ValueError, match=message):
        lf_cases.run(lf_cases.arguments(root, "refused", **changes))


def test_fsdp_by_the_launcher_without_a_gpu(root, unloaded, monkeypatch):
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    monkeypatch.setenv("FSDP_VERSION", "2")
    with pytest.raises(ValueError, match="one process on the CPU and would go without"):
        lf_cases.run(lf_cases.arguments(root, "refused"))
    with pytest.raises(ValueError, match="cannot run under FSDP 1"):  # the YAML's fsdp counts alone
        lf_cases.run(lf_cases.arguments(root, "refused", fsdp="full_shard"))
    monkeypatch.setenv("FSDP_VERSION", "1")
    for config in (None, {"version": 2}):  # without `fsdp` beside it, nobody reads the YAML's
        with pytest.raises(ValueError, match="under FSDP 1, .* set fsdp_version: 2, as in"):
            lf_cases.run(lf_cases.arguments(root, "refused", fsdp_config=config))
    with pytest.raises(ValueError, match="one process on the CPU"):
        args = {"fsdp": "full_shard", "fsdp_config": {"version": 2}}
        lf_cases.run(lf_cases.arguments(root, "refused", **args))


def test_zero3(root, unloaded, monkeypatch):
    import transformers.integrations

    monkeypatch.setattr(transformers.integrations, "is_deepspeed_zero3_enabled", lambda: True)
    with pytest.raises(ValueError, match="cannot run under DeepSpeed ZeRO-3.*use ZeRO-2, or FSDP2"):
        lf_cases.run(lf_cases.arguments(root, "refused"))


def test_a_model_without_experts(root, tmp_path):
    import transformers

    config = transformers.Qwen3Config(
        vocab_size=300, hidden_size=32, intermediate_size=48, num_hidden_layers=1,
        num_attention_heads=2, num_key_value_heads=1, head_dim=16,
    )  # fmt: skip
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    lf_cases.models.byte_tokenizer().save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="Qwen3ForCausalLM has no routed experts"):
        lf_cases.run(lf_cases.arguments(root, "refused", model_name_or_path=str(tmp_path)))


def test_a_target_that_matches_nothing(root):
    with pytest.raises(ValueError, match="LoRA target gate_prj matches no module"):
        lf_cases.run(lf_cases.arguments(root, "refused", lora_target="q_proj,gate_prj"))


def test_resume_under_fsdp_with_an_accelerate_that_loses_tensors(root, monkeypatch):
    import accelerate

    from kt_sft.llamafactory import checks
    from kt_sft.run import interruption

    class Arguments:
        resume_from_checkpoint, fsdp, adapter_name_or_path = (
            "out/checkpoint-2",
            ["full_shard"],
            None,
        )
        world_size = 2

    monkeypatch.setattr(interruption, "check_resumable", lambda checkpoint, world_size: None)

    monkeypatch.setattr(accelerate, "__version__", "1.15.0")
    checks.check_resume(Arguments, Arguments)
    monkeypatch.setattr(accelerate, "__version__", "1.14.0")
    with pytest.raises(ValueError, match="set adapter_name_or_path: out/checkpoint-2 beside"):
        checks.check_resume(Arguments, Arguments)


@pytest.mark.parametrize("order", [1, -1])
def test_gradients_that_are_not_finite_stop_the_run(order):
    """A NaN beside finite values, before or after them, must not pass as a small gradient."""
    model = torch.nn.ModuleDict({"attn": torch.nn.Linear(2, 2), "mlp": torch.nn.Linear(2, 2)})
    for value, parameter in zip(
        [float("nan"), 1.0][::order], model["attn"].parameters(), strict=True
    ):
        parameter.grad = torch.full_like(parameter, value)
    for parameter in model["mlp"].parameters():
        parameter.grad = torch.ones_like(parameter)
    with pytest.raises(RuntimeError, match="adapter's attention parameters are NaN or Inf"):
        stats.check_gradients(model)
    stats.check_gradients(model, overflow=True)


def test_gradients_that_are_all_zero_stop_the_run(root, monkeypatch):
    """F5: a part of the adapter that gets no gradient at the first step would never learn."""
    check = stats.check_gradients

    def zeroed(model, **kw):
        for name, parameter in model.named_parameters():
            if ".experts." in name and parameter.grad is not None:
                parameter.grad.zero_()
        check(model, **kw)

    monkeypatch.setattr(stats, "check_gradients", zeroed)
    with pytest.raises(
        RuntimeError, match="gradients of the adapter's experts parameters are zero"
    ):
        lf_cases.run(lf_cases.arguments(root, "zero"))


def test_an_optimizer_that_holds_other_parameters_stops_the_run(root, monkeypatch):
    monkeypatch.setattr(stats, "_optimizer_parameters", lambda optimizer: 17)
    with pytest.raises(
        RuntimeError, match=r"the optimizer holds 17 parameters but .* trains 23,552"
    ):
        lf_cases.run(lf_cases.arguments(root, "held"))


def test_several_gpus_in_one_process_are_not_data_parallel(root):
    from llamafactory.hparams import get_train_args

    from kt_sft.llamafactory import checks

    model_args, _, training_args, finetuning_args, _ = get_train_args(lf_cases.arguments(root, "x"))
    training_args._n_gpu = 2
    checks.check_run(model_args, training_args, finetuning_args)
    assert training_args.n_gpu == 1
