"""What the README offers fits together: YAMLs, data, launch configurations, pinned versions."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import lf_cases
import models
import pytest
import yaml

from kt_core.adapters.peft_format import read_adapter
from kt_sft.llamafactory.stages import STAGES

ROOT = Path(__file__).resolve().parents[2]
RECIPES = sorted((ROOT / "examples").glob("*.yaml"))
DATA = ROOT / "examples" / "data"

# LLaMA-Factory's own parser, in a process of its own: it sets global state.
PARSE = """
import sys, yaml
from llamafactory.hparams import get_train_args
for recipe in sys.argv[3:]:
    settings = yaml.safe_load(open(recipe))
    settings.update(use_cpu=True, output_dir=sys.argv[1])
    settings.update(yaml.safe_load(sys.argv[2]))
    model, data, training, tuning, _ = get_train_args(settings)
    print("parsed", model.use_kt, tuning.stage, tuning.lora_target)
"""


def parse(out: Path, extra: dict, *recipes: Path) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-c", PARSE, out, json.dumps(extra), *recipes],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        text=True,
        capture_output=True,
        timeout=300,
        check=False,
    )


def readme_recipe(folder: Path) -> Path:
    """The YAML in the README, as a file."""
    (text,) = re.findall(r"```yaml\n(.*?)```", (ROOT / "README.md").read_text(), re.S)
    path = folder / "readme.yaml"
    path.write_text(text)
    return path


def test_llamafactory_accepts_the_recipes(tmp_path: Path) -> None:
    recipes = [*RECIPES, readme_recipe(tmp_path)]
    done = parse(tmp_path / "out", {}, *recipes)
    assert done.returncode == 0, done.stderr[-2000:]
    stages = [yaml.safe_load(recipe.read_text())["stage"] for recipe in recipes]
    printed = [line for line in done.stdout.splitlines() if line.startswith("parsed")]
    assert printed == [f"parsed True {stage} ['all']" for stage in stages]


def test_a_misspelt_setting_is_refused(tmp_path: Path) -> None:
    done = parse(tmp_path / "out", {"kt_config": {"formt": "int8"}}, RECIPES[0])
    assert done.returncode != 0
    assert "formt" in done.stderr


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.stem)
def test_the_recipe_has_its_data(recipe: Path) -> None:
    settings = yaml.safe_load(recipe.read_text())
    listed = json.loads((ROOT / settings["dataset_dir"] / "dataset_info.json").read_text())
    for name in settings["dataset"].split(","):
        entry = listed[name]
        text = (ROOT / settings["dataset_dir"] / entry["file_name"]).read_text()
        if settings["stage"] == "pt":
            assert len(text) > 1000
            continue
        records = json.loads(text)
        assert entry.get("ranking", False) is (settings["stage"] in ("rm", "dpo"))
        wanted = {
            "sft": {"instruction", "output"},
            "kto": {"instruction", "output", "good"},
        }.get(settings["stage"], {"instruction", "chosen", "rejected"})
        assert records
        for record in records:
            assert wanted <= record.keys()
            assert all(record[key] for key in wanted - {"good"})
        if settings["stage"] == "kto":
            assert {record["good"] for record in records} == {True, False}


def test_every_stage_has_its_recipe() -> None:
    assert {yaml.safe_load(recipe.read_text())["stage"] for recipe in RECIPES} == set(STAGES)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory) -> Path:
    return models.build(
        "qwen3_moe", tmp_path_factory.mktemp("tiny"), tokenizer=True, vocab_size=300
    )


@pytest.mark.parametrize("recipe", [*RECIPES, None], ids=lambda path: path and path.stem)
def test_the_recipe_runs(recipe: Path | None, tiny: Path, tmp_path: Path, monkeypatch) -> None:
    """Two steps of the recipe as it is (None: the README's), with a tiny model, short records."""
    monkeypatch.chdir(ROOT)
    recipe = recipe or readme_recipe(tmp_path)
    settings = yaml.safe_load(recipe.read_text())
    small = {
        "model_name_or_path": str(tiny),
        "template": "chatml",
        "output_dir": str(tmp_path / "out"),
        "use_cpu": True,
        "max_steps": 2,
        "max_samples": 8,
        "cutoff_len": 64,
        "preprocessing_num_workers": None,
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 1,
        "logging_steps": 1,
    }
    lf_cases.run({k: v for k, v in (settings | small).items() if v is not None})
    assert len(lf_cases.losses(tmp_path / "out")) == 2
    assert read_adapter(tmp_path / "out").projections == ["gate", "up", "down"]
    head = tmp_path / "out" / "value_head.safetensors"
    assert head.exists() is (settings["stage"] == "rm")


def test_held_out_questions_are_not_trained() -> None:
    def key(text: str) -> str:
        return re.sub(r"\W+", " ", text).strip().lower()

    trained = {key(r["instruction"]) for r in json.loads((DATA / "identity.json").read_text())}
    sys.path.insert(0, str(ROOT / "examples"))
    try:
        import demo
    finally:
        sys.path.pop(0)
    held = demo.load_held()
    questions = held.paraphrases + [item["question"] for item in held.general]
    assert len(held.paraphrases) >= 10
    assert len(held.general) >= 5
    assert not {key(question) for question in questions} & trained


def test_the_command_without_a_gpu_is_the_same_everywhere() -> None:
    command = "llamafactory-cli train examples/{}.yaml use_cpu=true"
    assert f"| no GPU | `{command.format('kt_lora')}` |" in (ROOT / "README.md").read_text()
    for recipe in RECIPES:
        if recipe.stem.startswith("kt_"):  # the demo's YAML says use_cpu itself
            assert command.format(recipe.stem) in recipe.read_text()


def test_every_file_that_readme_and_makefile_name_exists() -> None:
    text = (ROOT / "README.md").read_text() + (ROOT / "Makefile").read_text()
    named = set(re.findall(r"\b(?:examples|accelerate_configs|src|scripts)/[\w./-]+\w", text))
    assert len(named) >= 6
    assert [name for name in sorted(named) if not (ROOT / name).exists()] == []


@pytest.mark.parametrize("name", sorted(p.stem for p in (ROOT / "accelerate_configs").iterdir()))
def test_launch_configuration_loads(name: str) -> None:
    from accelerate.commands.config.config_args import load_config_from_file

    config = load_config_from_file(str(ROOT / "accelerate_configs" / f"{name}.yaml"))
    assert config.mixed_precision == "bf16"
    assert config.use_cpu is (name == "cpu")
    if name.startswith("fsdp2"):
        assert config.fsdp_config["fsdp_version"] == 2
    if name == "deepspeed_zero2":
        assert config.deepspeed_config["zero_stage"] == 2


def test_what_we_ask_for_is_pinned_in_the_tested_set() -> None:
    def normal(name: str) -> str:
        return re.sub(r"[-_.]+", "-", name).lower()

    pinned = {
        normal(line.split("==")[0])
        for line in (ROOT / "constraints.txt").read_text().splitlines()
        if line and not line.startswith("#")
    }
    text = (ROOT / "pyproject.toml").read_text()
    lists = re.findall(r"^(?:requires|dependencies|sft|serve|dev) = \[(.*?)\]", text, re.M | re.S)
    asked = {
        normal(re.match(r"[\w.-]+", entry)[0])
        for block in lists
        for entry in re.findall(r'"([^"]+)"', block)
    }
    assert len(asked) > 10
    assert asked - pinned == set()
