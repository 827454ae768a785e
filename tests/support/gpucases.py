"""GPU kernels in tests: compiled on a CUDA machine, else in Triton's interpreter on the CPU.

Import this before anything of `kvcli.kernels.gpu`, and before Triton: a kernel is interpreted if TRITON_INTERPRET is
set when it is defined. So the variable is set here while all of them are imported, and what runs later, or in another
process, does not see it.
"""

from __future__ import annotations

import importlib
import os
import pkgutil
import random
from collections.abc import Iterator
from contextlib import ExitStack, nullcontext, suppress
from dataclasses import replace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
ASKED = os.environ.get("KV_TEST_INTERPRET", "").split(",")  # see CONTRIBUTING.md
EVERY = DEVICE == "cuda" or "all" in ASKED
COMPILED = pytest.mark.skipif(not EVERY, reason="takes long in Triton's interpreter (KV_TEST_INTERPRET=all runs it)")
# A case that takes its time there and differs little from others:
MORE = pytest.mark.thorough if DEVICE == "cpu" else ()


def _import_kernels() -> None:
    triton = pytest.importorskip("triton")
    with suppress(ImportError):  # else imported as the first kernel runs, and it wants what is defined here
        importlib.import_module("triton.experimental.gluon")
    package = importlib.import_module("kvcli.kernels.gpu")
    modules = [importlib.import_module(f"{package.__name__}.{m.name}") for m in pkgutil.iter_modules(package.__path__)]
    for module in (triton.language.standard, *modules):
        for x in vars(module).values():
            if isinstance(x, triton.runtime.jit.KernelInterface):
                interpreted = not isinstance(x, triton.runtime.JITFunction)
                assert interpreted == (DEVICE == "cpu"), f"{module.__name__} was imported too early"


with mock.patch.dict(os.environ):
    os.environ.pop("TRITON_INTERPRET", None)
    if DEVICE == "cpu":
        os.environ["TRITON_INTERPRET"] = "1"
    _import_kernels()
    if DEVICE == "cpu":
        importlib.import_module("interpreting").hasten()
        programs = importlib.import_module("programs")
        programs.reorder(next((how for how in programs.ORDERS if how in ASKED), programs.ORDERS[0]))
        if "watched" in ASKED:
            ALWAYS = ExitStack()
            ALWAYS.enter_context(programs.watched())

from sealedcases import Cache, layout  # noqa: E402

from kvcli.kernels import Angles, AttentionLayer, Entries, Into, PagedKV  # noqa: E402
from kvcli.kernels.attend import amplify  # noqa: E402
from kvcli.kernels.gpu.attention import block_rows, part_count  # noqa: E402
from kvcli.kernels.gpu.chip import Chip  # noqa: E402
from kvcli.kernels.gpu.pages import Asked, DevicePages, device_pages, half_angles, page_lists  # noqa: E402
from kvcli.kernels.gpu.products import Activations  # noqa: E402
from kvcli.kernels.gpu.rows import LOG2_E, Queries, prepare  # noqa: E402
from kvcli.kernels.reference.backend import ReferenceBackend  # noqa: E402
from kvcli.kernels.reference.rotation import rotate  # noqa: E402
from kvcli.runtime.cache.eviction import Retention  # noqa: E402
from kvcli.runtime.cache.sequence import Part  # noqa: E402
from kvcli.runtime.model.rope import RopeTable  # noqa: E402

OPS = ReferenceBackend()


@pytest.fixture
def watched() -> Iterator[None]:
    """In the interpreter no launch has programs that depend on their order, or accesses outside of tensors."""
    with programs.watched() if DEVICE == "cpu" and "watched" not in ASKED else nullcontext():
        yield


class HalfCentres(RopeTable):
    """Angles of the mean in the precision in which the GPU kernels take them, for sealing and for attention."""

    def centres(self, kv: PagedKV) -> Angles:
        cos, sin = super().centres(kv)
        return cos.half().float(), sin.half().float()


