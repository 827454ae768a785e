"""`kv bench`: which rows are run, what is reported and how it is refused. Nothing here judges a speed."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import tiny
from conftest import KvHere
from engines import open_tiny
from synthetics import small_model

from kvcli.cli import render
from kvcli.cli.commands.bench import speeds as command
from kvcli.cli.invocation import Invocation
from kvcli.options import CacheOptions, LoadOptions
from kvcli.runtime.engine.engine import Engine
from kvcli.runtime.evaluate import benching
from kvcli.runtime.evaluate.benching import Case, Speed
from kvcli.runtime.evaluate.quality import layout_of
from kvcli.runtime.host.device import Device
from kvcli.runtime.host.machine import ProbeFailed
from kvcli.runtime.host.memory import CUDA, Memory
from kvcli.runtime.plan import overheads
from kvcli.runtime.plan.overheads import Overheads

Bench = Callable[..., tuple[int, str, str]]
MIB = 1 << 20


@pytest.fixture
def bench(kv_here: KvHere, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Bench:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))

    def run(*args: str) -> tuple[int, str, str]:
        model = ("-m", str(tiny.make("llama").path)) if "-m" not in args else ()
        return kv_here("bench", *model, "--page-size", "16", "--bandwidth", "10", "-t", "2", *args)

    return run


def tables(out: str) -> list[list[list[str]]]:
    """The cells of each Markdown table, without its rule."""
    blocks = [block.splitlines() for block in out.split("\n\n") if block.startswith("|")]
    return [[[cell.strip() for cell in line.strip("|").split("|")] for line in (b[0], *b[2:])] for b in blocks]


@pytest.mark.slow
def test_tables_and_json_agree(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    make = command.as_object

    def both(tables: Any, setting: Any, bandwidth: Any, *rest: Any) -> dict[str, Any]:
        command.show(tables, setting, bandwidth, Invocation())
        render.write_out("\n")
        return make(tables, setting, bandwidth, *rest)

    monkeypatch.setattr(command, "as_object", both)
    code, out, err = bench("-p", "30,7", "-n", "5", "-d", "0,40", "-ct", "f16,int8/int4", "-r", "3", "--json")
    assert (code, err) == (0, "")
    value = json.loads(out.splitlines()[-1])
    speeds, memory = tables(out)
    assert speeds[0] == ["type", "test", "tok/s", "±", "ms p50", "ms p95", "% of limit"]
    labels = [f"{test}{end}" for end in ("", " @ d40") for test in ("pp30", "pp7", "tg5")]
    assert [row[:2] for row in speeds[1:]] == [[t, label] for t in ("f16", "int8/int4") for label in labels]
    assert (value["device"], value["threads"], value["repetitions"], value["bandwidth_gb_s"]) == ("cpu", 2, 3, 10)
    engine, types = open_tiny("llama", "auto"), {"f16": ("f16", "f16"), "int8": ("int8", "int4")}
    weights, row_bytes = engine.bytes_per_token(0), {t: layout_of(engine, types[t]).token_bytes() for t in types}
    for row, result in zip(speeds[1:], value["results"], strict=True):
        assert len(result["tps_samples"]) == 3 and min(result["tps_samples"]) > 0
        assert result["tps"] == statistics.median(result["tps_samples"])
        assert row[2] == f"{result['tokens_per_s']:,.2f}" and row[3] == f"{statistics.stdev(result['samples']):,.2f}"
        if result["test"] == "pp":
            assert row[4:] == ["-"] * 3 and result["share_of_limit"] is result["token_s_p50"] is None
            continue
        assert 0 < result["token_s_p50"] <= result["token_s_p95"]
        assert row[4:6] == [f"{result[key] * 1e3:,.3f}" for key in ("token_s_p50", "token_s_p95")]
        read = result["read_bytes_per_token"]
        assert read == weights + (result["depth_tokens"] + 3) * row_bytes[result["type_k"]]
        assert result["limit_tps"] == 10e9 / read
        assert row[6] == f"{100 * result['tokens_per_s'] * read / 10e9:.1f}"
    for row, found in zip(memory[1:], value["memory"], strict=True):
        assert found["tokens"] == 40 + 30 + 1 and row[1] == "71"
        assert row[2:] == [f"{found[k] / MIB:,.1f}" for k in ("kv_bytes", "predicted_bytes", "measured_bytes")]
        assert found["predicted_bytes"] > 100 * MIB < found["peak_bytes"]


def test_three_depths_make_a_line(bench: Bench) -> None:
    flags = ("-p", "0", "-n", "3", "-r", "1", "--no-warmup", "-ct", "f16,int8")
    code, out, _ = bench(*flags, "-d", "0,20,40")
    speeds, lines, _ = tables(out)
    assert code == 0 and len(speeds) == 7
    assert lines[0] == ["type", "test", "ms empty", "ns a token before", "off by %"]
    assert [row[:2] for row in lines[1:]] == [["f16", "tg3"], ["int8", "tg3"]]
    value = json.loads(bench(*flags, "-d", "0,20,40", "--json")[1])
    assert [(x["type_k"], x["tokens"]) for x in value["lines"]] == [("f16", 3), ("int8", 3)]
    first, results = value["lines"][0], value["results"][:3]
    distances = [
        abs((first["empty_token_s"] + first["context_token_s"] * (r["depth_tokens"] + 2)) * r["tps"] - 1)
        for r in results
    ]
    assert first["residual_percent"] == pytest.approx(100 * max(distances))
    assert json.loads(bench(*flags, "-d", "0,20", "--json")[1])["lines"] == []
    evicting = bench(*flags, "-d", "0,100,200", "--evict", "sink", "--json")
    assert evicting[0] == 0 and json.loads(evicting[1])["lines"] == []


def test_generation_above_the_limit_is_pointed_out(bench: Bench) -> None:
    flags = ("-p", "0", "-n", "2", "-r", "1", "--no-warmup", "-ct", "f16")
    told = "generation is above 100 % of the limit: --bandwidth (0.0 GB/s) is too low"
    assert bench(*flags)[2] == ""
    assert bench(*flags, "--bandwidth", "1e-6")[2].startswith(f"kv: warning: {told}")
    assert json.loads(bench(*flags, "--bandwidth", "1e-6", "--json")[1])["warnings"][0].startswith(told)


def test_json_alone(bench: Bench) -> None:
    code, out, _ = bench("-p", "0", "-n", "2", "-r", "1", "--json", "--no-warmup")
    value = json.loads(out)
    assert code == 0 and [r["test"] for r in value["results"]] == ["tg"]
    assert value["results"][0]["deviation"] is None and value["failures"] == []


def test_types_tail_and_sinks_are_those_of_kv_run(bench: Bench) -> None:
    """-ctk stands above -ct; one repetition has no deviation; a foreign name is told."""
    flags = ("-p", "0", "-n", "2", "-r", "1", "--no-warmup", "-ct", "q8_0", "-d", "330", "--kv-sink")
    found = []
    for sinks in ("1", "20"):
        code, out, err = bench(*flags, sinks, "-ctk", "f16", "--json")
        assert code == 0 and "q8_0 means int8 here" in err
        value = json.loads(out.splitlines()[-1])
        assert [(r["type_k"], r["type_v"]) for r in value["results"]] == [("f16", "int8")]
        assert (value["kv_tail"], value["kv_sink"]) == (1, int(sinks)) and value["results"][0]["deviation"] is None
        found.append(value["memory"][0]["kv_bytes"])
    assert found[0] != found[1]  # of one arena and of two


def test_a_terminal_gets_aligned_columns(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(render, "is_terminal", lambda stream: True)
    monkeypatch.setenv("NO_COLOR", "1")
    lines = bench("-p", "4", "-n", "2", "-r", "1", "-q")[1].splitlines()
    lines = lines[lines.index("") - 1 :]
    assert lines[2].split() == ["type", "test", "tok/s", "±", "ms", "p50", "ms", "p95", "%", "of", "limit"]
    assert not set("|{") & set("".join(lines)) and max(map(len, lines)) <= 80 and lines[3].startswith("f16   pp4")


@pytest.mark.parametrize(
    ("variant", "types", "depth", "again"),
    [("llama", "f16", 70, 0), ("llama", "int8", 64, 0), ("llama", "int8", 70, 3 * 6), ("gemma3", "f16", 70, 70)],
)
def test_a_depth_is_prefilled_once_where_the_cache_allows(
    variant: str, types: str, depth: int, again: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`again`: rows run anew, those of a sealed page before each repetition, those of a window once it is gone."""
    engine = open_tiny(variant, "auto", CacheOptions(type_k=types, type_v=types, page_size=16))
    rows, forward = [], Engine.forward_all

    def counted(self: Engine, parts: list[tuple[Any, list[int], bool]]) -> Any:
        rows.extend(len(ids) for _, ids, _ in parts)
        return forward(self, parts)

    monkeypatch.setattr(Engine, "forward_all", counted)
    wanted = benching.cases([50], [40], [depth])
    heard: list[str] = []
    found = list(benching.run(engine, wanted, 2, False, heard.append))
    assert heard == [f"pp50 @ d{depth}", f"tg40 @ d{depth}"]
    assert sum(rows) == depth + 2 * 50 + 2 * 41 + again
    prompt, generation = found
    assert len(prompt.rates) == len(generation.rates) == 2 and prompt.gaps == ()
    assert len(generation.gaps) == 2 * 40 and generation.read_bytes == engine.bytes_per_token(depth + 21)
    engine.pool.check([])


