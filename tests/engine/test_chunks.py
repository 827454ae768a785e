"""Rows of documents that were computed alone, in other places: what moving does to keys, what is computed in place, and
what no cache may have."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from engines import GREEDY, fresh, open_tiny, run

from kvcli.errors import UsageError
from kvcli.notices import Tell
from kvcli.options import CacheOptions, EvictOptions, PromptCacheOptions
from kvcli.runtime.cache import pagerows
from kvcli.runtime.cache.sequence import Sequence
from kvcli.runtime.engine import chunkcaches, chunks
from kvcli.runtime.engine.chunkcaches import ChunkCaches, Document
from kvcli.runtime.engine.engine import Engine
from kvcli.runtime.promptcache.marks import MovedChunk

GENERATOR = torch.Generator().manual_seed(11)
BEFORE, FIRST, SECOND, AFTER = (torch.randint(3, 370, (n,), generator=GENERATOR).tolist() for n in (37, 150, 130, 20))
WHOLE = BEFORE + FIRST + SECOND + AFTER


def _alone(engine: Engine, ids: list[int]) -> Sequence:
    seq = engine.new_sequence()
    chunks.compute(engine, seq, ids)
    return seq


def _keys(seq: Sequence, layer: int, lo: int, hi: int) -> torch.Tensor:
    """Keys of rows of a 16-bit cache: float32 [n, kv_heads, dim]."""
    group, index = seq.pool.layout.slots[layer] or (0, 0)
    return torch.cat([k for _, k, _ in pagerows.copies(seq.views()[group][index], lo, hi)])


def blend(engine: Engine, seq: Sequence, ids: list[int], places: list[chunks.Place], alone: Engine,
          sources: list[Sequence], repair: int = chunks.REPAIR, gate: int = chunks.GATE,
          limit: float = chunks.LIMIT) -> list[chunks.Moved]:  # fmt: skip
    """`chunks.put` at all of these places, compared until one of them has passed, as prompts of kv are."""
    found: list[chunks.Moved] = []
    for place in places:
        compared = 0 if any(each.passed for each in found) else gate
        found.append(chunks.put(engine, seq, ids, place, alone, sources[place.chunk], repair, compared, limit))
    return found


@pytest.mark.parametrize("backend", ("reference", "native"))
@pytest.mark.parametrize("variant", ("llama", "qwen3", "gemma3"))
def test_keys_of_the_first_layer_are_those_of_their_new_places(variant: str, backend: str):
    """They depend on the token and its position alone, so nothing is lost but a rounding."""
    engine = open_tiny(variant, backend, CacheOptions(512, page_size=16))
    source, seq = _alone(engine, FIRST), _alone(engine, BEFORE)
    chunks.graft(engine, seq, source, 5, 120)
    whole = _alone(engine, BEFORE + FIRST[5:120])
    assert seq.tokens == whole.tokens
    # Of a layer with a window as far as both have rows.
    mine, theirs = (_keys(each, 0, len(BEFORE), seq.length) for each in (seq, whole))
    n = min(len(mine), len(theirs))
    there = max(1, min(n, engine.config.layers[0].window or n) - 32)
    torch.testing.assert_close(mine[-there:], theirs[-there:], rtol=0, atol=4e-3 * float(theirs.abs().max()))
    untouched = _keys(source, 0, 5, 120)[-there:]
    assert (untouched - theirs[-there:]).abs().max() > 0.1 * float(theirs.abs().max()), "nothing was turned"


@pytest.mark.parametrize("types", ("f16", "int8"))
def test_what_is_repaired_wholly_is_the_whole_prompt(types: str):
    """With as many rows computed in place as the chunks have, nothing is moved; with fewer, what is left differs."""
    engine = open_tiny("llama", "native", CacheOptions(512, types, types, page_size=16))
    alone = engine if types == "f16" else engine.beside(CacheOptions(512, "f16", "f16", 16))
    sources = [_alone(alone, FIRST), _alone(alone, SECOND)]
    places = chunks.find(WHOLE, [FIRST, SECOND], 64)
    assert [(p.chunk, p.at, p.lo, p.hi) for p in places] == [(0, 37, 0, 150), (1, 187, 0, 130)]
    exact = fresh(engine, WHOLE)[0].log_softmax(-1)
    far = []
    for repair in (1000, 64, 0):
        seq = engine.new_sequence()
        moved = blend(engine, seq, WHOLE, places, alone, sources, repair, 0)
        assert sum(each.copied for each in moved) == sum(max(0, n - repair) for n in (150, 130))
        chunks.compute(engine, seq, WHOLE[seq.length : -1])
        last = engine.logits(engine.forward(seq, WHOLE[-1:]))[0].log_softmax(-1)
        far.append(float((exact.exp() * (exact - last)).sum()))
        assert seq.tokens == WHOLE and seq.shares == (repair == 1000)
        seq.close()
    assert far[0] < 1e-6 < far[1] and far[1] < 0.5 and far[2] < 0.5
    for source in sources:
        source.close()
    engine.pool.check([])
    alone.pool.check([])


def test_a_document_at_the_very_beginning_is_exact():
    engine = open_tiny("llama", "native", CacheOptions(512, page_size=16))
    ids, source, seq = FIRST + AFTER, _alone(engine, FIRST), engine.new_sequence()
    (moved,) = blend(engine, seq, ids, chunks.find(ids, [FIRST], 64), engine, [source])
    assert moved == chunks.Moved(chunks.Place(0, 0, 0, 150), 150) and seq.shares and not seq.losses()
    chunks.compute(engine, seq, ids[150:-1])
    assert torch.equal(engine.logits(engine.forward(seq, ids[-1:])), fresh(engine, ids))


def test_above_the_limit_all_is_computed():
    engine = open_tiny("llama", "native", CacheOptions(512, page_size=16))
    sources = [_alone(engine, FIRST), _alone(engine, SECOND)]
    places = chunks.find(WHOLE, [FIRST, SECOND], 64)
    seq = engine.new_sequence()
    found = blend(engine, seq, WHOLE, places, engine, sources, limit=math.inf)
    assert found[0].copied == 150 - chunks.REPAIR - chunks.GATE - chunks.ASKED and found[0].divergence > 0
    assert found[1] == chunks.Moved(places[1], 130 - chunks.REPAIR), "only the first is compared"
    seq.close()
    for limit, passes in ((found[0].divergence, True), (0.999 * found[0].divergence, False)):
        first = blend(engine, seq, WHOLE, places, engine, sources, limit=limit)[0]
        assert first.divergence == found[0].divergence and bool(first.copied) == passes
        seq.close()
    refused = blend(engine, seq, WHOLE, places, engine, sources, limit=0.0)
    assert not any(each.copied for each in refused) and all(each.divergence for each in refused), "none has passed"
    assert seq.moved is None
    last = chunks.compute(engine, seq, WHOLE[seq.length :])[-1:]
    assert torch.equal(engine.logits(last), fresh(engine, WHOLE))


@pytest.mark.parametrize("variant", ("llama", "gemma3"))
def test_a_divergence_is_that_of_rows_behind_copied_ones(variant: str):
    engine = open_tiny(variant, "native", CacheOptions(512, page_size=16))
    source, seq, ids = _alone(engine, FIRST), engine.new_sequence(), BEFORE + FIRST + AFTER
    (found,) = blend(engine, seq, ids, chunks.find(ids, [FIRST], 64), engine, [source], limit=math.inf)
    lo, gate, asked = chunks.REPAIR, chunks.GATE, chunks.ASKED
    full = _logits(engine, engine.new_sequence(), BEFORE + FIRST[: lo + gate + asked])[-asked:]
    again, blended = _alone(engine, FIRST[: lo + gate]), _alone(engine, BEFORE + FIRST[:lo])
    chunks.graft(engine, blended, again, lo, lo + gate)
    other = _logits(engine, blended, FIRST[lo + gate : lo + gate + asked])
    assert found.divergence == pytest.approx(float((full.exp() * (full - other)).sum(-1).mean()), rel=1e-3)
    assert found.copied == 150 - lo - gate - asked


def _logits(engine: Engine, seq: Sequence, ids: list[int]) -> torch.Tensor:
    return engine.logits(chunks.compute(engine, seq, ids)).double().log_softmax(-1)


def test_a_document_that_begins_the_prompt_passes_for_none_behind_it():
    """It saw all there is to see, though in 16 bits; so what is compared is the next."""
    engine = open_tiny("llama", "native", CacheOptions(512, "int8", "int8", page_size=16))
    alone = engine.beside(CacheOptions(512, "f16", "f16", 16))
    sources, ids = [_alone(alone, FIRST), _alone(alone, SECOND)], FIRST + SECOND + AFTER
    places, seq = chunks.find(ids, [FIRST, SECOND], 64), engine.new_sequence()
    for limit in (math.inf, 0.0):
        first, second = blend(engine, seq, ids, places, alone, sources, limit=limit)
        assert first.copied and first.divergence is None
        assert second.divergence and bool(second.copied) == (limit > 0)
        seq.close()


def test_tokens_of_chunks_are_found_where_they_stand():
    find = chunks.find
    assert [(p.chunk, p.at) for p in find(SECOND + BEFORE + FIRST, [FIRST, SECOND], 64)] == [(1, 0), (0, 167)]
    changed = [*BEFORE, 999, *FIRST[1:-2], 998, *AFTER]  # where texts meet, tokens may differ
    assert find(changed, [FIRST], 64) == [chunks.Place(0, 37, 1, 148)]
    assert find(BEFORE + FIRST[:40] + AFTER, [FIRST], 64) == [] == find(AFTER, [FIRST, SECOND], 64)
    assert len(find(BEFORE + FIRST, [FIRST, FIRST[10:]], 64)) == 1  # rows stand in one place once


def test_what_follows_moved_rows_is_for_no_cache():
    engine = open_tiny("llama", "native", CacheOptions(512, page_size=16))
    source, seq = _alone(engine, FIRST), _alone(engine, BEFORE)
    chunks.graft(engine, seq, source, 64, 150)
    chunks.compute(engine, seq, AFTER)
    twin = seq.fork()
    for each in (seq, twin):
        assert not each.shares and each.losses() == ("moved: chunks from row 37 on were computed alone",)
    seq.rewind(60)
    assert not seq.shares
    seq.rewind(37)
    assert seq.shares and not twin.shares
    twin.close()
    assert twin.shares


def _said() -> tuple[Tell, list[str]]:
    said: list[str] = []
    return Tell(said.append, said.append, said.append), said


@pytest.mark.parametrize("type_k", ("f16", "int4"))
def test_documents_are_stored_one_by_one_and_found_behind_any_text(
    type_k: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(chunkcaches, "LEAST", 64)
    monkeypatch.setattr(chunks, "LIMIT", math.inf)
    engine = open_tiny("llama", "native", CacheOptions(512, type_k, type_k, page_size=16))
    documents, options = [Document("a", FIRST), Document("b", SECOND)], PromptCacheOptions(store=tmp_path)
    answers = []
    tried = chunks.GATE + chunks.ASKED  # of the first document of each prompt
    for prompt, disk in ((WHOLE, 0), (AFTER + SECOND + BEFORE + FIRST + AFTER, 1)):
        caches = ChunkCaches(engine, documents, options, _said()[0])
        end = run(engine, engine.new_sequence(), prompt, GREEDY, caches=caches)
        caches.close()
        usage = end.usage
        names = sorted((each.name, each.tokens, each.copied) for each in usage.chunks)
        assert names == [("a", 150, 86 - (0 if disk else tried)), ("b", 130, 66 - (tried if disk else 0))]
        assert [each.kld is None for each in usage.chunks] == [False, True]
        assert usage.cache_read_tokens == 152 - tried and bool(usage.disk_tokens) == bool(disk)
        assert usage.cache_how == "2 of 2 documents moved, lossy" and end.losses[0].startswith("moved: ")
        assert usage.cache_write_tokens == 0
        answers.append(end.ids)
    stored = engine if type_k == "f16" else engine.beside(CacheOptions(512, "f16", "f16", 16))
    plain = stored.prompt_caches(replace(options, min_tokens=64), _said()[0])
    for ids, there in ((FIRST + AFTER, True), (WHOLE, False)):
        assert bool(plain.restore(stored.new_sequence(), ids).reuse.tokens) == there
    plain.close()


def test_a_document_above_the_limit_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(chunkcaches, "LEAST", 64)
    monkeypatch.setattr(chunks, "LIMIT", 0.0)
    engine = open_tiny("llama", "native", CacheOptions(512, page_size=16))
    tell, said = _said()
    caches = ChunkCaches(engine, [Document("a.txt", FIRST)], PromptCacheOptions(store=tmp_path), tell)
    end = run(engine, engine.new_sequence(), BEFORE + FIRST + AFTER, GREEDY, caches=caches)
    caches.close()
    exact = run(engine, engine.new_sequence(), BEFORE + FIRST + AFTER, GREEDY)
    assert end.ids == exact.ids and not end.losses and end.usage.cache_how == ""
    (chunk,) = end.usage.chunks
    assert isinstance(chunk, MovedChunk) and chunk.copied == 0 and any(t.startswith("a.txt is computed") for t in said)


def test_models_and_policies_that_cannot_move_rows_are_refused():
    for engine, why in (
        (open_tiny("llama4", "reference", CacheOptions(512)), "turned to another position"),
        (open_tiny("llama", "reference", CacheOptions(512, page_size=16, evict=EvictOptions("sink", 64))), "evicted"),
    ):
        with pytest.raises(UsageError, match=why):
            chunks.check(engine)
