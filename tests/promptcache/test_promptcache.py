"""Prompt-cache files: what is read is what was written, or nothing is."""

from __future__ import annotations

import hashlib
import json
import os
import random
import re
import struct
import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path
from unittest import mock

import promptfiles
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from promptfiles import IDENTITY, SIZE, blocks, make
from promptpages import fill

from kvcli.errors import CacheFileError
from kvcli.runtime.cache import layout as layouts
from kvcli.runtime.cache.layout import KVLayout
from kvcli.runtime.cache.pool import PagePool
from kvcli.runtime.cache.sequence import Sequence
from kvcli.runtime.config import FULL, SLIDING, LayerConfig, ModelConfig
from kvcli.runtime.promptcache import pagefiles
from kvcli.runtime.promptcache.file import ALIGN, Contents, PromptCacheFile, is_prompt_cache, write
from kvcli.runtime.promptcache.found import Found
from kvcli.runtime.promptcache.held import HeldPages, WindowTrail
from kvcli.runtime.promptcache.prefixpages import common_length, longest, needed

TYPES = st.sampled_from(("f32", "f16", "bf16", "fp8", "int8", "int6", "int4"))
LAYERS = st.lists(
    st.sampled_from([(FULL, 1, 0), (FULL, 2, 0), (SLIDING, 1, 21), (SLIDING, 1, 60)]), min_size=1, max_size=4
)


def _layout(layers: list[tuple[str, int, int]], k: str, v: str, tail: int, sinks: int) -> KVLayout:
    shapes = tuple(LayerConfig(kind, heads, 16, 16, window) for kind, heads, window in layers)
    config = ModelConfig("llama", "tiny", 10, 2, 2, 2, 4096, 1e-5, shapes, 1.0)
    with mock.patch.object(layouts, "SMALL_WINDOW", 30):  # the windows of 60 are sealed
        return KVLayout.build(config, k, v, SIZE, sinks=sinks, tail=tail)


def _same(a: Sequence, b: Sequence) -> None:
    assert a.tokens == b.tokens
    mine, theirs = a.numbered(), b.numbered()
    for key in needed(a.pool.layout, a.length):
        assert torch.equal(a.pool.page(key[0], mine[key]), b.pool.page(key[0], theirs[key])), key
    assert b.length == 0 or set(theirs) == set(needed(a.pool.layout, a.length))
    for group, (x, y) in enumerate(zip(a.bases, b.bases, strict=True)):
        if a.length >= SIZE and a.pool.layout.groups[group].sealed:
            for p, q in zip(x, y, strict=True):
                assert p.known and q.known
                for name in ("centre", "scale_k", "scale_v"):
                    m, n = getattr(p, name), getattr(q, name)
                    assert (m is None and n is None) or torch.equal(m, n)


def test_common_length() -> None:
    assert [common_length([1, 2, 3], other) for other in ([], [1, 2], [1, 3, 3], [1, 2, 3, 4])] == [0, 2, 1, 3]


@pytest.mark.slow
@settings(max_examples=40)
@given(
    layers=LAYERS, k=TYPES, v=TYPES, tail=st.integers(0, 1), sinks=st.integers(1, 2), seed=st.integers(0, 1 << 30),
    cuts=st.lists(st.integers(1, 70), min_size=1, max_size=5), share=st.floats(0, 1),
)  # fmt: skip
def test_a_loaded_sequence_is_the_saved_one(layers, k, v, tail, sinks, seed, cuts, share) -> None:
    """Whole, after a fork went on, and cut to any prefix that can be gone on from."""
    layout, generator = _layout(layers, k, v, tail, sinks), torch.Generator().manual_seed(seed)
    pool = PagePool(layout)
    seq, trail, token = Sequence(pool), WindowTrail(layout, sum(cuts)), iter(range(1, 10_000))
    for n in cuts:
        fill(seq, [next(token) for _ in range(n)], generator)
        trail.follow(seq)
    seq.drop()
    twin = seq.fork()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "x"
        keys, sizes = sorted({**trail.copies, **seq.numbered()}), [g.page_bytes for g in layout.arenas]
        held = HeldPages(seq, trail.copies, keys)
        other_twin = seq.fork()
        fill(other_twin, [next(token) for _ in range(20)], generator)  # goes on before they are written
        c = Contents(IDENTITY, seq.tokens, keys, dict(enumerate(sizes)), pagefiles.basis_arrays(held.bases))
        write(path, c, map(held.buffer, keys))
        held.close()
        other_twin.close()
        fill(twin, [next(token) for _ in range(20)], generator)
        other = PagePool(layout)
        with PromptCacheFile(path, IDENTITY) as file:
            valid = dict.fromkeys(file.contents.pages, seq.length)
            assert longest(layout, seq.length, valid) == seq.length
            for length in (seq.length, longest(layout, int(share * seq.length), valid)):
                found = Found.in_file(file, length, layout.page_size)
                pages = pagefiles.load_pages(other, found.pieces(needed(layout, length)))
                loaded = Sequence(other)
                loaded.adopt(
                    seq.tokens[:length], pages, pagefiles.bases_of(file.contents.basis, layout, length, other.device)
                )
                for (arena, _), page in pages.items():
                    other.release(arena, page)
                other.check(loaded.holds())
                if length == seq.length:
                    _same(seq, loaded)
                assert loaded.tokens == seq.tokens[:length] and loaded.rewindable(length) == length
                fill(loaded, [7] * 40, generator)  # it can be gone on from
                loaded.close()
        other.check([])
        assert [other.used(a) for a in range(len(layout.arenas))] == [0] * len(layout.arenas)
    pool.check([*seq.holds(), *twin.holds()])


