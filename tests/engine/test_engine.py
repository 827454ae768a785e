"""The engine on tiny models: results do not depend on how one comes by them.

Equal means equal to the bit, on both backends, with caches in 32 and 16 bits.
"""

from __future__ import annotations

import pytest
import tiny
import torch
from engines import PROMPT, fresh, last_logits, open_tiny, run
from kernelcases import same_bits

from kvcli.errors import UsageError
from kvcli.options import CacheOptions, LoadOptions, SampleOptions
from kvcli.runtime.engine.engine import Engine
from kvcli.runtime.host.cores import physical_cores

CHUNKS = (1, 2, 7, 16, 63, 64, 65, 100, len(PROMPT))


@pytest.fixture(
    scope="module",
    params=[
        ("llama", "native", "f32"),
        ("llama", "reference", "f16"),
        ("gemma3", "native", "f16"),
        ("gemma3", "reference", "f32"),
        *(
            pytest.param(case, marks=pytest.mark.thorough)
            for case in (
                ("llama", "native", "f16"),
                ("llama", "reference", "f32"),
                ("gemma3", "native", "f32"),
                ("gemma3", "reference", "f16"),
            )
        ),
    ],
    ids="-".join,
)
def engine(request: pytest.FixtureRequest) -> Engine:
    variant, backend, type_ = request.param
    found = open_tiny(variant, backend, CacheOptions(type_k=type_, type_v=type_))
    assert found.loaded.backend == backend and found.loaded.cache_types == (type_, type_) and not found.notices
    return found


@pytest.mark.slow
def test_any_chunk_size_gives_the_same_logits(engine: Engine):
    for prompt, chunks in ((PROMPT[:67], CHUNKS[:2]), (PROMPT, CHUNKS[2:])):
        whole = fresh(engine, prompt)
        assert whole.std() > 0.3
        for chunk in chunks:
            assert same_bits(fresh(engine, prompt, chunk), whole), chunk


@pytest.mark.slow
def test_decode_is_prefill(engine: Engine):
    seq = engine.new_sequence()
    hidden = engine.forward(seq, PROMPT[:120])
    rows = [hidden] + [engine.forward(seq, [token]) for token in PROMPT[120:]]
    other = engine.new_sequence()
    assert same_bits(torch.cat(rows), engine.forward(other, PROMPT))
    seq.close()
    other.close()


@pytest.mark.slow
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
    kept = seq.rewind_to(100)
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


def test_page_sizes_and_backends_agree_closely():
    found = [
        fresh(
            open_tiny("gemma3", backend, CacheOptions(type_k="f32", type_v="f32", page_size=size)),
            PROMPT,
        )
        for backend in ("native", "reference")
        for size in (16, 64)
    ]
    assert all((x - found[0]).abs().max() < 1e-4 for x in found)


# --- opening


def test_open_says_what_it_chose():
    engine = Engine.open(tiny.make("llama").path, LoadOptions("llama"), CacheOptions())
    assert engine.load_s > 0 and engine.ctx_size == tiny.CONTEXT and engine.loaded.cache_types == ("f16", "f16")
    assert physical_cores() >= 1


def test_a_context_beyond_training_is_noticed():
    engine = open_tiny("llama", "auto", CacheOptions(ctx_size=600))
    assert engine.ctx_size == 600 and any("600" in n and "512" in n for n in engine.notices)


@pytest.mark.parametrize(
    ("load", "cache"),
    [
        (LoadOptions("m", backend="cuda"), CacheOptions()),
        (LoadOptions("m"), CacheOptions(ctx_size=-1)),
        (LoadOptions("m"), CacheOptions(ubatch=-1)),
        (LoadOptions("m"), CacheOptions(page_size=60)),
        (LoadOptions("m"), CacheOptions(type_k="f64")),
        (LoadOptions("m"), CacheOptions(type_v="int2")),
    ],
)
def test_options_that_make_no_sense_are_refused(load: LoadOptions, cache: CacheOptions):
    with pytest.raises(UsageError):
        Engine.open(tiny.make("llama").path, load, cache)
