"""The engine on tiny models: results do not depend on how they were come by, and generation ends as it should.

Equal means equal to the bit, on both backends, with caches in 32 and 16 bits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import tiny
import torch
from kernelcases import need_native, same_bits

from kvcli.errors import ContextOverflow, DoesNotFit, KVError, UsageError
from kvcli.options import CacheOptions, LoadOptions, SampleOptions
from kvcli.runtime.engine import Engine, physical_cores
from kvcli.runtime.events import End, Prefill, Token
from kvcli.runtime.sequence import Sequence

GREEDY = SampleOptions(temperature=0.0, ignore_eos=True, max_tokens=8)
DRAWN = SampleOptions(4.0, 0, 1.0, 0.0, seed=8, ignore_eos=True, max_tokens=12)  # varied text, the same each time
PROMPT = torch.randint(3, 370, (140,), generator=torch.manual_seed(5)).tolist()
CHUNKS = (1, 2, 7, 16, 63, 64, 65, 100, len(PROMPT))


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("engine")


def open_tiny(folder: Path, variant: str, backend: str, cache: CacheOptions | None = None) -> Engine:
    if backend == "native":
        need_native()
    return Engine.open(tiny.make(folder, variant).path, LoadOptions(variant, 2, backend), cache or CacheOptions())


@pytest.fixture(
    scope="module",
    params=[(v, b, t) for v in ("llama", "gemma3") for b in ("native", "reference") for t in ("f32", "f16")],
    ids="-".join,
)
def engine(request: pytest.FixtureRequest, tiny_folder: Path) -> Engine:
    variant, backend, type_ = request.param
    found = open_tiny(tiny_folder, variant, backend, CacheOptions(type_k=type_, type_v=type_))
    assert found.backend == backend and found.cache_types == (type_, type_) and not found.notices
    return found


@pytest.fixture(scope="module")
def quick(tiny_folder: Path) -> Engine:
    """One engine for what does not touch numbers: sliding layers, pages of 16."""
    return open_tiny(tiny_folder, "gemma3", "auto", CacheOptions(page_size=16, ubatch=32))


@pytest.fixture
def seq(quick: Engine) -> Iterator[Sequence]:
    sequence = quick.new_sequence()
    yield sequence
    sequence.close()
    quick.pool.check([])


def last_logits(engine: Engine, seq: Sequence, ids: list[int], ubatch: int = 512) -> torch.Tensor:
    """Feed ids in chunks; logits [1, vocab] after the last."""
    engine.ubatch = ubatch
    for start, end in engine.chunks(seq.length, seq.length + len(ids)):
        at = seq.length
        assert start == at
        hidden = engine.forward(seq, ids[: end - start])
        ids = ids[end - start :]
    engine.ubatch = 512
    return engine.logits(hidden[-1:])


def fresh(engine: Engine, ids: list[int], ubatch: int = 512) -> torch.Tensor:
    seq = engine.new_sequence()
    logits = last_logits(engine, seq, ids, ubatch)
    seq.close()
    return logits


def run(
    engine: Engine,
    seq: Sequence,
    prompt: list[int],
    options: SampleOptions = GREEDY,
    **more: Callable[[], bool],
) -> End:
    """The last event, after checks that hold for every generation."""
    events = list(engine.generate(seq, prompt, options, **more))
    end, tokens = events[-1], [e for e in events if isinstance(e, Token)]
    assert isinstance(end, End) and isinstance(events[0], Prefill)
    assert [type(e) for e in events] == sorted((type(e) for e in events), key=[Prefill, Token, End].index)
    assert [t.id for t in tokens] == end.ids
    shown = "".join(t.text for t in tokens) + end.text
    decoded = engine.tokenizer.decode(end.ids, continues=True)
    assert shown == (decoded if end.stop is None else decoded[: decoded.index(end.stop)])
    whole = prompt + end.ids
    assert seq.tokens == whole[: seq.length]
    assert (end.usage.prompt_tokens, end.usage.completion_tokens) == (len(prompt), len(end.ids))
    assert end.timings.prefill_tokens == len(prompt) - end.usage.cache_read_tokens
    assert end.timings.decode_tokens == max(0, len(end.ids) - 1)
    if end.ids:
        assert end.timings.prefill_s > 0 and end.timings.prompt_tps > 0
        # The last token's row is computed with the next one.
        assert seq.length == len(whole) - 1 or end.finish_reason == "interrupted"
    return end


# --- the same numbers, however one comes by them


def test_any_chunk_size_gives_the_same_logits(engine: Engine):
    for prompt, chunks in ((PROMPT[:67], CHUNKS[:2]), (PROMPT, CHUNKS[2:])):
        whole = fresh(engine, prompt)
        assert whole.std() > 0.3
        for chunk in chunks:
            assert same_bits(fresh(engine, prompt, chunk), whole), chunk


def test_decode_is_prefill(engine: Engine):
    seq = engine.new_sequence()
    hidden = engine.forward(seq, PROMPT[:120])
    rows = [hidden] + [engine.forward(seq, [token]) for token in PROMPT[120:]]
    other = engine.new_sequence()
    assert same_bits(torch.cat(rows), engine.forward(other, PROMPT))
    seq.close()
    other.close()


def test_a_turn_on_the_cache_is_a_fresh_run(engine: Engine):
    first, second = engine.new_sequence(), engine.new_sequence()
    answer = run(engine, first, PROMPT[:100])
    context = PROMPT[:100] + answer.ids + PROMPT[100:]
    reused = run(engine, first, context)
    straight = run(engine, second, context)
    assert (reused.usage.cache_read_tokens, straight.usage.cache_read_tokens) == (
        100 + len(answer.ids) - 1,
        0,
    )
    assert reused.ids == straight.ids and len(answer.ids) == len(reused.ids) == 8
    assert first.tokens == second.tokens
    assert same_bits(last_logits(engine, first, [9]), last_logits(engine, second, [9]))
    first.close()
    second.close()


def test_rewind_and_replay_is_never_done(engine: Engine):
    seq = engine.new_sequence()
    engine.forward(seq, PROMPT[:100])
    engine.forward(seq, [11] * 35)
    kept = engine.rewind(seq, 100)
    assert kept == 100 and seq.tokens == PROMPT[:100]
    assert same_bits(last_logits(engine, seq, PROMPT[100:]), fresh(engine, PROMPT))
    seq.close()


def test_a_fork_is_a_copy_and_both_go_on_alone(engine: Engine):
    seq = engine.new_sequence()
    engine.forward(seq, PROMPT[:100])
    twin = seq.fork()
    other = PROMPT[10:50]
    a, b = last_logits(engine, seq, PROMPT[100:]), last_logits(engine, twin, other)
    assert same_bits(a, fresh(engine, PROMPT)) and same_bits(b, fresh(engine, PROMPT[:100] + other))
    assert not same_bits(a, b)
    seq.close()
    assert same_bits(last_logits(engine, twin, [7]), fresh(engine, PROMPT[:100] + other + [7]))
    twin.close()
    engine.pool.check([])


def test_greedy_is_exact_argmax(engine: Engine):
    seq, known = engine.new_sequence(), PROMPT[:40]
    end = run(engine, seq, known, SampleOptions(temperature=0.0, max_tokens=4))
    for token in end.ids:
        logits = fresh(engine, known)[0]
        assert token == int((logits == logits.max()).nonzero()[0])
        known = [*known, token]
    assert len(end.ids) == 4 or end.finish_reason == "stop"
    seq.close()


def test_page_sizes_and_backends_agree_closely(tiny_folder: Path):
    found = [
        fresh(
            open_tiny(tiny_folder, "gemma3", backend, CacheOptions(type_k="f32", type_v="f32", page_size=size)),
            PROMPT,
        )
        for backend in ("native", "reference")
        for size in (16, 64)
    ]
    assert all((x - found[0]).abs().max() < 1e-4 for x in found)


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


def test_ignore_eos_never_generates_an_end_token(quick: Engine, seq: Sequence):
    assert len(quick.tokenizer.eog_ids) == 2
    bias = dict.fromkeys(quick.tokenizer.eog_ids, 1e4)
    for options in (
        SampleOptions(temperature=0.0, logit_bias=bias, ignore_eos=True, max_tokens=30),
        SampleOptions(5.0, 0, 1.0, 0.0, seed=3, logit_bias=bias, ignore_eos=True, max_tokens=30),
    ):
        end = run(quick, seq, PROMPT[:50], options)
        assert len(end.ids) == 30 and not quick.tokenizer.eog_ids & set(end.ids)


def test_the_context_ends(tiny_folder: Path):
    engine = open_tiny(tiny_folder, "llama", "auto", CacheOptions(ctx_size=40))
    assert engine.ctx_size == 40
    seq = engine.new_sequence()
    end = run(engine, seq, PROMPT[:35], SampleOptions(temperature=0.0, ignore_eos=True))
    assert (end.finish_reason, len(end.ids), seq.length) == ("context", 6, 40)  # the last one needs no row
    end = run(engine, seq, PROMPT[:40], SampleOptions(temperature=0.0, ignore_eos=True))
    assert (end.finish_reason, len(end.ids)) == ("context", 1)


def test_a_prompt_that_is_too_long_is_refused_before_anything_happens(tiny_folder: Path):
    engine = open_tiny(tiny_folder, "llama", "auto", CacheOptions(ctx_size=40))
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
    text = quick.tokenizer.decode(run(quick, seq, PROMPT[:60], DRAWN).ids, continues=True)
    end = run(quick, seq, PROMPT[:60], replace(DRAWN, stop=(text[-2:] + "~~",)))
    assert (end.finish_reason, end.stop) == ("length", None) and end.text.endswith(text[-2:])


def cancel_after(calls: int) -> Callable[[], bool]:
    left = iter([False] * calls)
    return lambda: next(left, True)


def test_cancelled_while_prefilling(quick: Engine, seq: Sequence):
    expected = run(quick, seq, PROMPT, DRAWN).ids
    quick.rewind(seq, 0)
    end = run(quick, seq, PROMPT, DRAWN, cancelled=cancel_after(3))
    assert (end.finish_reason, end.ids, end.text) == ("interrupted", [], "")
    assert seq.tokens == PROMPT[:96]  # three chunks of 32
    again = run(quick, seq, PROMPT, DRAWN)
    assert again.usage.cache_read_tokens == 96 and again.ids == expected


def test_cancelled_while_answering(quick: Engine, seq: Sequence):
    whole = run(quick, seq, PROMPT[:60], DRAWN)
    counts = set()
    for calls in range(2, 16):
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


def test_a_full_pool_leaves_a_usable_sequence(tiny_folder: Path):
    engine = open_tiny(tiny_folder, "gemma3", "auto", CacheOptions(page_size=16, ubatch=16))
    seq = engine.new_sequence()
    expected = run(engine, seq, PROMPT[:40]).ids
    seq.close()
    engine.pool.budget_bytes = engine.pool.committed_bytes
    hogs = [(g, engine.pool.take(g)) for g in (0, 1) for _ in range(engine.pool._arenas[g].per_chunk - 5)]
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


def test_usage_counts_what_was_reused(tiny_folder: Path):
    engine = open_tiny(tiny_folder, "llama", "auto")
    seq = engine.new_sequence()
    same, changed = PROMPT[:50], [*PROMPT[:45], 3, *PROMPT[45:50]]
    longer = [*changed, *PROMPT[50:60]]
    for prompt, reused in ((same, 0), (same, 49), (changed, 45), (longer, 51), (PROMPT[100:130], 0)):
        assert run(engine, seq, prompt).usage.cache_read_tokens == reused
        engine.rewind(seq, len(prompt))


def test_prefill_reports_its_progress(quick: Engine, seq: Sequence):
    run(quick, seq, PROMPT[:40], replace(GREEDY, max_tokens=1))
    events = [e for e in quick.generate(seq, PROMPT, GREEDY) if isinstance(e, Prefill)]
    assert {(e.total, e.reused) for e in events} == {(100, 40)}
    assert [e.done for e in events] == [0, 24, 56, 88, 100]  # up to page edges, 32 at a time


def test_going_back_beyond_the_window_prefills_again(quick: Engine, seq: Sequence):
    run(quick, seq, PROMPT)
    assert quick.rewind(seq, 142) == 142  # its window is in the pages that are left
    context = PROMPT[:120] + PROMPT[:30]
    end = run(quick, seq, context)
    assert end.usage.cache_read_tokens == 0  # rows 101..119 of the sliding layers are gone
    other = quick.new_sequence()
    assert run(quick, other, context).ids == end.ids
    assert seq.tokens == other.tokens
    assert same_bits(last_logits(quick, seq, [9]), last_logits(quick, other, [9]))
    other.close()


def test_sliding_layers_hold_their_window_and_a_chunk(tiny_folder: Path):
    engine = open_tiny(tiny_folder, "gemma3", "auto", CacheOptions(page_size=16, ubatch=32))
    seq = engine.new_sequence()
    run(engine, seq, PROMPT, replace(GREEDY, max_tokens=341))
    assert seq.length == 480
    sliding, full = engine.layout.pages(480, 32)
    assert (sliding, full) == (4, 30)  # ceil(19 / 16) + 32 / 16
    assert (engine.pool.peak(0), engine.pool.peak(1)) == (sliding, full)


# --- opening


def test_open_reports_progress_and_what_it_chose(tiny_folder: Path):
    stages: list[tuple[str, int, int]] = []
    path = tiny.make(tiny_folder, "llama").path
    engine = Engine.open(path, LoadOptions("llama"), CacheOptions(), lambda *stage: stages.append(stage))
    size = path.stat().st_size
    assert stages[0] == ("load", 0, size) and stages[-1] == ("load", size, size)
    assert engine.load_s > 0 and engine.ctx_size == tiny.CONTEXT and engine.cache_types == ("f16", "f16")
    assert physical_cores() >= 1


def test_a_context_beyond_training_is_noticed(tiny_folder: Path):
    engine = open_tiny(tiny_folder, "llama", "auto", CacheOptions(ctx_size=600))
    assert engine.ctx_size == 600 and any("600" in n and "512" in n for n in engine.notices)


@pytest.mark.parametrize(
    ("load", "cache"),
    [
        (LoadOptions("m", backend="cuda"), CacheOptions()),
        (LoadOptions("m"), CacheOptions(ctx_size=-1)),
        (LoadOptions("m"), CacheOptions(ubatch=0)),
        (LoadOptions("m"), CacheOptions(page_size=60)),
        (LoadOptions("m"), CacheOptions(type_k="f64")),
        (LoadOptions("m"), CacheOptions(type_v="int2")),
    ],
)
def test_options_that_make_no_sense_are_refused(load: LoadOptions, cache: CacheOptions, tiny_folder: Path):
    with pytest.raises(UsageError):
        Engine.open(tiny.make(tiny_folder, "llama").path, load, cache)