class GpuCache(Cache):
    """A `Cache` written by the reference, whose pages come in random order and go to the device to be read."""

    def __init__(
        self, types: tuple[str, str], dims: tuple[int, int], kv_heads: int = 1, size: int = 16,
        retention: Retention | None = None, **more: int,
    ) -> None:  # fmt: skip
        super().__init__(OPS, layout(types, dims, kv_heads, size, **more).evicting(retention))
        self.rope.__class__ = HalfCentres
        for arena in range(len(self.layout.arenas)):
            pages = [self.pool.take(arena) for _ in range(24)]
            random.Random(arena).shuffle(pages)
            for page in pages:
                self.pool.release(arena, page)

    def on_device(
        self, start: int, rows: int = 1, heads: int = 0, window: int = 0, splits: int = 2,
        shift: np.ndarray | None = None,
    ) -> DevicePages:  # fmt: skip
        """The pages of the last step for queries of its rows, in copies where the device is not the CPU; `self.there`
        keeps them."""
        self.there = moved(self.kv)
        return self.pages_of(self.there, start, rows, heads, window, splits, shift)

    def pages_of(
        self, kv: PagedKV, start: int, rows: int, heads: int, window: int, splits: int, shift: np.ndarray | None
    ) -> DevicePages:
        """Pages on the device as kernels want them, with `self.angles`."""
        block, _ = block_rows(kv.record, heads or kv.record.kv_heads, rows, Chip.of(torch.device(DEVICE)))
        turns = any(each.entries.turned.any() for each in kv.classes)
        parts = part_count(splits, kv.open is not None, turns) if rows == 1 else 0
        lists = page_lists(kv, shift, Asked(start, rows, block, window, parts), DEVICE)
        return device_pages(kv, lists, DEVICE, None if self.angles is None else half_angles(self.angles, DEVICE))

    def back(self) -> None:
        """What kernels wrote, into the pages of the pool."""
        for here, there in zip(self.kv.classes, self.there.classes, strict=True):
            for a, b in zip(memory_of(here), memory_of(there), strict=True):
                if a is not None:
                    a.copy_(b)

    def queries(self, q: torch.Tensor, pages: DevicePages) -> tuple[torch.Tensor, Queries]:
        """Turned queries float32 [T, heads, dim_k], in the basis of the keys, and as `prepare` gives them."""
        (t, heads, dim), r = q.shape, pages.record
        rope = 0 if pages.angles is None else pages.angles.shape[1]
        factor, half = LOG2_E * dim**-0.5, rope // 2
        made = Queries.empty(t, heads, dim, rope, "cpu")
        kept = rotate(q) if pages.rotated[0] else q
        made.q.copy_(kept * factor)
        if pages.centre is not None:
            c = pages.centre.cpu().repeat_interleave(heads // r.kv_heads, 0)
            q1, q2, c1, c2 = q[..., :half], q[..., half:rope], c[:, :half], c[:, half:rope]
            made.qc.copy_(torch.cat((q1 * c1 + q2 * c2, q2 * c1 - q1 * c2), -1) * factor)
            made.qb.copy_((q[..., rope:] * c[:, rope:]).sum(-1) * factor)
        return kept, Queries(made.q.to(DEVICE), made.qc.to(DEVICE), made.qb.to(DEVICE))


class Layer:
    """One attention layer with random projections, by the reference and by the kernels."""

    def __init__(
        self, types: tuple[str, str], dims: tuple[int, int], kv_heads: int, heads: int, norm: bool = False,
        rope: bool = True, how: dict[str, Any] | None = None, **more: Any,
    ) -> None:  # fmt: skip
        """`how`: fields of its AttentionLayer."""
        self.cache = GpuCache(types, dims, kv_heads, **more)
        self.heads, self.kv_heads, self.dims = heads, kv_heads, dims
        self.generator = torch.manual_seed(heads)
        self.norms = tuple(self.random(dims[0]) + 1 for _ in range(2)) if norm else (None, None)
        self.rope = self.cache.rope if rope else None
        self.scale = dims[0] ** -0.5
        self.how = AttentionLayer(heads, self.scale, self.rope, eps=1e-6, **how or {})

    def random(self, *shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=self.generator)

    def projections(self, t: int) -> torch.Tensor:
        return self.random(t, (self.heads + self.kv_heads) * self.dims[0] + self.kv_heads * self.dims[1])

    def turned_queries(self, qkv: torch.Tensor, start: int, shift: np.ndarray) -> torch.Tensor:
        """The second queries, as the facade makes them."""
        kv, q = self.cache.kv, qkv[:, : self.heads * self.dims[0]].unflatten(1, (-1, self.dims[0])).clone()
        if self.norms[0] is not None:
            q = OPS.rms_norm(q, self.norms[0], 1e-6)
        if self.rope:
            OPS.rope_(q, *self.rope.inside(((start, len(qkv)),), shift))
        if kv.rotated[0]:
            OPS.rotate_(q)
        return q

    def rows(self, qkv: torch.Tensor, start: int) -> tuple[torch.Tensor, ...]:
        """q, k, v as the facade makes them of projections, q before and after it is rotated."""
        kv, n = self.cache.kv, self.heads * self.dims[0]
        end = n + self.kv_heads * self.dims[0]
        q, k = (x.unflatten(1, (-1, self.dims[0])).clone() for x in (qkv[:, :n], qkv[:, n:end]))
        v = qkv[:, end:].unflatten(1, (-1, self.dims[1])).clone()
        if self.norms[0] is not None and not self.how.norms_last:
            q, k = (OPS.rms_norm(x, w, 1e-6) for x, w in zip((q, k), self.norms, strict=True))
        amplify(q, ((start, len(qkv)),), self.how)
        if self.rope:
            for x in (q, k):
                OPS.rope_(x, *self.rope.at(start, len(qkv)))
        if self.norms[0] is not None and self.how.norms_last:
            q, k = (OPS.rms_norm(x, w, 1e-6) for x, w in zip((q, k), self.norms, strict=True))
        turned = q.clone()
        for x, rotated in zip((q, k, v), (kv.rotated[0], *kv.rotated), strict=True):
            if rotated:
                OPS.rotate_(x)
        return turned, q, k, v

    def step(self, t: int) -> Part:
        """Pages for t more rows."""
        part = self.cache.seq.reserve([0] * t)
        self.cache.kv = part.kv(0)
        return part

    def prepare(self, qkv: torch.Tensor, start: int, pages: DevicePages | None = None) -> Queries:
        self.pages = pages or self.cache.on_device(start, len(qkv), self.heads)
        q_norm, k_norm = (None if x is None else x.to(DEVICE) for x in self.norms)
        how = replace(self.how, q_norm=q_norm, k_norm=k_norm)
        return prepare(qkv.to(DEVICE), how, self.pages)


def memory_of(kv: PagedKV) -> list[torch.Tensor | None]:
    """The pages of a class: those of its entries, and those that are written to. One may come twice."""
    return [*kv.entries.memory, *kv.into.memory]


def moved(kv: PagedKV) -> PagedKV:
    """The same pages on the device, each once."""
    if DEVICE == "cpu":
        return kv
    made: dict[int, torch.Tensor] = {}

    def on(where: Entries | Into) -> Any:
        pages = [None if p is None else made.setdefault(p.data_ptr(), p.to(DEVICE)) for p in where.memory]
        addresses = np.array([0 if p is None else p.data_ptr() for p in pages], np.int64)
        return replace(where, addresses=addresses, memory=pages)

    opened = None if kv.open is None else moved(kv.open)
    return replace(kv, entries=replace(on(kv.entries), made={}), into=on(kv.into), open=opened, descriptors={})


def position(start: int) -> torch.Tensor:
    return torch.tensor([start], dtype=torch.int64, device=DEVICE)


def attention_over(
    kv: PagedKV, q: torch.Tensor, turned_q: torch.Tensor, start: int, window: int = 0, softcap: float = 0.0,
    angles: Angles | None = None,
) -> torch.Tensor:  # fmt: skip
    """Attention in float64 over what the list shows: q, turned_q [T, heads, dim_k] -> [T, heads * dim_v]."""
    record, out = kv.record, []
    for i, both in enumerate(zip(q.double(), turned_q.double(), strict=True)):
        scores, values = [], []
        for each in kv.classes:
            e, position = each.entries, start + i
            for at, n in enumerate(e.shows(np.array([position]))[0].tolist()):
                end = int(e.lo[at]) + n
                lo = max(int(e.lo[at]), position - window + 1 - int(e.first[at]) if window else 0)
                if lo < end:
                    k, v = (x.double() for x in each.rows(e.memory[at], lo, end))
                    centre = each.centre(at, angles)
                    k = k if centre is None else k + centre[:, lo:end].double()
                    k, v = (x.repeat_interleave(q.shape[1] // record.kv_heads, 0) for x in (k, v))
                    scores.append(torch.einsum("hd,hnd->hn", both[e.turned[at]], k) * record.dim_k**-0.5)
                    values.append(v)
        s = torch.cat(scores, 1)
        if softcap:
            s = softcap * torch.tanh(s / softcap)
        out.append(torch.einsum("hn,hnd->hd", s.softmax(-1), torch.cat(values, 1)).flatten())
    return torch.stack(out)


def error(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Root mean square of the difference, relative to what is expected; NaN where something is not finite."""
    found, expected = found.detach().cpu().double(), expected.double()
    return ((found - expected).norm() / expected.norm()).item()


def planes(x: Activations) -> torch.Tensor:
    """float64 [2, n] on the CPU: the vector as products read it with one plane, and with two."""
    coarse, fine = x.codes.cpu().double()
    steps = x.scales.cpu().double().repeat_interleave(32)
    return torch.stack((254 * coarse * steps, (254 * coarse + fine) * steps))


def expect_activations(x: torch.Tensor, made: Activations) -> None:
    """`made` stands for x float32 [n], but for half a code; errors relative to the largest element of the group."""
    x, (coarse, both) = x.cpu(), planes(made)
    largest = x.view(-1, 32).abs().amax(1).double().repeat_interleave(32)
    assert ((coarse - x).abs() <= largest * (0.501 / 127)).all()
    assert ((both - x).abs() <= largest * 2.0**-15).all()
    expected = torch.stack((coarse, both)).view(2, -1, 16)
    sums = made.sums.cpu().view(2, -1).double()
    assert ((sums - expected.sum(2)).abs() <= expected.abs().sum(2) * 1e-6).all()
    assert not made.keep or torch.equal(made.values.cpu(), x)
