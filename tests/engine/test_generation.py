"""Generation on tiny models: how it ends, what it shows, what it reuses, and what is left after an interruption."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from types import SimpleNamespace

import pytest
import tiny
import torch
from engines import DRAWN, GREEDY, PROMPT, last_logits, open_tiny, run
from kernelcases import same_bits

from kvcli.errors import ContextOverflow, DoesNotFit, KVError, ModelError, UsageError
from kvcli.options import CacheOptions, SampleOptions
from kvcli.runtime.cache.sequence import Sequence
from kvcli.runtime.engine import repeats
from kvcli.runtime.engine.engine import Engine
from kvcli.runtime.engine.events import Prefill
from kvcli.runtime.formats.gguf import GGUFFile
from kvcli.runtime.model.weights import Weights
from kvcli.runtime.text.tokenizer import StreamDecoder, Tokenizer


@pytest.fixture(scope="module")
def quick() -> Engine:
    """One engine for what does not touch numbers: sliding layers, pages of 16."""
    return open_tiny("gemma3", "auto", CacheOptions(page_size=16, ubatch=32))


@pytest.fixture
def seq(quick: Engine) -> Iterator[Sequence]:
    sequence = quick.new_sequence()
    yield sequence
    sequence.close()
    quick.pool.check([])


# --- how generation ends


def test_length(quick: Engine, seq: Sequence):
    for n in (0, 1, 5):
        end = run(quick, seq, PROMPT[:50], SampleOptions(max_tokens=n, ignore_eos=True, seed=1))
        assert (end.finish_reason, len(end.ids), end.stop) == ("length", n, None)


def test_an_end_token_stops_and_is_not_shown(quick: Engine, seq: Sequence):
    for eog in sorted(quick.tokenizer.eog_ids):
        options = SampleOptions(temperature=0.0, logit_bias={eog: 1e4})
        end = run(quick, seq, PROMPT[:50], options)
        assert (end.finish_reason, end.ids, end.text, seq.length) == ("stop", [], "", 50)


def test_an_answer_does_not_end_inside_a_character(quick: Engine, seq: Sequence):
    lead = next(i for i in range(quick.tokenizer.vocab_size) if quick.tokenizer.token_bytes(i) == b"\xf0")
    options = SampleOptions(temperature=0.0, logit_bias={lead: 1e4}, max_tokens=2)
    events = list(quick.generate(seq, PROMPT[:50], options))
    assert [event.text for event in events[-3:]] == ["", "\ufffd", ""]  # the second shows that the first was none
    assert events[-1].ids == [lead, lead]


def test_ignore_eos_never_generates_an_end_token(quick: Engine, seq: Sequence):
    assert len(quick.tokenizer.eog_ids) == 2
    bias = dict.fromkeys(quick.tokenizer.eog_ids, 1e4)
    for options in (
        SampleOptions(temperature=0.0, logit_bias=bias, ignore_eos=True, max_tokens=30),
        SampleOptions(5.0, 0, 1.0, 0.0, seed=3, logit_bias=bias, ignore_eos=True, max_tokens=30),
    ):
        end = run(quick, seq, PROMPT[:50], options)
        assert len(end.ids) == 30 and not quick.tokenizer.eog_ids & set(end.ids)


def test_an_answer_that_repeats_itself(quick: Engine, seq: Sequence, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(repeats, "LOOP_TOKENS", 32)
    options = SampleOptions(temperature=0.0, logit_bias={7: 1e4}, max_tokens=60)
    end = run(quick, seq, PROMPT[:50], options)
    assert (end.finish_reason, end.ids, end.loop) == ("repetition", [7] * 32, repeats.Loop(32, 1))
    assert end.loop.times == 32
    again = run(quick, seq, PROMPT[:50] + [7] * 40, options)
    assert (again.finish_reason, again.ids) == ("repetition", [7] * 32)  # the prompt may repeat itself
    for off in ({"loop_stop": False}, {"ignore_eos": True}):
        end = run(quick, seq, PROMPT[:50], replace(options, **off))
        assert (end.finish_reason, len(end.ids), end.loop) == ("length", 60, None)
    for first in ({"stop": (quick.tokenizer.decode([7, 7]),)}, {"max_tokens": 31}):
        assert run(quick, seq, PROMPT[:50], replace(options, **first)).finish_reason != "repetition"


def test_dry_reads_the_breakers_of_the_tokenizer(quick: Engine, seq: Sequence):
    """Greedy text of a random model soon repeats itself; with DRY it does not, but for what a breaker allows."""
    options = SampleOptions(temperature=0.0, max_tokens=40, ignore_eos=True, logit_bias={7: 1e4})
    dry = replace(options, dry_multiplier=1e9, dry_allowed_length=3)
    assert set(run(quick, seq, PROMPT[:50], options).ids) == {7}
    ids = run(quick, seq, PROMPT[:50], dry).ids
    assert ids[:5] == [7, 7, 7, 7, ids[4]] != [7] * 5
    text = quick.tokenizer.decode([7])
    assert set(run(quick, seq, PROMPT[:50], replace(dry, dry_sequence_breakers=(text,))).ids) == {7}


@pytest.mark.parametrize("variant", ["llama-padded", "llama-untied-padded"])
def test_rows_that_belong_to_no_token_are_never_drawn(variant: str):
    """An embedding of more rows than there are tokens, as files have whose sizes are rounded up."""
    engine, n = open_tiny(variant, "auto"), tiny.make(variant).n_tokens
    weights = Weights(GGUFFile.open(tiny.make(variant).path))
    rows = weights.file.tensors["token_embd.weight"].shape[0]
    assert engine.tokenizer.vocab_size == engine.config.vocab_size == n < rows
    name = "output.weight" if "output.weight" in weights else "token_embd.weight"
    seq = engine.new_sequence()
    hidden = engine.forward(seq, PROMPT[:50])[-1:]
    whole = hidden @ weights.matrix(name, rows, engine.config.d_model).decode().T
    assert int(whole.argmax()) >= n  # it would be drawn
    assert (engine.logits(hidden) - whole[:, :n]).abs().max() < 1e-4
    for options in (GREEDY, replace(DRAWN, max_tokens=40), SampleOptions(1.0, 40, 0.9, seed=1, max_tokens=8)):
        assert max(run(engine, seq, PROMPT[:50], options).ids) < n
    with pytest.raises(UsageError, match=f"`logit_bias` names token {n}, the vocabulary is 0 to {n - 1}"):
        run(engine, seq, PROMPT[:50], SampleOptions(logit_bias={n: 1.0}))
    with pytest.raises(UsageError, match="outside the vocabulary"):
        run(engine, seq, [n])


def test_a_vocabulary_longer_than_the_embedding_is_refused(monkeypatch: pytest.MonkeyPatch):
    n = tiny.make("llama").n_tokens
    found = SimpleNamespace(vocab_size=n + 1, bos_id=None, eos_id=None, controls=lambda text: [])
    monkeypatch.setattr(Tokenizer, "from_gguf", lambda *_: found)
    with pytest.raises(ModelError, match=f"the vocabulary has {n + 1} tokens, the embedding {n} rows"):
        open_tiny("llama", "auto")


def test_the_context_ends():
    engine = open_tiny("llama", "auto", CacheOptions(ctx_size=40))
    assert engine.ctx_size == 40
    seq = engine.new_sequence()
    end = run(engine, seq, PROMPT[:35], SampleOptions(temperature=0.0, ignore_eos=True))
    assert (end.finish_reason, len(end.ids), seq.length) == ("context", 6, 40)  # the last one needs no row
    end = run(engine, seq, PROMPT[:40], SampleOptions(temperature=0.0, ignore_eos=True))
    assert (end.finish_reason, len(end.ids)) == ("context", 1)


def test_a_prompt_that_is_too_long_is_refused_before_anything_happens():
    engine = open_tiny("llama", "auto", CacheOptions(ctx_size=40))
    seq = engine.new_sequence()
    run(engine, seq, PROMPT[:20])
    before = list(seq.tokens), list(seq.holds())
    with pytest.raises(ContextOverflow, match="41 tokens, 1 more than the context of 40"):
        engine.generate(seq, PROMPT[90:131], GREEDY)
    for wrong in ([], [engine.config.vocab_size], [-1, 5]):
        with pytest.raises(UsageError):
            engine.generate(seq, wrong, GREEDY)
    with pytest.raises(KVError):
        engine.generate(seq, PROMPT[100:120], SampleOptions(temperature=-1.0))
    assert (seq.tokens, list(seq.holds())) == before


def test_stop_strings_split_over_tokens_do_not_leak(quick: Engine, seq: Sequence):
    options = replace(DRAWN, max_tokens=40)
    plain = run(quick, seq, PROMPT[:60], options)
    text = quick.tokenizer.decode(plain.ids, continues=True)
    assert len(set(text)) > 10
    middle = len(text) // 2
    for length in (1, 2, 5, 9):
        stop = text[middle : middle + length]
        end = run(quick, seq, PROMPT[:60], replace(options, stop=("never", stop)))
        assert (end.finish_reason, end.stop) == ("stop", stop)
        assert end.ids == plain.ids[: len(end.ids)] and len(end.ids) < 40


def test_held_text_comes_out_at_the_end(quick: Engine, seq: Sequence):
    """A stop string that began and did not go on."""
    decoder = StreamDecoder(quick.tokenizer, continues=True)
    text = "".join(map(decoder.push, run(quick, seq, PROMPT[:60], DRAWN).ids))
    end = run(quick, seq, PROMPT[:60], replace(DRAWN, stop=(text[-2:] + "~~",)))
    assert (end.finish_reason, end.stop) == ("length", None) and end.text == text[-2:]


def cancel_after(calls: int) -> Callable[[], bool]:
    left = iter([False] * calls)
    return lambda: next(left, True)


def test_cancelled_while_prefilling(quick: Engine, seq: Sequence):
    expected = run(quick, seq, PROMPT, DRAWN).ids
    seq.rewind_to(0)
    end = run(quick, seq, PROMPT, DRAWN, cancelled=cancel_after(3))
    assert (end.finish_reason, end.ids, end.text) == ("interrupted", [], "")
    assert seq.tokens == PROMPT[:96]  # three chunks of 32
    again = run(quick, seq, PROMPT, DRAWN)
    assert again.usage.cache_read_tokens == 96 and again.ids == expected


def test_cancelled_while_answering(quick: Engine, seq: Sequence):
    whole = run(quick, seq, PROMPT[:60], DRAWN)
    counts = set()
    for calls in (2, *range(2, 12)):  # the first time the prompt takes one call more
        end = run(quick, seq, PROMPT[:60], DRAWN, cancelled=cancel_after(calls))
        assert end.finish_reason == "interrupted" and end.ids == whole.ids[: len(end.ids)]
        counts.add(len(end.ids))
    assert counts >= {0, 1, 2, 3} and max(counts) < 12
    assert run(quick, seq, PROMPT[:60], DRAWN).ids == whole.ids


def test_a_consumer_that_walks_away_leaves_a_usable_sequence(quick: Engine, seq: Sequence):
    expected = run(quick, seq, PROMPT[:60], DRAWN).ids
    for events in range(1, 6):
        running = quick.generate(seq, PROMPT[:70], DRAWN)
        for _ in range(events):
            next(running)
        running.close()
        assert run(quick, seq, PROMPT[:60], DRAWN).ids == expected


def test_a_model_that_is_cut_short_leaves_a_usable_sequence(
    quick: Engine, seq: Sequence, monkeypatch: pytest.MonkeyPatch
):
    """Ctrl-C between the reservation of rows and their commitment, in the prompt's second chunk."""
    expected = run(quick, seq, PROMPT[:60], DRAWN).ids
    seq.rewind_to(0)
    whole, calls = quick.model.hidden, iter([False, True])

    def hidden(step: object) -> torch.Tensor:
        found = whole(step)
        if next(calls, False):
            raise KeyboardInterrupt
        return found

    monkeypatch.setattr(quick.model, "hidden", hidden)
    with pytest.raises(KeyboardInterrupt):
        run(quick, seq, PROMPT[80:], DRAWN)
    assert seq.tokens == PROMPT[80:112]
    assert run(quick, seq, PROMPT[:60], DRAWN).ids == expected


