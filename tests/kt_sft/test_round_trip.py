"""Every mixture-of-experts family of the installed transformers goes the whole way: train, save,
stock peft, our inference, merge, stock transformers.

Families are found by looking (families.py), so a new one is tested without a change here.
"""

from __future__ import annotations

import logging
from pathlib import Path

import families
import pytest
import round_trip
import slow_experts

FAMILIES = {family.class_name: family for family in families.families()}
SAME = round_trip.SAME
PAGE = Path(__file__).resolve().parents[2] / "docs" / "families.md"


@pytest.fixture(scope="module", params=FAMILIES)
def trained(request, tmp_path_factory):
    """A family after three steps; those that are refused are skipped, the page has their reason."""
    family = FAMILIES[request.param]
    if round_trip.refusal(family):
        pytest.skip("refused")
    with pytest.MonkeyPatch.context() as patch:
        slow_experts.patch(patch)
        yield round_trip.train(family, tmp_path_factory.mktemp("family") / "base")


def _row_of(family: families.Family) -> str:
    (row,) = [r for r in PAGE.read_text().splitlines() if f"`{family.class_name}`" in r]
    return row


def test_the_page_has_every_family_and_the_reason_of_those_that_are_refused():
    """docs/families.md; a family that is new in transformers fails here until the page names it."""
    text, head = PAGE.read_text(), round_trip.page([])
    assert text.startswith(head), "run scripts/round_trip_table.py"
    rows = text.removeprefix(head).splitlines()
    assert [row.split("`")[1] for row in rows] == list(FAMILIES)
    for family in FAMILIES.values():
        if reason := round_trip.refusal(family):
            assert _row_of(family) == round_trip.refused_row(family, reason)


def test_the_page_says_what_is_so(trained):
    assert _row_of(trained.family) == round_trip.supported_row(trained)


def test_the_adapter_matters(trained):
    assert round_trip.error(trained.logits, trained.plain) > 0.1
    assert {"attention", "experts"} <= set(trained.groups)


def test_loss_and_gradients_are_those_of_the_familys_own_experts(trained):
    loss, ours = round_trip.gradients(round_trip.loaded(trained))
    expected, theirs = round_trip.gradients(round_trip.stock_model(trained.family, trained.base))
    assert abs(loss - expected) < SAME * expected
    assert set(ours) == set(theirs)
    largest = max(g.norm() for g in theirs.values())
    for name, gradient in theirs.items():
        assert (ours[name] - gradient).norm() < SAME * (gradient.norm() + 0.01 * largest), name


def test_stock_peft_reads_what_was_promised(trained, tmp_path):
    read = {}
    for layout in round_trip.LAYOUTS:
        choice = trained.save(layout, tmp_path / layout)
        assert choice.layout == layout
        error = round_trip.stock_peft(trained, tmp_path / layout)
        read[layout] = error is not None and error < SAME
        assert read[layout] == (choice.problem is None), (layout, error, choice.problem)
    auto = trained.save("auto", tmp_path / "auto")
    assert (auto.problem is None) == any(read.values())
    assert read[auto.layout] == any(read.values())
    assert auto.problem is not None or round_trip.stock_peft(trained, tmp_path / "auto") < SAME


@pytest.mark.parametrize("layout", round_trip.LAYOUTS)
def test_we_serve_and_merge_both_layouts(trained, tmp_path, layout):
    trained.save(layout, tmp_path / "adapter")
    assert round_trip.ours(trained, tmp_path / "adapter") < SAME
    assert round_trip.merged(trained, tmp_path / "adapter", tmp_path / "merged") < SAME


def test_both_stored_layouts(trained, tmp_path):
    """The hub's (per expert; [E, H, 2I] of Qwen3-VL-MoE) and the model's own, where they differ."""
    round_trip.build(trained.family, tmp_path / "own", save_original_format=False)
    if round_trip.stored(tmp_path / "own") == round_trip.stored(trained.base):
        pytest.skip("the hub's layout is the model's own")
    trained.save("auto", tmp_path / "adapter")
    assert round_trip.ours(trained, tmp_path / "adapter", tmp_path / "own") < SAME
    out = tmp_path / "merged"
    assert round_trip.merged(trained, tmp_path / "adapter", out, tmp_path / "own") < SAME
    assert round_trip.stored(out) == round_trip.stored(tmp_path / "own")


def test_adapters_of_either_class_on_either(tmp_path, monkeypatch):
    """LLaMA-Factory trains the multimodal class, the server loads the text class."""
    slow_experts.patch(monkeypatch)
    whole = FAMILIES["Qwen3_5MoeForConditionalGeneration"]
    text = FAMILIES["Qwen3_5MoeForCausalLM"]
    base = tmp_path / "base"
    for one, other in ((whole, text), (text, whole)):
        directory = tmp_path / one.class_name
        trained = round_trip.train(one, base)
        auto = trained.save("auto", directory)
        assert auto.problem is None
        assert round_trip.stock_peft(trained, directory) < SAME  # on the class that was trained
        assert round_trip.continued(trained, directory, base, other) < SAME
        assert round_trip.ours(trained, directory) < SAME
        assert round_trip.merged(trained, directory, tmp_path / f"merged {one.class_name}") < SAME


def test_a_trained_image_encoder_is_merged_and_not_served_by_the_text_class(tmp_path, monkeypatch):
    slow_experts.patch(monkeypatch)
    whole = FAMILIES["Qwen3_5MoeForConditionalGeneration"]
    trained = round_trip.train(whole, tmp_path / "base", vision=True)
    trained.save("auto", tmp_path / "adapter")
    with pytest.raises(ValueError, match=r"model\.visual\..* which is no part of the text model"):
        round_trip.ours(trained, tmp_path / "adapter")
    assert round_trip.merged(trained, tmp_path / "adapter", tmp_path / "merged") < SAME


def test_a_layout_that_stock_peft_does_not_read_is_named_before_training(
    tmp_path, monkeypatch, caplog
):
    """PhiMoE per expert: stock peft applied the attention only, without a word."""
    slow_experts.patch(monkeypatch)
    phimoe = FAMILIES["PhimoeForCausalLM"]
    with caplog.at_level(logging.WARNING, "kt"):
        round_trip.train(phimoe, tmp_path / "auto")
        assert not caplog.messages
        round_trip.train(phimoe, tmp_path / "named", export_layout="per_expert")
    (message,) = caplog.messages
    assert "does not apply it in full to PhimoeForCausalLM (per_expert layout" in message
    assert "kt_core.serve serves it" in message
