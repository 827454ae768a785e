"""`kv eval` on a tiny model, and on the real one, which can find a key."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tiny
import tinyvocab
import torch
from conftest import KvHere
from engines import open_tiny
from jsonchecks import check

from kvcli.cli.commands.eval import plot, throughput
from kvcli.cli.flags import comparedsettings
from kvcli.cli.wording import length_is
from kvcli.errors import DoesNotFit, UsageError
from kvcli.options import CacheOptions, EvictOptions, LoadOptions
from kvcli.runtime.engine.engine import Engine
from kvcli.runtime.evaluate import givenanswers, tasks

Eval = Callable[..., tuple[int, str, str]]
TEXT = "Pack my box with five dozen liquor jugs. The quick brown fox jumps over the lazy dog. " * 12


@pytest.fixture
def ask(kv_here: KvHere) -> Eval:
    def run(*args: str) -> tuple[int, str, str]:
        return kv_here("eval", *args, "-m", str(tiny.make("llama").path), "--page-size", "16")

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
    for tokens in (400, 1000):
        asked = tasks.example(tokenizer, tasks.RECALL, tokens, 3, depth)
        assert tokens - 60 < len(asked.context) + len(asked.answer) <= tokens
        text, whole = (tokenizer.decode(ids) for ids in (asked.context, asked.context + asked.answer))
        assert asked.answer and whole.endswith(f"The pass key is {asked.key}")
        assert asked.key not in text[-len(tasks.QUESTION) :]
        sentence = tasks.needle(asked.key)
        assert text.count(sentence) == 1 and text.count(asked.key) == 2
        body = len(text) - len(tasks.OPENING) - len(sentence) - len(tasks.QUESTION)
        at = (text.index(sentence) - len(tasks.OPENING)) / body
        assert abs(at - depth / 100) < 60 / body
        assert (asked.context[0] == tokenizer.bos_id) == tokenizer.add_bos


def _text(task: str, tokens: int, seed: int) -> tuple[str, str]:
    """A question up to its answer, and the answer."""
    tokenizer = TOKENIZERS["bytes"]
    asked = tasks.example(tokenizer, task, tokens, seed)
    assert tokens - 150 < len(asked.context) + len(asked.answer) <= tokens
    whole = tokenizer.decode(asked.context + asked.answer)
    assert whole.endswith(f" {asked.key}")
    return whole.removesuffix(asked.key), asked.key


@pytest.mark.parametrize("seed", range(3))
def test_every_answer_follows_from_its_context_alone(seed: int):
    text, key = _text("needles", 1500, seed)
    place = text.split("The code of the ")[-1].split()[0]
    assert text.count("The code of the") == tasks.KEYS + 1 and f"The code of the {place} is {key}: {key}." in text

    text, key = _text("variables", 1500, seed)
    value = text.split("have the value ")[1].split(",")[0]
    names = key.split(", ")
    assert len(names) == tasks.HOPS + 1 and f"VAR {names[0]} = {value}." in text
    assert all(f"VAR {b} = VAR {a}." in text for a, b in itertools.pairwise(names))
    places = [text.index(f"VAR {name} =") for name in names]
    assert places == sorted(places) and text.count("VAR ") == 4 * tasks.HOPS + 2

    text, key = _text("words", 1500, seed)
    words = text.split("than all others. ")[1].split("\n")[0].split()
    counts = {word: words.count(word) for word in words}
    assert max(counts, key=lambda word: counts[word]) == key
    assert counts.pop(key) >= len(words) // 8 and max(counts.values()) <= 3

    text, key = _text("facts", 1500, seed)
    name = text.split("Where does ")[1].split(" live?")[0]
    assert text.count(f"{name} lives in {key}, ") == 1 and text.count(f"{name} lives in ") == 2


def test_no_two_people_have_the_same_name():
    names = [tasks._name(number) for number in range(10_000)]
    assert len(set(names)) == len(names)


@pytest.mark.parametrize("task", ("needles", "variables", "words", "facts"))
def test_questions_are_drawn_from_the_seed(task: str):
    one, same, other = (tasks.example(TOKENIZERS["bytes"], task, 800, seed) for seed in (1, 1, 2))
    assert one == same and one.context != other.context
    with pytest.raises(UsageError, match="no room for the question"):
        tasks.example(TOKENIZERS["bytes"], task, 40, 1)


def test_passages_of_a_text():
    tokenizer = TOKENIZERS["bos"]
    first, second = tasks.passages(tokenizer, TEXT, 100, 2)
    ids = tokenizer.encode(TEXT)
    assert first.context + first.answer == ids[:100] and len(first.answer) == 12
    assert second.context + second.answer == [tokenizer.bos_id, *ids[101:200]]
    with pytest.raises(UsageError, match="a passage needs"):
        tasks.passages(tokenizer, "short", 100, 2)


SINK = EvictOptions("sink", 40, 4)


@pytest.mark.slow
@pytest.mark.parametrize(
    "cache",
    [CacheOptions(400, page_size=16), CacheOptions(400, "int4", "int8", 16, evict=SINK)],
    ids=("f16", "int4/int8, sink"),
)
def test_an_answer_is_scored_as_greedy_decoding_would_give_it(cache: CacheOptions):
    full = open_tiny("llama", "auto", CacheOptions(400, page_size=16))
    engine = full.beside(cache)
    asked = tasks.example(engine.tokenizer, tasks.RECALL, 300, 0, 50.0)
    steps: list[int] = []
    found = givenanswers.predictions(engine, asked, steps.append)
    assert sum(steps) == len(asked.context) + len(asked.answer) - 1
    seq, greedy, rows = engine.new_sequence(), [], []
    for start, end in engine.chunks(0, len(asked.context)):
        last = engine.forward(seq, asked.context[start:end])[-1:]
    for token in asked.answer:
        rows.append(engine.logits(last)[0].double().log_softmax(-1))
        greedy.append(int(rows[-1].argmax()))
        last = engine.forward(seq, [token])
    seq.close()
    torch.testing.assert_close(found.double(), torch.stack(rows), rtol=1e-5, atol=1e-5)
    base = givenanswers.predictions(full, asked)
    scored = givenanswers.score(found, base, asked.answer)
    want = torch.stack(rows)[range(len(asked.answer)), asked.answer]
    assert scored.nll == pytest.approx(-float(want.mean()), rel=1e-5)
    kld = (base.double().exp() * (base.double() - torch.stack(rows))).sum(-1).mean()
    assert scored.kld == pytest.approx(float(kld), rel=1e-4, abs=1e-7)
    assert (scored.kld == 0) == (cache.type_k == "auto")
    # What the model does say is an exact answer.
    assert not scored.exact and greedy != asked.answer
    assert not givenanswers.score(found, base, greedy[:1] + asked.answer[1:]).exact
    assert givenanswers.score(found[:1], base[:1], greedy[:1]).exact
    engine.pool.check([])


@pytest.mark.slow
def test_table_and_json_agree(ask: Eval):
    flags = ("recall", "--ctx", "300,400", "--depths", "0,50,100", "--trials", "2", "-ct", "f16,int4", "-s", "4")
    code, out, err = ask(*flags)
    assert code == 0, err
    lines = [line.split() for line in out.splitlines()]
    heads = [word for depth in (0, 50, 100) for word in ("recall", str(depth), "%")]
    assert lines[0] == ["setting", "tokens", *heads, "exact", "NLL", "KLD"]
    assert [line[:2] for line in lines[1:]] == [["f16", "300"], ["f16", "400"], ["int4", "300"], ["int4", "400"]]
    code, out, _ = ask(*flags, "--json")
    value = json.loads(out)
    results = value["results"]
    assert code == 0 and value["seed"] == 4 and len(results) == 12
    assert [(each["name"], each["type_k"]) for each in value["compared"]] == [("f16", "f16"), ("int4", "int4")]
    assert all(len(cell["answers"]) == cell["trials"] == 2 and cell["nll"] > 0 for cell in results)
    keys = [[a["key"] for a in cell["answers"]] for cell in results]
    assert keys[:6] == keys[6:] and len({k for pair in keys for k in pair}) == 12  # all get the same questions
    first = [cell for cell in results if (cell["name"], cell["ctx_size"]) == ("f16", 300)]
    assert lines[1][2:8] == [x for c in first for x in (f"{c['exact_trials']}/2", f"{c['nll']:.3f}")]
    assert float(lines[1][-2]) == pytest.approx(sum(c["nll"] for c in first) / 3, abs=1e-4)
    assert results[0]["nll"] != results[6]["nll"] and results[0]["kld"] == 0 < results[6]["kld"]


def _asked(ask: Eval, *flags: str) -> dict[str, Any]:
    code, out, err = ask(*flags, "--trials", "1", "--json")
    assert code == 0, err
    return json.loads(out)


def test_tail_and_sinks_reach_the_cache(ask: Eval):
    def nll(*flags: str) -> list[float]:
        value = _asked(ask, "recall", "--ctx", "300", "--depths", "50", "-ct", "f16,int4", *flags)
        return [cell["nll"] for cell in value["results"]]

    (f16, usual), (_, no_tail), (_, all_open) = nll(), nll("--kv-tail", "0"), nll("--kv-sink", "100")
    assert len({f16, usual, no_tail}) == 3 and all_open == pytest.approx(f16, abs=2e-3)


@pytest.mark.slow
def test_settings_are_options_of_kv_run(ask: Eval):
    """What is said for all types and what a setting says for itself come to the same."""
    flags = ("needles", "--tokens", "300")
    window = ("--evict", "window", "--window", "40")
    by_flags = _asked(ask, *flags, "-ct", "int4", *window)
    by_setting = _asked(ask, *flags, "--with", f"-ct int4 --page-size 16 {' '.join(window)}", "--with", "-ct int8/int4")
    assert [each["args"] for each in by_flags["compared"]] == [["-ct", "f16"], ["-ct", "int4", *window]]
    assert [each["evict"]["window"] for each in by_setting["compared"]] == [None, 40, None]
    assert [(e["type_k"], e["type_v"]) for e in by_setting["compared"]][2] == ("int8", "int4")
    assert [cell["nll"] for cell in by_flags["results"]] == [cell["nll"] for cell in by_setting["results"]][:2]


def test_a_text_is_gone_on_with(ask: Eval, tmp_path: Path):
    (tmp_path / "a.txt").write_text(TEXT)
    setting = "--page-size 16 --evict sink --window 64 -c 128"
    flags = ("-f", str(tmp_path / "a.txt"), "--tokens", "200", "--with", setting)
    code, out, err = ask("text", *flags, "--trials", "2")
    assert code == 0, err
    assert out.split()[:6] == ["setting", "tokens", "text", "PPL", "text", "KLD"]
    full, sink = _asked(ask, "text", *flags)["results"]
    assert full["ppl"] == pytest.approx(torch.tensor(full["nll"]).exp().item(), rel=1e-5) and full["kld"] == 0
    assert sink["kld"] > 0 and sink["name"] == setting


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("recall", "--kv-tail", "2"), "--kv-tail must "),
        (("recall", "--depths", "0,x"), "--depths must "),
        (("recall", "--depths", "101"), "--depths must "),
        (("recall", "--ctx", "1k,many"), "--tokens must "),
        (("recall", "--ctx", "20"), "no room for the question"),
        (("recall", "-ct", "int3"), "'int3' is not a cache type"),
        (("sums",), "there is no task 'sums'"),
        (("text",), "the task text needs a text"),
        (("needles", "-f", __file__), "-f is for the task text, not for needles"),
        (("--with", ""), "--with is empty"),
        (("--with", "-ct int3"), "'int3' is not a cache type"),
        (("--with", "-n 5"), "--with '-n 5': no such option: -n"),
        (("--with", "--window x --evict sink"), "--window must be a number of tokens"),
        (("--with", "--page-size many"), "--page-size must be a whole number"),
        (("--with", "int8"), "--with 'int8': unexpected argument: int8"),
        (("--with", "-ct 'int8"), "cannot be read"),
        (("--with", "--evict sink --keep -1"), "here is none"),
        (("--with", "--attend some"), "--attend must be all or pages:K"),
        (("--with", "--attend pages:4 --evict h2o --budget 50%"), "both choose rows by their scores"),
        (("recall", "--evict", "sink", "--keep", "-1"), "here is none"),
        (("--plot", "a.pdf"), "--plot must end in .svg or .png"),
        (("throughput", "words"), "throughput cannot be measured with other tasks"),
        (("throughput", "--tokens", "40"), "--tokens must be 64 or more for throughput, not 40"),
        (("throughput", "--ask-later"), "--ask-later cannot be used with throughput"),
        (("throughput", "--with", "-c 512"), "contexts of throughput are as long as --tokens says"),
        (("words", "--parallel", "1,2"), "--parallel is for throughput"),
        (("throughput", "--parallel", "0"), "--parallel must be 1 to 256, not '0'"),
        (("--plot", "/no/such/a.svg"), "there is no folder"),
        (("--plot", "/proc/version/a.svg"), "there is no folder"),
        (("--plot", "/proc/self/a.svg"), "it cannot be written"),
    ],
    ids=" ".join,
)
def test_nonsense_is_one_clear_line(ask: Eval, args: tuple[str, ...], message: str):
    code, out, err = ask(*args)
    assert (code, out) == (2, "") and message in err
    assert len(err.splitlines()) <= 3


def test_a_context_that_is_too_short_is_named(ask: Eval):
    code, out, err = ask("needles", "--tokens", "300", "--with", "-c 128")
    assert (code, out) == (5, "") and "128" in err


def test_errors_name_the_length_as_it_is_given():
    with pytest.raises(UsageError) as found, length_is("--tokens"):
        raise UsageError("`ctx=64` is short", "use a larger `ctx`")
    assert (found.value.message, found.value.hint) == ("--tokens 64 is short", "use a larger --tokens")


def test_a_budget_beyond_the_length_is_told_in_words_of_this_command(ask: Eval):
    code, _, err = ask("needles", "--tokens", "300", "--evict", "snapkv", "--budget", "5000")
    assert code == 2 and "larger --tokens" in err and "--ctx-size" not in err


def test_a_setting_that_is_not_possible_is_named(ask: Eval):
    code, out, err = ask("needles", "--tokens", "300", "--with", "--evict sink --window 64 -c 128")
    assert (code, out) == (2, "") and "--evict sink --window 64 -c 128: the context of 128 tokens is too short" in err


def test_what_makes_no_difference_is_said(ask: Eval):
    code, _, err = ask("needles", "--tokens", "300", "--trials", "1", "--with", "--evict sink --window 280 -c 512")
    assert code == 0 and "forgets nothing of 300 tokens: use a smaller --window" in err


@pytest.mark.models
def test_smollm2_finds_a_key(kv_here: KvHere, smollm2_path: Path):
    flags = ("--ctx", "256", "--depths", "0,50", "--trials", "1", "-ct", "f16,int8", "--json")
    code, out, _ = kv_here("eval", "recall", "-m", str(smollm2_path), *flags)
    results = json.loads(out)["results"]
    assert code == 0 and all(cell["exact_trials"] == 1 and cell["nll"] < 0.5 for cell in results)
    by_type = torch.tensor([cell["nll"] for cell in results]).view(2, 2)
    assert (by_type[0] - by_type[1]).abs().max() < 0.02


def test_what_is_evicted_is_not_there(ask: Eval):
    """The same question with everything, with a window, and with a window and the first tokens."""
    flags = ("recall", "--ctx", "300", "--depths", "0", "-ct", "f16")
    window = _asked(ask, *flags, "--evict", "window", "--window", "40")
    sink = _asked(ask, *flags, "--evict", "sink", "--window", "40")
    assert window["results"][0] == sink["results"][0]  # the full cache
    assert len({value["nll"] for each in (window, sink) for value in each["results"]}) == 3
    assert window["compared"][0]["evict"] == {"policy": "none", "keep": None, "window": None, "budget": None}
    assert window["compared"][1]["evict"] == {"policy": "window", "keep": 0, "window": 40, "budget": None}
    assert sink["compared"][1]["evict"] == {"policy": "sink", "keep": 4, "window": 40, "budget": None}


def test_what_is_not_read_makes_a_difference(ask: Eval):
    some, every = (f"-ct f16 --page-size 16 --attend pages:{k}" for k in (1, 100))
    value = _asked(ask, "needles", "--tokens", "300", "--with", some, "--with", every)
    full, few, all_of_them = value["results"]
    assert few["nll"] != full["nll"] == all_of_them["nll"] and few["kld"] > 0 == all_of_them["kld"]
    assert [each.get("attend") for each in value["compared"]] == [
        None, {"attended_pages": 1, "prefill_sparse": None}, {"attended_pages": 100, "prefill_sparse": None}
    ]  # fmt: skip


def test_a_picture(ask: Eval, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    path = tmp_path / "x.svg"
    flags = ("needles", "--tokens", "300", "--trials", "1", "--plot", str(path))
    monkeypatch.setattr(plot.importlib.util, "find_spec", lambda name: None)
    code, out, err = ask(*flags)
    assert (code, out) == (2, "") and "--plot needs matplotlib" in err and "pip install matplotlib" in err
    monkeypatch.undo()
    pytest.importorskip("matplotlib")
    code, _, err = ask(*flags)
    assert code == 0, err
    assert path.read_text("utf-8").startswith("<?xml")


def test_throughput_by_sequences_and_contexts(ask: Eval, tmp_path: Path):
    flags = "throughput", "--tokens", "64,80", "--parallel", "2,1", "--trials", "1", "-ct", "int8"
    code, out, err = ask(*flags, "--json")
    assert code == 0, err
    check("eval throughput", value := json.loads(out))
    cells = [(each["name"], each["ctx_size"], each["sequences"]) for each in value["results"]]
    assert cells == list(itertools.product(("f16", "int8"), (64, 80), (1, 2)))
    assert all(each["tps"] > 0 and len(each["tps_samples"]) == 1 for each in value["results"])
    pytest.importorskip("matplotlib")
    lines = {"f16, 64 tokens": [(1, 5.0), (2, 9.0)]}
    plot.draw_rates(str(path := tmp_path / "rates.svg"), lines, lines)
    assert path.read_text("utf-8").count("f16, 64 tokens") == 2


def test_throughput_of_a_setting_that_does_not_fit(ask: Eval, monkeypatch: pytest.MonkeyPatch):
    """The others are measured."""
    opened = throughput.engines.open_engine

    def open_engine(load: LoadOptions, cache: CacheOptions, *rest: Any) -> Engine:
        if cache.type_k == "f16":
            raise DoesNotFit("it is too large", "")
        return opened(load, cache, *rest)

    monkeypatch.setattr(throughput.engines, "open_engine", open_engine)
    flags = "throughput", "--tokens", "64", "--parallel", "1", "--trials", "1", "--json"
    code, out, err = ask(*flags, "-ct", "int8")
    assert code == 0 and "f16 is left out: it is too large" in err, err
    value = json.loads(out)
    assert [each["name"] for each in value["results"]] == ["int8"]
    assert value["failures"] == ["it is too large"] and [each["name"] for each in value["compared"]] == ["int8"]


def test_settings_that_are_the_same_are_measured_once():
    assert comparedsettings.parse("-ct  int8").cache == comparedsettings.parse("--cache-type=int8").cache
    assert comparedsettings.parse("-c 4k -ct q8_0").types == ("int8", "int8")
