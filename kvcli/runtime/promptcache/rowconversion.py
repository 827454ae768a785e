"""Rows of a 16-bit (or 32-bit) cache as pages of another cache type: what is done with rows of f16, of the store or of
a named file, where int8 is asked for.

The rows themselves are those of the file; a run with the smaller type would have computed them over its own coarser
rows. So the result is near it, not equal to it.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping

from kvcli.codecs import CODECS
from kvcli.errors import CacheFileError, DoesNotFit, UsageError
from kvcli.kernels import HostBackend
from kvcli.runtime.cache.layout import KVLayout, PageKey
from kvcli.runtime.cache.pagerows import copies
from kvcli.runtime.cache.pool import PagePool
from kvcli.runtime.cache.sequence import Sequence
from kvcli.runtime.config import ModelConfig
from kvcli.runtime.model.rope import RopeTable
from kvcli.runtime.model.sealing import seal_step
from kvcli.runtime.promptcache.file import PromptCacheFile
from kvcli.runtime.promptcache.fingerprint import LAYOUT_FIELDS, layout_fields
from kvcli.runtime.promptcache.found import Found
from kvcli.runtime.promptcache.pagefiles import bases_of, basis_arrays, release, take_rows
from kvcli.runtime.promptcache.prefixpages import needed
from kvcli.runtime.promptcache.rowsettings import pair, types_of
from kvcli.runtime.promptcache.sameness import APART, VALUES

STEP = 256  # rows that are converted at a time


def source_layout(config: ModelConfig, target: KVLayout, file: PromptCacheFile) -> KVLayout:
    """The layout of a file that may be converted. Raises CacheFileError, which says why it may not be."""
    found = file.contents.identity
    types = [set(found.get(name, "").split()) for name in ("cache_type_k", "cache_type_v")]
    try:
        size = int(found.get("page_size", ""))
        source = KVLayout.build(config, types[0].pop(), types[1].pop(), size)
        source = source.apart() if found.get(VALUES) == APART else source
    except (KeyError, ValueError, UsageError):
        raise CacheFileError(f"{file.path}: its cache types make no sense") from None
    pairs = [(s, t) for a, b in zip(source.groups, target.groups, strict=True)
             for s, t in ((a.codec_k, b.codec_k), (a.codec_v, b.codec_v))]  # fmt: skip
    if types[0] or types[1] or any(s.sealed for s, _ in pairs) or _fields(layout_fields(source)) != _fields(found):
        raise _refused(file, "rows below 16 bits are not encoded twice")
    if source.joined != target.joined:
        raise _refused(file, "values that are keys, too, are stored once in one of them and apart in the other")
    if target.retention:
        raise _refused(file, "rows were evicted")
    if target.states:
        raise _refused(file, "layers with a state have one that was computed over rows of its own type")
    if any(t.bits > s.bits for s, t in pairs):
        raise _refused(file, "it would look more precise than it is")
    return source


def _fields(found: Mapping[str, str]) -> dict[str, str]:
    return {name: found.get(name, "") for name in LAYOUT_FIELDS}


def _refused(file: PromptCacheFile, why: str) -> CacheFileError:
    types = pair(types_of(file.contents.identity))
    return CacheFileError(f"{file.path}: its cache type {types} cannot become this run's: {why}")


def larger(config: ModelConfig, target: KVLayout) -> list[KVLayout]:
    """The layouts whose rows may become those of `target`: of 16 bits or more, and at least as many as it has, the
    smallest first. None where rows are evicted, or layers have a state."""
    if target.retention or target.states:
        return []
    types = [name for name, each in CODECS.items() if not each.sealed]
    pairs = sorted(itertools.product(types, types), key=lambda pair: sum(CODECS[name].bits for name in pair))
    found = (KVLayout.build(config, k, v, target.page_size) for k, v in pairs)
    return [layout for layout in found if _holds(layout, target)]


def _holds(source: KVLayout, target: KVLayout) -> bool:
    """Whether every type is the same or has more bits, and some have."""
    pairs = [(s, t) for a, b in zip(source.groups, target.groups, strict=True)
             for s, t in ((a.codec_k, b.codec_k), (a.codec_v, b.codec_v))]  # fmt: skip
    more = all(s == t or s.bits > t.bits for s, t in pairs) and any(s != t for s, t in pairs)
    return more and source.joined == target.joined


def named(source: KVLayout) -> str:
    """The cache types of a layout: 'f16', or 'f32/f16' for keys and values."""
    group = source.groups[0]
    return pair((group.codec_k.name, group.codec_v.name))


def move(converted: Sequence, seq: Sequence) -> int:
    """Make `seq` have the rows of a converted sequence, or as many as can be gone on from; how many. Raises DoesNotFit,
    with nothing changed."""
    pool, length, held = seq.pool, converted.rewindable(converted.length), converted.numbered()
    pages: dict[PageKey, int] = {}
    try:
        for key in needed(pool.layout, length):
            pages[key] = pool.take(key[0])
            pool.page(key[0], pages[key]).copy_(converted.pool.page(key[0], held[key]))
    except DoesNotFit:
        release(pool, pages)
        raise
    bases = bases_of(basis_arrays(converted.bases), pool.layout, length, pool.device)
    seq.adopt(converted.tokens[:length], pages, bases)
    release(pool, pages)
    return length


def blocked(source: KVLayout, target: KVLayout, length: int) -> str:
    """Why `length` rows cannot be converted; "" = they can."""
    if any(b.sealed and a.first_page(length) for a, b in zip(source.groups, target.groups, strict=True)):
        return "the first rows of its sliding windows are gone, which fix the scales of this cache type"
    return ""


def convert(
    found: Found,
    tokens: list[int],
    source: KVLayout,
    config: ModelConfig,
    target: KVLayout,
    rope_of: Callable[[int], RopeTable | None],
    ops: HostBackend,
) -> Sequence:
    """A sequence in a pool of its own, on the CPU, with the rows of `tokens`, which files have in the layout `source`.

    Raises CacheFileError where one is damaged.
    """
    length = len(tokens)
    theirs, ours = Sequence(PagePool(source)), Sequence(PagePool(target))
    take_rows(theirs, found, tokens)
    views = theirs.views()
    own = [(i, slot) for i, slot in enumerate(source.slots) if slot and config.layers[i].shares_kv_with is None]
    for start in range(0, length, STEP):
        end = min(length, start + STEP)
        into = ours.reserve(tokens[start:end])
        for layer, (group, index) in own:
            kv = into.kv(layer)
            for at, k, v in copies(views[group][index], start, end):
                if kv.rotated[0]:
                    ops.rotate_(k)
                if kv.rotated[1]:
                    ops.rotate_(v)
                ops.store(k, v, kv, at)
            seal_step(ops, rope_of(layer), kv, start, end)
        ours.commit(tokens[start:end])
    return ours
