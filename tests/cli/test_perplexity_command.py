"""`kv perplexity` on tiny models, whose figures are computed here by hand; one golden figure on the real model."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from conftest import ROOT, KvHere
from engines import open_tiny

from kvcli.errors import UsageError
from kvcli.options import CacheOptions, LoadOptions
from kvcli.runtime.cache.layout import KVLayout
from kvcli.runtime.cache.pool import PagePool
from kvcli.runtime.cache.sequence import Sequence
from kvcli.runtime.engine.engine import Engine
from kvcli.runtime.evaluate import quality
from kvcli.runtime.evaluate.quality import Scoring

TEXT = "The cache of a transformer holds 1234 keys. It's read page by page; isn't it?\n" * 20
Ppl = Callable[..., tuple[int, str, str]]


@pytest.fixture
def ppl(kv_here: KvHere, tmp_path: Path) -> Ppl:
    """kv perplexity on the tiny llama and TEXT, chunks of 128."""
    path = tmp_path / "text.txt"
    path.write_text(TEXT)

    def run(*args: str, files: tuple[str, ...] = (str(path),)) -> tuple[int, str, str]:
        given = [word for file in files for word in ("-f", file)]
        return kv_here(
            "perplexity", "-m", str(tiny.make("llama").path), "-c", "128", "--page-size", "16", *given, *args
        )

    return run


# --- the protocol


def test_chunks_do_not_overlap_and_begin_with_bos_where_the_model_adds_it():
    ids = list(range(100, 133))
    assert Scoring(8).cut(ids, None) == [ids[0:8], ids[8:16], ids[16:24], ids[24:32]]
    assert Scoring(8, 2).cut(ids, 1) == [[1, *ids[1:8]], [1, *ids[9:16]]]
    assert (Scoring(512).first, Scoring(512).scored) == (256, 255)  # as llama-perplexity has it
    assert (Scoring(8, score_from=0).first, Scoring(8, score_from=0).scored) == (0, 7)
    assert (Scoring(1024, score_from=256).first, Scoring(1024, score_from=256).scored) == (256, 767)
    with pytest.raises(UsageError, match="the text has 33 tokens, one chunk needs 64"):
        Scoring(64).cut(ids, None)
    for nothing in (Scoring(4), Scoring(64, score_from=62), Scoring(64, score_from=100)):
        with pytest.raises(UsageError, match="nothing to measure"):
            nothing.check()


@pytest.mark.slow
def test_figures_are_those_of_a_computation_by_hand():
    engine = open_tiny("llama", "native", CacheOptions(page_size=16))
    ids = engine.tokenizer.encode(TEXT)
    protocol = Scoring(100, 3, 30)
    chunks = protocol.cut(ids, None)
    found = quality.measure(engine, [chunks[:2], chunks[2:]], [("int4", "int8"), ("f32", "f32")], protocol, _silent)
    assert list(found) == [("f16", "f16"), ("int4", "int8"), ("f32", "f32")]
    logs = {}
    for types in found:
        pool, parts = PagePool(KVLayout.build(engine.config, *types, 16)), []
        for chunk in chunks:  # token by token, as decode does it
            seq = Sequence(pool)
            hidden = torch.cat([engine.forward(seq, [token]) for token in chunk])
            parts.append(engine.logits(hidden[30:-1]).double().log_softmax(-1))
        logs[types] = torch.cat(parts)
    targets = torch.tensor([token for chunk in chunks for token in chunk[31:]])[:, None]
    base, n = logs["f16", "f16"], 3 * 69
    for types, parts in found.items():
        row, log_p = quality.summarize(parts, found[quality.BASE]), logs[types]
        nll = -log_p.gather(1, targets)[:, 0]
        assert row.tokens == n == len(nll)
        assert row.ppl == pytest.approx(float(nll.mean().exp()), rel=1e-5)
        assert row.ppl_error == pytest.approx(float(nll.mean().exp() * nll.std() / n**0.5), rel=1e-4)
        reference = -base.gather(1, targets).mean()
        assert row.ppl_delta == pytest.approx(100 * float((nll.mean() - reference).exp() - 1), abs=1e-3)
        kld = (base.exp() * (base - log_p)).sum(-1)
        assert row.kld == pytest.approx(float(kld.mean()), rel=1e-3, abs=2e-7)
        assert row.kld_error == pytest.approx(float(kld.std() / n**0.5), rel=1e-3, abs=2e-7)
        assert row.kld_max == pytest.approx(float(kld.max()), rel=1e-3, abs=1e-6)
        assert float(kld.median()) <= row.kld_p99 + 1e-6 and row.kld_p99 <= row.kld_max
        assert row.top1 == pytest.approx(100 * float((log_p.argmax(-1) == base.argmax(-1)).double().mean()))
    assert quality.summarize(found["int4", "int8"], found[quality.BASE]).kld > 1e-6  # sealed pages were read


def _silent(stage: str, done: int, total: int) -> None:
    """No progress."""


def test_slices_and_steps_change_nothing(monkeypatch: pytest.MonkeyPatch):
    engine = open_tiny("llama", "native", CacheOptions(page_size=16))
    chunks = Scoring(128).cut(engine.tokenizer.encode(TEXT), None)[:1]
    first = quality.measure(engine, [chunks], [("int4", "int4")], Scoring(128), _silent)
    monkeypatch.setattr(quality, "SLICE_ELEMENTS", 7 * engine.config.vocab_size)
    engine = open_tiny("llama", "native", CacheOptions(page_size=16, ubatch=5))
    again = quality.measure(engine, [chunks], [("int4", "int4")], Scoring(128), _silent)
    for types, (scores,) in first.items():
        assert torch.equal(scores.nll, again[types][0].nll)
        assert torch.allclose(scores.kld, again[types][0].kld, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("types", [("f16", "f16"), ("f32", "f32"), ("int8", "int8"), ("int4", "f16"), ("fp8", "fp8")])
def test_bytes_are_those_that_the_pool_holds_at_the_peak(types: tuple[str, str]):
    engine = open_tiny("llama", "native", CacheOptions(page_size=16))
    layout = quality.layout_of(engine, types)
    pool = PagePool(layout)
    seq = Sequence(pool)
    elements = sum(len(g.layers) * g.kv_heads * (g.dim_k + g.dim_v) for g in layout.groups)
    for tokens in (100, 128, 300):
        for token in range(seq.length, tokens):
            engine.forward(seq, [token])
        cost = quality.cost(layout, tokens)
        held = sum(pool.peak(a) * arena.page_bytes for a, arena in enumerate(layout.arenas)) + layout.constant_bytes
        assert cost.bytes_per_token == pytest.approx(held / tokens)
        assert cost.bits == pytest.approx(8 * held / (elements * -(-tokens // 16) * 16))
        if types[0] == types[1] and types[0] in ("f16", "f32"):
            assert cost.bits == cost.sealed_bits == int(types[0][1:])
        else:
            assert cost.sealed_bits < cost.bits


# --- the command


def test_the_table_has_a_row_for_each_type_and_f16_first(ppl: Ppl):
    code, out, err = ppl("-v", "-ct", "int4,int8/int4,f32")
    assert code == 0, err
    quality, sizes = ([line.split() for line in table.splitlines()] for table in out.split("\n\n"))
    lines = quality
    assert lines[0][:3] == ["type", "PPL", "±"]
    assert [line[0] for line in lines[1:]] == ["f16", "int4", "int8/int4", "f32"]
    assert lines[1][3:5] == ["+0.000", "0.000000"] and all(len(line) == 9 for line in lines[1:])
    assert [line[0] for line in sizes] == ["type", "f16", "int4", "int8/int4", "f32"]
    assert max(map(len, out.splitlines())) <= 80
    assert float(lines[2][1]) > 1 and float(lines[2][4]) > 0
    assert "tokens scored" in err
    _, out, _ = ppl("--chunks", "1", "-ctk", "fp8,f16", "-ctv", "int8,int4")
    multiplied = ["fp8/int8", "fp8/int4", "f16/int8", "f16/int4"]
    assert [line.split()[0] for line in out.split("\n\n")[0].splitlines()[1:]] == ["f16", *multiplied]


def test_json_is_one_object_with_every_figure(ppl: Ppl, tmp_path: Path):
    other = tmp_path / "other.txt"
    other.write_text(TEXT[7:])
    code, out, _ = ppl("-ct", "int4,q4_0", "--chunks", "1", "--json", files=(str(tmp_path / "text.txt"), str(other)))
    value = json.loads(out)
    assert code == 0 and value["failures"] == []
    assert value["protocol"] == {"ctx_size": 128, "chunks": 1, "first_scored_token": 64} | {
        "chunk": 128,
        "first_scored": 64,
    }
    assert [(t["chunks"], t["tokens"] > 128) for t in value["texts"]] == [(1, True), (1, True)]
    assert [(t["type_k"], t["type_v"], t["scored_tokens"]) for t in value["types"]] == [
        ("f16", "f16", 126),
        ("int4", "int4", 126),
    ]
    row = value["types"][1]
    assert len(row["by_text"]) == 2 and all(each["scored_tokens"] == 63 for each in row["by_text"])
    both = math.exp(sum(math.log(each["ppl"]) for each in row["by_text"]) / 2)
    assert row["ppl"] == pytest.approx(both) and 0 < row["kld"] <= row["kld_max"]
    assert row["bits_per_element"] > row["sealed_bits_per_element"] > 4 and row["bytes_per_token"] > 0


def test_tail_and_sinks_change_what_is_read_and_what_it_costs(ppl: Ppl):
    def row(*flags: str) -> dict:
        code, out, err = ppl("-ct", "int4", "--chunks", "2", "--json", *flags)
        assert code == 0, err
        return json.loads(out)["types"][1]

    usual, no_tail, more_sinks = row(), row("--kv-tail", "0"), row("--kv-sink", "4")
    assert usual == row("--kv-tail", "1", "--kv-sink", "1")
    assert no_tail["kld"] > 1.2 * usual["kld"] > usual["kld"] > more_sinks["kld"] > 0
    assert row("--kv-sink", "0")["kld"] > usual["kld"]
    assert no_tail["bytes_per_token"] == usual["bytes_per_token"] < more_sinks["bytes_per_token"]
    everything = row("--kv-sink", "8")  # all pages are sinks; the basis of keys is another, so not all bits are f16's
    assert everything["kld"] < 1e-5 and everything["sealed_bits"] == usual["sealed_bits"] < 16


def test_a_type_that_is_not_put_to_the_test_is_told(ppl: Ppl):
    told = "int4 makes no difference in 32 tokens"
    assert told in ppl("-ct", "int4,f32", "--chunks", "1", "-c", "32", "--page-size", "16")[2]
    code, _, err = ppl("-ct", "int4", "--chunks", "1", "-c", "34", "--page-size", "16")
    assert code == 0 and "makes no difference" not in err


def test_gates_are_exit_8_after_the_table(ppl: Ppl):
    code, out, err = ppl("-ct", "int4", "--chunks", "1", "--max-kld", "1e-9")
    assert code == 8 and out.count("\n") == 7 and "int4: KLD" in err and "above 1e-09" in err
    code, out, _ = ppl("-ct", "int4", "--chunks", "1", "--max-kld", "1e-9", "--json")
    value = json.loads(out)
    assert code == 8 and value["failures"] == [value["error"]["message"]] and value["error"]["code"] == 8
    assert ppl("-ct", "int4", "--chunks", "1", "--max-kld", "10", "--max-ppl-delta", "50%")[0] == 0


def test_the_gate_of_ppl_is_on_the_way_up_only(ppl: Ppl):
    _, out, _ = ppl("-ct", "int4,int8", "--chunks", "1", "--json")
    deltas = {t["type_k"]: t["ppl_delta_percent"] for t in json.loads(out)["types"]}
    for name in ("int4", "int8"):
        code, _, err = ppl("-ct", name, "--chunks", "1", "--max-ppl-delta", "0")
        assert (code == 8) == (deltas[name] > 0), (name, err)


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("-ct", "int3"), "'int3' is not a cache type"),
        (("-ct", "f16,,int4"), "empty entry"),
        (("-ct", "int8/"), "'' is not a cache type"),
        (("-ctv", "int8/int4"), "--cache-type-v: 'int8/int4' is not a cache type"),
        (("-ct", "auto,f16", "--max-kld", "0"), "a limit for f16 alone checks nothing"),
        (("-ct", "f16", "--max-ppl-delta", "1"), "a limit for f16 alone checks nothing"),
        (("--max-ppl-delta", "much"), "--max-ppl-delta must "),
        (("--max-kld", "-1"), "--max-kld must "),
        (("--chunks", "-1"), "--chunks must "),
        (("-c", "4"), "nothing to measure"),
        (("-c", "100k"), "one chunk needs"),
        (("--page-size", "48"), "--page-size must "),
        (("--kv-tail", "0", "--kv-sink", "0"), "cannot be used together"),
        (("-f", "-", "-f", "-"), "stands twice"),
        (("-f", "/nowhere"), "cannot read /nowhere"),
    ],
    ids=" ".join,
)
def test_nonsense_is_one_clear_line(ppl: Ppl, args: tuple[str, ...], message: str):
    code, out, err = ppl(*args)
    assert (code, out) == (2, "") and message in err


@pytest.mark.slow
def test_a_foreign_name_is_told_and_stdin_is_read(kv, tmp_path: Path):
    result = kv("ppl", "-m", str(tiny.make("llama").path), "-c", "64", "-ct", "q8_0", input=TEXT)
    assert result.returncode == 0, result.stderr
    assert "q8_0 means int8 here: about the same size, a different format" in result.stderr
    assert [line.split()[0] for line in result.stdout.split("\n\n")[0].splitlines()] == ["type", "f16", "int8"]


# --- the real models against float32 of another program


def _f32(engine: Engine, texts: list[list[int]], protocol: Scoring) -> list[float]:
    """PPL of each text, one chunk, through an f32 cache."""
    found = quality.measure(engine, [[ids] for ids in texts], [("f32", "f32")], protocol, _silent)
    row = quality.summarize(found["f32", "f32"], found[quality.BASE])
    assert abs(row.ppl_delta) < 0.1 and row.kld < 1e-4
    return [quality.summarize([scores], [scores]).ppl for scores in found["f32", "f32"]]


def _open(path: Path, ubatch: int = 0) -> Engine:
    return Engine.open(path, LoadOptions(path.stem), CacheOptions(type_k="f32", type_v="f32", ubatch=ubatch))


@pytest.mark.models
@pytest.mark.parametrize("name", ("smollm2", "gemma3"))
def test_golden_perplexity(name: str, request: pytest.FixtureRequest):
    """Every token but the first of the short golden texts, in several steps; test_goldens.py reads the long one."""
    goldens = json.loads((ROOT / "tests" / "data" / f"goldens_{name}.json").read_text())
    texts = [golden for kind, golden in goldens.items() if kind != "long"]
    engine = _open(request.getfixturevalue(f"{name}_path"), ubatch=16)
    found = _f32(engine, [golden["ids"] for golden in texts], Scoring(score_from=0))
    assert len(found) >= 4 and found == pytest.approx([math.exp(golden["mean_nll"]) for golden in texts], rel=1e-3)


@pytest.mark.models
@pytest.mark.parametrize(("name", "ppl"), [("smollm2", 10.549276), ("gemma3", 10.350456)])
def test_golden_perplexity_by_the_protocol_of_llama_perplexity(name: str, ppl: float, request: pytest.FixtureRequest):
    """The first of the chunks of 2,048 tokens of a text that is not part of the project: pydoc.txt."""
    folder = os.environ.get("KV_TEST_TEXTS")
    if not folder:
        pytest.skip("KV_TEST_TEXTS does not name a folder with pydoc.txt")
    engine, protocol = _open(request.getfixturevalue(f"{name}_path")), Scoring(2048, 1)
    tokenizer = engine.tokenizer
    ids = tokenizer.encode((Path(folder) / "pydoc.txt").read_text("utf-8"))
    chunks = protocol.cut(ids, tokenizer.bos_id if tokenizer.add_bos else None)
    assert _f32(engine, chunks, protocol) == pytest.approx([ppl], rel=1e-3)


def test_all_types_evict_alike(ppl: Ppl):
    def measured(*flags: str) -> dict[str, Any]:
        code, out, err = ppl("-ct", "f16,int4", "--chunks", "1", "--json", *flags)
        assert code == 0, err
        return json.loads(out)

    whole, evicting = measured(), measured("--evict", "sink", "--window", "16")
    assert (
        evicting["evict"] == {"policy": "sink", "keep": 4, "window": 16, "budget": None}
        and whole["evict"]["policy"] == "none"
    )
    for a, b in zip(whole["types"], evicting["types"], strict=True):
        assert a["ppl"] != b["ppl"] and a["bytes_per_token"] > b["bytes_per_token"]


def test_no_text_is_said_before_a_model_is_opened(ppl: Ppl, tmp_path: Path):
    (tmp_path / "empty").write_text(" \n")
    code, out, err = ppl(files=(str(tmp_path / "empty"),))
    assert (code, out) == (2, "")
    assert err == f"kv: error: there is no text in {tmp_path}/empty\n  give -f FILE, or pipe a text in\n"
