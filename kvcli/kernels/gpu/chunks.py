"""From chunk to chunk of 64 rows with the states of heads, on a GPU: what gated delta networks (deltachunks.py) and
Mamba-2 (mamba.py) have in common.

Of a chunk's rows, g are their decays added up, q and k their queries and keys, S is the state before them, and v is
what they add to it: out = e^g S'q + (q . k, decayed from row to row) v, and S = e^g(last) S + sum of e^(g(last) - g)
k v'. Products are of float32 numbers in three parts, as exact as sums in float32.
"""

# mypy: disable-error-code="no-untyped-def,misc"

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from kvcli.kernels.gpu.launching import launch
from kvcli.kernels.gpu.legs import CHUNK, Legs, ends_of, first_chunk, load_state, rows_of, state_at

STATE_COLUMNS = 32  # of a head's matrix that a program carries from chunk to chunk
COLUMNS = 32  # of queries, keys and values that are multiplied at a time
LEAST = 16  # the smallest side of a product


@dataclass(frozen=True)
class Heads:
    """How heads lie in mixed channels [T, channels]: queries [keys, dim_k] from column `queries` on, keys from column
    `first_keys` on; value head h reads those of h mod `keys` where they are `tiled`, else neighbours share some. Each
    has dim_v elements."""

    channels: int
    keys: int
    heads: int
    dim_k: int
    dim_v: int
    queries: int
    first_keys: int
    tiled: bool

    @property
    def padded(self) -> tuple[int, int]:
        """Powers of two that hold dim_k and dim_v, as products want them."""
        k, v = (max(LEAST, triton.next_power_of_2(n)) for n in (self.dim_k, self.dim_v))
        return k, v

    def sizes(self) -> Iterator[tuple[str, int]]:
        """Constants of the kernels."""
        pk, pv = self.padded
        yield from (("CHANNELS", self.channels), ("KEYS", self.keys), ("HEADS", self.heads), ("DK", self.dim_k))
        yield from (("DV", self.dim_v), ("PK", pk), ("PV", pv), ("Q_AT", self.queries), ("K_AT", self.first_keys))
        yield from (("TILED", self.tiled), ("SIZE", CHUNK), ("EACH", min(COLUMNS, pk, pv)))


@dataclass(frozen=True)
class Within:
    """What does not depend on states, of each chunk and head: `between` [chunk, heads, 64, 64], queries times keys,
    decayed; `of_rows` [.., dim_v], what rows add to the state; and less of_state [.., dim_k] times it, where that is
    not None; `factors` [.., 3, 64]: of queries, of keys, and of the state."""

    between: torch.Tensor
    of_rows: torch.Tensor
    of_state: torch.Tensor | None
    factors: torch.Tensor

    @classmethod
    def empty(cls, heads: Heads, chunks: int, delta: bool, device: torch.device) -> Within:
        pk, pv = heads.padded

        def of(n: int) -> torch.Tensor:
            return torch.empty(chunks, heads.heads, CHUNK, n, device=device)

        return cls(of(CHUNK), of(pv), of(pk) if delta else None, of(3))


@triton.jit
def softplus(x):
    """ln(1 + e^x); x itself where that is the same in float32."""
    return tl.where(x > 20.0, x, tl.log(1.0 + tl.exp(tl.minimum(x, 20.0))))


@triton.jit
def dot(a, b):
    return tl.dot(a, b, input_precision="tf32x3")


@triton.jit
def key_head_of(head, KEYS: tl.constexpr, HEADS: tl.constexpr, TILED: tl.constexpr):
    if TILED:
        return head % KEYS
    else:
        return head // (HEADS // KEYS)


@triton.jit
def store_factors(factors, cell, i, of_q, of_k, g, SIZE: tl.constexpr):
    """Of queries, of keys, and of the state; g: decays added up."""
    last = tl.sum(tl.where(i == SIZE - 1, g, 0.0), 0)
    tl.store(factors + cell * 3 + i, of_q * tl.exp(g))
    tl.store(factors + cell * 3 + SIZE + i, of_k * tl.exp(last - g))
    tl.store(factors + cell * 3 + 2 * SIZE + i, tl.exp(last) + tl.zeros_like(g))


@triton.jit
def store_between(between, cell, i, products, g, SIZE: tl.constexpr):
    """Queries times keys, of this row or before it, decayed."""
    decayed = products * tl.exp(tl.minimum(g[:, None] - g[None, :], 0.0))
    decayed = tl.where(i[:, None] >= i[None, :], decayed, 0.0)
    tl.store(between + cell * SIZE + i[:, None] * SIZE + i[None, :], decayed)


