"""`kv estimate` with a draft model, a layer or a head that predicts tokens."""

from __future__ import annotations

import json
from pathlib import Path

import eagles
import pytest
import tiny
from conftest import KvHere
from estimatecases import fixture_own_folders, fixture_small, ok  # noqa: F401

from kvcli.runtime.engine.spec import drafting
from kvcli.runtime.plan import repacked


def test_a_draft_model_is_counted(small: Path, kv_here: KvHere) -> None:
    both, alone, theirs = (
        json.loads(ok(kv_here("estimate", *args, "--vram", "80G", "-c", "64", "--json")))
        for args in ((str(small), "--draft-model", str(small)), (str(small),), (str(small),))
    )
    assert (both["draft_model"], alone["draft_model"]) == (str(small), None)
    names = {each["name"]: each["predicted_bytes"] for each in both["fixed"]}
    assert names["draft: weights"] == names["weights"] > 0
    for sums, one, other in zip(both["types"], alone["types"], theirs["types"], strict=True):
        assert sums["draft_kv_bytes"] == sums["kv_bytes"] == one["kv_bytes"] and one["draft_kv_bytes"] == 0
        once = names["CUDA context + libraries"]  # of the process
        assert sums["predicted_bytes"] == one["predicted_bytes"] + other["predicted_bytes"] - once
    asked = "estimate", str(small), "--draft-model", str(small), "--vram", "80G", "-c", "64"
    screen = ok(kv_here(*asked))
    assert "draft KV" in screen and "\ndraft      " in screen and max(map(len, screen.splitlines())) <= 80
    assert "draft: KV pool" in ok(kv_here(*asked, "--explain"))
    assert f"--draft-model {small}" in ok(kv_here(*asked, "--print-args"))
    code, _, err = kv_here("estimate", str(small), "--draft-model", "nowhere.gguf")
    assert code == 3 and "the draft model: " in err


def test_a_layer_that_predicts_further_tokens_is_counted(kv_here: KvHere) -> None:
    asked = "estimate", str(tiny.make("glm4moe-ahead").path), "--vram", "80G", "-c", "64"
    both, alone = (json.loads(ok(kv_here(*asked, *more, "--json"))) for more in (("--spec", "mtp"), ()))
    names = {each["name"]: each["predicted_bytes"] for each in both["fixed"]}
    assert 0 < names["draft: weights"] < names["weights"] and "draft: tokenizer" not in names
    for sums, one in zip(both["types"], alone["types"], strict=True):
        assert 0 < sums["draft_kv_bytes"] < sums["kv_bytes"] == one["kv_bytes"]
    assert "--spec mtp" in ok(kv_here(*asked, "--spec", "mtp", "--print-args"))
    code, _, err = kv_here("estimate", str(tiny.make("llama").path), "--spec", "mtp")
    assert code == 3 and "no layer that predicts further tokens" in err
    code, _, err = kv_here(*asked, "--spec", "suffix")
    assert code == 2 and "--spec suffix has no memory of its own to plan" in err


def test_a_head_is_counted(kv_here: KvHere) -> None:
    head = str(eagles.make("llama")[0])
    asked = "estimate", str(tiny.make("llama").path), "--draft-model", head, "--vram", "80G", "-c", "64"
    found = json.loads(ok(kv_here(*asked, "--json")))
    assert found["draft_model"] == head and all(
        0 < each["draft_kv_bytes"] < each["kv_bytes"] for each in found["types"]
    )


def test_pairs_that_are_refused_have_no_plan(kv_here: KvHere, monkeypatch: pytest.MonkeyPatch) -> None:
    llama = str(tiny.make("llama").path)
    for more, code, told in (
        (("--evict", "h2o", "--budget", "128"), 2, "nothing can be guessed with --evict h2o"),
        (("--attend", "pages:4"), 2, "nothing can be guessed with --attend pages:4"),
    ):
        found, _, err = kv_here("estimate", llama, "--draft-model", llama, *more)
        assert found == code and told in err
    ahead, head = str(tiny.make("glm4moe-ahead").path), str(eagles.make("llama")[0])
    with monkeypatch.context() as patched:
        patched.setattr(repacked, "MOST_HEAD_DIM", 4)
        for asked in ((llama, "--draft-model", llama), (llama, "--draft-model", head), (ahead, "--spec", "mtp")):
            assert kv_here("estimate", *asked, "--device", "cpu")[0] == 0
            found, _, err = kv_here("estimate", *asked, "--vram", "8G")
            assert found == 3 and "cannot be computed on a GPU: a head dim" in err
    monkeypatch.setattr(drafting, "differing", lambda mine, theirs: "token 3 is 'a', and 'b' in the model")
    found, _, err = kv_here("estimate", llama, "--draft-model", llama)
    assert found == 3 and "the draft model has another vocabulary: token 3 is 'a'" in err
