"""The mass that rows get of single tokens, in their graphs: see `kernels.Watch`, whose numbers these are.

Attention leaves the scores of a token's query (`Noted`), which are few beside what it read. When its partial results
are there, `note` makes probabilities of them and adds these up, beside the kernel that merges the results.
"""

# mypy: disable-error-code="no-untyped-def,misc"

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kvcli.kernels.gpu.attention import Partials
from kvcli.kernels.gpu.language import SERIAL, wait_at_end, wait_for_previous
from kvcli.kernels.gpu.launching import launch
from kvcli.kernels.gpu.mass import log_weights
from kvcli.kernels.gpu.pages import DevicePages
from kvcli.kernels.gpu.shares import NOTHING, WHOLE
from kvcli.kernels.gpu.span import EDGE, edge_bound
from kvcli.kernels.gpu.tiles import bound, launch_options
from kvcli.kernels.paged import MASS_UNIT

UNIT = tl.constexpr(MASS_UNIT)
_NOTHING, _WHOLE = tl.constexpr(NOTHING), tl.constexpr(WHOLE)
WARPS = 2


@triton.jit(do_not_specialize=["edges_from", "room", "layer"])
def _note(
    scores, tops, totals, sinks, position, work, edges, places, target, edges_from, room, layer,
    GROUP: tl.constexpr, PAD: tl.constexpr, MOST: tl.constexpr, SIZE: tl.constexpr, SINKS: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """One program: a KV head and what one program of attention read, page after page."""
    head, share, parts = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    start = tl.load(position).to(tl.int32)
    kind, lo, hi = tl.load(work + share * 4), tl.load(work + share * 4 + 2), tl.load(work + share * 4 + 3)
    base, pitch = tl.load(target), tl.load(target + 1)
    if (kind == _NOTHING) | (base == 0):
        hi = lo
    mass = base.to(tl.pointer_type(tl.int64)) + (layer * tl.num_programs(0) + head) * pitch
    g = tl.arange(0, PAD)
    there = g < GROUP
    r = tl.arange(0, SIZE)
    rows = scores + (head * GROUP + g)[:, None].to(tl.int64) * room
    wait_for_previous(PDL)
    heads = head * GROUP + g
    norm = log_weights(tops, totals, sinks, heads, heads * parts, parts, there, MOST, SINKS)
    for i in tl.range(bound(lo), bound(hi)):
        if kind == _WHOLE:
            place = tl.load(places + i)
            seen = r < SIZE
            at = i * SIZE
        else:
            place = tl.load(edges + i * EDGE + 1)
            end = tl.minimum(edge_bound(edges, i, 3, 1), start + 1 - place.to(tl.int32))
            seen = (r >= edge_bound(edges, i, 2, 1)) & (r < end)
            at = edges_from + i * SIZE
        s = tl.load(rows + (at + r)[None, :], mask=there[:, None] & seen[None, :], other=float("-inf"))
        got = tl.sum((tl.exp2(s - norm[:, None]) * UNIT + 0.5).to(tl.int32), 0)
        to = mass + place + r
        tl.store(to, tl.load(to, mask=seen, other=0) + got.to(tl.int64), mask=seen)
    wait_at_end(PDL)


def note(partials: Partials, pages: DevicePages, sinks: torch.Tensor | None = None, pdl: int = SERIAL) -> None:
    """Add what each row got of a token's query to where `pages.lists.noted` says. Where a row is seen, only one
    program adds to it."""
    lists, (_, heads, parts) = pages.lists, partials.tops.shape
    assert lists.noted is not None
    r, to = pages.record, lists.noted
    group = heads // r.kv_heads
    launch(_note, (r.kv_heads, parts))(
        to.scores, partials.tops, partials.totals, partials.tops if sinks is None else sinks, lists.position,
        lists.work, lists.edges, to.places, to.target, to.edges_from, to.scores.shape[1], pages.layer,
        group, triton.next_power_of_2(group), triton.next_power_of_2(parts), r.page_size, sinks is not None, pdl,
        **launch_options(pdl, WARPS),
    )  # fmt: skip
