"""Sealed caches for tests: sequences over one or more layers whose pages are full of NaN until they are written."""

from __future__ import annotations

import torch
from cachecases import SmallPool
from kernelcases import place

from kvcli.codecs import CODECS
from kvcli.kernels import Angles, Backend, PagedKV
from kvcli.kernels.cpu.backend import NativeBackend
from kvcli.kernels.reference.fixed import rounded_query
from kvcli.runtime.cache.layout import KVLayout
from kvcli.runtime.cache.sequence import Sequence
from kvcli.runtime.config import FULL, LayerConfig, ModelConfig, RopeConfig
from kvcli.runtime.model.rope import RopeTable
from kvcli.runtime.model.sealing import seal_step

SEALED = tuple(row.name for row in CODECS.values() if row.sealed)
DIMS = ((64, 64), (72, 72), (80, 80), (96, 96), (112, 112), (128, 128), (192, 192), (256, 256), (192, 128), (72, 40))
PAIRS = (
    ("int8", "int4"), ("int4", "int8"), ("int6", "int4"), ("f16", "int4"), ("int8", "f32"), ("fp8", "int8"),
    ("int5", "int4"), ("int8", "int5"),
)  # fmt: skip
LANES = {"avx512vnni": 16, "avxvnni": 8, "neoni8mm": 8, "neondot": 8}  # `lanes` of kv_keys, where bytes are multiplied


def gaussian(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.manual_seed(seed))


class PoisonedPool(SmallPool):
    """Pages come with every byte set: every number in them is NaN, of codes and of scales."""

    def take(self, group: int) -> int:
        page = super().take(group)
        self.page(group, page).fill_(0xFF)
        return page


def layout(types: tuple[str, str], dims: tuple[int, int], kv_heads: int = 1, size: int = 16, **more: int) -> KVLayout:
    """One full layer."""
    layer = LayerConfig(FULL, kv_heads, *dims, 0, RopeConfig(10000.0, dims[0] - dims[0] % 4))
    return KVLayout.build(ModelConfig("llama", "", 10, 2, 2, 1, 4096, 1e-5, (layer,), 1.0), *types, size, **more)


class Cache:
    """One layer's rows on a poisoned pool, written in the order and the pieces that `append` is called with."""

    def __init__(self, ops: Backend, where: KVLayout) -> None:
        self.ops, self.layout = ops, where
        self.pool = PoisonedPool(where)
        self.seq = Sequence(self.pool)
        layer = where.groups[0]
        self.rope = RopeTable(RopeConfig(10000.0, layer.dim_k - layer.dim_k % 4))
        self.kv: PagedKV
        self.angles: Angles | None = None

    def append(self, k: torch.Tensor, v: torch.Tensor) -> PagedKV:
        """Rows as a model gives them (they are rotated here where the cache wants it); returns the step's view."""
        part = self.seq.reserve([0] * len(k))
        self.kv = part.kv(0)
        k, v = k.clone(), v.clone()
        for rows, rotated in zip((k, v), self.kv.rotated, strict=True):
            if rotated:
                self.ops.rotate_(rows)
        self.ops.store(k, v, self.kv, part.start)
        self.angles = seal_step(self.ops, self.rope, self.kv, part.start, part.start + len(k))
        self.seq.commit([0] * len(k))
        return self.kv

    def attend(
        self, q: torch.Tensor, start: int, window: int = 0, softcap: float = 0.0, ops: Backend | None = None
    ) -> torch.Tensor:
        """Queries [T, heads, dim_k], in the basis of the keys, from position `start` on."""
        scale = self.kv.record.dim_k**-0.5
        return (ops or self.ops).attention(q, self.kv, start, window, scale, softcap, self.angles)

    def form(self, page: int, own: int) -> PagedKV:
        """The class of pages in which a query of page `own` has to read `page`: the open one for the first pages, the
        sinks, and for the tail, its own."""
        group = self.layout.groups[0]
        return self.kv.open if self.kv.open and (page < group.sinks or page > own - group.tail) else self.kv

    def in_integers(self) -> bool:
        """Whether the backend multiplies queries with keys of sealed pages in integers (`rounded_query`)."""
        codec, dim, size = self.kv.record.codec_k, self.kv.record.dim_k, self.kv.record.page_size
        fast = isinstance(self.ops, NativeBackend) and not self.ops.exact
        lanes = LANES.get(self.ops.isa, 0) if fast else 0
        return bool(lanes and codec.grid and codec.bits in (4, 8) and dim % (4 * lanes) == 0 and size % lanes == 0)

    def parts(self, page: int, own: int, end: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """float64 [kv_heads, n, dim]: keys and values of a page up to slot `end`, as a query of page `own` has to read
        it, and the mean that the keys lack."""
        source = self.form(page, own)
        at = place(source, page)
        k, v = (x.double() for x in source.rows(source.entries.memory[at], 0, end))
        centre = source.centre(at, self.angles)
        return k, v, torch.zeros_like(k) if centre is None else centre[:, :end].double()

    def rows(self, page: int, own: int, end: int) -> tuple[torch.Tensor, torch.Tensor]:
        """`parts`, the mean added to the keys."""
        k, v, centre = self.parts(page, own, end)
        return k + centre, v

    def dense(self, q: torch.Tensor, start: int, window: int = 0, softcap: float = 0.0) -> torch.Tensor:
        """Attention in float64 over decoded rows: q [T, heads, dim_k] -> [T, heads * dim_v], query by query. Keys
        of sealed pages are multiplied with rounded queries where the backend does so."""
        record, out = self.kv.record, []
        size, group = record.page_size, q.shape[1] // record.kv_heads
        for_sealed = rounded_query(q) if self.in_integers() else q.double()
        decoded: dict[tuple[int, bool], tuple[torch.Tensor, ...]] = {}  # by page and form
        for i, query in enumerate(q.double()):
            position = start + i
            own = position // size
            first = max(0, position - window + 1) if window else 0
            seen = slice(first % size, position + 1 - first // size * size)
            keys = [(p, self.form(p, own) is self.kv) for p in range(first // size, own + 1)]
            products, values = [], []
            for key in keys:
                if key not in decoded:
                    decoded[key] = self.parts(key[0], own, size)
                k, v, centre = (x.repeat_interleave(group, 0) for x in decoded[key])
                each = for_sealed[i] if key[1] else query
                products.append(torch.einsum("hd,hnd->hn", each, k) + torch.einsum("hd,hnd->hn", query, centre))
                values.append(v)
            v = torch.cat(values, 1)[:, seen]
            scores = torch.cat(products, 1)[:, seen] * record.dim_k**-0.5
            if softcap:
                scores = softcap * torch.tanh(scores / softcap)
            out.append(torch.einsum("hn,hnd->hd", scores.softmax(-1), v).flatten())
        return torch.stack(out)
