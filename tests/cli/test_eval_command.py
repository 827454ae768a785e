"""`kv eval recall` on a tiny model, and on the real one, which can find a key."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import tiny
import tinyvocab
import torch
from conftest import KvHere
from engines import open_tiny

from kvcli.errors import UsageError
from kvcli.options import CacheOptions
from kvcli.runtime.cache.pool import PagePool
from kvcli.runtime.evaluate import quality, recall

Recall = Callable[..., tuple[int, str, str]]


@pytest.fixture
def ask(kv_here: KvHere) -> Recall:
    def run(*args: str) -> tuple[int, str, str]:
        return kv_here("eval", "recall", "-m", str(tiny.make("llama").path), "--page-size", "16", *args)

    return run


TOKENIZERS = {
    "bytes": tinyvocab.tiny(),
    "digits": tinyvocab.tiny("smollm"),
    "bos": tinyvocab.tiny(add_bos_token=True),
}


@pytest.mark.parametrize("name", TOKENIZERS)
@pytest.mark.parametrize("depth", (0, 25, 50, 99.5, 100))
def test_a_question_fills_the_context_and_hides_the_key_at_its_depth(name: str, depth: float):
    tokenizer = TOKENIZERS[name]
    for ctx in (400, 1000):
        asked = recall.question(tokenizer, ctx, depth, 3)
        assert ctx - 60 < len(asked.context) + len(asked.answer) <= ctx
        text, whole = (tokenizer.decode(ids) for ids in (asked.context, asked.context + asked.answer))
        assert asked.answer and whole.endswith(f"The pass key is {asked.key}")
        assert asked.key not in text[-len(recall.QUESTION) :]
        sentence = recall.needle(asked.key)
        assert text.count(sentence) == 1 and text.count(asked.key) == 2
        body = len(text) - len(recall.OPENING) - len(sentence) - len(recall.QUESTION)
        at = (text.index(sentence) - len(recall.OPENING)) / body
        assert abs(at - depth / 100) < 60 / body
        assert (asked.context[0] == tokenizer.bos_id) == tokenizer.add_bos


def test_questions_are_drawn_from_the_seed():
    one, same, other = (recall.question(TOKENIZERS["bytes"], 500, 50, seed) for seed in (1, 1, 2))
    assert one == same and one.key != other.key and one.context != other.context
    assert one.key != recall.question(TOKENIZERS["bytes"], 500, 25, 1).key
    with pytest.raises(UsageError, match="no room for the question"):
        recall.question(TOKENIZERS["bytes"], 50, 50, 1)


@pytest.mark.slow
@pytest.mark.parametrize("types", [("f16", "f16"), ("int4", "int8")], ids="/".join)
def test_an_answer_is_scored_as_greedy_decoding_would_give_it(types: tuple[str, str]):
    engine = open_tiny("llama", "auto", CacheOptions(page_size=16))
    pool = PagePool(quality.layout_of(engine, types))
    asked = recall.question(engine.tokenizer, 300, 50, 0)
    seq = recall.Sequence(pool)
    last, greedy, nll = engine.forward(seq, asked.context)[-1:], [], []
    for token in asked.answer:
        log_p = engine.logits(last)[0].double().log_softmax(-1)
        nll.append(-float(log_p[token]))
        greedy.append(int(log_p.argmax()))
        last = engine.forward(seq, [token])
    seq.close()
    found = recall.ask(engine, pool, asked)
    assert found.nll == pytest.approx(sum(nll) / len(nll), rel=1e-5)
    assert not found.exact and greedy != asked.answer
    # What the model does say first is an exact answer of one token.
    said = recall.PassKey(50, "", asked.context, greedy[:1])
    assert recall.ask(engine, pool, said).exact
    pool.check([])


@pytest.mark.slow
def test_table_and_json_agree(ask: Recall):
    flags = ("--ctx", "300,400", "--depths", "0,50,100", "--trials", "2", "-ct", "f16,int4", "-s", "4")
    code, out, err = ask(*flags)
    assert code == 0, err
    lines = [line.split() for line in out.splitlines()]
    assert lines[0] == ["type", "ctx", "0", "%", "50", "%", "100", "%", "exact", "NLL"]
    assert [line[:2] for line in lines[1:]] == [["f16", "300"], ["f16", "400"], ["int4", "300"], ["int4", "400"]]
    code, out, _ = ask(*flags, "--json")
    value = json.loads(out)
    results = value["results"]
    assert code == 0 and value["seed"] == 4 and len(results) == 12
    assert all(len(cell["answers"]) == cell["trials"] == 2 and cell["nll"] > 0 for cell in results)
    keys = [[a["key"] for a in cell["answers"]] for cell in results]
    assert keys[:6] == keys[6:] and len({k for pair in keys for k in pair}) == 12  # every type gets the same questions
    first = [cell for cell in results if (cell["type_k"], cell["ctx_size"]) == ("f16", 300)]
    assert lines[1][2:8] == [x for c in first for x in (f"{c['exact']}/2", f"{c['nll']:.3f}")]
    assert float(lines[1][-1]) == pytest.approx(sum(c["nll"] for c in first) / 3, abs=1e-4)
    assert results[0]["nll"] != results[6]["nll"]  # int4 is another cache


def test_tail_and_sinks_reach_the_cache(ask: Recall):
    def nll(*flags: str) -> list[float]:
        code, out, err = ask("--ctx", "300", "--depths", "50", "-ct", "f16,int4", "--json", *flags)
        assert code == 0, err
        return [cell["nll"] for cell in json.loads(out)["results"]]

    (f16, usual), (_, no_tail), (_, all_open) = nll(), nll("--kv-tail", "0"), nll("--kv-sink", "100")
    assert len({f16, usual, no_tail}) == 3 and all_open == pytest.approx(f16, abs=2e-3)


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("--kv-tail", "2"), "--kv-tail must "),
        (("--depths", "0,x"), "--depths must "),
        (("--depths", "101"), "--depths must "),
        (("--ctx", "1k,many"), "--ctx must "),
        (("--ctx", "20"), "no room for the question"),
        (("-ct", "int3"), "'int3' is not a cache type"),
    ],
    ids=" ".join,
)
def test_nonsense_is_one_clear_line(ask: Recall, args: tuple[str, ...], message: str):
    code, out, err = ask(*args)
    assert (code, out) == (2, "") and message in err


def test_the_group_alone_shows_its_help(kv_here: KvHere):
    code, out, err = kv_here("eval")
    assert (code, out) == (2, "") and "recall" in err


@pytest.mark.models
def test_smollm2_finds_a_key(kv_here: KvHere, smollm2_path: Path):
    code, out, _ = kv_here(
        *("eval", "recall", "-m", str(smollm2_path), "--ctx", "256", "--depths", "0,50", "-ct", "f16,int8", "--json")
    )
    results = json.loads(out)["results"]
    assert code == 0 and all(cell["exact"] == 1 and cell["nll"] < 0.5 for cell in results)
    by_type = torch.tensor([cell["nll"] for cell in results]).view(2, 2)
    assert (by_type[0] - by_type[1]).abs().max() < 0.02


def test_what_is_evicted_is_not_there(ask: Recall):
    """The same question with everything, with a window, and with a window and the first tokens."""

    def nll(*flags: str) -> tuple[float, dict[str, object]]:
        code, out, err = ask("--ctx", "300", "--depths", "0", "-ct", "f16", "--json", *flags)
        assert code == 0, err
        value = json.loads(out)
        return value["results"][0]["nll"], value["evict"]

    whole, window = nll(), nll("--evict", "window", "--window", "40")
    sink = nll("--evict", "sink", "--window", "40")
    assert len({whole[0], window[0], sink[0]}) == 3
    assert whole[1] == {"policy": "none", "keep": None, "window": None}
    assert window[1] == {"policy": "window", "keep": 0, "window": 40}
    assert sink[1] == {"policy": "sink", "keep": 4, "window": 40}
    code, _, err = ask("--evict", "sink", "--keep", "-1")
    assert code == 2 and "here is none" in err
