"""What a generation takes from caches, on tiny models: the answer is that of a cold run, whatever was found."""

from __future__ import annotations

import errno
import os
import random
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
import tiny
from engines import GREEDY, PROMPT, open_tiny, run
from reusecases import FOUR, NOWHERE, Told, ask, engine_of, files_in, store_in

from kvcli.errors import DoesNotFit
from kvcli.options import CacheOptions, EvictOptions, PromptCacheOptions
from kvcli.runtime.cache import grouplayout as layouts
from kvcli.runtime.promptcache import chatfiles, filerows, ledger
from kvcli.runtime.promptcache.found import Found
from kvcli.runtime.promptcache.shelves import Shelves
from kvcli.runtime.promptcache.store import PromptStore


@pytest.fixture(autouse=True)
def own_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("variant", "types"),
    [
        pytest.param(variant, types, marks=() if variant == usual else pytest.mark.thorough)
        for types, usual in (
            (("f16", "f16", 1), "gemma3"),
            (("f32", "bf16", 1), "llama"),
            (("int8", "int4", 1), "gemma3"),
            (("fp8", "fp8", 1), "llama"),
            (("int6", "int6", 0), "llama"),
        )
        for variant in ("llama", "gemma3")
    ],
)
def test_from_disk_it_is_the_cold_run(tmp_path: Path, variant: str, types: tuple[str, str, int]) -> None:
    """Documents of the window's length and around it, of whole pages and not; another question behind each."""
    engine = engine_of(variant, *types)
    sealed = engine.layout.groups[-1].sealed or engine.layout.groups[0].sealed
    window, size = tiny.WINDOW, engine.layout.page_size
    for n in (window - 1, window, window + 1, 5 * window, 64):
        root, document = tmp_path / str(n), PROMPT[:n]
        first, second = [*document, 5, 6, 7], [*document, 8, 9, 10, 11, 12]
        cold = ask(engine, second, NOWHERE)
        assert cold.usage.cache_read_tokens == 0
        written = ask(engine, first, store_in(root))
        assert written.usage.cache_write_tokens == len(first) and len(files_in(root)) == 1
        found = ask(engine, second, store_in(root))
        least = n // size * size if sealed else n
        assert found.usage.disk_tokens == found.usage.cache_read_tokens >= least
        assert found.ids == cold.ids
        assert len(files_in(root)) == 2
        sizes = sorted(p.stat().st_size for p in files_in(root))
        assert n < 100 or 2 * sizes[0] < sizes[1], "only what is new was written"
        again = ask(engine, second, store_in(root))
        assert again.ids == cold.ids and again.usage.cache_write_tokens == 0
        assert len(second) - again.usage.disk_tokens <= (1 if not sealed else size)
        shorter = second[:-2]
        assert ask(engine, shorter, store_in(root)).ids == ask(engine, shorter, NOWHERE).ids


@pytest.mark.parametrize("disk", [True, False])
def test_sixteen_bit_caches_reuse_to_the_token(tmp_path: Path, disk: bool) -> None:
    """170 and 165 tokens that share 150: pages alone would give 144."""
    engine = engine_of("llama")
    other = [*range(20, 28)] * 25
    first, second = [*PROMPT, *other[:30]], [*PROMPT, *other[:10], *range(60, 75)]
    assert (len(first), len(second)) == (170, 165)
    cold = ask(engine, second, NOWHERE)
    if disk:
        ask(engine, first, store_in(tmp_path))
        found = ask(engine, second, store_in(tmp_path))
    else:
        with closing(engine.prompt_caches(NOWHERE, Told())) as caches:
            seq, twin = engine.new_sequence(), engine.new_sequence()
            run(engine, seq, first, FOUR, caches=caches)
            found = run(engine, twin, second, FOUR, caches=caches)
            seq.close()
            twin.close()
    assert found.usage.cache_read_tokens == 150 and found.ids == cold.ids
    assert found.usage.disk_tokens == (150 if disk else 0)


