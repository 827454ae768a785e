"""`--prompt-cache FILE` on tiny models: when a file that the user names is read, written, converted or left alone."""

from __future__ import annotations

import os
from contextlib import closing, suppress
from dataclasses import replace
from pathlib import Path

import pytest
from engines import PROMPT, run
from promptfiles import IDENTITY, blocks, contents
from reusecases import FOUR, NOWHERE, Told, ask, engine_of, files_in, store_in

from kvcli.errors import CacheFileError
from kvcli.options import PromptCacheOptions
from kvcli.runtime.promptcache.file import PromptCacheFile
from kvcli.runtime.promptcache.userfile import UserFile


@pytest.fixture(autouse=True)
def own_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def _named(path: Path, **more: object) -> PromptCacheOptions:
    return PromptCacheOptions(file=path, **more)  # type: ignore[arg-type]


def _tokens(path: Path) -> list[int]:
    with PromptCacheFile(path) as file:
        return file.contents.tokens


@pytest.mark.slow
@pytest.mark.parametrize(("variant", "k"), [("llama", "f16"), ("gemma3", "int4")])
def test_a_file_is_made_used_extended_and_kept(tmp_path: Path, variant: str, k: str) -> None:
    engine, path = engine_of(variant, k), tmp_path / "x.safetensors"
    document, longer = PROMPT[:90], [*PROMPT[:90], *range(3, 20)]
    made = ask(engine, document, _named(path))
    assert (made.usage.disk_tokens, made.usage.cache_write_tokens) == (0, 90) and _tokens(path) == document
    more = ask(engine, longer, _named(path))
    assert more.usage.disk_tokens >= 80 and _tokens(path) == longer
    assert more.ids == ask(engine, longer, NOWHERE).ids
    before, told = path.stat().st_mtime_ns, Told()
    other = [*PROMPT[:90], 7, 7, 7]
    assert ask(engine, other, _named(path), told).usage.disk_tokens >= 80
    assert ask(engine, document[:60], _named(path)).ids == ask(engine, document[:60], NOWHERE).ids
    assert path.stat().st_mtime_ns == before and told.lines == []
    elsewhere = [4, *PROMPT[:60]]
    miss = ask(engine, elsewhere, _named(path, read_only=True)).usage.cache_miss
    assert "shares the first 0 tokens" in miss and path.stat().st_mtime_ns == before
    told = Told()
    assert ask(engine, elsewhere, _named(path), told).usage.cache_write_tokens == 0
    assert "it is left as it is" in told.lines[0] and path.stat().st_mtime_ns == before
    whole = ask(engine, longer, _named(path, save_answer=True))
    assert _tokens(path) == [*longer, *whole.ids[:-1]]


def test_a_file_that_cannot_be_used_is_a_line_or_exit_6(tmp_path: Path) -> None:
    engine, path = engine_of("llama"), tmp_path / "x"
    cold = ask(engine, PROMPT, NOWHERE)
    ask(engine_of("gemma3"), PROMPT[:50], _named(path))
    with pytest.raises(CacheFileError, match="made with the weights of another model") as caught:
        ask(engine, PROMPT, _named(path, strict=True))
    assert caught.value.exit_code == 6
    told = Told()
    assert ask(engine, PROMPT, _named(path), told).ids == cold.ids
    assert len(told.lines) == 1 and "it is left as it is" in told.lines[0] and _tokens(path) == PROMPT[:50]
    path.unlink()
    ask(engine, PROMPT, _named(path))
    with pytest.raises(CacheFileError, match="f16"):  # a larger cache type is another setting
        ask(engine_of("llama", "int8"), PROMPT, _named(path, strict=True))
    whole = path.read_bytes()
    middle = len(whole) // 2
    flipped = whole[:middle] + bytes([whole[middle] ^ 16]) + whole[middle + 1 :]
    for broken in (flipped, whole[:5000], whole[:300] + b"x" + whole[301:], whole[:-1], b""):
        path.write_bytes(broken)
        told = Told()
        assert ask(engine, PROMPT, _named(path), told).ids == cold.ids
        assert len(told.lines) == 1 and "\n" not in told.lines[0] and _tokens(path) == PROMPT
        assert "it will be replaced" in told.lines[0]


