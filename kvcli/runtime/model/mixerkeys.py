"""Which layers of a GGUF file keep a state, from its keys. No torch."""

from __future__ import annotations

from collections.abc import Callable

from kvcli.runtime.config import MAX_CONV, Mixer, ShortConv
from kvcli.runtime.formats.ggufkeys import Keys

MixerReader = Callable[[Keys, int], list[Mixer | None]]  # of so many layers; None = it has attention


def short_convs(keys: Keys, n_layers: int) -> list[Mixer | None]:
    """Short convolutions where layers have no heads of keys."""
    kernel = keys.integer("shortconv.l_cache", limit=MAX_CONV)
    heads = keys.each("attention.head_count_kv", n_layers, limit=4096, zero=True)
    return [None if n else ShortConv(kernel) for n in heads]