@pytest.mark.slow
@pytest.mark.parametrize("types", [("f16", "f16"), ("int8", "int4")])
@pytest.mark.parametrize("variant", ["llama", "gemma3"])
def test_the_tree_gives_what_a_cold_run_computes(variant: str, types: tuple[str, str]) -> None:
    """Prompts that share beginnings of all lengths, through one engine; pages are shared, not copied."""
    engine, generator, reused = engine_of(variant, *types), random.Random(1), 0
    prompts = []
    for _ in range(12):
        base = generator.choice(prompts) if prompts else []
        shared = base[: generator.randrange(len(base) // 2, len(base) + 1)]
        prompts.append([*shared, *generator.choices(range(3, 300), k=30)][:200])
    cold = [ask(engine, prompt, NOWHERE).ids for prompt in prompts]
    with closing(engine.prompt_caches(NOWHERE, Told())) as caches:
        seq = engine.new_sequence()
        for prompt, ids in zip(prompts, cold, strict=True):
            end = run(engine, seq, prompt, FOUR, caches=caches)
            assert end.ids == ids
            reused += end.usage.cache_read_tokens
            engine.pool.check([*seq.holds(), *caches.tree.holds()])
        assert reused > 200
        seq.close()
    engine.pool.check([])


def test_many_answers_share_the_pages_of_the_prompt() -> None:
    engine = engine_of("llama", "f16")
    prompt = (PROMPT * 2)[:250]
    alone = ask(engine, prompt, NOWHERE)
    with closing(engine.prompt_caches(NOWHERE, Told())) as caches:
        seqs = [engine.new_sequence() for _ in range(8)]
        ends = [run(engine, seq, prompt, FOUR, caches=caches) for seq in seqs]
        pages = engine.pool.used(0)
        for seq in seqs:
            seq.close()
    assert [end.usage.cache_read_tokens for end in ends] == [0] + [249] * 7
    assert all(end.ids == alone.ids for end in ends)
    assert pages < 1.3 * (254 / 16) + 8


def test_a_flipped_bit_costs_a_prefill_and_the_file(tmp_path: Path) -> None:
    engine = engine_of("gemma3", "int8")
    prompt = PROMPT[:100]
    cold = ask(engine, prompt, NOWHERE)
    for trial in range(6):
        ask(engine, prompt, store_in(tmp_path))
        (path,) = files_in(tmp_path)
        data = bytearray(path.read_bytes())
        at = random.Random(trial).randrange(4096, len(data))
        data[at] ^= 16
        path.write_bytes(data)
        told = Told()
        end = ask(engine, prompt, store_in(tmp_path), told)
        assert end.ids == cold.ids
        if end.usage.disk_tokens:  # a byte that nobody reads
            assert told.lines == [] or "damaged" in told.lines[0]
            path.unlink()
            continue
        assert end.usage.cache_read_tokens == 0
        assert [line for line in told.lines if "damaged" in line and "removed" in line and "\n" not in line]
        assert ask(engine, prompt, store_in(tmp_path)).usage.disk_tokens > 80
        for rest in files_in(tmp_path):
            rest.unlink()


def test_a_damaged_file_that_cannot_be_removed_is_a_line_and_no_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, prompt = engine_of("llama"), PROMPT[:100]
    cold = ask(engine, prompt, NOWHERE)
    ask(engine, prompt, store_in(tmp_path))
    (path,) = files_in(tmp_path)
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 16
    path.write_bytes(data)

    def refuses(self: Path, missing_ok: bool = False) -> None:
        raise PermissionError(13, "Permission denied")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "unlink", refuses)
        told = Told()
        end = ask(engine, prompt, store_in(tmp_path), told)
    assert end.ids == cold.ids and end.usage.cache_read_tokens == 0
    assert len([line for line in told.lines if "damaged" in line]) == 1 and path.exists()


def test_a_file_that_cannot_be_opened_now_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, prompt = engine_of("llama"), PROMPT[:100]
    cold = ask(engine, prompt, store_in(tmp_path))
    (path,) = files_in(tmp_path)
    opens = os.open

    def too_many(name: str | Path, *rest: int) -> int:
        if str(name) == str(path):
            raise OSError(errno.EMFILE, "Too many open files")
        return opens(name, *rest)

    with monkeypatch.context() as patch:
        patch.setattr(os, "open", too_many)
        assert ask(engine, prompt, store_in(tmp_path)).ids == cold.ids
    assert ask(engine, prompt, store_in(tmp_path)).usage.disk_tokens > 80


def test_what_a_writer_did_not_expect_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object, **__: object) -> None:
        raise ValueError("an odd page")

    monkeypatch.setattr(PromptStore, "add", fails)
    told = Told()
    ask(engine_of("llama"), PROMPT[:100], store_in(tmp_path), told)
    assert [line for line in told.lines if "was not written: ValueError: an odd page" in line]


