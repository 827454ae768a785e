"""The mass of attention: what each row gets of the queries, against float64; whole numbers, so that chunks and threads
change nothing."""

from __future__ import annotations

import pytest
import torch
from kernelcases import ISAS, backend, native, poisoned, record

from kvcli.kernels import MASS_UNIT, Backend, PagedKV, RecordLayout, Watch

BACKENDS = (*ISAS, "reference")
# (query heads, KV heads), window, first position, queries, the first that is noted, cap of scores, sinks or none
CASES = [
    ((4, 2), 0, 0, 37, 0, 0.0, False),
    ((6, 2), 0, 40, 33, 50, 0.0, True),
    ((4, 1), 20, 60, 18, 0, 5.0, False),
    ((2, 2), 0, 300, 1, 0, 0.0, True),
    ((8, 2), 70, 200, 1, 200, 0.0, False),
    ((3, 1), 0, 100, 40, 139, 0.0, False),
]


class Case:
    def __init__(self, heads: tuple[int, int], window: int, start: int, n: int, since: int, cap: float, sinks: bool):
        generator = torch.manual_seed(1)
        self.heads, self.window, self.start, self.n, self.since, self.cap = heads, window, start, n, since, cap
        self.r: RecordLayout = record(heads[1], 24, 40)
        self.q = 2 * torch.randn(n, heads[0], 24, generator=generator)
        self.k = torch.randn(start + n, heads[1], 24, generator=generator)
        self.v = torch.randn(start + n, heads[1], 40, generator=generator)
        self.sinks = torch.randn(heads[0], generator=generator) if sinks else None

    def cache(self, ops: Backend) -> PagedKV:
        kv = poisoned(self.r, 0, self.start + self.n)
        ops.store(self.k, self.v, kv, 0)
        return kv

    def mass(self, ops: Backend, pieces: int = 1, largest: bool = False) -> torch.Tensor:
        kv, found = self.cache(ops), torch.zeros(self.heads[1], self.start + self.n, dtype=torch.int64)
        at = self.start
        for q in self.q.tensor_split(pieces):
            how = self.window, 0.2, self.cap, None, None, self.sinks
            plain = ops.attention(q, kv, at, *how)
            assert torch.equal(ops.attention(q, kv, at, *how, Watch(self.since, found, largest=largest)), plain)
            at += len(q)
        return found

    def dense(self, largest: bool = False) -> torch.Tensor:
        """float64 [kv_heads, rows]."""
        k = self.k.double().repeat_interleave(self.heads[0] // self.heads[1], 1)
        scores = torch.einsum("qhd,khd->hqk", self.q.double(), k) * 0.2
        if self.cap:
            scores = self.cap * torch.tanh(scores / self.cap)
        query, row = torch.arange(self.start, self.start + self.n)[:, None], torch.arange(self.start + self.n)
        seen = (row <= query) & ((row > query - self.window) if self.window else True)
        scores = scores.masked_fill(~seen, -torch.inf)
        if self.sinks is not None:
            own = self.sinks.double()[:, None, None].expand(-1, self.n, 1)
            scores = torch.cat([scores, own], -1)
        shares = scores.softmax(-1)[:, query[:, 0] >= self.since, : len(row)]
        if largest:
            return shares.amax(1).unflatten(0, (self.heads[1], -1)).amax(1)
        return shares.sum(1).unflatten(0, (self.heads[1], -1)).sum(1)


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("name", BACKENDS)
def test_mass_is_that_of_float64(name: str, case: tuple):
    c = Case(*case)
    found = c.mass(backend(name)).double() / MASS_UNIT
    torch.testing.assert_close(found, c.dense(), rtol=1e-4, atol=1e-5)
    if not case[-1]:
        queries = c.start + c.n - max(c.start, c.since)
        each = found.sum(1) / (queries * c.heads[0] // c.heads[1])
        assert (each - 1).abs().max() < 1e-3  # a query's probabilities sum to one


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("name", BACKENDS)
def test_the_most_that_a_query_gives(name: str, case: tuple):
    """In place of the sum; chunks change nothing of it, either."""
    c = Case(*case)
    found = c.mass(backend(name), largest=True)
    torch.testing.assert_close(found.double() / MASS_UNIT, c.dense(largest=True), rtol=1e-4, atol=1e-5)
    assert torch.equal(c.mass(backend(name), min(3, c.n), largest=True), found)


@pytest.mark.parametrize("case", CASES[:3] + CASES[-1:], ids=str)
def test_chunks_and_threads_change_no_mass(case: tuple):
    c = Case(*case)
    whole = c.mass(native())
    assert torch.equal(c.mass(native(threads=1), 5), whole) and torch.equal(c.mass(native(), 2), whole)
    reference = backend("reference")
    assert torch.equal(c.mass(reference, 3), c.mass(reference))


def test_many_heads_on_one_row_are_counted():
    """More than numbers of 32 bits hold: 64 tokens, 16 heads, and all look at row 0."""
    r, n = record(1, 24, 24), 64
    k = torch.zeros(n, 1, 24)
    k[0] = 10
    for ops in (native(), backend("reference")):
        kv, found = poisoned(r, 0, n), torch.zeros(1, n, dtype=torch.int64)
        ops.store(k, k, kv, 0)
        ops.attention(torch.ones(n, 16, 24), kv, 0, watch=Watch(0, found))
        assert abs(int(found[0, 0]) - 16 * n * MASS_UNIT) < n * 16
