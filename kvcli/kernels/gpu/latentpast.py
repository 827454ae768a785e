"""Attention of many queries over latents, un-absorbed (arXiv 2405.04434): latents become keys and values of each head,
some at a time, and the vendor's library has the rest.

Where rows are sealed, a query sees its own page in 16 bits and those before it as they are sealed. Then a step is cut
into runs: rows of one run are absorbed among themselves, and see the runs before it as they see the past.

A key of a head has fewer elements than a latent. Absorbed queries need no keys, which is worth it where they are few;
those of a long step are many for each latent.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from kvcli.kernels.attend import AttentionLayer, attend_latents
from kvcli.kernels.gpu import latentcombine, latentrows, latents
from kvcli.kernels.gpu.attention import LOG2_E, Partials
from kvcli.kernels.gpu.pages import BoundStretch, DevicePages
from kvcli.kernels.gpu.past import LEAST_ROWS, STAGED_ROWS, library, library_takes, stage
from kvcli.kernels.gpu.rows import Queries
from kvcli.kernels.gpu.tiles import LARGEST_HALF
from kvcli.kernels.paged import PagedKV, Stretch

CELLS = 16 * STAGED_ROWS  # keys of all heads that are there at a time
MANY = 2048  # queries of a step that is worth it for its own rows
OWN_ROWS = 512  # where not all of these see their rows alike, as many are absorbed among themselves
LEAST_QUERIES = 512
WORTH = 1 << 23  # queries times rows before them, likewise, whether absorbed ones have a graph or not
Weighed = tuple[torch.Tensor, torch.Tensor]  # results [T, heads, dim_v], natural logarithms of their weights [heads, T]


def least_pages(part: Stretch, layer: AttentionLayer, device: torch.device, dim_k: int, dim_v: int) -> int:
    """`Asked.past` of a part; 0 = its queries are absorbed. `dim_k`, `dim_v`: of keys and values of heads."""
    n, start = part.hi - part.lo, part.start
    many = n * start >= WORTH or n >= MANY
    plain = n >= LEAST_QUERIES and not layer.softcap and part.shift is None
    takes = many and plain and library_takes(device, dim_k, dim_v)
    return LEAST_ROWS // part.kv.record.page_size if takes else 0


def sees_all(kv: PagedKV, start: int, end: int) -> bool:
    """Whether queries [start, end) see every row before them, in pages that lie in their order, in 16 bits or more."""
    e, size = kv.entries, kv.record.page_size
    whole = (e.lo == 0) & (e.hi == size) & (e.since <= start) & (e.until >= end) & (e.turned == 0)
    return kv.open is None and bool(whole.all() and np.array_equal(e.first, np.arange(len(e)) * size))


class Unabsorbed:
    """The queries of a step in one layer: `turned` ones as `latentrows.prepare` has made them, and the `others`
    [T, heads, plain], as they were before they were absorbed. `keys`, `values`: see `GpuBackend.place_heads`."""

    def __init__(
        self, ops: Any, queries: Queries, others: torch.Tensor, pages: DevicePages, layer: AttentionLayer, start: int,
        keys: torch.Tensor, values: torch.Tensor,
    ) -> None:  # fmt: skip
        t, self.pages, self.heads = len(others), pages, layer.heads
        scaled = others * (layer.scale * LOG2_E)
        if layer.temperature is not None:
            growth, length, offset = layer.temperature
            chunks = (torch.arange(start + offset, start + offset + t, device=scaled.device) // length).float()
            scaled *= (1 + growth * torch.log1p(chunks))[:, None, None]
        limit = LARGEST_HALF.value
        self.q = torch.cat((queries.q[:t, :, : pages.record.dim_k], scaled.clamp_(-limit, limit).half()), 2)
        by_rank = [keys.mT.float(), values.float()]  # [heads, plain or dim_v, rank]
        for x in by_rank if pages.rotated[1] else ():
            ops.rotate_(x)
        self._keys, self._values = (x.half().flatten(0, 1).T for x in by_rank)

    def _rows(self, lo: int, hi: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values [rows, heads, dim] of entries [lo, hi) of the table."""
        turned, latents = stage(self.pages, lo, hi)
        latents = latents[:, 0]
        keys, values = ((latents @ x).unflatten(1, (self.heads, -1)) for x in (self._keys, self._values))
        return torch.cat((turned.expand(-1, self.heads, -1), keys), 2), values

    @property
    def _each(self) -> int:
        """Entries whose keys and values are there at a time."""
        return max(LEAST_ROWS, CELLS // self.heads) // self.pages.record.page_size

    def over(self, lo: int, hi: int) -> Weighed | None:
        """All queries over all rows of entries [lo, hi)."""
        found = None
        for first in range(lo, hi, self._each):
            found = merged(found, library(self.q, *self._rows(first, min(first + self._each, hi))))
        return found

    def over_runs(self, near: Weighed, start: int, own: int) -> torch.Tensor:
        """Results of all queries, of which `near` has those over what their runs do not see apart (`Asked.own`)."""
        pasts, size = self.pages.lists.pasts, self.pages.record.page_size
        lo, common, last = next((lo for lo, hi in pasts if hi), 0), pasts[0][1], pasts[-1][1]
        found = merged(self.over(lo, common), near)
        cuts = [0, *((start // own + n) * own - start for n in range(1, len(pasts))), len(self.q)]
        for first in range(max(lo, common), last, self._each):  # of the step's own
            keys, values = self._rows(first, min(first + self._each, last))
            parts = [
                library(self.q[a:b], keys[: (hi - first) * size], values[: (hi - first) * size])
                for a, b, (_, hi) in zip(cuts, cuts[1:], pasts, strict=False)
                if hi > first
            ]
            since = cuts[len(pasts) - len(parts)]
            some = torch.cat([x for x, _ in parts]), torch.cat([x for _, x in parts], 1)
            both, sums = merged((found[0][since:], found[1][:, since:]), some)
            found = torch.cat((found[0][:since], both)), torch.cat((found[1][:, :since], sums), 1)
        return found[0]

    def over_own(self, lo: int, hi: int, start: int) -> Weighed:
        """Each query over the rows from entry lo on up to its own; the first one is at position `start`."""
        t, before = len(self.q), start - lo * self.pages.record.page_size
        keys, values = (x[: before + t] for x in self._rows(lo, hi))
        q = torch.nn.functional.pad(self.q, (0, 0, 0, 0, before, 0))  # a square
        found, weights = library(q, keys, values, causal=True)
        return found[before:], weights[:, before:]


def merged(one: Weighed | None, other: Weighed | None) -> Weighed:
    """Results over some rows and over others as those over all."""
    if one is None or other is None:
        found = one or other
        assert found is not None
        return found
    (a, u), (b, v) = one, other
    sums = torch.logaddexp(u, v)
    of_a, of_b = ((x - sums).exp().T.unsqueeze(-1) for x in (u, v))
    return a * of_a + b * of_b, sums


def weights_of(partials: Partials) -> torch.Tensor:
    """Natural logarithms of the weights of merged partial results: float32 [heads, T]."""
    top = torch.where(partials.totals > 0, partials.tops, -1e30).amax(-1, keepdim=True)
    total = torch.where(partials.totals > 0, partials.totals * torch.exp2(partials.tops - top), 0.0).sum(-1)
    return ((top[..., 0] + total.log2()) * math.log(2.0)).T


def attend(
    ops: Any, pages_of: Callable[..., DevicePages], turned: torch.Tensor, others: torch.Tensor, row: torch.Tensor,
    parts: Sequence[Stretch] | Sequence[BoundStretch], layer: AttentionLayer, keys: torch.Tensor, values: torch.Tensor,
) -> torch.Tensor:  # fmt: skip
    """See `kernels.attend.attend_latents`. `pages_of`: see `GpuBackend`."""
    found, matrices = [], (layer, keys, values)
    dims = turned.shape[2] + others.shape[2], values.shape[1]
    for part in parts:
        rows = slice(part.lo, part.hi)
        given = turned[rows], others[rows], row[rows]
        past = 0 if isinstance(part, BoundStretch) else least_pages(part, layer, ops.device, *dims)
        if isinstance(part, BoundStretch) or not past:
            alone = part if isinstance(part, BoundStretch) else part._replace(lo=0, hi=part.hi - part.lo)
            found.append(attend_latents(ops, *given, [alone], *matrices))
        else:
            found.append(_attend_many(ops, pages_of, *given, part, *matrices, past))
    return found[0] if len(found) == 1 else torch.cat(found)


def _attend_many(
    ops: Any, pages_of: Callable[..., DevicePages], turned: torch.Tensor, others: torch.Tensor, row: torch.Tensor,
    part: Stretch, layer: AttentionLayer, keys: torch.Tensor, values: torch.Tensor, past: int,
) -> torch.Tensor:  # fmt: skip
    """The rows of one part. What they do not all see wholly is seen by absorbed queries, where it is sealed in part."""
    kv, start, end = part.kv, part.start, part.start + part.hi - part.lo
    alone = sees_all(kv, start, end)
    absorbed = others.new_zeros(*others.shape[:2], kv.record.dim_v) if alone else ops.by_head(others, keys)
    qkv = torch.cat((torch.cat((turned, absorbed), 2).flatten(1), row), 1)
    own = 0 if alone else OWN_ROWS // kv.record.page_size * kv.record.page_size
    asked = 1 if own else past, own
    queries = latentrows.prepare(qkv, layer, pages_of(part, layer, None, *asked))
    layer.seal(kv, start, end)
    pages = pages_of(part, layer, None, *asked)
    if not in_order(pages.lists.pasts):
        own, pages = 0, pages_of(part, layer, None, past)
    many = Unabsorbed(ops, queries, others, pages, layer, start, keys, values)
    if alone:
        before = start // kv.record.page_size
        return merged(many.over(0, before), many.over_own(before, len(kv.entries), start))[0].flatten(1)
    partials = latents.attend(queries, pages)
    found = latentcombine.combine(partials, pages).unflatten(1, (layer.heads, -1))
    near = ops.by_head(found, values), weights_of(partials)
    return many.over_runs(near, start, own or end).flatten(1)


def in_order(pasts: Sequence[tuple[int, int]]) -> bool:
    """Whether each run sees apart what those before it do, and maybe more."""
    some = [past for past in pasts if any(past)]
    return len({lo for lo, _ in some}) < 2 and sorted(pasts) == list(pasts)
