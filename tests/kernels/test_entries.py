"""Page lists made by hand: rows that were compacted or moved, that come late or go early, seen by one of two queries.
Kernels know of none of that but what a list says, and what no entry shows is NaN.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from kernelcases import backend, one_thread, same_bits, whole
from sealedcases import LANES

from kvcli.codecs import CODECS, RecordLayout
from kvcli.kernels import NEVER, Angles, Backend, Basis, Entries, Into, PagedKV
from kvcli.kernels.reference.backend import ReferenceBackend
from kvcli.kernels.reference.fixed import rounded_query
from kvcli.runtime.config import RopeConfig
from kvcli.runtime.model.rope import RopeTable

SIZE, DIM, HEADS, KV_HEADS, SCALE = 16, 32, 4, 2, 0.2
OPS, ROPE = ReferenceBackend(), RopeTable(RopeConfig(10000.0, DIM))


@pytest.fixture(autouse=True)
def _one_thread():
    with one_thread():
        yield


def pages_of(record: RecordLayout, n: int) -> tuple[np.ndarray, tuple[torch.Tensor, ...]]:
    """Addresses and memory of pages of two layers, full of NaN."""
    memory = tuple(torch.full((2, KV_HEADS * record.record_bytes), 0xFF, dtype=torch.uint8) for _ in range(n))
    return np.array([page.data_ptr() for page in memory], dtype=np.int64), memory


def listed(random: np.random.Generator, kv: PagedKV, last: int) -> PagedKV:
    """The class of pages with two entries of each page in the order of nominal positions; some rows are in none."""
    n = len(kv.into.addresses)
    which, cut = np.repeat(random.permutation(n), 2), random.integers(1, SIZE, n).repeat(2)
    second = np.arange(2 * n) % 2 == 1
    lo, hi = np.where(second, cut, 0), np.where(second, SIZE - random.integers(0, 3, 2 * n), cut)
    hi = np.maximum(lo, hi)
    first = random.integers(0, last, 2 * n)
    until = np.where(random.random(2 * n) < 0.3, random.integers(1, last, 2 * n), NEVER)
    since = np.where(random.random(2 * n) < 0.3, random.integers(0, last, 2 * n), 0)
    order = np.argsort(first, kind="stable")
    memory = tuple(kv.into.memory[at] for at in which[order])
    columns = (x[order] for x in (first, lo, hi, since, until, random.integers(0, 2, 2 * n)))
    return replace(kv, entries=Entries(kv.into.addresses[which][order], *columns, memory), descriptors={})


def hidden(kv: PagedKV) -> None:
    """Set every byte of rows that no entry shows."""
    of = kv.entries
    every = zip(of.memory, of.lo, of.hi, strict=True)
    shown = {(page.data_ptr(), slot) for page, lo, hi in every for slot in range(lo, hi)}
    for page in kv.into.memory:
        for slot in range(SIZE):
            for data in kv.slots(page, slot, slot + 1) if (page.data_ptr(), slot) not in shown else ():
                data.fill_(0xFF)


def made(types: tuple[str, str], seed: int, last: int) -> tuple[PagedKV, Angles | None]:
    """A layer with random rows behind a list made by hand, in one class or in two, and the angles of its mean."""
    random, noise = np.random.default_rng(seed), torch.manual_seed(seed)
    sealed, n, layers = CODECS[types[0]].sealed, 5, []
    for codec_k, codec_v in (types, ("f16", "f16"))[: 1 + sealed]:
        record = RecordLayout.of(SIZE, KV_HEADS, DIM, DIM, CODECS[codec_k], CODECS[codec_v])
        addresses, memory = pages_of(record, n)
        into = Into(0, addresses, memory)
        layers.append(PagedKV(record, whole(into, SIZE), into, 1, KV_HEADS * record.record_bytes))
    kv = layers[0]
    if sealed:
        scale = torch.full((KV_HEADS,), 0.01)
        basis = Basis(torch.randn(KV_HEADS, DIM, generator=noise), scale, scale, True)
        kv = replace(kv, open=layers[1], basis=basis if CODECS[types[0]].centred else replace(basis, centre=None))
    rows = [torch.randn(n * SIZE, KV_HEADS, DIM, generator=noise) for _ in range(4)]
    OPS.store(rows[0], rows[1], kv, 0)
    if sealed:
        OPS.seal(kv, 0, n * SIZE, ROPE.centres(kv))
        OPS.store(rows[2], rows[3], kv, 0)  # what stands open is something else
        kv = replace(kv, open=listed(random, layers[1], last))
    kv = listed(random, kv, last)
    for each in kv.classes:
        hidden(each)
    return kv, ROPE.centres(kv) if kv.basis.centre is not None else None


def multiplied(ops: Backend, kv: PagedKV, q: torch.Tensor) -> torch.Tensor:
    """float64 queries as they are multiplied with the keys of that class: rounded where products are integers."""
    codec, lanes = kv.record.codec_k, LANES.get(getattr(ops, "isa", ""), DIM)
    return rounded_query(q) if codec.grid and codec.bits in (4, 8) and DIM % (4 * lanes) == 0 else q.double()


def expected(
    ops: Backend, kv: PagedKV, q: torch.Tensor, turned: torch.Tensor, start: int, window: int, angles: Angles | None
) -> torch.Tensor:
    """float64 [T, HEADS * DIM], query by query and entry by entry; rows of queries that see nothing are NaN."""
    out = []
    asked = [[multiplied(ops, each, x) for x in (q, turned)] for each in kv.classes]
    for position, queries in enumerate(zip(q.double(), turned.double(), strict=True), start):
        scores, values = [], []
        for each, rounded in zip(kv.classes, asked, strict=True):
            e = each.entries
            for at, page in enumerate(e.memory):
                slots = [s for s in range(e.lo[at], e.hi[at]) if e.first[at] + s <= position
                         and e.since[at] <= position < e.until[at]
                         and not (window and e.first[at] + s <= position - window)]  # fmt: skip
                if slots:
                    k, v = (x[:, [s - slots[0] for s in slots]] for x in each.rows(page, slots[0], slots[-1] + 1))
                    centre = each.centre(at, angles)
                    mean = torch.zeros_like(k) if centre is None else centre[:, slots]
                    k, mean = (x.double().repeat_interleave(HEADS // KV_HEADS, 0) for x in (k, mean))
                    score = torch.einsum("hd,hnd->hn", rounded[e.turned[at]][position - start], k)
                    scores.append((score + torch.einsum("hd,hnd->hn", queries[e.turned[at]], mean)) * SCALE)
                    values.append(v.double().repeat_interleave(HEADS // KV_HEADS, 0))
        if not scores:
            out.append(torch.full((HEADS * DIM,), torch.nan, dtype=torch.float64))
            continue
        weights = torch.cat(scores, 1).softmax(1)
        out.append(torch.einsum("hn,hnd->hd", weights, torch.cat(values, 1)).flatten())
    return torch.stack(out)


@pytest.mark.parametrize("name", ("reference", ""))
@pytest.mark.parametrize("types", (("f32", "f16"), ("int4", "int8"), ("fp8", "int5")), ids="/".join)
@settings(max_examples=8)
@given(
    seed=st.integers(0, 999), last=st.sampled_from((40, 300)), n=st.integers(1, 40), window=st.sampled_from((0, 0, 25))
)
@example(seed=109, last=40, n=5, window=0)  # two pages at one position
def test_kernels_see_what_the_list_says_and_nothing_else(
    types: tuple[str, str], name: str, seed: int, last: int, n: int, window: int
):
    ops, (kv, angles) = backend(name), made(types, seed, last)
    start, noise = last // 2, torch.manual_seed(seed)
    q, turned = (torch.randn(n, HEADS, DIM, generator=noise) for _ in range(2))
    wanted = expected(ops, kv, q, turned, start, window, angles)
    found = ops.attention(q, kv, start, window, SCALE, 0.0, angles, turned)
    seeing = ~wanted.isnan().any(1)
    assert found[seeing].isfinite().all() and ((found - wanted)[seeing].abs() < 1e-5).all()
    for at in range(0, n, 7):  # a query by itself
        alone = ops.attention(q[at : at + 1], kv, start + at, window, SCALE, 0.0, angles, turned[at : at + 1])
        assert same_bits(alone, found[at : at + 1]) or not seeing[at]


@pytest.mark.parametrize("types", (("f16", "f16"), ("int8", "int4")), ids="/".join)
def test_the_position_inside_the_cache_is_that_of_the_last_row_seen(types: tuple[str, str]):
    """Of rows in one class or the other, that are there for all queries, come, or go."""
    kv, _ = made(types, 3, 300)
    shift = kv.shift(150, 100)
    assert shift is not None
    for position, by in enumerate(shift.tolist(), 150):
        seen = 0
        for e in (each.entries for each in kv.classes):
            for first, lo, hi, since, until in zip(e.first, e.lo, e.hi, e.since, e.until, strict=True):
                seen += sum(since <= position < until and first + slot <= position for slot in range(lo, hi))
        assert position - by == seen - 1
