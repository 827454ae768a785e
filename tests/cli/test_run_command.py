"""`kv run` with an engine that has no weights: what comes out. What goes in: test_run_input.py; how it ends:
test_run_end.py; with the real model: test_run_real.py."""

from __future__ import annotations

import json
import stat

import pytest
import tiny
from conftest import KvHere
from runcases import fixture_kv  # noqa: F401

from kvcli.errors import KVError


def test_the_answer_alone_is_on_stdout_and_nothing_on_stderr(kv):
    outcome = kv("run", "hello")
    assert (outcome.code, outcome.out, outcome.err) == (0, "an answer\n", "")


@pytest.mark.parametrize(
    ("answer", "args", "out"),
    [
        ("text\n", (), "text\n"),
        ("text", ("--no-newline",), "text"),
        ("", (), "\n"),
        ("[bold]x[/bold] :smile: é 🙂", (), "[bold]x[/bold] :smile: é 🙂\n"),
        ("\x1b[2Jx\r\n", (), "\x1b[2Jx\r\n"),
    ],
)
def test_text_passes_unchanged_and_ends_with_one_newline(kv, answer, args, out):
    kv.engine.answers = [answer]
    assert kv("run", "hello", *args).out == out


def test_json_is_one_object(kv):
    kv.engine.answers = ["é\x1b"]
    outcome = kv("run", "hello", "--json", "--seed", "7", "--logit-bias", "40-inf")
    assert (outcome.code, outcome.err) == (0, "")
    value = json.loads(outcome.out)
    assert outcome.out.endswith("}\n") and outcome.out.count("\n") == 1
    assert "é" in outcome.out
    assert value["text"] == "é\x1b"
    assert value["finish_reason"] == "stop"
    prompt = len(kv.engine.calls[0][0])
    assert value["usage"] == {
        "prompt_tokens": prompt,
        "cache_read_tokens": 0,
        "cache_disk_tokens": 0,
        "cache_write_tokens": 0,
        "cache_miss": None,
        "cache_how": None,
        "breakpoints": [],
        "predicted_read_s": None,
        "predicted_compute_s": None,
        "completion_tokens": 2,
        "reasoning_tokens": 0,
        "drafted_tokens": 0,
        "accepted_tokens": 0,
        "tokens_per_step": 0.0,
    }
    assert value["kv"]["type_k"] == "f32" and value["kv"]["page_size"] == 64
    assert value["kv"]["tokens"] == prompt + 2
    assert value["kv"]["page_utilization"] == round((prompt + 2) / 64, 6)
    assert value["kv"]["contiguous_bytes"] == 4096 << 14
    assert value["sampling"]["seed"] == 7
    assert value["sampling"]["temperature"] == 0.8
    assert value["sampling"]["logit_bias"] == {"40": "-inf"}
    assert value["memory"]["peak_bytes"] > 1 << 20
    assert set(value) == {
        *("kv_schema", "model", "text", "reasoning", "finish_reason", "stop", "repetition", "usage"),
        *("timings", "kv", "evict", "memory", "sampling", "params", "warnings", "prompt_cut", "prompt_evicted_tokens"),
    }


def test_jsonl_is_one_event_a_line(kv):
    outcome = kv("run", "hello", "--jsonl")
    events = [json.loads(line) for line in outcome.out.splitlines()]
    assert [event["event"] for event in events][:3] == ["start", "progress", "token"]
    assert events[-1]["event"] == "end"
    texts = [event["text"] for event in events if event["event"] == "token"]
    assert "".join(texts) == "an answer" == events[-1]["text"]
    assert len(texts) == 9 and {event["sample"] for event in events} == {0}


def test_errors_are_json_where_json_was_asked_for(kv):
    outcome = kv("run", "hello", "--json", "-c", "abc")
    assert outcome.code == 2
    error = json.loads(outcome.out)["error"]
    assert error["code"] == 2
    assert "abc" in error["message"]


def test_stats_are_one_line_on_stderr(kv):
    outcome = kv("run", "hello", "--stats", "-s", "5")
    assert outcome.out == "an answer\n"
    line = outcome.err
    assert line.startswith("kv: reused 0 of ") and line.count("\n") == 1
    for part in (
        "prefilled 24 · 0.50 s · 48 tok/s",
        "gen 9 tok",
        "TTFT 0.60 s",
        "load 0.25 s",
        "KV f32 33/4,096",
        "peak ",
        "seed 5",
    ):
        assert part in line


def test_output_file_holds_the_same_bytes(kv, tmp_path):
    path = tmp_path / "out.txt"
    path.write_text("old")
    path.chmod(0o640)
    assert kv("run", "hello", "-o", str(path)).out == path.read_text()
    assert stat.S_IMODE(path.stat().st_mode) == 0o640
    assert list(tmp_path.iterdir()) == [path]


def test_output_file_is_refused_before_the_model_is_loaded(kv, tmp_path):
    for name in (tmp_path, tmp_path / "missing" / "file"):
        assert kv("run", "hello", "-o", str(name)).code == 74
    assert kv.opened == []


@pytest.mark.parametrize("quiet", [False, True])
def test_the_slow_path_is_said_without_a_terminal(
    quiet: bool, kv_here: KvHere, monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing() -> None:
        raise KVError("the kernels are not there", "make them")

    monkeypatch.setattr("kvcli.kernels.cpu.backend.library", missing)
    how = ("--raw", "--no-stdin", "--no-cache", "-n", "1", *(["-q"] if quiet else []))
    code, _, err = kv_here("run", "-m", str(tiny.make("llama").path), *how, "a")
    said = "slow path (plain torch): the kernels are not there; make them"
    assert (code, [line for line in err.splitlines() if said in line]) == (0, [] if quiet else [f"kv: {said}"])