def test_a_sequence_is_what_its_repetitions_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every prompt begins with the same rows; repetitions of a prompt differ behind them."""
    engine, prompts = open_tiny("llama", "auto", CacheOptions(page_size=16)), []
    generate = Engine.generate
    monkeypatch.setattr(
        Engine, "generate", lambda self, seq, ids, options: prompts.append(ids) or generate(self, seq, ids, options)
    )
    list(benching.run(engine, benching.cases([20], [3], [0, 33]), 2, True, lambda _: None))
    assert [len(ids) for ids in prompts] == [20] * 3 + [1] * 3 + [53] * 3 + [34] * 3
    assert len({tuple(ids[:33]) for ids in prompts[6:]}) == 1
    assert len({tuple(ids[33:]) for ids in prompts[6:9]}) == 3


@pytest.mark.slow
def test_types_that_do_not_fit_are_left_out(bench: Bench, tmp_path: Path) -> None:
    path = small_model(tmp_path)
    options = CacheOptions(1002, "int4", "int4", 16, force_types=True)
    limit = Engine.open(path, LoadOptions("x", 2), options).plan.total + 8 * MIB
    flags = ("-m", str(path), "--vram-limit", str(limit), "-p", "0", "-n", "2", "-d", "998", "-r", "1")
    code, out, err = bench(*flags, "-ct", "f32,int4", "--json")
    assert code == 4 and "warning: f32 is left out: a context of 1,002 needs" in err
    value = json.loads(out.splitlines()[-1])
    assert [r["type_k"] for r in value["results"]] == ["int4"] and len(value["failures"]) == 1
    code, out, err = bench(*flags, "-ct", "f32")
    assert (code, out) == (4, "") and err.count("a context of 1,002 needs") == 1 and "left out" not in err


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("-p", "0", "-n", "0"), "nothing to measure"),
        (("-p", "5,x"), "--n-prompt must "),
        (("-n", ""), "--n-gen must "),
        (("-d", "-4"), "--n-depth must "),
        (("-d", "cuda"), "-d is not --device"),
        (("-d", "0", "-d", "4k"), "put all values in one list: -d LIST"),
        (("--prompt-cache", ""), "--prompt-cache "),
        (("-r", "0"), "--repetitions must "),
        (("-ub", "-1"), "--ubatch-size must "),
        (("-ctk", "f16,int3"), "'int3' is not a cache type"),
        (("-ct", "f16,"), "--cache-type must "),
        (("--bandwidth", "0"), "--bandwidth must "),
        (("--page-size", "17"), "--page-size must "),
        (("--device", "tpu"), "--device must "),
    ],
    ids=" ".join,
)
def test_nonsense_is_one_clear_line(bench: Bench, args: tuple[str, ...], message: str) -> None:
    code, out, err = bench(*args)
    assert (code, out) == (2, "") and message in err


def test_figures_of_a_test() -> None:
    speed = Speed(Case("tg", 4), (10.0, 30.0, 20.0), tuple(range(100, 0, -1)), 500)
    assert (speed.median, speed.deviation, speed.gap(0.5), speed.gap(0.95), speed.gap(1)) == (20, 10, 51, 96, 100)
    assert speed.limit(1e-6) == 2 and speed.limit(None) is None
    assert Speed(Case("pp", 4), (1.0,), (), 0).limit(5) is None
    assert [str(t) for t in benching.cases([0, 4], [2], [0, 9])] == ["pp4", "tg2", "pp4 @ d9", "tg2 @ d9"]


def test_the_speed_of_memory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    gpu, said = Device(CUDA, 1, "a card"), []
    monkeypatch.setattr(benching, "measure", lambda *words: {"bandwidth_gb_s": float(len(words))})
    assert benching.bandwidth(Device("cpu"), said.append) == (1, "measured")
    assert benching.bandwidth(gpu, said.append) == (2, "measured") and len(said) == 2
    overheads.store("a card", Overheads(bandwidth=3000.0))
    assert benching.bandwidth(gpu, said.append) == (3000, "kv doctor") and len(said) == 2

    def fails(*words: str) -> None:
        raise ProbeFailed("no answer")

    monkeypatch.setattr(benching, "measure", fails)
    assert benching.bandwidth(Device("cpu"), said.append) == (None, "no answer")


def test_memory_on_a_gpu_is_counted_from_before_the_first_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    free = [70, 50]
    monkeypatch.setattr(benching, "gpus", lambda: [Memory(CUDA, "a card", 80, each, "nvml") for each in free])
    meter = benching.Meter()
    free[:] = 75, 20
    monkeypatch.setattr(benching, "peak_on_card", lambda index, before: (index, before - 8))
    assert meter.used(SimpleNamespace(device=Device(CUDA, 1))) == (1, 42)


@pytest.mark.slow
def test_a_prompt_that_is_repeated_has_room(bench: Bench) -> None:
    evict = ("--evict", "kvzip", "--budget", "50%")
    code, out, _ = bench("-p", "20", "-n", "6", "-d", "150", "-ct", "f16", "-r", "1", "--no-warmup", *evict)
    assert code == 0 and " ".join(evict) in out.splitlines()[0]


def test_the_heading_names_what_is_forgotten_and_read(bench: Bench) -> None:
    flags = ("-p", "20", "-n", "0", "-d", "100", "-ct", "f16", "-r", "1", "--no-warmup")
    for more in (("--evict", "sink", "--window", "32"), ("--attend", "pages:4")):
        code, out, err = bench(*flags, *more)
        assert code == 0 and " ".join(more) in out.splitlines()[0], err
    assert "--evict" not in bench(*flags)[1]


def test_errors_name_no_option_that_is_not_there(bench: Bench) -> None:
    code, _, err = bench("-p", "20", "-n", "6", "--evict", "snapkv", "--budget", "5000")
    assert code == 2 and "larger -d" in err and "ctx" not in err


def test_evicting(bench: Bench) -> None:
    flags = ("-p", "20", "-n", "6", "-d", "150", "-ct", "f16", "-r", "1", "--no-warmup", "-ub", "16")
    found = []
    for more in ((), ("--evict", "sink", "--window", "32")):
        code, out, err = bench(*flags, *more, "--json")
        assert (code, err) == (0, "")
        found.append(json.loads(out.splitlines()[-1]))
    assert found[1]["evict"] == {"policy": "sink", "keep": 4, "window": 32, "budget": None}
    reads = [next(r["read_bytes_per_token"] for r in x["results"] if r["test"] == "tg") for x in found]
    assert reads[1] < reads[0]
