"""The one list of options: what LLaMA-Factory, transformers' Trainer and peft.LoraConfig can be
asked, and what a use_kt run makes of it. docs/options.md is written from it
(scripts/option_table.py), test_options.py holds it against stock and against the installed
argument classes: a field that is not in it is named by a failing test.

A verdict is "supported" (stock's result, shown by `cases` or by the test named in `test`, or by
nothing where the option never meets the model), "refused" (one sentence, before a model is loaded)
or "no effect" (in stock as with use_kt; `note` says why).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

SUPPORTED, REFUSED, NO_EFFECT = "supported", "refused", "no effect"
STAGES = ("sft", "pt", "dpo", "kto", "rm")


@dataclass(frozen=True)
class Case:
    """A run of `stage` with `changes`, compared with stock's. acts: the losses differ from those of
    the same run without `changes` (but with `beside`, which other options need).

    fails: stock itself ends with such an error, and so must we.
    slow: it takes long, or the option only says how the Trainer steps.
    `{root}` in a string is the directory of models and data, `{adapter}` a trained adapter there.
    """

    changes: dict[str, Any]
    stage: str = "sft"
    acts: bool = True
    beside: dict[str, Any] = field(default_factory=dict)
    fails: str = ""
    slow: bool = False


@dataclass(frozen=True)
class Option:
    """A row of the table. value, message: what is refused, and how."""

    of: str
    name: str
    verdict: str
    note: str = ""
    cases: tuple[Case, ...] = ()
    test: str = ""
    value: Any = None
    message: str = ""
    beside: dict[str, Any] = field(default_factory=dict)


MODEL, DATA, TUNING = "ModelArguments", "DataArguments", "FinetuningArguments"
TRAINING, GENERATING, LORA = "TrainingArguments", "GeneratingArguments", "LoraConfig"


def _many(of: str, names: str, verdict: str, note: str) -> Iterator[Option]:
    for name in names.split():
        yield Option(of, name, verdict, note)


def _same(of: str, name: str, *cases: Case, note: str = "", verdict: str = SUPPORTED) -> Option:
    return Option(of, name, verdict, note, cases)


def _refused(of: str, name: str, value: Any, message: str, note: str, **beside: Any) -> Option:
    return Option(of, name, REFUSED, note, value=value, message=message, beside=beside)


def _elsewhere(of: str, name: str, test: str, note: str = "") -> Option:
    return Option(of, name, SUPPORTED, note, test=test)


def _value(
    name: str,
    *values: Any,
    acts: bool = True,
    stage: str = "sft",
    fails: str = "",
    slow: bool = False,
    **beside: Any,
) -> list[Case]:
    return [Case({name: value}, stage, acts, beside, fails, slow) for value in values]


# ------------------------------------------------------------------------------- ModelArguments

_FULL = {"model_name_or_path": "{root}/full"}  # no row for a new token
_HEAD = "embed_tokens,lm_head"

_MODEL = [
    _same(MODEL, "model_name_or_path", Case({}, acts=False), note="in every run of this table"),
    _same(MODEL, "adapter_name_or_path", Case({"adapter_name_or_path": "{adapter}"})),
    _same(
        MODEL,
        "adapter_folder",
        Case({"adapter_name_or_path": "{root}", "adapter_folder": "adapter"}),
    ),
    *_many(
        MODEL,
        "cache_dir model_revision hf_hub_token ms_hub_token om_hub_token trust_remote_code",
        SUPPORTED,
        "where files come from",
    ),
    _same(MODEL, "use_fast_tokenizer", *_value("use_fast_tokenizer", False, acts=False)),
    _same(MODEL, "resize_vocab", *_value("resize_vocab", True, **_FULL)),
    _same(MODEL, "add_tokens", *_value("add_tokens", "It is,course", **_FULL)),
    _same(MODEL, "add_special_tokens", *_value("add_special_tokens", "number,course", **_FULL)),
    _same(
        MODEL,
        "new_special_tokens_config",
        *_value("new_special_tokens_config", "{root}/tokens.yaml", **_FULL),
    ),
    _same(
        MODEL,
        "init_special_tokens",
        *_value(
            "init_special_tokens",
            *("desc_init", "desc_init_w_noise"),
            new_special_tokens_config="{root}/tokens.yaml",
            **_FULL,
        ),
    ),
    _same(MODEL, "split_special_tokens", *_value("split_special_tokens", True)),
    _same(MODEL, "low_cpu_mem_usage", *_value("low_cpu_mem_usage", False, acts=False)),
    _same(
        MODEL,
        "rope_scaling",
        *_value("rope_scaling", "linear", fails="expected int, got float", cutoff_len=1024),
        note="LLaMA-Factory 0.9.5 fails with it, with use_kt as without: transformers 5 wants a "
        "whole number",
    ),
    _same(
        MODEL,
        "flash_attn",
        *_value("flash_attn", "disabled", "sdpa", "fa2", acts=False),
        note="the attention is the model's own",
    ),
    _same(
        MODEL,
        "shift_attn",
        *_value("shift_attn", True, acts=False),
        verdict=NO_EFFECT,
        note="LLaMA-Factory knows it for Llama only, and warns",
    ),
    _refused(
        MODEL, "mixture_of_depths", "convert", "mixture_of_depths='convert' is not", "other layers"
    ),
    _refused(MODEL, "use_unsloth", True, "use_unsloth=True is not", "other model code"),
    _refused(
        MODEL,
        "use_unsloth_gc",
        True,
        "use_unsloth_gc=True needs a CUDA device",
        "without CUDA, and with `activation: retain`; else as in stock",
        kt_config={"activation": "recompute"},
    ),
    _refused(
        MODEL,
        "enable_liger_kernel",
        True,
        "enable_liger_kernel=True is not supported with use_kt",
        "it replaces the experts; the loss is computed in blocks without it",
    ),
    _same(
        MODEL,
        "moe_aux_loss_coef",
        *_value("moe_aux_loss_coef", 0.5, use_reentrant_gc=False),
        *_value("moe_aux_loss_coef", 0.5, stage="pt", use_reentrant_gc=False),
        *_value("moe_aux_loss_coef", 0.5, stage="dpo", acts=False),
        *_value("moe_aux_loss_coef", 0.5, stage="kto", acts=False),
        *_value("moe_aux_loss_coef", 0.5, stage="rm", acts=False),
        note="for the families that LLaMA-Factory knows, as in stock; with reentrant checkpoints "
        "stock loses its gradient, `activation: retain` does not",
    ),
    _same(
        MODEL,
        "disable_gradient_checkpointing",
        *_value("disable_gradient_checkpointing", True, acts=False),
    ),
    _same(
        MODEL,
        "use_reentrant_gc",
        *_value("use_reentrant_gc", False, acts=False),
        note="`true` needs `activation: recompute`",
    ),
    _same(MODEL, "upcast_layernorm", *_value("upcast_layernorm", True, acts=False)),
    _same(MODEL, "upcast_lmhead_output", *_value("upcast_lmhead_output", True, acts=False)),
    _refused(MODEL, "train_from_scratch", True, "the experts are frozen", "the experts are frozen"),
    _refused(
        MODEL, "infer_backend", "vllm", "does not know experts in CPU memory", "only huggingface"
    ),
    *_many(MODEL, "offload_folder", NO_EFFECT, "nothing is offloaded: experts are in memory"),
    *_many(MODEL, "use_kv_cache infer_dtype", SUPPORTED, "chat and export; training has no cache"),
    _refused(
        MODEL,
        "use_v1_kernels",
        True,
        "use_v1_kernels=True is not supported with use_kt",
        "kernels of other processors, some in the place of the experts",
    ),
    *_many(MODEL, "print_param_status", SUPPORTED, "prints; experts are no parameters"),
    *_many(
        MODEL,
        "quantization_method quantization_type double_quantization quantization_device_map",
        NO_EFFECT,
        "only with quantization_bit, which is refused",
    ),
    _refused(MODEL, "quantization_bit", 4, "choose kt_config.format", "kt_config.format instead"),
    *_many(
        MODEL,
        "image_max_pixels image_min_pixels image_do_pan_and_scan crop_to_patches video_max_pixels "
        "video_min_pixels video_fps video_maxlen use_audio_in_video audio_sampling_rate",
        SUPPORTED,
        "before the model: images, video, audio",
    ),
    _elsewhere(MODEL, "export_dir", "test_export.py", "export"),
    *_many(MODEL, "export_device", NO_EFFECT, "export reads and writes files, no device"),
    *(
        Option(
            MODEL,
            name,
            REFUSED,
            "by export",
            test="test_export.py::test_exports_that_are_refused",
        )
        for name in ("export_size", "export_legacy_format", "export_hub_model_id")
    ),
    _refused(
        MODEL,
        "export_quantization_bit",
        4,
        "export_quantization_bit=4 is not supported with use_kt",
        "by training and export",
        export_quantization_dataset="x",
    ),
    *_many(
        MODEL,
        "export_quantization_dataset export_quantization_nsamples export_quantization_maxlen",
        NO_EFFECT,
        "only with export_quantization_bit, which is refused",
    ),
    *_many(
        MODEL,
        "vllm_maxlen vllm_gpu_util vllm_enforce_eager vllm_max_lora_rank vllm_config sglang_maxlen "
        "sglang_mem_fraction sglang_tp_size sglang_config sglang_lora_backend",
        NO_EFFECT,
        "of other backends, which are refused",
    ),
    *_many(
        MODEL,
        "use_kt kt_config kt_cpu_activation",
        SUPPORTED,
        "see [settings.md](settings.md)",
    ),
    *(
        _refused(MODEL, name, value, f"{name}=.* is not supported with use_kt", note)
        for name, value, note in (
            ("kt_weight_path", "/x", "kt_config.packed_dir instead"),
            ("kt_expert_checkpoint_path", "/x", "model_name_or_path is read"),
            ("kt_use_lora_experts", True, "name experts in lora_target"),
            ("kt_lora_expert_num", 2, "of KTransformers' own experts"),
            ("kt_lora_expert_intermediate_size", 8, "of KTransformers' own experts"),
        )
    ),
]

# -------------------------------------------------------------------------------- DataArguments

_DATA = [
    _same(DATA, "template", Case({"template": "qwen"})),
    *_many(DATA, "dataset dataset_dir", SUPPORTED, "in every run of this table"),
    *_many(
        DATA,
        "media_dir overwrite_cache preprocessing_num_workers data_shared_file_system tool_format",
        SUPPORTED,
        "before the model: data",
    ),
    _elsewhere(
        DATA,
        "eval_dataset",
        "test_stages.py::test_evaluation_during_training_and_compute_accuracy",
    ),
    _same(DATA, "cutoff_len", *_value("cutoff_len", 24)),
    _same(DATA, "train_on_prompt", *_value("train_on_prompt", True)),
    _same(DATA, "mask_history", *_value("mask_history", True, acts=False), note="several turns"),
    _same(
        DATA,
        "streaming",
        *_value("streaming", True, dataloader_num_workers=1),
    ),
    _same(DATA, "buffer_size", *_value("buffer_size", 4, streaming=True, dataloader_num_workers=1)),
    _same(DATA, "mix_strategy", *_value("mix_strategy", "interleave_under", dataset="sft,more")),
    _same(
        DATA,
        "interleave_probs",
        *_value("interleave_probs", "0.9,0.1", mix_strategy="interleave_over", dataset="sft,more"),
    ),
    _same(DATA, "preprocessing_batch_size", *_value("preprocessing_batch_size", 4, packing=True)),
    _same(DATA, "max_samples", *_value("max_samples", 4)),
    *_many(DATA, "eval_num_beams", SUPPORTED, "predict_with_generate"),
    _same(DATA, "ignore_pad_token_for_loss", *_value("ignore_pad_token_for_loss", False)),
    _same(DATA, "val_size", *_value("val_size", 0.25)),
    _same(
        DATA,
        "eval_on_each_dataset",
        *_value("eval_on_each_dataset", True, eval_dataset="sft,more", acts=False),
    ),
    _same(
        DATA,
        "packing",
        *_value("packing", True),
        *_value("packing", False, stage="pt"),
    ),
    _same(DATA, "neat_packing", *_value("neat_packing", True)),
    _same(DATA, "default_system", *_value("default_system", "You count.")),
    _same(DATA, "enable_thinking", *_value("enable_thinking", False, template="qwen3")),
    _same(
        DATA, "preserve_thinking", *_value("preserve_thinking", True, template="qwen3", acts=False)
    ),
    *_many(DATA, "tokenized_path", SUPPORTED, "before the model: tokenized data kept on disk"),
]

# -------------------------------------------------------------------------- FinetuningArguments

_ONLY = "only with {}, which is refused"
_TUNING = [
    *_many(
        TUNING,
        "freeze_trainable_layers freeze_trainable_modules freeze_extra_modules",
        NO_EFFECT,
        _ONLY.format("finetuning_type: freeze"),
    ),
    _same(
        TUNING,
        "additional_target",
        *_value("additional_target", "lm_head", "embed_tokens", _HEAD, "norm"),
        note="modules that are trained whole; not `experts`",
    ),
    _same(TUNING, "lora_alpha", *_value("lora_alpha", 64)),
    _same(TUNING, "lora_dropout", *_value("lora_dropout", 0.5)),
    _same(TUNING, "lora_rank", *_value("lora_rank", 2)),
    _same(
        TUNING,
        "lora_target",
        *_value("lora_target", "q_proj,v_proj", "q_proj,lm_head", "q_proj,embed_tokens"),
        note="and names of expert projections and groups, see README",
    ),
    _same(TUNING, "loraplus_lr_ratio", *_value("loraplus_lr_ratio", 16.0)),
    _same(
        TUNING,
        "loraplus_lr_embedding",
        *_value(
            "loraplus_lr_embedding", 1e-2, loraplus_lr_ratio=4.0, lora_target="q_proj,embed_tokens"
        ),
    ),
    _same(TUNING, "use_rslora", *_value("use_rslora", True)),
    _same(
        TUNING,
        "use_dora",
        *_value("use_dora", True),
        note="not on experts",
    ),
    _refused(TUNING, "pissa_init", True, "pissa_init=True is not", "experts are packed"),
    *_many(TUNING, "pissa_iter", NO_EFFECT, _ONLY.format("pissa_init")),
    _refused(
        TUNING,
        "pissa_convert",
        True,
        "pissa_convert=True is not supported with use_kt",
        "nothing to convert without pissa_init",
    ),
    _refused(
        TUNING,
        "create_new_adapter",
        True,
        "create_new_adapter=True needs the old adapter merged",
        "with adapter_name_or_path; alone it has no effect",
        adapter_name_or_path="{adapter}",
    ),
    *_many(
        TUNING,
        "module_dropout oft_rank oft_block_size oft_target",
        NO_EFFECT,
        _ONLY.format("finetuning_type: oft"),
    ),
    _same(TUNING, "pref_beta", *_value("pref_beta", 1.0, stage="dpo")),
    _same(TUNING, "pref_ftx", *_value("pref_ftx", 0.5, stage="dpo")),
    _same(
        TUNING,
        "pref_bco_weight",
        *_value("pref_bco_weight", 0.5, stage="dpo"),
    ),
    _same(
        TUNING,
        "pref_loss",
        *_value("pref_loss", "ipo", "orpo", "simpo", stage="dpo"),
        *_value("pref_loss", "hinge", "kto_pair", stage="dpo", acts=False),
        note="LLaMA-Factory hands hinge and kto_pair to no trl from 0.24 on: sigmoid, in stock too",
    ),
    _same(TUNING, "dpo_label_smoothing", *_value("dpo_label_smoothing", 0.2, stage="dpo")),
    _same(TUNING, "kto_chosen_weight", *_value("kto_chosen_weight", 3.0, stage="kto")),
    _same(TUNING, "kto_rejected_weight", *_value("kto_rejected_weight", 3.0, stage="kto")),
    _same(TUNING, "simpo_gamma", *_value("simpo_gamma", 2.0, stage="dpo", pref_loss="simpo")),
    _same(TUNING, "ld_alpha", *_value("ld_alpha", 0.25, stage="dpo")),
    _same(
        TUNING,
        "ref_model",
        *_value(
            "ref_model", "{root}/model", stage="dpo", adapter_name_or_path="{adapter}", acts=False
        ),
    ),
    _same(
        TUNING,
        "ref_model_adapters",
        *_value(
            "ref_model_adapters",
            "{adapter}",
            stage="dpo",
            ref_model="{root}/model",
            adapter_name_or_path="{adapter}",
        ),
    ),
    _refused(
        TUNING, "ref_model_quantization_bit", 4, "ref_model_quantization_bit=4 is not", "bf16 only"
    ),
    *_many(
        TUNING,
        "ppo_buffer_size ppo_epochs ppo_score_norm ppo_target ppo_whiten_rewards reward_model "
        "reward_model_adapters reward_model_quantization_bit reward_model_type",
        NO_EFFECT,
        _ONLY.format("stage: ppo"),
    ),
    *(
        _refused(
            TUNING,
            f"use_{name}",
            True,
            "Cannot use LoRA with GaLore, APOLLO or BAdam together",
            "for full fine-tuning; LLaMA-Factory refuses it with LoRA",
        )
        for name in ("galore", "apollo", "badam")
    ),
    *_many(
        TUNING,
        "galore_target galore_rank galore_update_interval galore_scale galore_proj_type "
        "galore_layerwise",
        NO_EFFECT,
        _ONLY.format("use_galore"),
    ),
    *_many(
        TUNING,
        "apollo_target apollo_rank apollo_update_interval apollo_scale apollo_proj "
        "apollo_proj_type apollo_scale_type apollo_layerwise apollo_scale_front",
        NO_EFFECT,
        _ONLY.format("use_apollo"),
    ),
    *_many(
        TUNING,
        "badam_mode badam_start_block badam_switch_mode badam_switch_interval badam_update_ratio "
        "badam_mask_mode badam_verbose",
        NO_EFFECT,
        _ONLY.format("use_badam"),
    ),
    *_many(
        TUNING,
        "use_swanlab swanlab_project swanlab_workspace swanlab_run_name swanlab_mode "
        "swanlab_api_key swanlab_logdir swanlab_lark_webhook_url swanlab_lark_secret plot_loss",
        SUPPORTED,
        "logs",
    ),
    *_many(TUNING, "pure_bf16", SUPPORTED, "on a GPU; LLaMA-Factory refuses it elsewhere"),
    *_many(TUNING, "stage", SUPPORTED, "pt, sft, rm, dpo, kto: the runs of this table; not ppo"),
    _refused(
        TUNING,
        "finetuning_type",
        "full",
        "set finetuning_type: lora",
        "lora only: experts are frozen",
    ),
    _refused(TUNING, "use_llama_pro", True, "use_llama_pro=True is not", "other layers"),
    _elsewhere(
        TUNING,
        "use_adam_mini",
        "test_stages.py::test_optimizers_with_a_rule_for_matrices",
        "not with experts in lora_target",
    ),
    _same(
        TUNING,
        "use_muon",
        *_value("use_muon", True, max_steps=2),  # it computes in bf16: a third step is too far
        note="not with experts in lora_target",
    ),
    *_many(TUNING, "use_mca", NO_EFFECT, "set by LLaMA-Factory from USE_MCA, for other model code"),
    _refused(
        TUNING,
        "use_hyper_parallel",
        True,
        "use_hyper_parallel=True is not supported with use_kt",
        "for full fine-tuning",
    ),
    *_many(TUNING, "hyper_parallel_args", NO_EFFECT, _ONLY.format("use_hyper_parallel")),
    _same(TUNING, "use_dft_loss", *_value("use_dft_loss", True)),
    _same(
        TUNING,
        "use_asft_loss",
        *_value("use_asft_loss", True, ref_model="{root}/model"),
        note="without ref_model, where LLaMA-Factory fails at the first step, it is refused",
    ),
    _same(
        TUNING,
        "asft_alpha",
        *_value("asft_alpha", 2.0, use_asft_loss=True, ref_model="{root}/model"),
    ),
    _same(TUNING, "use_eaft_loss", *_value("use_eaft_loss", True)),
    _same(TUNING, "eaft_alpha", *_value("eaft_alpha", 3.0, use_eaft_loss=True)),
    _same(
        TUNING,
        "freeze_vision_tower",
        *_value(
            "freeze_vision_tower",
            False,  # batches of text bring the tower nothing, and must not end the run
            model_name_or_path="{root}/multimodal",
            lora_target="q_proj,qkv,linear_fc1",
        ),
    ),
    *_many(
        TUNING,
        "freeze_multi_modal_projector freeze_language_model",
        SUPPORTED,
        "which Linear layers of a multimodal model `lora_target: all` means, as in stock",
    ),
    _elsewhere(
        TUNING,
        "compute_accuracy",
        "test_stages.py::test_evaluation_during_training_and_compute_accuracy",
    ),
    _same(TUNING, "disable_shuffling", *_value("disable_shuffling", True)),
    *_many(TUNING, "early_stopping_steps", SUPPORTED, "when to end, from the evaluations"),
    _same(
        TUNING,
        "include_effective_tokens_per_second",
        *_value("include_effective_tokens_per_second", True, acts=False),
    ),
]

# ---------------------------------------------------------------------------- TrainingArguments

_TRAINING = [
    *_many(
        TRAINING,
        "ray_num_workers ray_init_kwargs master_addr master_port",
        NO_EFFECT,
        "only with USE_RAY=1 in the environment, which is refused",
    ),
    _refused(TRAINING, "fp8", True, "fp8=True is not supported with use_kt", "bf16: true instead"),
    *_many(
        TRAINING, "fp8_backend fp8_enable_fsdp_float8_all_gather", NO_EFFECT, _ONLY.format("fp8")
    ),
    _same(
        TRAINING,
        "enable_torch_profiler",
        *_value("enable_torch_profiler", True, acts=False, slow=True),
    ),
    *_many(
        TRAINING,
        "profiler_output_dir profiler_wait_steps profiler_warmup_steps profiler_active_steps "
        "profiler_repeat profiler_record_shapes profiler_profile_memory profiler_with_stack "
        "profile_modules",
        SUPPORTED,
        "what the profiler writes",
    ),
    *_many(
        TRAINING,
        "output_dir overwrite_output_dir run_name project trackio_space_id report_to logging_dir "
        "logging_strategy logging_first_step logging_steps logging_nan_inf_filter log_level "
        "log_level_replica log_on_each_node disable_tqdm push_to_hub hub_model_id hub_strategy "
        "hub_token hub_private_repo hub_always_push hub_revision skip_memory_metrics debug "
        "include_num_input_tokens_seen",
        SUPPORTED,
        "logs, directories, the hub",
    ),
    *_many(
        TRAINING,
        "do_train do_eval do_predict learning_rate max_steps num_train_epochs use_cpu seed "
        "per_device_train_batch_size per_device_eval_batch_size gradient_accumulation_steps",
        SUPPORTED,
        "in the runs of this table, or of test_stages.py",
    ),
    _same(TRAINING, "data_seed", *_value("data_seed", 7, slow=True)),
    _same(TRAINING, "full_determinism", *_value("full_determinism", True, acts=False, slow=True)),
    _same(TRAINING, "weight_decay", *_value("weight_decay", 10.0, slow=True)),
    _same(TRAINING, "adam_beta1", *_value("adam_beta1", 0.1, slow=True)),
    _same(TRAINING, "adam_beta2", *_value("adam_beta2", 0.1, slow=True)),
    _same(TRAINING, "adam_epsilon", *_value("adam_epsilon", 0.1, slow=True)),
    _same(TRAINING, "max_grad_norm", *_value("max_grad_norm", 1e-6, optim="sgd", slow=True)),
    _same(TRAINING, "optim", *_value("optim", "adafactor", "sgd")),
    _same(TRAINING, "optim_args", *_value("optim_args", "momentum=0.9", optim="sgd", slow=True)),
    _same(
        TRAINING, "lr_scheduler_type", *_value("lr_scheduler_type", "constant", "cosine", slow=True)
    ),
    _same(
        TRAINING,
        "lr_scheduler_kwargs",
        *_value("lr_scheduler_kwargs", {"num_cycles": 3}, lr_scheduler_type="cosine", slow=True),
    ),
    _same(TRAINING, "warmup_steps", *_value("warmup_steps", 2, slow=True)),
    _same(TRAINING, "warmup_ratio", *_value("warmup_ratio", 0.5, slow=True)),
    _same(
        TRAINING,
        "neftune_noise_alpha",
        *_value("neftune_noise_alpha", 5.0),
        *_value("neftune_noise_alpha", 5.0, stage="dpo"),
    ),
    _same(
        TRAINING,
        "label_smoothing_factor",
        *_value("label_smoothing_factor", 0.2),
        *_value("label_smoothing_factor", 0.2, stage="pt"),
    ),
    *_many(TRAINING, "label_names", SUPPORTED, "set by LLaMA-Factory"),
    _same(
        TRAINING,
        "average_tokens_across_devices",
        *_value("average_tokens_across_devices", False, acts=False, slow=True),
    ),
    _same(
        TRAINING,
        "auto_find_batch_size",
        *_value("auto_find_batch_size", True, acts=False, slow=True),
    ),
    _same(
        TRAINING,
        "gradient_checkpointing",
        *_value("gradient_checkpointing", True, acts=False, slow=True),
    ),
    _same(
        TRAINING,
        "gradient_checkpointing_kwargs",
        *_value(
            "gradient_checkpointing_kwargs",
            {"use_reentrant": False},
            gradient_checkpointing=True,
            acts=False,
        ),
    ),
    _same(TRAINING, "dataloader_drop_last", *_value("dataloader_drop_last", True, max_samples=5)),
    _same(
        TRAINING,
        "dataloader_num_workers",
        *_value("dataloader_num_workers", 1, acts=False, slow=True),
    ),
    *_many(
        TRAINING,
        "dataloader_pin_memory dataloader_persistent_workers dataloader_prefetch_factor "
        "remove_unused_columns accelerator_config ignore_data_skip length_column_name "
        "sortish_sampler",
        SUPPORTED,
        "before the model: data loading",
    ),
    _same(
        TRAINING,
        "train_sampling_strategy",
        *_value("train_sampling_strategy", "sequential", "group_by_length"),
    ),
    *_many(
        TRAINING,
        "bf16 bf16_full_eval tf32 fp16 fp16_full_eval",
        SUPPORTED,
        "experts compute in bf16 or int8 whatever the other layers do; `fp16` not with "
        "kt_config.check_finite",
    ),
    _same(
        TRAINING,
        "torch_compile",
        *_value("torch_compile", True, torch_compile_backend="eager", acts=False, slow=True),
        note="experts are left as they are",
    ),
    *_many(TRAINING, "torch_compile_backend torch_compile_mode", SUPPORTED, "of torch_compile"),
    *_many(TRAINING, "torch_empty_cache_steps", SUPPORTED, "memory of the accelerator"),
    _refused(
        TRAINING,
        "use_liger_kernel",
        True,
        "use_liger_kernel=True is not supported with use_kt",
        "as enable_liger_kernel",
    ),
    *_many(TRAINING, "liger_kernel_config", NO_EFFECT, _ONLY.format("use_liger_kernel")),
    _same(TRAINING, "use_cache", *_value("use_cache", True, acts=False, slow=True)),
    *_many(
        TRAINING,
        "eval_strategy eval_steps eval_delay eval_on_start eval_accumulation_steps "
        "eval_do_concat_batches eval_use_gather_object batch_eval_metrics include_for_metrics "
        "prediction_loss_only metric_for_best_model greater_is_better load_best_model_at_end "
        "predict_with_generate generation_config generation_max_length generation_num_beams",
        SUPPORTED,
        "evaluation",
    ),
    *_many(
        TRAINING,
        "save_strategy save_steps save_total_limit save_on_each_node save_only_model "
        "enable_jit_checkpoint resume_from_checkpoint restore_callback_states_from_checkpoint",
        SUPPORTED,
        "saving and resuming: test_interruption.py",
    ),
    *_many(
        TRAINING,
        "local_rank ddp_backend ddp_broadcast_buffers ddp_bucket_cap_mb "
        "ddp_find_unused_parameters ddp_timeout",
        SUPPORTED,
        "several processes: test_launch.py",
    ),
    *_many(
        TRAINING,
        "deepspeed fsdp fsdp_config",
        SUPPORTED,
        "DeepSpeed to ZeRO-2 and FSDP2; ZeRO-3 and FSDP 1 are refused",
    ),
    _refused(
        TRAINING,
        "optim_target_modules",
        ["q_proj"],
        "optim_target_modules=.* is not supported with use_kt",
        "of GaLore and the like, for full fine-tuning",
    ),
    Option(
        TRAINING,
        "parallelism_config",
        REFUSED,
        "tensor, context and expert parallel: each process computes whole experts",
        test="test_options.py::test_parallelism_is_refused",
    ),
]

# ---------------------------------------------------------------------------- GeneratingArguments

_GENERATING = [
    *_many(
        GENERATING,
        "do_sample temperature top_p top_k num_beams max_length max_new_tokens repetition_penalty "
        "length_penalty skip_special_tokens",
        SUPPORTED,
        "what generation makes of the logits",
    ),
]

# --------------------------------------------------------------------------------- LoraConfig

_LORA_TEST = "test_lora_options.py"
_LORA_REFUSED = f"{_LORA_TEST}::test_what_cannot_be_saved_is_refused_before_the_first_step"
_LORA = [
    *(
        _elsewhere(LORA, name, test, note)
        for name, test, note in (
            ("r", _LORA_TEST, ""),
            (
                "target_modules",
                "test_targets.py",
                "and names of groups and expert projections",
            ),
            ("exclude_modules", "test_peft_configs.py", ""),
            ("lora_alpha", _LORA_TEST, ""),
            ("lora_dropout", _LORA_TEST, ""),
            ("use_rslora", _LORA_TEST, ""),
            ("modules_to_save", _LORA_TEST, ""),
            ("rank_pattern", "test_peft_configs.py", ""),
            ("alpha_pattern", "test_peft_configs.py", ""),
            ("target_parameters", "test_targets.py", ""),
            ("trainable_token_indices", _LORA_TEST, ""),
            ("ensure_weight_tying", _LORA_TEST, ""),
            ("runtime_config", _LORA_TEST, ""),
            ("bias", _LORA_TEST, "`none` and `all`; `lora_only` is refused"),
            ("init_lora_weights", _LORA_TEST, "not those that change the base (PiSSA, OLoRA, ...)"),
            ("use_dora", _LORA_TEST, "not on experts"),
            ("lora_bias", _LORA_TEST, "not on experts"),
            ("layers_to_transform", _LORA_TEST, "not on experts"),
            ("layers_pattern", _LORA_TEST, "not on experts"),
            ("fan_in_fan_out", _LORA_TEST, "not on experts"),
        )
    ),
    *(
        Option(LORA, name, REFUSED, "before the first step", test=_LORA_REFUSED)
        for name in (
            *("velora_config", "alora_invocation_tokens", "use_qalora", "monteclora_config"),
            *("layer_replication", "use_bdlora", "arrow_config"),
        )
    ),
    *_many(
        LORA,
        "task_type peft_type auto_mapping peft_version base_model_name_or_path revision "
        "inference_mode",
        SUPPORTED,
        "what an adapter is and where it comes from",
    ),
    *_many(
        LORA,
        "megatron_config megatron_core loftq_config eva_config corda_config lora_ga_config "
        "qalora_group_size",
        NO_EFFECT,
        "settings of what is refused",
    ),
]

OPTIONS: tuple[Option, ...] = (*_MODEL, *_DATA, *_TUNING, *_TRAINING, *_GENERATING, *_LORA)
