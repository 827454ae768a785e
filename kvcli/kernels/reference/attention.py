"""Paged attention: the plain-torch reference.

Rows are read page by page and never expanded whole. A query's result depends on its position and on what the pages
hold, not on how many queries a call has: sums are the same bits in any order (sums.py), pages are visited in order and
combined by a running softmax (arXiv 2205.14135), and a page that a query cannot see changes nothing in its row.

Sealed pages hold k - c (c the mean, rotated like a key); q . c is added to the scores of such a page, so that all
scores are the true ones. Rotation (rotation.py) is the caller's: q, k and v come rotated, and the output is in the
basis of v.

Where rows are evicted (`PagedKV.retained`), the first rows are scored by a second query, at the position that it has
inside the cache (arXiv 2309.17453): keys stay as they are, and so does everything that is said above.
"""

from __future__ import annotations

from itertools import pairwise

import torch

from kvcli.kernels.paged import CENTRE_ROWS, Angles, PagedKV
from kvcli.kernels.reference.sums import dot, exp, mix, split, tanh, total


def attention(
    q: torch.Tensor,
    kv: PagedKV,
    start: int,
    window: int = 0,
    scale: float = 1.0,
    softcap: float = 0.0,
    angles: Angles | None = None,
    sink_q: torch.Tensor | None = None,
) -> torch.Tensor:
    """Causal attention of q [T, heads, dim_k] at positions start.. over the pages -> float32 [T, heads * dim_v].

    A query at position p sees rows (p - window, p], all of [0, p] when window is 0, or what `PagedKV.oldest` says.
    `sink_q`: like q, with RoPE at p - gap (`PagedKV.gaps`); needed where some gap is not 0. `softcap` c > 0 replaces a
    score s by c * tanh(s / c). `angles`: see `store.seal`.
    """
    if sink_q is None:
        sink_q = q
    size, cuts = kv.record.page_size, [0]
    if kv.open is not None:  # queries of one page at a time: they read the same pages open
        cuts += range(size - start % size, q.shape[0], size)
    cuts.append(q.shape[0])
    parts = [_attend(q[a:b], sink_q[a:b], kv, start + a, window, scale, softcap, angles) for a, b in pairwise(cuts)]
    return torch.cat(parts).flatten(1)


def _by_head(q: torch.Tensor, kv_heads: int) -> torch.Tensor:
    """q [n, heads, dim] -> [kv_heads, rows, dim]; rows: head of the group, then query."""
    n, heads, dim = q.shape
    return q.reshape(n, kv_heads, heads // kv_heads, dim).permute(1, 2, 0, 3).flatten(1, 2)


def _attend(
    q: torch.Tensor, sink_q: torch.Tensor, kv: PagedKV, start: int, window: int, scale: float, softcap: float,
    angles: Angles | None,
) -> torch.Tensor:  # fmt: skip
    r = kv.record
    n, heads = q.shape[0], q.shape[1]
    group = heads // r.kv_heads
    queries, sink_queries = (split(_by_head(x, r.kv_heads)) for x in (q, sink_q))
    position = start + torch.arange(n).repeat(group)  # [rows]
    since = torch.from_numpy(kv.oldest(position.numpy()))  # [rows]
    top = q.new_full((r.kv_heads, group * n, 1), -torch.inf)
    weight = torch.zeros_like(top)
    acc = q.new_zeros(r.kv_heads, group * n, r.dim_v)
    oldest = max(0, start - window + 1) if window else int(since[0])
    front = min(-(-kv.keep // r.page_size), oldest // r.page_size)
    for page in (*range(front), *range(oldest // r.page_size, (start + n - 1) // r.page_size + 1)):
        base = page * r.page_size
        lo, hi = max(oldest - base, 0) if page >= front else 0, min(start + n - base, r.page_size)
        seeing = sink_queries if base < kv.keep else queries  # the same ones where there is no gap
        source = kv.view(page, start // r.page_size)
        keys = q.new_zeros(r.kv_heads, r.page_size, r.dim_k)
        values = q.new_zeros(r.kv_heads, r.page_size, r.dim_v)
        keys[:, lo:hi], values[:, lo:hi] = source.rows(page, lo, hi)
        scores = dot(seeing, keys)  # [kv_heads, rows, page_size]
        centre = source.centre(page, angles)
        if centre is not None:  # the same for CENTRE_ROWS rows
            of_centre = dot(seeing, centre[:, ::CENTRE_ROWS])
            scores = scores + of_centre.repeat_interleave(CENTRE_ROWS, 2)
        scores = scores * scale
        if softcap:
            scores = softcap * tanh(scores / softcap)
        at = base + torch.arange(r.page_size)
        unseen = at[None, :] > position[:, None]
        if window:
            unseen |= at[None, :] <= position[:, None] - window
        unseen |= (at[None, :] >= kv.keep) & (at[None, :] < since[:, None])
        scores = scores.masked_fill(unseen[None], -torch.inf)
        new_top = torch.maximum(top, scores.amax(-1, keepdim=True))
        safe = new_top.masked_fill(new_top == -torch.inf, 0.0)
        decay, p = exp(top - safe), exp(scores - safe)
        weight = weight * decay + total(p)[..., None]
        acc = acc * decay + mix(p, values)
        top = new_top
    out = (acc / weight).view(r.kv_heads, group, n, r.dim_v)
    return out.permute(2, 0, 1, 3).reshape(n, heads, r.dim_v)