def test_rows_that_the_pool_has_no_room_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are computed again, and their file is left as it is."""
    engine, prompt, file = engine_of("llama"), PROMPT[:100], tmp_path / "x.safetensors"
    cold = ask(engine, prompt, NOWHERE)
    options = PromptCacheOptions(file=file)
    ask(engine, [*prompt[:90], 1, 2, 3], options)
    before = file.read_bytes()

    def full(*_: object) -> None:
        raise DoesNotFit("the KV pool is full")

    monkeypatch.setattr(filerows, "take_rows", full)
    told = Told()
    end = ask(engine, prompt, options, told)
    assert end.ids == cold.ids and "no room" in end.usage.cache_miss and file.read_bytes() == before


def test_a_store_that_cannot_be_written_costs_nothing_but_a_line(tmp_path: Path) -> None:
    engine, told = engine_of("llama"), Told()
    (tmp_path / "prompts").write_text("in the way")
    end = ask(engine, PROMPT, store_in(tmp_path), told)
    assert end.ids == ask(engine, PROMPT, NOWHERE).ids
    assert len(told.lines) == 1 and "was not written" in told.lines[0]
    small, told = store_in(tmp_path / "small", max_bytes=1000, awaited=True), Told()
    end = ask(engine, PROMPT, small, told)
    assert any("more than the 1000 B of the store" in line for line in told.lines)
    assert end.usage.cache_write_tokens == 0 and end.unwritten == (told.lines[-1],)


def test_what_another_process_has_stored_meanwhile_is_not_written_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, finds, order = engine_of("llama"), Shelves.find, iter((True, False, False))
    ask(engine, [*PROMPT, 5, 6], store_in(tmp_path))
    monkeypatch.setattr(Shelves, "find", lambda store, tokens: Found() if next(order) else finds(store, tokens))
    for patience, files in ((1e9, 1), (0.0, 2)):
        order = iter((True, False, False))
        monkeypatch.setattr(ledger, "STALE_S", patience)
        end = ask(engine, [*PROMPT, 7, 8 + files], store_in(tmp_path))
        assert end.usage.cache_read_tokens == 0
        assert (end.usage.cache_write_tokens < 32) == (patience == 0)


def test_what_a_chat_goes_on_from_is_as_new_as_its_last_turn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, options = engine_of("llama"), store_in(tmp_path, memory=True, chat="")
    with closing(engine.prompt_caches(options, Told())) as caches:
        seq = engine.new_sequence()
        monkeypatch.setattr(chatfiles, "LONG_ROWS", 100)
        run(engine, seq, PROMPT, FOUR, caches=caches)
        caches._wait()
        (path,) = files_in(tmp_path)
        long_ago = path.stat().st_mtime - 86400
        os.utime(path, (long_ago, long_ago))
        run(engine, seq, [*seq.tokens, *PROMPT[:40]], FOUR, caches=caches)
        caches._wait()
        seq.close()
    engine.pool.check([])
    assert path.stat().st_mtime > long_ago + 80000


@pytest.mark.parametrize(
    ("variant", "k", "evict"),
    [("llama", "f16", ""), ("gemma3", "f16", ""), ("gemma3", "int4", ""), ("llama", "int8", "sink")],
)
def test_what_was_prefilled_for_long_is_stored_however_it_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, variant: str, k: str, evict: str
) -> None:
    """In parts, each of which can be gone on from; the whole prompt is that of a run that was not stopped."""
    options = EvictOptions(evict, window=64) if evict else EvictOptions()
    engine = open_tiny(variant, "native", CacheOptions(320, k, k, 16, ubatch=32, evict=options))
    cold, hidden, left = ask(engine, PROMPT, NOWHERE), engine.model.hidden, iter(range(3))
    monkeypatch.setattr(ledger, "PART_S", 0.0)
    monkeypatch.setattr(ledger, "PART_SHARE", 0.0)

    def stopped(*args: object) -> object:
        if next(left, None) is None:
            raise SystemExit(130)
        return hidden(*args)  # type: ignore[arg-type]

    with monkeypatch.context() as patch:
        patch.setattr(engine.model, "hidden", stopped)
        patch.setattr(ledger.PromptLedger, "interrupted", lambda *_: None)  # as if it was killed
        with closing(engine.prompt_caches(store_in(tmp_path), Told())) as caches:
            seq = engine.new_sequence()
            with pytest.raises(SystemExit):
                run(engine, seq, PROMPT, FOUR, caches=caches)
            seq.close()
    engine.pool.check([])
    assert len(files_in(tmp_path)) == 3
    end = ask(engine, PROMPT, store_in(tmp_path, awaited=True))
    assert end.ids == cold.ids and end.usage.disk_tokens == 96
    assert 44 <= end.usage.cache_write_tokens < 64 and end.unwritten == ()
    again = ask(engine, [*PROMPT, 5], store_in(tmp_path))
    assert again.usage.disk_tokens >= 128 and again.ids == ask(engine, [*PROMPT, 5], NOWHERE).ids
    whole = ask(engine, [9, *PROMPT], store_in(tmp_path, awaited=True))
    assert whole.usage.cache_write_tokens == 141 and len(files_in(tmp_path)) == 6 + bool(evict), (
        "parts are one file in the end"
    )


def test_what_is_written_is_what_came_of_it(tmp_path: Path) -> None:
    """The answer ends when the file is there, where that is asked for; a file that is not written counts nothing."""
    engine, file = engine_of("llama"), tmp_path / "none" / "x"
    end = ask(engine, PROMPT, store_in(tmp_path, awaited=True, file=file))
    assert end.usage.cache_write_tokens == len(PROMPT) and len(end.unwritten) == 1 and str(file) in end.unwritten[0]
    end = ask(engine, PROMPT, PromptCacheOptions(file=file, awaited=True))
    assert end.usage.cache_write_tokens == 0 and "No such file" in end.unwritten[0]
    end = ask(engine, PROMPT, PromptCacheOptions(file=tmp_path / "x", awaited=True, save_answer=True))
    assert end.usage.cache_write_tokens == len(PROMPT) + len(end.ids) - 1 and end.unwritten == ()


@pytest.mark.parametrize("policy", ["sink", "window"])
@pytest.mark.parametrize(("variant", "k"), [("llama", "f16"), ("gemma3", "f16"), ("llama", "int4")])
def test_what_was_evicted_is_not_missed(tmp_path: Path, variant: str, k: str, policy: str) -> None:
    """Documents longer than the window; other windows share what saw all before it."""
    evict = EvictOptions(policy, window=32)
    options = CacheOptions(ctx_size=128, page_size=16, type_k=k, type_v=k, evict=evict)
    engine = open_tiny(variant, "native", options)
    document = PROMPT[:100]
    cold = ask(engine, [*document, 8, 9, 10], NOWHERE)
    assert ask(engine, [*document, 5, 6], store_in(tmp_path)).usage.cache_write_tokens == 102
    found = ask(engine, [*document, 8, 9, 10], store_in(tmp_path))
    assert found.ids == cold.ids and found.usage.disk_tokens >= 96
    with closing(engine.prompt_caches(NOWHERE, Told())) as caches:
        seq, twin = engine.new_sequence(), engine.new_sequence()
        run(engine, seq, [*document, 5, 6], FOUR, caches=caches)
        again = run(engine, twin, [*document, 8, 9, 10], FOUR, caches=caches)
        assert again.ids == cold.ids and again.usage.cache_read_tokens >= 96
        engine.pool.check([*seq.holds(), *twin.holds(), *caches.tree.holds()])
        seq.close()
        twin.close()
    other, prompt = open_tiny(variant, "native", replace(options, evict=replace(evict, window=48))), [*document, 5, 6]
    found = ask(other, prompt, store_in(tmp_path))
    assert engine.retention is not None and found.usage.disk_tokens <= engine.retention.whole
    assert found.ids == ask(other, prompt, NOWHERE).ids


def test_a_miss_says_why(tmp_path: Path) -> None:
    engine, told = engine_of("llama"), Told()
    first = ask(engine, PROMPT, store_in(tmp_path), told)
    assert first.usage.cache_miss == "" and len(told.lines) == 1 and "`store=None`" in told.lines[0]
    other = [*PROMPT[:5], 9, *PROMPT[6:]]
    assert "differs at token 5 (it has" in ask(engine, other, store_in(tmp_path)).usage.cache_miss
    miss = ask(engine_of("llama", "int8"), PROMPT, store_in(tmp_path, converts=False)).usage.cache_miss
    assert "shares 140 tokens with this one, but was stored with cache type f16, this run has int8" in miss
    assert ask(engine, PROMPT[:6], store_in(tmp_path)).usage.cache_miss == "", "too short to be kept"


# --- memory


def test_what_is_kept_gives_way_to_what_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a budget that is exactly the plan's, prompts that fill the context run one after another."""
    monkeypatch.setattr(layouts, "CHUNK_BYTES", 1)
    engine = open_tiny("gemma3", "native", CacheOptions(ctx_size=128, page_size=16, type_k="int8", type_v="int8"))
    planned = engine.plan.kv_bytes
    engine.pool.budget_bytes = planned
    with closing(engine.prompt_caches(NOWHERE, Told())) as caches:
        seq = engine.new_sequence()
        for n in range(4):
            prompt = [n + 3, *PROMPT[:119]]
            assert run(engine, seq, prompt, replace(GREEDY, max_tokens=20), caches=caches).finish_reason == "context"
            engine.pool.check([*seq.holds(), *caches.tree.holds()])
        assert engine.pool.committed_bytes <= planned
        more = [engine.new_sequence() for _ in range(6)]
        with pytest.raises(DoesNotFit):
            for n, other in enumerate(more):
                run(engine, other, [60 + n, *PROMPT[:119]], GREEDY, caches=caches)
        for each in (seq, *more):
            each.close()
    engine.pool.check([])


def test_pages_that_nobody_uses_do_not_make_the_pool_larger_than_planned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layouts, "CHUNK_BYTES", 1)
    engine = open_tiny("llama", "native", CacheOptions(ctx_size=160, page_size=16))
    with closing(engine.prompt_caches(NOWHERE, Told())) as caches:
        seq = engine.new_sequence()
        for n in range(12):
            run(engine, seq, [n + 3, *PROMPT[:90]], GREEDY, caches=caches)
        assert engine.pool.committed_bytes <= engine.plan.kv_bytes + engine.layout.arenas[0].committed_bytes(1)
        seq.close()