def test_what_is_no_prompt_cache_is_left_alone(tmp_path: Path) -> None:
    engine = engine_of("llama")
    cold = ask(engine, PROMPT[:40], NOWHERE)
    letter, fifo, folder, loop = (tmp_path / n for n in ("letter", "fifo", "folder", "loop"))
    letter.write_text("Dear Ann, no cache this is, and none it shall become; it has more than eighty letters, too.")
    os.mkfifo(fifo)
    folder.mkdir()
    loop.symlink_to(loop)
    for path in (letter, fifo, folder, loop):
        told, before = Told(), os.lstat(path)
        assert ask(engine, PROMPT[:40], _named(path), told).ids == cold.ids
        after = os.lstat(path)
        assert (before.st_ino, before.st_mode, before.st_size) == (after.st_ino, after.st_mode, after.st_size)
        assert len(told.lines) == 1 and "left as it is" in told.lines[0]
    told = Told()
    assert ask(engine, PROMPT[:40], _named(tmp_path / "none" / "x"), told).ids == cold.ids
    assert len(told.lines) == 1 and "was not written: No such file" in told.lines[0]


@pytest.mark.parametrize("variant", ["llama", "gemma3"])
@pytest.mark.parametrize(("k", "page"), [("int8", 16), ("int4", 32), ("fp8", 16)])
def test_sixteen_bits_become_fewer_and_say_so(tmp_path: Path, variant: str, k: str, page: int) -> None:
    """Rows are near those of a cold run with that type; the file stays what it is, and nothing gets into the store."""
    source, engine, path = engine_of(variant, "f16"), engine_of(variant, k, page=page), tmp_path / "x"
    ask(source, PROMPT, _named(path))
    before, told = path.read_bytes(), Told()
    options = replace(store_in(tmp_path), file=path)
    with closing(engine.prompt_caches(options, told)) as caches:
        seq, cold = engine.new_sequence(), engine.new_sequence()
        end = run(engine, seq, [*PROMPT, 8, 9], FOUR, caches=caches)
        assert end.usage.disk_tokens >= len(PROMPT) // page * page
        assert any("converted from f16" in line for line in told.lines)
        expected = engine.logits(engine.forward(cold, [*seq.tokens, 3])[-1:])
        logits = engine.logits(engine.forward(seq, [3]))
        spread = float(expected.std())
        assert float((logits - expected).abs().max()) < 0.8 * spread
        seq.close()
        cold.close()
    assert path.read_bytes() == before and files_in(tmp_path) == []


@pytest.mark.parametrize(("have", "want"), [("int8", "f16"), ("int8", "int4"), ("f16", "f32"), ("int4", "int8")])
def test_fewer_bits_do_not_become_more(tmp_path: Path, have: str, want: str) -> None:
    path, told = tmp_path / "x", Told()
    ask(engine_of("llama", have), PROMPT, _named(path))
    before = path.read_bytes()
    engine = engine_of("llama", want)
    end = ask(engine, PROMPT, _named(path), told)
    assert end.usage.disk_tokens == 0 and end.ids == ask(engine, PROMPT, NOWHERE).ids
    assert len(told.lines) == 1 and f"its cache type {have} cannot become this run's" in told.lines[0]
    assert path.read_bytes() == before


def _opened(path: Path, **more: object) -> UserFile:
    file = UserFile(_named(path, **more))
    with suppress(FileNotFoundError):
        file.open(IDENTITY).close()
    return file


def _write(file: UserFile, tokens: list[int]) -> None:
    part = contents(tokens)
    file.write(part, iter(blocks(part)))


def test_what_another_process_makes_meanwhile_is_not_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, tokens, other = tmp_path / "x", list(range(40)), [7] * 50
    one, two, forced = _opened(path), _opened(path), _opened(path, replace=True)
    _write(one, tokens)
    with pytest.raises(CacheFileError, match="another process has put other rows there"):
        _write(two, other)
    assert _tokens(path) == tokens
    _write(two, tokens[:30])  # is all there
    assert _tokens(path) == tokens
    three = _opened(path)
    _write(one, [*tokens, 1])
    with pytest.raises(CacheFileError, match="another process has put other rows there"):
        _write(three, [*tokens, 2])
    assert _tokens(path) == [*tokens, 1]
    _write(forced, other)
    assert _tokens(path) == other and [p.name for p in tmp_path.iterdir()] == ["x"]

    def no_links(*_: object) -> None:
        raise PermissionError

    monkeypatch.setattr(os, "link", no_links)
    _write(_opened(tmp_path / "y"), tokens)
    assert _tokens(tmp_path / "y") == tokens
