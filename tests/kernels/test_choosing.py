"""What queries read where they do not read all: both backends against float64, on pages whose unread rows are NaN."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from kernelcases import ISAS, backend, one_thread, place, poisoned, record, same_bits

from kvcli.codecs import SummaryLayout
from kvcli.kernels import NEVER, Basis, Choice, Entries, PagedKV, Summaries
from kvcli.kernels.paged import CHOICE_BLOCK
from kvcli.kernels.reference.choosing import choose, summarize

SIZE, MEANS, KV_HEADS, HEADS, SCALE = 32, 2, 2, 6, 0.3
BACKENDS = (*ISAS, "reference")


@pytest.fixture(autouse=True)
def _one_thread():
    with one_thread():
        yield


def cache(rows: int, choice: Choice | None, dims: tuple[int, int], seed: int) -> PagedKV:
    """Pages of `rows` random rows, all but the first, the last and the one before it with a summary."""
    r, noise = record(KV_HEADS, *dims, "f16", "f32", SIZE), torch.manual_seed(seed)
    kv, n = poisoned(r, 0, rows), -(-rows // SIZE)
    rows_k = torch.randn(rows, KV_HEADS, dims[0], generator=noise)
    backend("reference").store(rows_k, torch.randn(rows, KV_HEADS, dims[1], generator=noise), kv, 0)
    each = SummaryLayout(KV_HEADS, MEANS, dims[0])
    memory = [torch.full((2, each.bytes), 0xFF, dtype=torch.uint8) for _ in range(n)]
    addresses = np.array([each.data_ptr() for each in memory], np.int64)
    addresses[[0, *range(max(0, n - 2), n)]] = 0
    found = replace(kv, entries=replace(kv.entries, summaries=Summaries(addresses, memory, each)), choice=choice)
    summarize(found, np.flatnonzero(addresses))
    return found


def expected(q: torch.Tensor, kv: PagedKV, start: int) -> np.ndarray:
    """What is read, in float64: bool [kv_heads, blocks, entries]."""
    summaries, choice, group = kv.entries.summaries, kv.choice, HEADS // KV_HEADS
    assert summaries is not None and choice is not None
    blocks = sorted({(start + t) // CHOICE_BLOCK for t in range(len(q))})
    found = np.ones((KV_HEADS, len(blocks), len(kv.entries)), bool)
    for head in range(KV_HEADS):
        for i, block in enumerate(blocks):
            mine = [t for t in range(len(q)) if (start + t) // CHOICE_BLOCK == block]
            pooled = q[mine][:, head * group : (head + 1) * group].double().mean((0, 1))
            scores = {}
            for at in np.flatnonzero(summaries.addresses).tolist():
                keys = kv.rows(kv.entries.memory[at], 0, SIZE)[0][head].double()
                means = keys.unflatten(0, (MEANS, -1)).mean(1)
                scales = means.abs().amax(1, keepdim=True) / 127
                scores[at] = float(((means / scales).round() * scales @ pooled).max()) * SCALE
            best = sorted(scores, key=lambda at: -scores[at])
            most = scores[best[0]]
            for place_, at in enumerate(best):
                near = scores[at] >= most + math.log(choice.threshold) if choice.threshold else place_ < choice.pages
                found[head, i, at] = near
    return found


@pytest.mark.parametrize("dims", ((64, 40), (20, 8)))
@pytest.mark.parametrize("choice", (Choice(1), Choice(4), Choice(0, 0.4), Choice(0, 1.0)))
@pytest.mark.parametrize(("start", "n"), ((448, 1), (417, 1), (384, 20), (250, 140)))
def test_what_is_chosen(choice: Choice, start: int, n: int, dims: tuple[int, int]) -> None:
    kv = cache(start + n, choice, dims, start + n)
    q = torch.randn(n, HEADS, dims[0])
    assert (choose(q, kv, start, SCALE).numpy() == expected(q, kv, start)).all()


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize("choice", (Choice(1), Choice(3), Choice(0, 0.4)))
@pytest.mark.parametrize(("start", "n"), ((448, 1), (417, 1), (384, 20), (250, 140)))
def test_attention_reads_no_more(name: str, choice: Choice, start: int, n: int) -> None:
    """It is that over lists without what is not read, which may be NaN."""
    kv = cache(start + n, choice, (64, 40), n)
    q, ops = torch.randn(n, HEADS, 64), backend(name)
    read = torch.from_numpy(expected(q, kv, start))
    got = ops.attention(q, kv, start, 0, SCALE)
    for i, block in enumerate(sorted({(start + t) // CHOICE_BLOCK for t in range(n)})):
        rows = [t for t in range(n) if (start + t) // CHOICE_BLOCK == block]
        for head in range(KV_HEADS):
            kept = replace(kv, entries=some(kv.entries, read[head, i].numpy()), choice=None, descriptors={})
            alone = ops.attention(q[rows[0] : rows[-1] + 1], kept, start + rows[0], 0, SCALE)
            own = slice(head * HEADS // KV_HEADS * 40, (head + 1) * HEADS // KV_HEADS * 40)
            assert same_bits(got[rows[0] : rows[-1] + 1, own].contiguous(), alone[:, own].contiguous()), (i, head)
    for at in np.flatnonzero(~read.any(1).any(0).numpy()):  # by no head
        kv.records(kv.entries.memory[at]).fill_(0xFF)
    assert same_bits(ops.attention(q, kv, start, 0, SCALE), got)


def some(entries: Entries, which: np.ndarray) -> Entries:
    at = np.flatnonzero(which)
    columns = (getattr(entries, x)[at] for x in ("addresses", "first", "lo", "hi", "since", "until", "turned"))
    return Entries(*columns, [entries.memory[i] for i in at])


@pytest.mark.parametrize("name", BACKENDS)
def test_with_as_many_pages_as_there_are_nothing_changes(name: str) -> None:
    ops = backend(name)
    for start, n in ((448, 1), (250, 140)):
        every, q = cache(start + n, Choice(100), (64, 40), n), torch.randn(n, HEADS, 64)
        plain = replace(every, choice=None, descriptors={})
        assert same_bits(ops.attention(q, every, start, 0, SCALE), ops.attention(q, plain, start, 0, SCALE))


@pytest.mark.parametrize("name", BACKENDS)
def test_of_equal_pages_the_earlier_are_read(name: str) -> None:
    kv, ops = cache(449, Choice(3), (64, 40), 1), backend(name)
    for at in np.flatnonzero(kv.entries.summaries.addresses).tolist():
        codes, scales = kv.summary(at)
        codes.fill_(100)
        scales.fill_(0.005)
    q = torch.randn(1, HEADS, 64)
    assert choose(q, kv, 448, SCALE)[0, 0].nonzero().flatten().tolist() == [0, 1, 2, 3, 13, 14]
    got = ops.attention(q, kv, 448, 0, SCALE)
    for at in range(4, 13):
        kv.records(kv.entries.memory[at]).fill_(0xFF)
    assert same_bits(ops.attention(q, kv, 448, 0, SCALE), got)


def told(kv: PagedKV, at: int) -> torch.Tensor:
    """The means of an entry: float32 [kv_heads, means, dim]."""
    codes, scales = kv.summary(at)
    return codes * scales[..., None]


@pytest.mark.parametrize("dims", ((64, 40), (20, 8)))
def test_a_mean_is_off_by_half_a_step(dims: tuple[int, int]) -> None:
    kv = cache(449, Choice(3), dims, 1)
    keys = kv.rows(kv.entries.memory[3], 0, SIZE)[0].unflatten(1, (MEANS, -1)).mean(2)
    step = keys.abs().amax(-1, keepdim=True) / 127
    assert ((told(kv, 3) - keys).abs() <= 0.501 * step).all() and (kv.summary(3)[0].abs().amax(-1) == 127).all()
    kv.records(kv.entries.memory[3]).zero_()
    summarize(kv, np.array([3]))
    assert not told(kv, 3).any()


def test_a_summary_has_the_mean_that_sealed_keys_lack() -> None:
    kv = cache(449, Choice(3), (64, 40), 1)
    centre, at = torch.randn(KV_HEADS, 64), 3
    sealed = replace(kv, open=kv, basis=Basis(centre, known=True), descriptors={})
    before = told(kv, at)
    summarize(sealed, np.array([at]))
    from kvcli.kernels.reference.rotation import rotate

    lacked = rotate(centre[None])[0][:, None]
    assert torch.allclose(told(kv, at), before + lacked, atol=4e-2)
    assert place(kv, at) == at and kv.entries.until[at] == NEVER
