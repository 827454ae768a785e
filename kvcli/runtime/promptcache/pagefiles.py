"""Between the pool and prompt-cache files: pages and bases to bytes and back, on whichever device the pool is."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import torch

from kvcli.errors import CacheFileError
from kvcli.kernels import Basis
from kvcli.runtime.cache.layout import Arena, GroupLayout, KVLayout, PageKey
from kvcli.runtime.cache.pagelist import Bases, Selected
from kvcli.runtime.cache.pool import PagePool
from kvcli.runtime.cache.sequence import Sequence
from kvcli.runtime.host.cores import usable_cpus
from kvcli.runtime.promptcache.file import PromptCacheFile, damaged
from kvcli.runtime.promptcache.found import Found, Piece, files_of
from kvcli.runtime.promptcache.prefixpages import needed

READERS = 4  # threads that read and check pages
_FIELDS = ("centre", "scale_k", "scale_v")


def host_bytes(page: torch.Tensor) -> memoryview:
    """The bytes of a page: its own memory on a CPU, a copy from a GPU."""
    return memoryview(page.cpu().flatten().numpy().data)


def take_rows(seq: Sequence, found: Found, tokens: list[int]) -> list[PromptCacheFile]:
    """Make `seq` have the rows of `tokens` that files have; the files that were read. Raises CacheFileError and
    DoesNotFit, with nothing changed."""
    pool, length = seq.pool, len(tokens)
    pieces = found.pieces(needed(pool.layout, length))
    files = files_of(pieces)
    basis = next((file.contents.basis for file in files if file.contents.basis), {})
    bases = bases_of(basis, pool.layout, length, pool.device)
    pages = load_pages(pool, pieces)
    seq.adopt(tokens, pages, bases)
    release(pool, pages)
    return files


def take_selected(seq: Sequence, file: PromptCacheFile) -> int:
    """Make the empty `seq` have the rows that were selected of a prompt, as the file has them; how many tokens that is.
    Raises CacheFileError and DoesNotFit, with nothing changed."""
    pool, contents = seq.pool, file.contents
    size, length = pool.layout.page_size, len(contents.tokens)
    selected = {}
    for name, array in contents.basis.items():
        kind, *numbers = name.split(".")
        if kind != "selected":
            continue
        (group, below), layout = map(int, numbers), pool.layout.groups
        if not 0 <= group < len(layout) or not 0 < array.shape[-1] < below <= length or below % size:
            raise damaged(file.path, "its selected rows make no sense")
        if array.shape[:-1] != (len(layout[group].layers), layout[group].kv_heads):
            raise damaged(file.path, "its selected rows are those of another model")
        selected[group] = Selected(array.shape[-1], below, torch.from_numpy(array.astype(np.int32)).to(pool.device))
    bases = bases_of(contents.basis, pool.layout, length, pool.device)
    pages = load_pages(pool, {key: [Piece(file, key, size, 0, size, 0)] for key in contents.pages})
    seq.adopt(contents.tokens, pages, bases, selected=selected)
    if seq.selector:
        seq.selector.restored(length)
    release(pool, pages)
    return length


def selected_arrays(seq: Sequence) -> dict[str, np.ndarray]:
    """What a file keeps of the choice of rows: positions, int32 [layers, kv_heads, rows], named by group, and by the
    position of the first row that was not asked about."""
    return {f"selected.{g}.{rows.below}": rows.positions.cpu().numpy() for g, rows in seq.selected.items()}


def release(pool: PagePool, pages: Mapping[PageKey, int]) -> None:
    """Let go of these pages."""
    for (arena, _), page in pages.items():
        pool.release(arena, page)


def load_pages(pool: PagePool, wanted: Mapping[PageKey, list[Piece]]) -> dict[PageKey, int]:
    """New pages with the contents that files have for them; the caller releases them.

    All are checked before any is returned. Raises CacheFileError or DoesNotFit, with nothing taken.
    """
    taken: dict[PageKey, int] = {}
    try:
        for key in wanted:
            taken[key] = pool.take(key[0])
        with ThreadPoolExecutor(min(READERS, len(usable_cpus()))) as threads:
            list(threads.map(lambda key: _load(wanted[key], pool, key, taken[key]), taken))
    except BaseException:
        release(pool, taken)
        raise
    return taken


def _load(pieces: list[Piece], pool: PagePool, key: PageKey, taken: int) -> None:
    page, arena = pool.page(key[0], taken), pool.layout.arenas[key[0]]
    if page.device.type == "cpu" and page.is_contiguous():
        _read(pieces, arena, host_bytes(page))
        return
    with torch.inference_mode():  # of this thread
        staging = torch.empty(page.shape, dtype=torch.uint8, pin_memory=page.device.type == "cuda")
        _read(pieces, arena, host_bytes(staging))
        page.copy_(staging)


def read_page(pieces: list[Piece], arena: Arena) -> memoryview:
    """A page of an arena in memory of its own. Raises CacheFileError."""
    memory = memoryview(bytearray(arena.page_bytes))
    _read(pieces, arena, memory)
    return memory


def _read(pieces: list[Piece], arena: Arena, into: memoryview) -> None:
    """The rows of one page, from pages of files that may have another size, or a state. Raises CacheFileError."""
    size = arena.page_size
    for piece in pieces:
        other = piece.size != size and isinstance(arena, GroupLayout)
        theirs = replace(arena, page_size=piece.size) if other else arena
        if piece.file.contents.page_bytes[piece.key[0]] != theirs.page_bytes:
            raise damaged(piece.file.path, "its pages have another size")
        if not other:
            piece.file.read(piece.key, into)
        else:
            assert isinstance(theirs, GroupLayout) and isinstance(arena, GroupLayout)
            cut(piece.file.copy(piece.key), theirs, piece.lo, piece.hi, into, arena, piece.at)


def cut(
    source: memoryview, theirs: GroupLayout, lo: int, hi: int, into: memoryview, ours: GroupLayout, at: int
) -> None:
    """Copy rows [lo, hi) of a page to those from `at` on of a page of another size, of one type of 16 bits or more."""
    for layout in (theirs, ours):
        assert not layout.record.k_scales and not layout.record.v_scales, "their scales would have to move, too"
    records = len(ours.layers) * ours.kv_heads
    a, b = (np.frombuffer(memory, np.uint8).reshape(records, -1) for memory in (source, into))
    for begins, ends, row in (
        (0, 0, ours.record.k_row_bytes),
        (theirs.record.v_offset, ours.record.v_offset, ours.record.v_row_bytes),
    ):
        b[:, ends + at * row : ends + (at + hi - lo) * row] = a[:, begins + lo * row : begins + hi * row]


def basis_arrays(bases: Bases) -> dict[str, np.ndarray]:
    """What a file keeps of the bases: float32 arrays, named by group, layer of the group and field."""
    found = {}
    for g, layers in enumerate(bases):
        for i, basis in enumerate(layers):
            for name in _FIELDS:
                value = getattr(basis, name)
                if basis.known and value is not None:
                    found[f"basis.{g}.{i}.{name}"] = value.cpu().numpy()
    return found


def bases_of(arrays: Mapping[str, np.ndarray], layout: KVLayout, length: int, device: torch.device) -> Bases:
    """The bases of a sequence of `length` rows. Raises CacheFileError where the file lacks one."""
    if length < layout.page_size:
        return tuple(tuple(Basis() for _ in group.layers) for group in layout.groups)
    found = []
    for g, group in enumerate(layout.groups):
        wanted = {
            "centre": (group.kv_heads, group.dim_k) if group.codec_k.centred else None,
            "scale_k": (group.kv_heads,) if group.codec_k.static_bytes else None,
            "scale_v": (group.kv_heads,) if group.codec_v.static_bytes else None,
        }
        layers = []
        for i in range(len(group.layers)):
            values = {}
            for name, shape in wanted.items():
                array = arrays.get(f"basis.{g}.{i}.{name}")
                if shape is not None and (array is None or array.shape != shape):
                    raise CacheFileError(f"the file lacks the {name.replace('_', ' ')} of layer {group.layers[i]}")
                values[name] = None if shape is None or array is None else torch.from_numpy(array.copy()).to(device)
            layers.append(Basis(**values, known=group.sealed))
        found.append(tuple(layers))
    return tuple(found)
