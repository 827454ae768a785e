"""Storing rows in pages and attending to them: both backends against a dense float64 computation.

Pages start full of NaN, and only rows that a query may see are stored: whatever is read beyond them poisons the
result. The windows, starts and lengths sit around the edges of pages and of spans (256 positions, see cpu.c).
"""

from __future__ import annotations

from itertools import cycle, product

import pytest
import torch
from kernelcases import ISAS, backend, native, one_thread, poisoned, record, same_bits, stored

from kvcli.kernels import Backend, PagedKV, RecordLayout

BACKENDS = (*ISAS, "reference")
DIMS = (
    (64, 64),
    (72, 72),
    (80, 80),
    (96, 96),
    (112, 112),
    (128, 128),
    (192, 192),
    (256, 256),
    (192, 128),
    (8, 40),
)
WINDOWS = (0, 1, 5, 64, 100)
CODECS = tuple(product(("f32", "f16", "bf16"), repeat=2))
HEADS = ((2, 2), (6, 2), (4, 1), (3, 3), (8, 2), (3, 1))  # (query heads, KV heads)
# (page size, first position of the queries, queries)
PLACES = (
    (16, 0, 1), (16, 0, 37), (16, 1, 16), (16, 15, 1), (16, 15, 2), (16, 16, 17), (16, 126, 3), (16, 127, 1),
    (16, 63, 2), (16, 64, 1),
    (16, 128, 1), (16, 129, 33), (16, 255, 1), (16, 256, 5), (16, 300, 1), (64, 0, 65), (64, 63, 1), (64, 64, 1),
    (64, 63, 18), (64, 255, 3), (64, 256, 1), (64, 510, 4), (64, 511, 1), (64, 512, 1), (64, 513, 2), (64, 1030, 1),
)  # fmt: skip


@pytest.fixture(autouse=True)
def _one_thread():
    with one_thread():
        yield


