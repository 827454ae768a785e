"""Paged attention: the plain-torch reference.

Rows are read entry by entry (`Entries`) and never expanded whole. A query's result depends on its position and on what
its entries hold, not on how many queries a call has: sums are the same bits in any order (sums.py), entries are visited
in the order of their positions and combined by a running softmax (arXiv 2205.14135), and one that a query does not see
changes nothing in its row.

Sealed pages hold k - c (c the mean, rotated like a key); q . c is added to the scores of such a page, so that all
scores are the true ones. Rotation (rotation.py) is the caller's: q, k and v come rotated, and the output is in the
basis of v. Turned entries are scored by a second query, which is the caller's too (`attend`).
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch

from kvcli.kernels.paged import CENTRE_ROWS, CHOICE_BLOCK, MASS_UNIT, Angles, PagedKV, Watch
from kvcli.kernels.reference.choosing import choose
from kvcli.kernels.reference.sums import dot, exp, mix, split, tanh, total


def attention(
    q: torch.Tensor,
    kv: PagedKV,
    start: int,
    window: int = 0,
    scale: float = 1.0,
    softcap: float = 0.0,
    angles: Angles | None = None,
    turned_q: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
    watch: Watch | None = None,
) -> torch.Tensor:
    """Causal attention of q [T, heads, dim_q] at positions start.. over the entries -> float32 [T, heads * dim_v].

    A query at position p sees what its entries show of rows (p - window, p], of [0, p] when window is 0, where it is
    not left out by `PagedKV.choice` (choosing.py). `turned_q`:
    like q, for turned entries; needed where `PagedKV.shift` is not 0. `softcap` c > 0 replaces a score s by
    c * tanh(s / c). `angles`: of `PagedKV.centres`. `sinks`: a logit of each head, float32 [heads], that takes part in
    the softmax and has no value (as in gpt-oss). `watch`: where probabilities are added up.
    """
    r, (n, heads) = kv.record, q.shape[:2]
    group = heads // r.kv_heads
    queries = [split(_by_head(x, r.kv_heads)) for x in (q, q if turned_q is None else turned_q)]
    position = start + torch.arange(n).repeat(group)  # [rows]
    read = None if kv.choice is None else choose(q, kv, start, scale)
    block = position // CHOICE_BLOCK - start // CHOICE_BLOCK
    top = q.new_full((r.kv_heads, group * n, 1), -torch.inf)
    weight = torch.zeros_like(top)
    acc = q.new_zeros(r.kv_heads, group * n, r.dim_v)
    noted: list[tuple[int, torch.Tensor]] = []  # scores, and the place of the entry's first slot
    for source, at in _in_order(kv):
        of = source.entries
        first, turned = int(of.first[at]), int(of.turned[at])
        lo = max(int(of.lo[at]), start - window + 1 - first if window else 0)
        hi = min(int(of.hi[at]), start + n - first)
        seen = _seen(position, source, at, window)[None]
        if read is not None and source is kv:
            seen = seen & read[:, block, at, None]
        if lo >= hi or not seen.any():
            continue
        keys = q.new_zeros(r.kv_heads, r.page_size, r.dim_k)
        values = q.new_zeros(r.kv_heads, r.page_size, r.dim_v)
        keys[:, lo:hi], values[:, lo:hi] = source.rows(of.memory[at], lo, hi)
        if r.joined:
            keys = torch.cat((keys, values), -1)
        scores = dot(queries[turned], keys)  # [kv_heads, rows, page_size]
        centre = source.centre(at, angles)
        if centre is not None:  # the same for CENTRE_ROWS rows
            of_centre = dot(queries[turned], centre[:, ::CENTRE_ROWS])
            scores = scores + of_centre.repeat_interleave(CENTRE_ROWS, 2)
        scores = scores * scale
        if softcap:
            scores = softcap * tanh(scores / softcap)
        scores = scores.masked_fill(~seen, -torch.inf)
        if watch is not None and watch.mass is not None and start + n > watch.since:
            noted.append((first, scores))
        new_top = torch.maximum(top, scores.amax(-1, keepdim=True))
        safe = new_top.masked_fill(new_top == -torch.inf, 0.0)
        decay, p = exp(top - safe), exp(scores - safe)
        weight = weight * decay + total(p)[..., None]
        acc = acc * decay + mix(p, values)
        top = new_top
    if sinks is not None:
        sink = sinks.view(r.kv_heads, group, 1).repeat_interleave(n, 1)  # [kv_heads, rows, 1]
        new_top = torch.maximum(top, sink)
        decay = exp(top - new_top)
        acc, weight = acc * decay, weight * decay + exp(sink - new_top)
        top = new_top
    if watch is not None and watch.mass is not None:
        counts = position >= watch.since
        for first, scores in noted:
            shares = (exp(scores - top) / weight)[:, counts]
            each = (shares * MASS_UNIT).round().long()  # [kv_heads, queries, page_size]
            some = watch.mass[:, first : first + r.page_size]
            got = (each.amax(1) if watch.largest and each.shape[1] else each.sum(1))[:, : some.shape[1]]
            some.copy_(torch.maximum(some, got) if watch.largest else some + got)
    out = (acc / weight).view(r.kv_heads, group, n, r.dim_v)
    return out.permute(2, 0, 1, 3).reshape(n, heads * r.dim_v)


def _in_order(kv: PagedKV) -> Iterator[tuple[PagedKV, int]]:
    """The entries of all classes by their positions: the class, and the entry's place in its list."""
    order = np.argsort(np.concatenate([of.entries.first for of in kv.classes]), kind="stable").tolist()
    places = [(of, at) for of in kv.classes for at in range(len(of.entries))]
    return (places[i] for i in order)


def _seen(position: torch.Tensor, kv: PagedKV, at: int, window: int) -> torch.Tensor:
    """Which slots of an entry queries at `position` [rows] see: bool [rows, page_size]."""
    of, slot, query = kv.entries, torch.arange(kv.record.page_size), position[:, None]
    row = int(of.first[at]) + slot
    seen = (slot >= int(of.lo[at])) & (slot < int(of.hi[at])) & (row <= query)
    seen &= (query >= int(of.since[at])) & (query < int(of.until[at]))
    return seen & (row > query - window) if window else seen


def _by_head(q: torch.Tensor, kv_heads: int) -> torch.Tensor:
    """q [n, heads, dim] -> [kv_heads, rows, dim]; rows: head of the group, then query."""
    n, heads, dim = q.shape
    return q.reshape(n, kv_heads, heads // kv_heads, dim).permute(1, 2, 0, 3).flatten(1, 2)
