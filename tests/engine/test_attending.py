"""Engines whose queries do not read all: exact while nothing is left out, marked where something is, the same on every
backend, after forks, rewinds and restores.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from engines import DRAWN, GREEDY, PROMPT, open_tiny, run
from kernelcases import need_native, same_bits
from reusecases import Told

from kvcli.errors import UsageError
from kvcli.options import AttendOptions, CacheOptions, EvictOptions, PromptCacheOptions
from kvcli.runtime.cache import attending
from kvcli.runtime.cache.sequence import Sequence
from kvcli.runtime.engine.engine import Engine
from kvcli.runtime.engine.spec.guesses import Guesses

SIZE = 16
FEW, MANY = AttendOptions(2), AttendOptions(40)
SPARSE = AttendOptions(share=0.3, sparse_from=32)


@pytest.fixture(autouse=True)
def _short_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attending, "LEAST_ROWS", 8)


def opened(
    attend: AttendOptions, types: str = "f16", variant: str = "llama", backend: str = "native", **more
) -> Engine:
    options = {"page_size": SIZE, "ubatch": 24, "attend": attend, "force_types": True, **more}
    return open_tiny(variant, backend, CacheOptions(240, types, types, **options))


def prefilled(engine: Engine, n: int = 120) -> Sequence:
    seq = engine.new_sequence()
    for start, end in engine.chunks(0, n):
        engine.forward(seq, PROMPT[start:end])
    return seq


def answered(engine: Engine, seq: Sequence, ids: list[int] = PROMPT[120:]) -> torch.Tensor:
    return torch.cat([engine.forward(seq, [i], answering=True) for i in ids])


@pytest.mark.parametrize("variant", ("llama", "gemma3", "gpt-oss"))
@pytest.mark.parametrize("types", ("f16", "int8", "int4", "fp8"))
def test_all_pages_are_all(types: str, variant: str) -> None:
    found = []
    for attend in (AttendOptions(), MANY):
        engine = opened(attend, types, variant)
        seq = prefilled(engine)
        found.append(answered(engine, seq))
        assert seq.exact is None and seq.shares
    assert same_bits(*found)


@pytest.mark.parametrize("types", ("f16", "int8", "fp8"))
def test_backends_choose_alike(types: str) -> None:
    found = {}
    for backend in ("native", "reference"):
        engine = opened(FEW, types, backend=backend)
        seq = prefilled(engine)
        found[backend] = answered(engine, seq, PROMPT[120:124])
        assert seq.exact == 120 and not seq.shares and "2 pages" in seq.losses()[0]
    full = opened(AttendOptions(), types)
    exact = answered(full, prefilled(full), PROMPT[120:124])
    error = (found["native"] - found["reference"]).norm() / exact.norm()
    assert error < 0.02 < (found["native"] - exact).norm() / exact.norm()


@pytest.mark.parametrize("types", ("f16", "int4"))
def test_a_fork_goes_on_alike_and_a_rewind_forgets_the_mark(types: str) -> None:
    engine = opened(FEW, types)
    seq = prefilled(engine)
    answered(engine, seq, PROMPT[120:125])
    twin = seq.fork()
    assert twin.exact == 120
    assert same_bits(answered(engine, seq, PROMPT[125:]), answered(engine, twin, PROMPT[125:]))
    first = answered(engine, prefilled(engine), PROMPT[112:])
    seq.rewind_to(112)
    assert seq.exact is None and seq.shares
    engine.forward(seq, PROMPT[112:120])
    again = prefilled(engine, 112)
    assert same_bits(answered(engine, again, PROMPT[112:]), answered(engine, prefilled(engine, 112), PROMPT[112:]))
    assert first.shape == (28, engine.config.d_model)


def test_a_page_that_is_written_again_is_summarized_again() -> None:
    engine, other = opened(FEW), PROMPT[::-1]
    seq = prefilled(engine)
    answered(engine, seq, PROMPT[120:122])
    seq.rewind_to(40)
    for start, end in engine.chunks(40, 120):
        engine.forward(seq, other[start:end])
    fresh = engine.new_sequence()
    ids = PROMPT[:40] + other[40:120]
    for start, end in engine.chunks(0, 40):
        engine.forward(fresh, ids[start:end])
    for start, end in engine.chunks(40, 120):
        engine.forward(fresh, ids[start:end])
    assert same_bits(answered(engine, seq), answered(engine, fresh))


def test_a_batch_is_its_single_runs() -> None:
    engine = opened(FEW)
    alone = [engine.generate(engine.new_sequence(), PROMPT[:n], GREEDY) for n in (100, 130)]
    ids = [[e.id for e in events if hasattr(e, "id")] for events in alone]
    requests = [engine.request(engine.new_sequence(), PROMPT[:n], GREEDY) for n in (100, 130)]
    while not all(r.finished for r in requests):
        engine.step(requests)
    assert [r.history[n:] for r, n in zip(requests, (100, 130), strict=True)] == ids
    assert all(r.seq.exact is not None for r in requests)


@pytest.mark.parametrize("types", ("f16", "int4"))
@pytest.mark.parametrize("attend", (SPARSE, AttendOptions(threshold=0.5, sparse_from=32)))
def test_sparse_prefill(attend: AttendOptions, types: str) -> None:
    found = []
    for backend in ("native", "reference"):
        engine = opened(attend, types, backend=backend)
        seq = engine.new_sequence()
        found.append(torch.cat([engine.forward(seq, PROMPT[a:b]) for a, b in engine.chunks(0, 130)]))
        assert seq.exact is not None and 32 <= seq.exact < 80 and "sparsely" in seq.losses()[0]
    exact = prefilled(full := opened(AttendOptions(), types), 0)
    whole = torch.cat([full.forward(exact, PROMPT[a:b]) for a, b in full.chunks(0, 130)])
    assert same_bits(found[0][: seq.exact], whole[: seq.exact])
    # Where scores are close backends may choose otherwise; most rows are the same.
    error = ((found[0] - found[1]).norm(dim=1) / whole.norm(dim=1)).median()
    assert error < 1e-2 and not torch.allclose(found[0], whole, atol=1e-3)


def test_rows_that_left_something_out_are_not_shared(tmp_path: Path) -> None:
    engine, file = opened(FEW), tmp_path / "rows.kv"
    told = Told()
    kept = PromptCacheOptions(file=file, save_answer=True, memory=True, awaited=True)
    caches = engine.prompt_caches(kept, told)
    seq = engine.new_sequence()
    end = run(engine, seq, PROMPT[:130], GREEDY, caches=caches)
    caches.save(seq)
    assert any("read in part from token 130" in loss for loss in end.losses)
    assert not file.exists() and "lossy" in end.unwritten[0] and told.lines == []  # not in the middle of an answer
    again = run(engine, engine.new_sequence(), PROMPT[:130] + end.ids + PROMPT[:4], GREEDY, caches=caches)
    assert again.usage.cache_read_tokens == 128  # whole pages of the prompt, nothing of the answer
    caches.close()
    assert end.unwritten[0] in told.lines


def test_with_rows_evicted() -> None:
    for evict in (EvictOptions("window", 112), EvictOptions("sink", 96, 20), EvictOptions("shift", 64, 4)):
        found = {}
        for backend in ("native", "reference"):
            engine = opened(FEW, backend=backend, evict=evict)
            seq = prefilled(engine, 130)
            found[backend] = answered(engine, seq, PROMPT[:4])
            assert seq.exact == 130
        assert (found["native"] - found["reference"]).abs().max() < 2e-2


def test_what_cannot_be() -> None:
    with pytest.raises(UsageError, match="no layer of this model"):
        opened(FEW, variant="llama-sliding")
    with pytest.raises(UsageError, match="one of them 0"):
        attending.check(AttendOptions(threshold=0.1, share=0.1), EvictOptions())
    with pytest.raises(UsageError, match="0 or more"):
        attending.check(AttendOptions(-1), EvictOptions())


@pytest.mark.parametrize("types", ("f16", "int4"))
def test_memory_has_room_for_summaries(types: str) -> None:
    plain, few = opened(AttendOptions(), types), opened(FEW, types)
    per_page = few.layout.groups[0].summary_bytes
    group = few.layout.groups[0]
    means = group.kv_heads * (SIZE // 16)
    codes = means * -(-group.dim_k // 16) * 16  # bytes, beside a float32 scale each
    assert per_page == len(group.layers) * -(-(codes + 4 * means) // 16) * 16
    pages = few.plan.kv_bytes // group.held_bytes if types == "f16" else None
    assert few.plan.kv_bytes > plain.plan.kv_bytes
    if pages:
        assert few.plan.kv_bytes - plain.plan.kv_bytes == pages * per_page
    answered(few, prefilled(few))
    assert few.pool.committed_bytes <= few.plan.kv_bytes


def test_options_are_named() -> None:
    need_native()
    assert replace(FEW, threshold=0.25).named == "`attend=pages:2` `prefill_sparse=0.25`"
    assert SPARSE.named == "`prefill_sparse=30%` `prefill_sparse_from=32`"
    for text in ("pages:0", "pages:", "pages:x", "some"):
        with pytest.raises(UsageError, match="pages:K"):
            attending.pages_of(text)
    for text in ("0", "2", "101%", "x", "nan", "-1"):
        with pytest.raises(UsageError, match="prefill_sparse"):
            attending.sparseness(text)


class Asked(Guesses):
    """Guesses nothing, and knows how much it was asked for at most."""

    most = 0

    def next(self, length: int, most: int) -> list[int]:
        self.most = max(self.most, most)
        return []


def test_nothing_is_guessed_where_each_token_chooses(monkeypatch: pytest.MonkeyPatch) -> None:
    for attend, guesses in ((FEW, False), (SPARSE, True)):
        engine = opened(attend)
        asked = Asked(engine.session, "suffix")
        monkeypatch.setattr(engine.session, "guesses", lambda method, asked=asked: asked)
        run(engine, engine.new_sequence(), PROMPT[:122])
        assert bool(asked.most) == guesses


@pytest.mark.parametrize("types", ("f16", "int4"))
def test_an_answer_that_gave_up_its_pages_goes_on_as_it_was(types: str) -> None:
    engine, options = opened(FEW, types), replace(DRAWN, max_tokens=20)
    kept, parked = (engine.request(engine.new_sequence(), PROMPT[:121], options) for _ in range(2))
    while len(parked.history) < 130:
        engine.step([parked])
    parked.park()
    for each in (parked, kept):
        while not each.finished:
            engine.step([each])
    assert parked.history == kept.history and parked.seq.exact == kept.seq.exact == 121
    assert same_bits(answered(engine, parked.seq), answered(engine, kept.seq))