class Case:
    """Queries at [start, start + n) and every row that one of them sees."""

    def __init__(self, r: RecordLayout, heads: int, start: int, n: int, window: int, seed: int = 0) -> None:
        generator = torch.manual_seed(seed)
        self.r, self.start, self.n, self.window = r, start, n, window
        self.scale = r.dim_k**-0.5
        self.first = max(0, start - window + 1) if window else 0
        rows = start + n - self.first
        width = heads * r.dim_k + r.kv_heads * (r.dim_k + r.dim_v)
        qkv = torch.randn(rows, width, generator=generator)  # views of one wide matrix, as a model makes them
        self.q = qkv[-n:, : heads * r.dim_k].unflatten(1, (heads, r.dim_k))
        self.k = qkv[:, heads * r.dim_k :][:, : r.kv_heads * r.dim_k].unflatten(1, (r.kv_heads, r.dim_k))
        self.v = qkv[:, width - r.kv_heads * r.dim_v :].unflatten(1, (r.kv_heads, r.dim_v))

    def cache(self, ops: Backend, pieces: int = 2) -> PagedKV:
        """The rows in poisoned pages, stored in pieces."""
        kv, at = poisoned(self.r, self.first, self.start + self.n), self.first
        for k, v in zip(self.k.tensor_split(pieces), self.v.tensor_split(pieces), strict=True):
            ops.store(k, v, kv, at)
            at += k.shape[0]
        return kv

    def run(
        self, ops: Backend, kv: PagedKV, i: int = 0, n: int | None = None, softcap: float = 0.0,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:  # fmt: skip
        """Queries i .. i + n."""
        q = self.q[i : i + (self.n if n is None else n)]
        return ops.attention(q, kv, self.start + i, self.window, self.scale, softcap, sinks=sinks)

    def dense(self, softcap: float = 0.0, sinks: torch.Tensor | None = None) -> torch.Tensor:
        """float64 [n, heads * dim_v] of what the codecs keep."""
        group = self.q.shape[1] // self.r.kv_heads
        k = stored(self.k, self.r.codec_k).repeat_interleave(group, 1)  # [rows, heads, dim_k]
        v = stored(self.v, self.r.codec_v).repeat_interleave(group, 1)
        scores = torch.einsum("qhd,khd->hqk", self.q.double(), k) * self.scale
        if softcap:
            scores = softcap * torch.tanh(scores / softcap)
        distance = torch.arange(self.start, self.start + self.n)[:, None] - torch.arange(
            self.first, self.start + self.n
        )
        unseen = (distance < 0) | ((distance >= self.window) if self.window else False)
        scores = scores.masked_fill(unseen, -torch.inf)
        if sinks is not None:
            beside = sinks.double()[:, None, None].expand(-1, scores.shape[1], 1)
            return torch.einsum("hqk,khd->qhd", torch.cat((scores, beside), -1).softmax(-1)[..., :-1], v).flatten(1)
        return torch.einsum("hqk,khd->qhd", scores.softmax(-1), v).flatten(1)


def cases(dims: tuple[int, int], step: int):
    """Each window at each place, with codecs and heads in turn; one in `step` of them, others for other dims."""
    every = zip(product(PLACES, WINDOWS), cycle(CODECS), cycle(HEADS), strict=False)
    for ((size, start, n), window), (codec_k, codec_v), (q_heads, kv_heads) in list(every)[
        DIMS.index(dims) % step :: step
    ]:
        yield Case(record(kv_heads, *dims, codec_k, codec_v, size), q_heads, start, n, window, seed=start + n)


def worst(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Largest difference; infinite where anything is NaN."""
    assert found.shape == expected.shape and found.dtype == torch.float32
    return float((found - expected).abs().nan_to_num(torch.inf).max())


@pytest.mark.slow
@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize("dims", DIMS, ids=str)
def test_attention_is_right_and_queries_do_not_depend_on_each_other(dims: tuple[int, int], name: str):
    torch.set_num_threads(2 if dims == (64, 64) else 1)
    ops = backend(name)
    for case in cases(dims, {"avx512": 2, "base": 6, "reference": 6}.get(name, 3)):
        kv = case.cache(ops)
        chunk = case.run(ops, kv)
        where = (case.r, case.start, case.n, case.window)
        assert worst(chunk, case.dense()) < 3e-6, where
        for i in {0, 1, case.n // 2, case.n - 1} & set(range(case.n)):
            assert same_bits(case.run(ops, kv, i, 1), chunk[i : i + 1]), (where, i)
        for i, n in ((0, 7), (7, 10), (2, 16)):  # other ways to cut the chunk
            if i + n <= case.n:
                assert same_bits(case.run(ops, kv, i, n), chunk[i : i + n]), (where, i, n)


@pytest.mark.parametrize("name", ISAS)
@pytest.mark.parametrize("dims", ((64, 64), (72, 72), (192, 128)), ids=str)
def test_sums_do_not_depend_on_the_size_of_pages(dims: tuple[int, int], name: str):
    ops = backend(name)
    for start, n, window in ((0, 70, 0), (300, 1, 0), (300, 40, 100), (700, 1, 300)):
        found = []
        for size in (16, 32, 64, 128, 256):
            case = Case(record(2, *dims, "f16", "bf16", size), 6, start, n, window)
            found.append(case.run(ops, case.cache(ops)))
        assert all(same_bits(each, found[0]) for each in found[1:]), (start, n, window)


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize("softcap", (0.5, 30.0))
def test_softcap(softcap: float, name: str):
    ops = backend(name)
    for case in (
        Case(record(2, 64, 64), 4, 120, 20, 0),
        Case(record(1, 72, 72, page_size=64), 4, 520, 1, 90),
    ):
        kv = case.cache(ops)
        assert worst(case.run(ops, kv, softcap=softcap), case.dense(softcap)) < 3e-6
        assert worst(case.run(ops, kv), case.dense(softcap)) > 1e-4 or softcap == 30.0


@pytest.mark.parametrize("name", BACKENDS)
def test_logits_beside_the_scores(name: str):
    """Far above all scores, among them, and far below, where they change nothing."""
    ops, sinks = backend(name), torch.tensor([60.0, 1.0, -1.0, -90.0])
    for case in (Case(record(2, 64, 64), 4, 120, 20, 0), Case(record(1, 72, 72, page_size=64), 4, 1100, 1, 90)):
        kv = case.cache(ops)
        found, dim = case.run(ops, kv, sinks=sinks), case.r.dim_v
        assert worst(found, case.dense(sinks=sinks)) < 3e-6
        assert worst(found[:, dim : 2 * dim], case.dense()[:, dim : 2 * dim].float()) > 1e-3
        assert same_bits(case.run(ops, kv, 0, 1, sinks=sinks), found[:1])
        assert same_bits(case.run(ops, kv)[:, 3 * dim :], found[:, 3 * dim :])


@pytest.mark.parametrize("name", BACKENDS)
def test_large_and_equal_scores(name: str):
    """A key a thousand times closer than all others, and keys that are all the same."""
    ops = backend(name)
    for k_of in (lambda k: k * 100, lambda k: torch.ones_like(k)):
        case = Case(record(2, 64, 64), 2, 250, 3, 0)
        case.k = k_of(case.k)
        kv = case.cache(ops)
        assert worst(case.run(ops, kv), case.dense()) < 2e-5


@pytest.mark.parametrize("codecs", CODECS, ids="/".join)
def test_store_writes_the_specified_bytes_and_nothing_else(codecs: tuple[str, str]):
    generator = torch.manual_seed(2)
    for dims, size, start, n in product(((64, 64), (72, 40), (7, 3)), (16, 64), (0, 13, 70), (1, 60)):
        r = record(3, *dims, *codecs, size)
        k, v = (torch.randn(n, 3, d, generator=generator) for d in dims)
        k[0, 0, :3] = torch.tensor([1e-7, -6e-8, 70000.0])  # subnormal, below, beyond the range of f16
        k[0, 1, :3] = torch.tensor([65519.0, 2.0**-14, -0.0])
        kv = poisoned(r, start, start + n)
        backend("reference").store(k, v, kv, start)
        expected = [p.clone() for p in kv.into.memory]
        touched = sum(int((p != 0xFF).sum()) for p in kv.into.memory)
        assert 0 < touched <= n * 3 * (r.k_row_bytes + r.v_row_bytes)
        for isa in ISAS:
            try:
                ops = native(isa)
            except pytest.skip.Exception:
                continue
            again = poisoned(r, start, start + n)
            ops.store(k, v, again, start)
            for found, wanted in zip(again.into.memory, expected, strict=True):
                assert torch.equal(found, wanted), (isa, dims, start, n)


def test_threads_change_no_bit():
    for start, n in ((0, 40), (300, 1), (520, 1), (515, 40)):
        case = Case(record(3, 64, 64, "f16", "f16"), 9, start, n, 0)
        results = []
        for threads in (1, 2):
            ops = native("", threads)
            assert ops._lib.kv_threads() == threads
            results.append(case.run(ops, case.cache(ops)))
        assert same_bits(*results)