def test_a_full_pool_leaves_a_usable_sequence():
    engine = open_tiny("gemma3", "auto", CacheOptions(page_size=16, ubatch=16))
    seq = engine.new_sequence()
    expected = run(engine, seq, PROMPT[:40]).ids
    seq.close()
    engine.pool.budget_bytes = engine.pool.committed_bytes
    hogs = [(g, engine.pool.take(g)) for g in (0, 1) for _ in range(engine.layout.groups[g].pages_per_chunk - 5)]
    with pytest.raises(DoesNotFit):
        run(engine, seq, PROMPT)
    assert 0 < seq.length < 100 and seq.tokens == PROMPT[: seq.length]
    assert run(engine, seq, PROMPT[:40]).ids == expected
    engine.pool.check([*hogs, *seq.holds()])


# --- drawing, reuse and counts


def test_the_same_seed_draws_the_same_tokens(quick: Engine, seq: Sequence):
    def draw(seed: int) -> list[int]:
        return run(
            quick, seq, PROMPT[:50], SampleOptions(temperature=1.5, seed=seed, max_tokens=20, ignore_eos=True)
        ).ids

    first = draw(11)
    assert draw(11) == first
    assert draw(12) != first


def test_usage_counts_what_was_reused():
    engine = open_tiny("llama", "auto")
    seq = engine.new_sequence()
    same, changed = PROMPT[:50], [*PROMPT[:45], 3, *PROMPT[45:50]]
    longer = [*changed, *PROMPT[50:60]]
    for prompt, reused in ((same, 0), (same, 49), (changed, 45), (longer, 51), (PROMPT[100:130], 0)):
        assert run(engine, seq, prompt).usage.cache_read_tokens == reused
        seq.rewind_to(len(prompt))