@triton.jit
def _across(mixed, between, of_rows, of_state, factors, table, offset, out, n, CHANNELS: tl.constexpr,
            KEYS: tl.constexpr, HEADS: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, PK: tl.constexpr,
            PV: tl.constexpr, Q_AT: tl.constexpr, K_AT: tl.constexpr, TILED: tl.constexpr, SIZE: tl.constexpr,
            EACH: tl.constexpr, WIDTH: tl.constexpr, DELTA: tl.constexpr):  # fmt: skip
    """Some columns of one head's matrix, chunk after chunk of each leg: out [T, HEADS * DV]. They stay where the
    leg leaves them, EACH rows in registers at a time: no other program knows of them."""
    head, column = tl.program_id(1), tl.program_id(0) * WIDTH
    key_head = key_head_of(head, KEYS, HEADS, TILED)
    i, e, j = tl.arange(0, SIZE), tl.arange(0, EACH), tl.arange(0, WIDTH)
    here = head.to(tl.int64) * (DK * DV) + column + e[:, None] * DV + j[None, :]
    in_v = column + j < DV
    row = i[:, None] * CHANNELS + e[None, :]
    for leg in range(n):
        lo, hi = rows_of(table, leg)
        source, target = ends_of(table, leg)
        if target != 0:
            state = state_at(target, offset) + here
            cell = (first_chunk(table, leg) * HEADS + head) * SIZE
            tl.debug_barrier()  # the state before it may be what the leg before it has left
            for a in range(0, PK, EACH):
                mask = (a + e < DK)[:, None] & in_v[None, :]
                tl.store(state + a * DV, load_state(source, offset, here + a * DV, mask), mask=mask)
            for first in range(lo, hi, SIZE):
                there = i < (hi - first).to(tl.int32)
                of_keys = mixed + first * CHANNELS + K_AT + key_head * DK
                of_queries = mixed + first * CHANNELS + Q_AT + key_head * DK
                change = tl.load(of_rows + cell * PV + column + i[:, None] * PV + j[None, :])
                y = tl.zeros([SIZE, WIDTH], tl.float32)
                tl.debug_barrier()
                for a in range(0, PK, EACH):
                    s = tl.load(state + a * DV, mask=(a + e < DK)[:, None] & in_v[None, :], other=0.0)
                    if DELTA:
                        change -= dot(tl.load(of_state + cell * PK + a + i[:, None] * PK + e[None, :]), s)
                    mask = there[:, None] & (a + e < DK)[None, :]
                    y += dot(tl.load(of_queries + a + row, mask=mask, other=0.0), s)
                y *= tl.load(factors + cell * 3 + i)[:, None]
                y += dot(tl.load(between + cell * SIZE + i[:, None] * SIZE + i[None, :]), change)
                to = out + first * (HEADS * DV) + head * DV + column
                tl.store(to + i[:, None] * (HEADS * DV) + j[None, :], y, mask=there[:, None] & in_v[None, :])
                change *= tl.load(factors + cell * 3 + SIZE + i)[:, None]
                whole = tl.load(factors + cell * 3 + 2 * SIZE)
                tl.debug_barrier()
                for a in range(0, PK, EACH):
                    mask = there[:, None] & (a + e < DK)[None, :]
                    k = tl.load(of_keys + a + row, mask=mask, other=0.0)
                    mask = (a + e < DK)[:, None] & in_v[None, :]
                    s = tl.load(state + a * DV, mask=mask, other=0.0)
                    tl.store(state + a * DV, s * whole + dot(tl.trans(k), change), mask=mask)
                cell += HEADS * SIZE


def across(mixed: torch.Tensor, heads: Heads, within: Within, legs: Legs, out: torch.Tensor) -> None:
    """What heads find, into out [T, heads * dim_v], and the matrices behind each leg. `legs`: with the offset of the
    matrices."""
    width, delta = min(STATE_COLUMNS, heads.padded[1]), within.of_state is not None
    launch(_across, (triton.cdiv(heads.dim_v, width), heads.heads))(
        mixed, within.between, within.of_rows, within.of_state if delta else within.of_rows, within.factors, legs.table,
        legs.offset, out, len(legs.table), **dict(heads.sizes()), WIDTH=width, DELTA=delta, num_warps=4, num_stages=1,
    )  # fmt: skip