def test_other_tools_can_open_it(tmp_path: Path) -> None:
    from safetensors.numpy import load_file

    c = make(tmp_path / "x.safetensors", list(range(40)))
    found = load_file(tmp_path / "x.safetensors")
    assert found["tokens"].tolist() == list(range(40))
    assert found["arena1"].shape == (3, 5000) and found["arena1"][2].tobytes() == blocks(c)[5]
    header = (tmp_path / "x.safetensors").read_bytes()
    (length,) = struct.unpack("<Q", header[:8])
    entries = json.loads(header[8 : 8 + length])
    starts = [8 + length + entries[f"arena{a}"]["data_offsets"][0] for a in (0, 1)]
    assert [start % ALIGN for start in starts] == [0, 0]


def test_it_is_private_and_leaves_nothing_else(tmp_path: Path) -> None:
    os.umask(os.umask(0))
    make(tmp_path / "x", [1, 2, 3])
    assert os.stat(tmp_path / "x").st_mode & 0o777 == 0o600
    assert os.listdir(tmp_path) == ["x"]


def test_what_differs_is_named(tmp_path: Path) -> None:
    make(tmp_path / "x", list(range(40)))
    for changed, told in (
        ({"weights": "other"}, "the weights of another model or adapter"),
        ({"cache_type_k": "int4"}, "cache type f16/?, this run has int4/?"),
        ({"sums": "x"}, "other settings"),
    ):
        with pytest.raises(CacheFileError, match=re.escape(told)) as caught:
            PromptCacheFile(tmp_path / "x", {**IDENTITY, **changed})
        assert caught.value.foreign


def _read_all(path: Path) -> list[bytes]:
    with PromptCacheFile(path, IDENTITY) as file:
        found = []
        for key in file.contents.pages:
            memory = bytearray(file.contents.page_bytes[key[0]])
            file.read(key, memoryview(memory))
            found.append(bytes(memory))
        return found


def test_any_changed_byte_is_found(tmp_path: Path) -> None:
    """In the header, in each page, in what follows them. Bytes between pages, which nobody reads, may be anything."""
    path, generator = tmp_path / "x", random.Random(3)
    c = make(path, list(range(40)))
    whole = path.read_bytes()
    assert _read_all(path) == blocks(c)
    (length,) = struct.unpack("<Q", whole[:8])
    entries = json.loads(whole[8 : 8 + length])
    paddings = [range(*(8 + length + x for x in e["data_offsets"])) for n, e in entries.items() if n.startswith("padd")]
    places = [generator.randrange(len(whole)) for _ in range(300)]
    places += [8 + length + entries[f"arena{a}"]["data_offsets"][0] + n * size + 3
               for a, size in ((0, 64), (1, 5000)) for n in range(3)]  # fmt: skip
    for at in places:
        if any(at in padding for padding in paddings):
            continue
        path.write_bytes(whole[:at] + bytes([whole[at] ^ (1 << generator.randrange(8))]) + whole[at + 1 :])
        with pytest.raises(CacheFileError):
            _read_all(path)


def test_each_field_of_the_header_matters(tmp_path: Path) -> None:
    """Changed in a file whose lengths are right: it is refused whatever the field says."""
    path = tmp_path / "x"
    make(path, list(range(40)))
    whole = path.read_bytes()
    (length,) = struct.unpack("<Q", whole[:8])
    entries = json.loads(whole[8 : 8 + length])
    for name, value in entries["__metadata__"].items():
        for other in {"", value + " ", value[:-1] + "7"} - {value}:
            changed = {**entries, "__metadata__": {**entries["__metadata__"], name: other}}
            text = json.dumps(changed, separators=(",", ":")).encode()
            path.write_bytes(struct.pack("<Q", length) + text.ljust(length) + whole[8 + length :])
            with pytest.raises(CacheFileError):
                _read_all(path)


