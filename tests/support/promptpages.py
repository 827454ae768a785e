"""Sequences whose pages hold random bytes, as if a model had filled them."""

from __future__ import annotations

import torch

from kvcli.kernels import Basis
from kvcli.runtime.cache.layout import KVLayout
from kvcli.runtime.cache.pagelist import Bases
from kvcli.runtime.cache.sequence import Sequence


def known_bases(layout: KVLayout, seed: int) -> Bases:
    """Bases as a first page fixes them, with random values."""
    g = torch.Generator().manual_seed(seed)
    groups = []
    for group in layout.groups:
        k, v, heads = group.codec_k, group.codec_v, group.kv_heads
        groups.append(
            tuple(
                Basis(
                    torch.rand(heads, group.dim_k, generator=g) if k.centred else None,
                    torch.rand(heads, generator=g) if k.static_bytes else None,
                    torch.rand(heads, generator=g) if v.static_bytes else None,
                    group.sealed,
                )
                for _ in group.layers
            )
        )
    return tuple(groups)


def fill(seq: Sequence, tokens: list[int], generator: torch.Generator) -> None:
    """Append rows: the pages they go into get random bytes, as if they had been computed and sealed."""
    before = seq.numbered()
    first = seq.length < seq.pool.layout.page_size <= seq.length + len(tokens)
    seq.reserve(tokens)
    for key, page in seq.numbered().items():
        if before.get(key) != page:
            memory = seq.pool.page(key[0], page)
            memory.copy_(torch.randint(0, 256, memory.shape, dtype=torch.uint8, generator=generator))
    if first:
        bases = known_bases(seq.pool.layout, int(torch.randint(1 << 30, (1,), generator=generator)))
        for mine, theirs in zip(seq.bases, bases, strict=True):
            for basis, known in zip(mine, theirs, strict=True):
                vars(basis).update(vars(known))
    seq.commit(tokens)
