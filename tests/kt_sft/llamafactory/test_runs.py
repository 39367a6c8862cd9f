"""Training through stock LLaMA-Factory on a tiny model."""

from __future__ import annotations

import json
from pathlib import Path

import lf_cases
import pytest
import safetensors.torch
import torch

from kt_core import adapters, hf, runtime
from kt_core.adapters.peft_format import CONFIG_FILE, WEIGHTS_FILE, read_adapter
from kt_core.module import KTExpertsLinear
from kt_sft.report import stats
from kt_sft.report.stats import STATS_FILE


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return lf_cases.workspace(tmp_path_factory.mktemp("lf"))


def test_the_command_that_users_type(root):
    """`llamafactory-cli train` with nothing but our package installed, bf16, int8 experts."""
    args = lf_cases.arguments(root, "cli", kt_config={"format": "int8"}, bf16=True, plot_loss=True)
    done = lf_cases.command(args)
    assert done.returncode == 0, done.stderr[-3000:]
    out = Path(args["output_dir"])
    losses = lf_cases.losses(out)
    assert len(losses) == 4 and losses[-1] < losses[0]
    printed = done.stdout + done.stderr
    counts = "23,552 (attention 3,584, shared_experts 0, experts 19,968"
    assert f"kt: trainable parameters: {counts}" in printed
    assert "kt: activation=retain: gradient checkpointing set to non-reentrant" in printed
    assert "kt: saved 23552 trained parameters in 28 tensors" in printed
    stats = json.loads((out / STATS_FILE).read_text())
    assert stats["tokens"] > 100 and stats["tokens_per_s"] > 0 and stats["steps"] == 4
    assert stats["expert_seconds"]["forward"] > 0 and stats["expert_seconds"]["backward"] > 0
    assert stats["peak_rss_bytes"] > 2**27
    assert sum(stats["trainable"].values()) == 23552
    tensors = safetensors.torch.load_file(out / WEIGHTS_FILE)
    assert sum(t.numel() for t in tensors.values()) == 23552
    assert (out / "training_loss.png").exists() and (out / "trainer_log.jsonl").exists()
    model = hf.load_model(root / "model")
    ids = torch.arange(3, 23)[None]
    adapters.load_adapter(model, out, "tuned")
    with torch.no_grad():
        base = model(input_ids=ids).logits
        with adapters.adapter(model, "tuned"):
            assert (model(input_ids=ids).logits - base).abs().max() > 0


def test_bad_input_ends_the_command_with_one_sentence(root):
    args = lf_cases.arguments(root, "sentence", finetuning_type="full")
    done = lf_cases.command(args)
    assert done.returncode == 1 and not Path(args["output_dir"]).exists()
    assert "Traceback" not in done.stderr
    assert done.stderr.splitlines()[-1].startswith("error: use_kt keeps the experts frozen, so")
    traced = lf_cases.command(args, KT_LOG="DEBUG")
    assert traced.returncode == 1 and "Traceback" in traced.stderr


def test_a_defect_keeps_its_traceback(monkeypatch, capsys):
    import sys

    from kt_sft.llamafactory import messages

    seen = []
    monkeypatch.setattr(sys, "excepthook", lambda *error: seen.append(error[1]))
    messages.print_sentences()
    messages.print_sentences()  # once is enough
    theirs, ours = KeyError("a defect"), ValueError("elsewhere")
    for error in (theirs, ours):
        sys.excepthook(type(error), error, error.__traceback__)
    assert seen == [theirs, ours] and capsys.readouterr().err == ""


def test_the_launcher_where_autoload_is_off(root):
    args = lf_cases.arguments(root, "launch", max_steps=1)
    import sys

    program = (sys.executable, "-m", "kt_sft.launch", "llamafactory.cli", "train")
    done = lf_cases.command(args, *program, TORCH_DEVICE_BACKEND_AUTOLOAD="0")
    assert done.returncode == 0, done.stderr[-3000:]
    assert read_adapter(args["output_dir"]).projections == ["gate", "up", "down"]


def test_without_use_kt_nothing_changes(root):
    """Losses of a run in this process, with our package, and in one where it is switched off."""
    plain = {"use_kt": None, "kt_config": None}
    with_us = lf_cases.arguments(root, "with", **plain)
    lf_cases.run(with_us)
    without = lf_cases.arguments(root, "without", **plain)
    done = lf_cases.command(without, TORCH_DEVICE_BACKEND_AUTOLOAD="0")
    assert done.returncode == 0, done.stderr[-3000:]
    assert "kt_sft" not in done.stdout + done.stderr
    assert lf_cases.losses(with_us["output_dir"]) == lf_cases.losses(without["output_dir"])
    assert not (Path(with_us["output_dir"]) / STATS_FILE).exists()
    assert read_adapter(with_us["output_dir"]).projections == []


def test_checkpointing_on_and_off_and_recompute_agree(root):
    runs = {
        "on": {},
        "off": {"disable_gradient_checkpointing": True},
        "recompute": {"kt_config": {"format": "bf16", "activation": "recompute"}},
        "alias": {"kt_cpu_activation": "recompute"},
    }
    results = []
    for name, changes in runs.items():
        args = lf_cases.arguments(root, f"gc-{name}", **changes)
        lf_cases.run(args)
        results.append(lf_cases.losses(args["output_dir"]))
    assert all(r == results[0] for r in results[1:])


