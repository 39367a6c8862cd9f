"""Every option of tests/options.py does what its verdict says: the same losses as stock on the same
tiny model, or one sentence before a model is loaded; and no option of the installed packages is
missing there.

The experts are SlowExperts, so stock's losses are expected to fp32 rounding; LoRA is on the
attention, whose factors stock has too.
"""

from __future__ import annotations

import ast
import copy
import dataclasses
import json
import shutil
from functools import cache
from pathlib import Path
from types import SimpleNamespace

import families
import lf_cases
import pytest
import slow_experts
import stage_cases
import torch
import yaml
from options import OPTIONS, REFUSED, Case

from kt_sft.llamafactory import stages

TESTS = Path(__file__).resolve().parents[2]
SAME = 2e-5  # relative, of fp32 losses after three steps
OTHER = 1e-4


def classes() -> dict[str, type]:
    """The installed argument classes, by the name they have in the list."""
    import peft
    from llamafactory import hparams

    found = [vars(hparams)[name] for name in dir(hparams) if name.endswith("Arguments")]
    found = [c for c in found if c.__name__ not in ("EvaluationArguments", "RayArguments")]
    return {c.__name__: c for c in (*found, peft.LoraConfig)}


def fields(of: type) -> set[str]:
    return {field.name for field in dataclasses.fields(of) if field.init}


def test_the_list_has_every_class_and_every_option_once():
    assert {option.of for option in OPTIONS} == set(classes())
    names = [(option.of, option.name) for option in OPTIONS]
    assert len(names) == len(set(names))


@pytest.mark.parametrize("of", sorted({option.of for option in OPTIONS}))
def test_every_option_of_the_installed_packages_is_looked_at(of):
    listed = {option.name for option in OPTIONS if option.of == of}
    unknown = sorted(fields(classes()[of]) - listed)
    assert not unknown, f"unknown option {', '.join(unknown)}: supported, refused or no effect?"
    gone = sorted(listed - fields(classes()[of]))
    assert not gone, f"{', '.join(gone)} is in tests/options.py but not in {of}: remove it there"


def test_a_new_option_is_named(monkeypatch):
    import peft

    newer = dataclasses.make_dataclass(
        "LoraConfig", [("use_magic", bool, False)], bases=(peft.LoraConfig,)
    )
    monkeypatch.setattr(peft, "LoraConfig", newer)
    with pytest.raises(AssertionError, match="unknown option use_magic: supported, refused or no"):
        test_every_option_of_the_installed_packages_is_looked_at("LoraConfig")


@cache
def functions(file: str) -> set[str]:
    tree = ast.parse(next(TESTS.rglob(file)).read_text())
    return {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}


def test_tests_that_are_named_exist():
    for option in OPTIONS:
        file, _, function = option.test.partition("::")
        assert not file or not function or function in functions(file), option
        assert not file or any(name.startswith("test_") for name in functions(file)), option
        shown = option.cases or option.message or option.test
        assert option.verdict != REFUSED or shown, f"nothing shows that {option.name} is refused"


def test_the_page_is_current(monkeypatch):
    monkeypatch.syspath_prepend(str(TESTS.parent / "scripts"))
    import option_table

    assert option_table.PAGE.read_text() == option_table.page(), "run scripts/option_table.py"


# ----------------------------------------------------------------------------------------- runs


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """A workspace with a second dataset, descriptions of tokens, a model without a row to spare
    (`full`), and an adapter that stock has trained; all weights in fp32."""
    root = stage_cases.workspace(tmp_path_factory.mktemp("options"))
    for name, rows in (("model", 300), ("full", 262)):
        lf_cases.models.build(
            "qwen3_moe", root / name, tokenizer=True, vocab_size=rows, dtype=torch.float32
        )
    tower = families.Family(
        "qwen3_vl_moe", "Qwen3VLMoeForConditionalGeneration", families.MAPPINGS[1]
    )
    config = families.tiny(tower)
    config.get_text_config().vocab_size = 300
    torch.manual_seed(0)
    tower.cls(config).float().save_pretrained(root / "multimodal")
    lf_cases.models.byte_tokenizer().save_pretrained(root / "multimodal")
    more = [{"instruction": f"Is {i} odd?", "input": "", "output": f"{i % 2}."} for i in range(16)]
    (root / "more.json").write_text(json.dumps(more))
    info = json.loads((root / "dataset_info.json").read_text())
    (root / "dataset_info.json").write_text(json.dumps(info | {"more": {"file_name": "more.json"}}))
    words = {"number": "a count of things", "course": "the way that it goes"}
    (root / "tokens.yaml").write_text(yaml.safe_dump(words))
    _losses(root, "adapter", Case({}), kt=False)
    return root


