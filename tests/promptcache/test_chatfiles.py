"""What chats leave in the store: little, enough to go on from, and nothing that others rely on goes."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from engines import PROMPT, open_tiny, run
from promptfiles import SIZE, blocks
from promptkills import killed_writer, segment, store_at
from reusecases import FOUR, NOWHERE, Told, ask, engine_of, files_in, store_in

from kvcli.options import CacheOptions, EvictOptions
from kvcli.runtime.config import FULL
from kvcli.runtime.engine.engine import Engine
from kvcli.runtime.engine.events import End
from kvcli.runtime.promptcache import chatfiles
from kvcli.runtime.promptcache.file import PromptCacheFile

_EVICTING: dict[tuple[str, str], Engine] = {}


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(chatfiles, "SHORT_ROWS", 48)
    monkeypatch.setattr(chatfiles, "LONG_ROWS", 100)


def evicting(variant: str, k: str) -> Engine:
    """Of 320 tokens of context the first 16 and the last 64 stay."""
    if (variant, k) not in _EVICTING:
        options = CacheOptions(320, k, k, 16, evict=EvictOptions("sink", window=64, keep=4))
        _EVICTING[variant, k] = open_tiny(variant, "native", options)
    return _EVICTING[variant, k]


class Chat:
    """Messages of a few tokens and answers of four, in one process."""

    def __init__(self, engine: Engine, root: Path, name: str = "ann", tokens: tuple[int, ...] | list[int] = ()) -> None:
        self.engine, self.root, self.tokens = engine, root, list(tokens)
        self.told = Told()
        self.elsewhere: list[list[int]] = []  # the tokens of other branches
        self.caches = engine.prompt_caches(store_in(root, chat=name, memory=True), self.told, lambda: self.elsewhere)
        self.sequence = engine.new_sequence()
        self.live_bytes = 0

    def say(self, message: list[int]) -> End:
        end = run(self.engine, self.sequence, [*self.tokens, *message], FOUR, history=True, caches=self.caches)
        self.tokens += [*message, *end.ids]
        arenas = enumerate(self.engine.layout.arenas)
        self.live_bytes = sum(self.sequence.pages(i) * arena.page_bytes for i, arena in arenas)
        return end

    def turns(self, count: int, seed: int = 0) -> None:
        generator = random.Random(seed)
        for _ in range(count):
            self.say(generator.choices(range(3, 300), k=generator.randrange(3, 12)))

    def close(self, save: bool = True) -> None:
        if save:
            self.caches.save(self.sequence)
        self.caches.close()
        self.sequence.close()
        self.engine.pool.check([])


def owners(root: Path) -> list[str | None]:
    found = []
    for path in files_in(root):
        with PromptCacheFile(path) as file:
            found.append(file.contents.about.get("owner"))
    return found


def payload(root: Path) -> int:
    """Bytes of the pages in the store: with tiny models most of a file is its header."""
    total = 0
    for path in files_in(root):
        with PromptCacheFile(path) as file:
            total += file.contents.payload_bytes
    return total


@pytest.mark.slow
@pytest.mark.parametrize(
    ("variant", "k"),
    [
        pytest.param("llama", "f16", marks=pytest.mark.thorough),
        pytest.param("llama", "int4", marks=pytest.mark.thorough),
        ("gemma3", "int8"),
    ],
)
def test_sixty_turns_that_evict_leave_about_twice_the_live_cache(tmp_path: Path, variant: str, k: str) -> None:
    engine = evicting(variant, k)
    chat = Chat(engine, tmp_path)
    for turn in range(12):
        chat.turns(5, seed=turn)
        chat.caches._wait()
        assert payload(tmp_path) < 2.4 * chat.live_bytes and len(files_in(tmp_path)) < 8
    tokens = chat.tokens
    chat.close()
    assert len(tokens) > 600 and set(owners(tmp_path)) == {"ann"}
    cold = ask(engine, [*tokens[:300], 5, 6], NOWHERE)
    assert ask(engine, [*tokens[:300], 5, 6], store_in(tmp_path)).ids == cold.ids, "whatever is gone"
    again = Chat(engine, tmp_path, tokens=tokens)
    end = again.say([7, 8, 9])
    assert end.usage.disk_tokens >= len(tokens) // 16 * 16 - 16
    again.close()
    other = Chat(engine, tmp_path / "none", tokens=tokens)
    assert other.say([7, 8, 9]).ids == end.ids and other.sequence.tokens == [*tokens, 7, 8, 9, *end.ids[:3]]
    other.close()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("variant", "k"),
    [
        pytest.param("llama", "f16", marks=pytest.mark.thorough),
        ("gemma3", "f16"),
        pytest.param("llama", "int8", marks=pytest.mark.thorough),
    ],
)
def test_a_killed_chat_goes_on_after_any_turn(tmp_path: Path, variant: str, k: str) -> None:
    """With the message that was lost, and with another one instead."""
    for engine in (evicting(variant, k), engine_of(variant, k)):
        root = tmp_path / str(bool(engine.retention))
        chat = Chat(engine, root)
        for turn in range(20):
            before = list(chat.tokens)
            chat.turns(1, seed=turn)
            chat.caches._wait()
            if turn % 4 != 3:
                continue
            lost = chat.sequence.tokens[len(before) : -3]
            chat.close(save=False)
            for message in (lost, [3, 4, 5]):
                other = Chat(engine, root, "", before)
                assert other.say(message).usage.disk_tokens >= (len(before) - 4) // 16 * 16 - 16, (turn, message)
                other.close(save=False)
            chat = Chat(engine, root, tokens=chat.tokens)
        chat.close()


def test_what_is_full_and_not_evicted_is_never_written_again(tmp_path: Path) -> None:
    engine, seen = engine_of("llama", "f16"), {}
    chat = Chat(engine, tmp_path)
    for turn in range(20):
        chat.turns(1, seed=turn)
        chat.caches._wait()
        seen.update({path: path.stat().st_size for path in files_in(tmp_path)})
    tokens, live = chat.tokens, chat.live_bytes
    chat.close()
    left = files_in(tmp_path)
    assert 3 <= len(left) <= 8 and payload(tmp_path) < 1.5 * live
    page = engine.layout.arenas[0].page_bytes
    final = [path for path in left if path.stat().st_size > 3 * page]
    assert len(final) >= 2 and len(seen) >= 20
    other = Chat(engine, tmp_path, "bob", tokens[:150])
    assert other.say([9, 9]).usage.disk_tokens >= 144, "shared by another chat"
    other.close()
    assert set(left) <= set(files_in(tmp_path))


def test_what_was_taken_back_stays_where_nothing_is_evicted(tmp_path: Path) -> None:
    for engine, stays in ((engine_of("llama", "f16"), True), (evicting("llama", "f16"), False)):
        root = tmp_path / str(stays)
        chat = Chat(engine, root)
        chat.say(PROMPT[:40])
        before = list(chat.tokens)
        chat.say(PROMPT[40:60])
        taken, chat.tokens = list(chat.tokens), before
        chat.turns(12)
        chat.close()
        found = ask(engine, [*taken, 5], store_in(root))
        assert found.usage.disk_tokens == (len(taken) - 4 if stays else 16), "what is kept is the same"


@pytest.mark.slow
def test_other_branches_keep_their_rows(tmp_path: Path) -> None:
    engine = evicting("llama", "int4")
    chat = Chat(engine, tmp_path)
    chat.turns(15)
    main = list(chat.tokens)
    chat.caches.save(chat.sequence)
    chat.elsewhere = [main]
    chat.turns(30, seed=1)
    chat.close()
    again = Chat(engine, tmp_path, tokens=main)
    assert again.say([5]).usage.disk_tokens >= len(main) // 16 * 16 - 16
    again.close()
    again = Chat(engine, tmp_path, tokens=main)  # now no branch needs it
    again.turns(30, seed=2)
    again.close()
    found = ask(engine, [*main, 5], store_in(tmp_path))
    assert found.usage.disk_tokens == 16


@pytest.mark.parametrize(("variant", "k"), [("llama", "f16"), ("llama", "int4"), ("gemma3", "f16")])
def test_branches_share_the_rows_of_what_they_have_in_common(tmp_path: Path, variant: str, k: str) -> None:
    """In memory, where another branch computes only what is new; and on disk, where each page is there once."""
    engine = engine_of(variant, k)
    chat = Chat(engine, tmp_path)
    chat.turns(8)
    trunk, grown = list(chat.tokens), []
    for seed in (1, 2, 3):  # as /branch does: the tokens of the branch, in the same sequence
        chat.tokens, chat.elsewhere = list(trunk), grown
        end = chat.say([7 + seed, 8, 9])
        assert end.usage.cache_read_tokens >= len(trunk) // 16 * 16 - (16 if k == "int4" else 4)
        chat.turns(3, seed)
        chat.caches.save(chat.sequence)
        grown.append(list(chat.tokens))
    chat.close()
    counts: dict[tuple[int, int], int] = {}
    for path in files_in(tmp_path):
        with PromptCacheFile(path) as file:
            for arena, number in file.contents.pages:
                end_of_page = (number + 1) * 16  # a file may end inside a page, which the next one has whole
                if end_of_page <= min(len(trunk), file.contents.end) and engine.layout.arenas[arena].kind == FULL:
                    counts[arena, number] = counts.get((arena, number), 0) + 1
    assert len(counts) >= len(trunk) // 16 and set(counts.values()) == {1}
    for tokens in grown:
        assert ask(engine, [*tokens, 5], store_in(tmp_path)).ids == ask(engine, [*tokens, 5], NOWHERE).ids


def test_a_damaged_file_of_another_branch_is_told(tmp_path: Path) -> None:
    chat = Chat(evicting("llama", "f16"), tmp_path)
    chat.turns(3)
    branch = list(chat.tokens)
    chat.caches.save(chat.sequence)
    chat.caches._wait()
    damaged = files_in(tmp_path)[0]
    damaged.write_bytes(b"")
    chat.elsewhere = [branch]
    chat.caches.save(chat.sequence)
    chat.say([5, 6, 7])
    chat.close()
    assert [str(damaged) in line and line.endswith("it was removed") for line in chat.told.lines].count(True) == 1


def test_chats_do_not_rely_on_windows_of_other_chats(tmp_path: Path) -> None:
    engine, common = evicting("llama", "f16"), PROMPT[:90]
    first = Chat(engine, tmp_path, "ann")
    first.say(common)
    first.close()
    second = Chat(engine, tmp_path, "bob")
    assert second.say([*common, 5]).usage.disk_tokens == 90
    tokens = second.tokens
    second.close()
    first = Chat(engine, tmp_path, "ann", common)
    first.turns(30)
    first.close()
    second = Chat(engine, tmp_path, "bob", tokens)
    assert second.say([7]).usage.disk_tokens >= 90
    second.close()


def test_a_long_message_is_kept_for_others(tmp_path: Path) -> None:
    engine, document = evicting("llama", "f16"), PROMPT[:120]
    chat = Chat(engine, tmp_path)
    chat.say(document)
    chat.turns(20)
    chat.close()
    assert sorted(owners(tmp_path), key=str)[0] is None
    assert ask(engine, [*document, 4, 5], store_in(tmp_path)).usage.disk_tokens == 120


@pytest.mark.slow
def test_a_chat_without_a_name_replaces_its_own_files(tmp_path: Path) -> None:
    engine = evicting("llama", "f16")
    for number in (1, 2):
        chat = Chat(engine, tmp_path, "")
        chat.turns(30, seed=number)
        chat.close(save=False)
        assert len(set(owners(tmp_path))) == number
    assert len(files_in(tmp_path)) < 10


def test_kills_while_a_file_is_replaced_leave_the_old_or_the_new(tmp_path: Path) -> None:
    """At every point of the writing."""
    old, new = list(range(3 * SIZE + 5)), list(range(5 * SIZE + 2))
    reached = 0
    for point in range(40):
        store = store_at(tmp_path / str(point))
        part = segment(store, old)
        first = store.add(part, blocks(part))
        if not killed_writer(tmp_path / str(point), new, 0, point, (first,)):
            break
        reached += 1
        found = store.find(old)
        found.close()
        assert set(found.valid.values()) >= {len(old)} and len(found.valid) >= 8
        for path in store.folder.glob("*.safetensors"):
            with PromptCacheFile(path) as file:
                for key in file.contents.pages:
                    file.copy(key)
    assert reached > 15 and not first.exists()
    found = store.find(new)
    found.close()
    assert set(found.valid.values()) == {len(new)}
