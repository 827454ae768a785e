"""Predicted speeds: the constants are those that fit what was measured, and the documentation has what they say."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from conftest import KvHere
from synthetics import module

from kvcli.runtime.cache.layout import KVLayout
from kvcli.runtime.config import FULL, LayerConfig
from kvcli.runtime.headers.plannedmodel import planned_model
from kvcli.runtime.headers.shapes import Given
from kvcli.runtime.host.memory import CUDA
from kvcli.runtime.plan import speed
from kvcli.runtime.plan.cards import CARDS

predicted = module("predicted")


def test_the_constants_fit_what_was_measured() -> None:
    for name, value in predicted.fit().items():
        assert getattr(speed, name) == pytest.approx(value, rel=0.005), name
    for case in predicted.H200:
        assert 1 / predicted.seconds(case, "h200-141g") == pytest.approx(case.tps, rel=0.045), case


def test_another_card_is_met_that_nothing_was_fitted_to() -> None:
    for case in predicted.H100:
        assert 0.85 * case.tps < 1 / predicted.seconds(case, "h100-80g") < 1.02 * case.tps, case


def test_the_documentation_has_these_tables() -> None:
    page = predicted.PAGE.read_text("utf-8")
    assert f"<!-- predicted -->\n{predicted.predictions()}\n<!-- end -->" in page
    assert f"<!-- compared -->\n{predicted.comparison()}\n<!-- end -->" in page


def test_a_token_is_the_sum_of_its_parts() -> None:
    """Two layers of 64 + 64 elements a row, by hand."""
    config = planned_model("llama-3.2-1b", Given(), CUDA, offline=True).config
    config = replace(config, layers=(LayerConfig(FULL, 8, 64, 64),) * 2)
    assert speed.launches(config) == 7 + 2 * 7
    assert speed.launches(replace(config, block=replace(config.block, post_norms=True))) == 7 + 2 * 9
    card = replace(CARDS["h200-141g"], bandwidth=1000.0, multiprocessors=100)
    found = speed.token_seconds(config, 10**9, KVLayout.build(config, "int4", "f16"), 1000, card)
    rows = 1000 * 2 * 8 * (64 // 2 + 2 + 2 * 64)
    unpacking = 1000 * 2 * 8 * 64 * speed.UNPACK / 100
    assert found == pytest.approx(21 * speed.LAUNCH + 1e-3 / speed.WEIGHTS + rows * 1e-12 / speed.ROWS + unpacking)
    older = speed.token_seconds(
        config, 10**9, KVLayout.build(config, "int4", "f16"), 1000, replace(card, capability=(8, 6))
    )
    assert older is not None and found is not None and older - found == pytest.approx(21 * speed.NOT_AHEAD)


def test_a_card_that_kv_does_not_take_has_no_speed() -> None:
    config = planned_model("llama-3.2-1b", Given(), CUDA, offline=True).config
    layout = KVLayout.build(config, "f16", "f16")
    assert [speed.token_seconds(config, 1, layout, 1, CARDS[x]) for x in ("t4-16g", "v100-16g", "gtx1080ti-11g")] == [
        None
    ] * 3


def test_an_estimate_has_it(kv_here: KvHere) -> None:
    words = ("estimate", "llama-3.1-8b", "-ct", "f16,int4", "-c", "8192")

    def found(*more: str) -> list[float | None]:
        return [x["predicted_tps"] for x in json.loads(kv_here(*words, *more, "--json")[1])["types"]]

    on_card = found("--gpu", "rtx3090")
    assert on_card == [pytest.approx(134, abs=1.5), pytest.approx(153, abs=1.5)]
    line = next(x for x in kv_here(*words, "--gpu", "rtx3090")[1].splitlines() if x.startswith("≈"))
    assert line == f"≈ tok/s  f16 {on_card[0]:.0f}, int4 {on_card[1]:.0f}: predicted for a full context"
    slower = found("--gpu", "rtx3090", "--bandwidth", "500")
    assert all(a < 0.65 * b for a, b in zip(slower, on_card, strict=True) if a and b)
    assert (
        found("--gpu", "t4") == found("--device", "cpu") == found("--gpu", "rtx3090", "--batch-size", "2") == [None] * 2
    )
    assert "≈ tok/s" not in kv_here(*words, "--gpu", "t4")[1]