@pytest.fixture
def side_by_side(monkeypatch):
    """Exact experts, and nothing left behind: default_system and enable_thinking change templates
    for the whole process, full_determinism stays on."""
    from llamafactory.data import template

    slow_experts.patch(monkeypatch)
    monkeypatch.setattr(template, "TEMPLATES", copy.deepcopy(template.TEMPLATES))
    yield
    torch.use_deterministic_algorithms(False)


def _arguments(root: Path, output: str, case: Case, *, kt: bool) -> dict:
    data = {"rm": "dpo"}.get(case.stage, case.stage)
    args = lf_cases.arguments(
        root,
        output,
        stage=case.stage,
        dataset=data,
        max_steps=3,
        gradient_accumulation_steps=1,
        lora_target="q_proj,k_proj,v_proj,o_proj",
    )
    places = {"{root}": str(root), "{adapter}": str(root / "adapter")}
    for key, value in (case.beside | case.changes).items():
        for place, path in places.items():
            value = value.replace(place, path) if isinstance(value, str) else value
        args[key] = value
    if not kt:
        args = {k: v for k, v in args.items() if k not in ("use_kt", "kt_config")}
    return args


def _losses(root: Path, output: str, case: Case, *, kt: bool) -> list[float]:
    args = _arguments(root, output, case, kt=kt)
    if output != "adapter":
        shutil.rmtree(args["output_dir"], ignore_errors=True)
    lf_cases.run(args)
    return lf_cases.losses(args["output_dir"])


@pytest.fixture(scope="module")
def plain(root):
    """Losses of stock without an option, by stage and by what stands beside it."""

    @cache
    def losses(stage: str, beside: str) -> list[float]:
        return _losses(root, "plain", Case({}, stage, beside=json.loads(beside)), kt=False)

    return losses


def _distance(a: list[float], b: list[float]) -> float:
    assert a and b
    if len(a) != len(b):
        return float("inf")
    return max(abs(x - y) / max(abs(x), 1e-6) for x, y in zip(a, b, strict=True))


CASES = [
    pytest.param(case, id=f"{option.name}={'-'.join(map(str, case.changes.values()))}-{case.stage}",
                 marks=[pytest.mark.slow] if case.slow else [])
    for option in OPTIONS
    for case in option.cases
]  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_an_option_does_what_it_does_in_stock(case, root, plain, side_by_side):
    if case.fails:
        for kt in (False, True):
            with pytest.raises(Exception, match=case.fails):
                _losses(root, "run", case, kt=kt)
        return
    stock = _losses(root, "run", case, kt=False)
    assert _distance(stock, _losses(root, "run", case, kt=True)) < SAME
    without = plain(case.stage, json.dumps(case.beside, sort_keys=True))
    if case.acts:
        assert _distance(stock, without) > OTHER, "the option does nothing in stock either"
    else:
        assert _distance(stock, without) < SAME, "the option acts: say so in the list"


def _refused() -> list:
    return [pytest.param(o, id=o.name) for o in OPTIONS if o.verdict == REFUSED and o.message]


@pytest.mark.parametrize("option", _refused())
def test_an_option_is_refused_before_a_model_is_loaded(option, root, monkeypatch):
    import llamafactory.hparams.parser as parser
    import llamafactory.train.sft.workflow as workflow

    def load_model(*args, **kw):
        raise AssertionError("a model was loaded")

    monkeypatch.setattr(parser, "check_version", lambda *args, **kw: None)
    monkeypatch.setattr(workflow, "load_model", load_model)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    case = Case({option.name: option.value}, beside=option.beside)
    with pytest.raises(ValueError, match=option.message):
        lf_cases.run(_arguments(root, "refused", case, kt=True))


def test_what_could_only_fail_later_is_refused(root, monkeypatch):
    case = Case({"use_asft_loss": True})
    with pytest.raises(ValueError, match=r"use_asft_loss=True .* set ref_model"):
        lf_cases.run(_arguments(root, "refused", case, kt=True))
    monkeypatch.setenv("USE_RAY", "1")
    from llamafactory.hparams import get_train_args

    with pytest.raises(ValueError, match="USE_RAY=1 is not supported with use_kt; unset it"):
        get_train_args(_arguments(root, "refused", Case({}), kt=True))


def test_parallelism_is_refused():
    finetuning = SimpleNamespace(stage="sft", additional_target=None)
    model, training = SimpleNamespace(), SimpleNamespace(parallelism_config="tp_size=2")
    with pytest.raises(ValueError, match="parallelism_config='tp_size=2' is not supported with"):
        stages.check(model, finetuning, training)