def test_prefill_reports_its_progress(quick: Engine, seq: Sequence):
    run(quick, seq, PROMPT[:40], replace(GREEDY, max_tokens=1))
    events = [e for e in quick.generate(seq, PROMPT, GREEDY) if isinstance(e, Prefill)]
    assert {(e.total, e.reused) for e in events} == {(100, 40)}
    assert [e.done for e in events] == [0, 24, 56, 88, 100]  # up to page edges, 32 at a time


def test_going_back_beyond_the_window_prefills_again(quick: Engine, seq: Sequence):
    run(quick, seq, PROMPT)
    assert seq.rewind_to(142) == 142  # its window is in the pages that are left
    context = PROMPT[:120] + PROMPT[:30]
    end = run(quick, seq, context)
    assert end.usage.cache_read_tokens == 0  # rows 101..119 of the sliding layers are gone
    other = quick.new_sequence()
    assert run(quick, other, context).ids == end.ids
    assert seq.tokens == other.tokens
    assert same_bits(last_logits(quick, seq, [9]), last_logits(quick, other, [9]))
    other.close()


def test_sliding_layers_hold_their_window_and_a_chunk():
    engine = open_tiny("gemma3", "auto", CacheOptions(page_size=16, ubatch=32))
    seq = engine.new_sequence()
    run(engine, seq, PROMPT, replace(GREEDY, max_tokens=341))
    assert seq.length == 480
    sliding, full = engine.layout.pages(480, 32)
    assert (sliding, full) == (4, 30)  # ceil(19 / 16) + 32 / 16
    assert (engine.pool.peak(0), engine.pool.peak(1)) == (sliding, full)