@pytest.mark.parametrize(
    ("target", "projections", "dense"),
    [
        ("gate_proj,down_proj", ["gate", "down"], False),
        ("q_proj,v_proj,up_proj", ["up"], True),
        ("experts", ["gate", "up", "down"], False),
        ("q_proj", [], True),
    ],
)
def test_lora_target(root, target, projections, dense):
    args = lf_cases.arguments(root, "target", lora_target=target, max_steps=2)
    lf_cases.run(args)
    data = read_adapter(args["output_dir"])
    assert (data.projections, bool(data.dense)) == (projections, dense)


def test_resume_continues_where_it_stopped(root):
    """4 steps against 2 steps, then 2 more from the checkpoint; dropout on."""
    changes = {"lora_dropout": 0.1, "save_steps": 2, "save_strategy": "steps"}
    whole = lf_cases.arguments(root, "whole", **changes)
    lf_cases.run(whole)
    checkpoint = str(Path(whole["output_dir"]) / "checkpoint-2")
    rest = lf_cases.arguments(root, "rest", resume_from_checkpoint=checkpoint, **changes)
    lf_cases.run(rest)
    assert lf_cases.losses(rest["output_dir"])[2:] == lf_cases.losses(whole["output_dir"])[2:]
    a, b = (
        safetensors.torch.load_file(Path(r["output_dir"]) / WEIGHTS_FILE) for r in (whole, rest)
    )
    assert a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)
    # F17: adapter (4 bytes a parameter), optimizer (8), tokenizer and logs; nothing of the base
    sizes = {p.name: p.stat().st_size for p in Path(checkpoint).iterdir()}
    assert sizes["optimizer.pt"] < 2.5 * sizes[WEIGHTS_FILE] < 2.5 * 4 * 23552 * 1.5
    assert not any(name.startswith("model") for name in sizes)


def test_an_adapter_to_start_from(root):
    first = lf_cases.arguments(root, "first", lora_dropout=0.1)
    lf_cases.run(first)
    more = lf_cases.arguments(root, "more", adapter_name_or_path=first["output_dir"], max_steps=1)
    lf_cases.run(more)
    config = json.loads((Path(more["output_dir"]) / CONFIG_FILE).read_text())
    assert config["target_modules"] == sorted(
        ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    )
    assert read_adapter(more["output_dir"]).dropout == 0.1
    assert lf_cases.losses(more["output_dir"])[0] < lf_cases.losses(first["output_dir"])[0]


# ----------------------------------------------------------- F14: every key of kt_config does
# something


def test_format_and_group_change_what_is_stored(root, monkeypatch):
    kept = {}
    monkeypatch.setattr(stats.KTCallback, "on_train_begin", _remember_experts(kept))
    for key, config in (
        ("bf16", {"format": "bf16"}),
        ("int8", {"format": "int8"}),
        ("int4", {"format": "int4"}),
        ("int4 group 64", {"format": "int4", "group": 64}),
    ):
        kept["now"] = key
        with pytest.raises(InterruptedError):
            lf_cases.run(lf_cases.arguments(root, "format", kt_config=config))
    assert kept["bf16"].nbytes > kept["int8"].nbytes > kept["int4"].nbytes
    assert (kept["int4"].group, kept["int4 group 64"].group) == (32, 64)
    fine, coarse = (kept[k].get(0, "gate") for k in ("int4", "int4 group 64"))
    assert not torch.equal(fine, coarse)


def _remember_experts(kept):
    def on_train_begin(self, args, state, control, **kw):
        modules = [m for m in kw["model"].modules() if isinstance(m, KTExpertsLinear)]
        kept[kept["now"]] = modules[0].experts
        raise InterruptedError  # enough seen

    return on_train_begin


def test_threads(root):
    before = runtime.threads()
    try:
        for n in sorted({1, runtime.allowed_cpus()}):
            config = {"format": "bf16", "threads": n}
            lf_cases.run(lf_cases.arguments(root, "threads", kt_config=config, max_steps=1))
            assert runtime.threads() == n
        too_many = {"threads": 1 + runtime.allowed_cpus()}
        with pytest.raises(ValueError, match="threads"):
            lf_cases.run(lf_cases.arguments(root, "threads", kt_config=too_many))
    finally:
        runtime.set_threads(before)


def test_check_finite_names_layer_and_tensor(root):
    config = {"format": "bf16", "check_finite": True}
    found = lf_cases.arguments(root, "finite", kt_config=config, max_steps=4)
    lf_cases.run(found)  # nothing to refuse
    found = lf_cases.arguments(
        root, "finite", kt_config=config, max_steps=4, learning_rate=1e30, max_grad_norm=0.0
    )
    with pytest.raises(
        FloatingPointError, match=r"layers\.\d+\.mlp.* has \d+ values .* NaN or Inf"
    ):
        lf_cases.run(found)


def test_packed_dir(root, tmp_path):
    config = {"format": "int8", "packed_dir": str(tmp_path / "packed")}
    results = []
    for name in ("packed1", "packed2"):
        args = lf_cases.arguments(root, name, kt_config=config)
        lf_cases.run(args)
        results.append(lf_cases.losses(args["output_dir"]))
        files = [(p.name, p.stat().st_mtime_ns) for p in (tmp_path / "packed").iterdir()]
        assert files
    assert results[0] == results[1]


def test_numa_nodes(root):
    one = lf_cases.arguments(
        root, "numa", kt_config={"format": "bf16", "numa_nodes": 1}, max_steps=1
    )
    lf_cases.run(one)
    with pytest.raises(
        ValueError, match="numa_nodes is 99 but this process has CPUs and memory on"
    ):
        lf_cases.run(lf_cases.arguments(root, "numa", kt_config={"numa_nodes": 99}))