def test_a_cut_file_is_refused(tmp_path: Path) -> None:
    path, generator = tmp_path / "x", random.Random(4)
    make(path, list(range(40)))
    whole = path.read_bytes()
    for size in [0, 1, 8, len(whole) - 1, *(generator.randrange(len(whole)) for _ in range(50))]:
        path.write_bytes(whole[:size])
        with pytest.raises(CacheFileError):
            _read_all(path)
        assert is_prompt_cache(path) == (size == 0 or size >= 49)


def test_a_file_cut_while_it_is_read_is_an_error(tmp_path: Path) -> None:
    c = make(tmp_path / "x", list(range(40)))
    with PromptCacheFile(tmp_path / "x", IDENTITY) as file:
        os.truncate(tmp_path / "x", 9000)
        with pytest.raises(CacheFileError, match="cut off"):
            file.read(c.pages[-1], memoryview(bytearray(5000)))


def test_what_is_no_file_of_this_user_is_refused_at_once(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "folder").mkdir()
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    make(tmp_path / "theirs", [1])
    (tmp_path / "text").write_text("no cache of mine, but a letter")
    for name in ("fifo", "folder", "loop", "text", "missing"):
        with pytest.raises(CacheFileError) as caught:
            PromptCacheFile(tmp_path / name)
        assert "\n" not in caught.value.message and name in caught.value.message
        assert not is_prompt_cache(tmp_path / name)
    with mock.patch("os.geteuid", return_value=os.geteuid() + 1), pytest.raises(CacheFileError, match="another user"):
        PromptCacheFile(tmp_path / "theirs")


def test_pages_of_another_size_are_not_taken_for_ours(tmp_path: Path) -> None:
    layout = _layout([(FULL, 1, 0)], "f16", "f16", 1, 1)
    pool = PagePool(layout)
    make(tmp_path / "x", list(range(40)))
    with PromptCacheFile(tmp_path / "x") as file, pytest.raises(CacheFileError, match="another size"):
        pagefiles.load_pages(pool, Found.in_file(file, 16, 16).pieces([(0, 0)]))
    pool.check([])


def test_names_and_bytes_do_not_depend_on_the_process(tmp_path: Path) -> None:
    code = (
        "import sys; sys.path[:0] = sys.argv[1].split(':'); from pathlib import Path; import promptfiles\n"
        "from kvcli.runtime.promptcache.store import Limits, PromptStore; import hashlib\n"
        "path = Path(sys.argv[2]) / 'x'; c = promptfiles.make(path, list(range(100)))\n"
        "store = PromptStore(path.parent, promptfiles.IDENTITY, 16, Limits(1, 1), print)\n"
        "print(store.path_of(c).name, store.chain(c.tokens)[-1], hashlib.sha256(path.read_bytes()).hexdigest())"
    )
    found = set()
    for seed in ("0", "1"):
        folder = tmp_path / seed
        folder.mkdir()
        paths = f"{Path(promptfiles.__file__).parent}:{Path(layouts.__file__).parents[2]}"
        result = subprocess.run([sys.executable, "-c", code, paths, str(folder)], capture_output=True, text=True,
                                env={**os.environ, "PYTHONHASHSEED": seed})  # fmt: skip
        assert result.returncode == 0, result.stderr
        found.add(result.stdout)
    assert len(found) == 1 and len(found.pop().split()[1]) == 64


def test_a_failed_write_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "x"
    make(path, [1, 2, 3])
    before = hashlib.sha256(path.read_bytes()).digest()

    def fail(wanted: str, point: str) -> None:
        if point == wanted:
            raise OSError(28, "No space left on device")

    for wanted in ("opened", "header", "page", "written", "flushed"):
        with pytest.raises(OSError):
            make(path, list(range(40)), checkpoint=partial(fail, wanted))
        assert hashlib.sha256(path.read_bytes()).digest() == before
        assert os.listdir(tmp_path) == ["x"]


def test_a_short_write_of_a_page_is_refused(tmp_path: Path) -> None:
    c = promptfiles.contents(list(range(40)))
    with pytest.raises(ValueError, match="a page of"):
        write(tmp_path / "x", c, [b"abc"] * len(c.pages))
    assert os.listdir(tmp_path) == []
