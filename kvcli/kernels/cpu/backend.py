"""The CPU backend: `cpu.c` called through ctypes. Same signatures as the reference functions.

Arrays cross as addresses, so every tensor is float32 on the CPU with unit stride in its last dim; views of whole rows
(a slice of a wider matrix) are fine and cost no copy.
"""

from __future__ import annotations

import ctypes
import functools
from array import array
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from ctypes import c_double, c_float, c_int64, c_void_p
from typing import Any, Literal

import torch

from kvcli.codecs import RecordLayout
from kvcli.errors import KVError, UsageError
from kvcli.kernels.attend import AttentionLayer, attend, attend_latents
from kvcli.kernels.cpu.calls import Calls
from kvcli.kernels.cpu.entries import choice, entries
from kvcli.kernels.cpu.interleaved import InterleavedExperts, PlacedExperts
from kvcli.kernels.cpu.library import library
from kvcli.kernels.cpu.matrices import Interleaver, Matrix, OfExperts, expert_table, weight_table
from kvcli.kernels.cpu.states import delta_net, mamba, short_conv
from kvcli.kernels.experts import experts
from kvcli.kernels.paged import Angles, PagedKV, Stretch, Watch
from kvcli.kernels.reference.basis import fix_basis
from kvcli.kernels.reference.choosing import summarize
from kvcli.kernels.reference.experts import ExpertMatrices, by_head
from kvcli.kernels.reference.matmul import QuantTensor, add_changed_rows, add_changes, place
from kvcli.kernels.reference.pointwise import activated, gated, softcap
from kvcli.routing import GATINGS, Routing

ACTS = {"silu": 0, "gelu": 1, "relu2": 2, "clamped": 3}
FEW_ROWS = 16  # of a step whose calls are noted


class _Routing(ctypes.Structure):
    """`Routing`, the gating as its place in GATINGS."""

    _fields_ = [
        *((name, c_int64) for name in ("experts", "used", "gating", "normed", "groups", "groups_used", "best")),
        ("scale", c_float),
    ]


class _Codec(ctypes.Structure):
    """`Numbers` of codecs.py."""

    _fields_ = [
        *((name, c_int64) for name in ("bits", "mantissa", "packing", "lowest", "tries")),
        ("largest", c_double),
    ]


class _Record(ctypes.Structure):
    _fields_ = [
        *((name, c_int64) for name in ("bytes", "k_row", "v_row", "v_offset", "k_scales", "v_scales")),
        ("codec_k", _Codec),
        ("codec_v", _Codec),
    ]


class _Class(ctypes.Structure):
    _fields_ = [("into", c_void_p), ("offset", c_int64), ("record", _Record)]


class _Paged(ctypes.Structure):
    _fields_ = [
        *(("entries", c_void_p), ("n_entries", c_int64), ("sealed", c_int64)),
        *((name, _Class) for name in ("closed", "open")),
        *((name, c_int64) for name in ("into_first", "into_place", "page_size", "kv_heads", "dim_k", "dim_v")),
        *((name, c_void_p) for name in ("static_k", "static_v", "centre", "cos", "sin")),
        *((name, c_int64) for name in ("rope_half", "exact", "joined", "pages", "means", "summary_offset")),
        ("threshold", c_double),
    ]


@functools.cache
def _routing(r: Routing) -> _Routing:
    return _Routing(r.experts, r.used, GATINGS.index(r.gating), r.normed, r.groups, r.groups_used, r.best, r.scale)


def _address(x: torch.Tensor | None) -> int | None:
    return None if x is None else x.data_ptr()


@functools.cache
def _record(r: RecordLayout) -> _Record:
    """Raises KVError for a cache type that the compiled kernels do not have."""
    codecs = []
    for codec in (r.codec_k, r.codec_v):
        codecs.append(_Codec(*codec.numbers))
        if not library().kv_has_codec(ctypes.byref(codecs[-1])):
            raise KVError(f"the compiled CPU kernels lack the cache type {codec.name}", "reinstall kv")
    places = r.record_bytes, r.k_row_bytes, r.v_row_bytes, r.v_offset, r.k_scales, r.v_scales
    return _Record(*places, *codecs)


def _class(kv: PagedKV) -> _Class:
    return _Class(kv.into.addresses.ctypes.data, kv.offset, _record(kv.record))


def _noted(watch: Watch | None) -> tuple[int, int, int, int]:
    """Where mass goes: `mass`, `ld_mass`, `since` and `largest` of kv_part."""
    mass = None if watch is None else watch.mass
    if watch is None or mass is None:
        return 0, 0, 0, 0
    return mass.data_ptr(), mass.stride(0), watch.since, watch.largest


class NativeBackend:
    """Bit-identical for any number of rows and threads (see cpu.c); agrees with the reference to float32 rounding.

    `exact`: rows of products stay float32, and so do queries, which else are rounded where the processor multiplies
    bytes (`fixed.rounded_query`). Else `place` and `place_experts` interleave weights of formats that are worth it, and
    rows of their products are in fixed point (see reference/fixed.py). `mapped` says of memory, by its address and
    size, whether it is a file's: weights there are interleaved when they are used (see cpu_interleave.h).
    """

    name: Literal["native"] = "native"
    device = torch.device("cpu")
    place_rows = staticmethod(place)

    def __init__(self, threads: int, isa: str = "", exact: bool = False) -> None:
        self._lib = library()
        chosen = self._lib.kv_init(threads, isa.encode())
        if chosen is None:
            raise UsageError(f"this processor cannot run the {isa} kernels", "unset KV_CPU_ISA, or name another one")
        self.isa = chosen.decode()
        self.sums_by_page = False
        self.exact = exact or not self._lib.kv_has_fixed()
        self._tables: dict[tuple[int, ...], ctypes.Array] = {}
        self.mapped: Callable[[int, int], bool] = lambda address, nbytes: False
        self._interleaver, self._with_experts = Interleaver(self._lib, lambda *memory: self.mapped(*memory)), False
        self._calls: Calls | None = None

    @contextmanager
    def noted(self) -> Iterator[Calls]:
        """Note the calls that are made meanwhile, to make them again."""
        library = self._lib
        self._calls = self._lib = calls = Calls(library)  # type: ignore[assignment]
        try:
            yield calls
        finally:
            self._lib, self._calls = library, None

    def _new(self, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """An empty tensor."""
        return (self._calls.new if self._calls else torch.empty)(*shape, dtype=dtype)

    def _table(
        self, weights: Sequence[Matrix] | Sequence[OfExperts], made: Callable[..., ctypes.Array] = weight_table
    ) -> ctypes.Array:
        key = tuple(map(id, weights))
        found = self._tables.get(key)
        if found is None:
            found = self._tables[key] = made(weights)
            found.keep = tuple(weights)  # type: ignore[attr-defined]  # keeps the ids valid
            found.rows = sum(w.rows for w in weights)  # type: ignore[attr-defined]
            found.changed = any(isinstance(w, Matrix) and w.changes for w in weights)  # type: ignore[attr-defined]
        return found

    @property
    def interleaved_bytes(self) -> int:
        """Of all matrices that are interleaved."""
        return self._interleaver.nbytes

    @property
    def pending_bytes(self) -> int:
        """What matrices that are interleaved when they are used, and were not yet, would take."""
        return self._interleaver.pending_bytes

    def finish(self) -> None:
        """Interleave now what is to be interleaved when it is used: a forked process has what is there before."""
        self._interleaver.finish()

    @property
    def arithmetic(self) -> str:
        """See `kernels`."""
        fixed = " rows in fixed point" + ", of experts and heads, too" * self._with_experts
        return f"cpu native {self.isa}{'' if self.exact else fixed}"

    def place(self, weights: tuple[QuantTensor, ...], paired: bool = False) -> tuple[Matrix, ...]:
        """Matrices whose rows `matmul` stacks: interleaved, or where the file is mapped."""
        return weights if self.exact else tuple(map(self._interleaver.matrix, weights))

    def place_experts(self, weights: ExpertMatrices, paired: bool = False) -> ExpertMatrices | PlacedExperts:
        """Likewise matrices of experts."""
        return self.place_heads(weights)

    def place_heads(self, weights: ExpertMatrices) -> ExpertMatrices | PlacedExperts:
        """And those of heads."""
        if self.exact:
            return weights
        placed = PlacedExperts(tuple(map(self._interleaver.experts, weights.parts)), weights.bias)
        self._with_experts |= any(isinstance(w, InterleavedExperts) for w in placed.parts)
        return placed

    def matmul(self, x: torch.Tensor, weights: Sequence[Matrix], add_to: torch.Tensor | None = None) -> torch.Tensor:
        table, (m, k) = self._table(weights), x.shape
        out = self._new(m, table.rows) if add_to is None else add_to  # type: ignore[attr-defined]
        self._lib.kv_matmul(
            table, len(weights), x.data_ptr(), m, k, x.stride(0), out.data_ptr(), out.stride(0), add_to is not None
        )
        if table.changed:  # type: ignore[attr-defined]
            add_changes(self.matmul, x, weights, out)
        return out

    experts = experts
    by_head = by_head
    short_conv, delta_net, mamba = short_conv, delta_net, mamba

    def route(
        self, logits: torch.Tensor, routing: Routing, bias: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        shape = logits.shape[0], routing.used
        ids, weights = self._new(*shape, dtype=torch.int64), self._new(*shape)
        self._lib.kv_route(
            logits.data_ptr(), shape[0], ctypes.byref(_routing(routing)), _address(bias), ids.data_ptr(),
            weights.data_ptr(),
        )  # fmt: skip
        return ids, weights

    def matmul_experts(
        self, x: torch.Tensor, weights: ExpertMatrices | PlacedExperts, ids: torch.Tensor
    ) -> torch.Tensor:
        table, pairs, k = self._table(weights.parts, expert_table), ids.numel(), x.shape[1]
        out = self._new(pairs, table.rows)  # type: ignore[attr-defined]
        self._lib.kv_matmul_experts(
            table, len(weights.parts), weights.experts, ids.data_ptr(), pairs, pairs // x.shape[0], x.data_ptr(), k,
            x.stride(0), out.data_ptr(), out.stride(0),
        )  # fmt: skip
        return out if weights.bias is None else out.add_(weights.bias[ids.flatten()])

    def mix(self, y: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        (t, n), d = weights.shape, y.shape[1]
        out = self._new(t, d)
        self._lib.kv_mix(y.data_ptr(), weights.data_ptr(), t, n, d, out.data_ptr())
        return out

    def rows(self, weight: Matrix, ids: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        low, high = map(int, torch.aminmax(ids))
        if low < 0 or high >= weight.rows:
            raise IndexError(f"rows {low} to {high} asked for, there are {weight.rows}")
        out = self._new(ids.shape[0], weight.cols)
        self._lib.kv_rows(self._table((weight,)), ids.data_ptr(), ids.shape[0], weight.cols, scale, out.data_ptr())
        add_changed_rows(self.matmul, self.rows, weight, ids, scale, out)
        return out

    def _norm(
        self, x: torch.Tensor, weight: torch.Tensor, eps: float, bias: torch.Tensor | None = None, centred: bool = False
    ) -> torch.Tensor:
        d, out = x.shape[-1], self._new(*x.shape)  # heads of few tokens are not copied: no list of calls could do that
        pieces = (x,) if x.dim() == 2 else tuple(x) if len(x) <= FEW_ROWS else (x.reshape(-1, d),)
        how, n = (weight.data_ptr(), _address(bias), centred, eps, len(pieces[0]), d), 4 * len(pieces[0]) * d
        for i, rows in enumerate(pieces):
            self._lib.kv_norm(rows.data_ptr(), rows.stride(0), *how, out.data_ptr() + i * n, d)
        return out

    rms_norm = normed = _norm

    def layer_norm(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, eps: float) -> torch.Tensor:
        return self._norm(x, weight, eps, bias, centred=True)

    activated = activated
    gated = gated
    attend_latents = attend_latents
    softcap = staticmethod(softcap)
    fix_basis = fix_basis
    summarize = staticmethod(summarize)

    def add_(self, x: torch.Tensor, y: torch.Tensor, scale: float = 1.0) -> None:
        (n, d), ldy = x.shape, y.stride(0) if y.dim() == 2 else 0
        self._lib.kv_add(x.data_ptr(), x.stride(0), y.data_ptr(), ldy, scale, n, d)

    def rope_(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> None:
        t, heads, dim = x.shape
        self._lib.kv_rope(x.data_ptr(), x.stride(0), t, heads, dim, 2 * cos.shape[1], cos.data_ptr(), sin.data_ptr())

    def activate(self, x: torch.Tensor, act: str) -> torch.Tensor:
        return self._activate(x, x.shape[1], act, False)

    def glu(self, x: torch.Tensor, act: str) -> torch.Tensor:
        return self._activate(x, x.shape[1] // 2, act, True)

    def _activate(self, x: torch.Tensor, f: int, act: str, gates: bool) -> torch.Tensor:
        out = self._new(x.shape[0], f)
        self._lib.kv_activate(x.data_ptr(), x.shape[0], f, ACTS[act], gates, out.data_ptr())
        return out

    def _paged(self, kv: PagedKV, angles: Angles | None = None) -> int:
        """The address of the C view of a layer's pages, which lives as long as `kv`."""
        known = kv.basis.known
        key = (known,) if angles is None else (known, angles[0].data_ptr(), angles[1].data_ptr())
        found: Any = kv.descriptors.get(key)
        if found is None:
            r, basis = kv.record, kv.basis
            half = angles[0].shape[1] if angles else 0
            cos, sin = (x.data_ptr() for x in angles) if angles else (None, None)
            listed = entries(kv)
            view = _Paged(
                listed.ctypes.data, len(listed), kv.open is not None, _class(kv), _class(kv.open or kv),
                kv.into.first, len(kv.entries), r.page_size, r.kv_heads, r.dim_k, r.dim_v,
                _address(basis.scale_k), _address(basis.scale_v), _address(basis.centre), cos, sin, half, self.exact,
                r.joined,
                *choice(kv),
            )  # fmt: skip
            found = kv.descriptors[key] = ctypes.addressof(view), view
        return int(found[0])

    def _parts(self, parts: Sequence[Stretch], angles: Sequence[Angles | None] | None = None) -> array[int]:
        """The C view of the parts (kv_part); it has to live until the call that it is for has returned."""
        numbers: list[int] = []
        for part, found in zip(parts, angles or (None,) * len(parts), strict=True):
            numbers += self._paged(part.kv, found), part.lo, part.hi - part.lo, part.start, *_noted(part.watch)
        made = array("q", numbers)
        if self._calls:
            self._calls.parts.append(made)
        return made

    def rotate_(self, x: torch.Tensor) -> None:
        t, heads, dim = x.shape
        self._lib.kv_rotate(x.data_ptr(), x.stride(0), t, heads, dim)

    def seal(self, kv: PagedKV, first: int, end: int, angles: Angles | None = None) -> None:
        self._lib.kv_seal(self._paged(kv, angles), first, end)

    def store(self, k: torch.Tensor, v: torch.Tensor, kv: PagedKV, start: int) -> None:
        self.store_each(k, v, [Stretch(0, k.shape[0], kv, start)])

    def store_each(self, k: torch.Tensor, v: torch.Tensor, parts: Sequence[Stretch]) -> None:
        """See `attend.store_each`."""
        there = self._parts(parts)
        self._lib.kv_store(k.data_ptr(), k.stride(0), v.data_ptr(), v.stride(0), there.buffer_info()[0], len(parts))

    def attention(
        self,
        q: torch.Tensor,
        kv: PagedKV,
        start: int,
        window: int = 0,
        scale: float = 1.0,
        softcap: float = 0.0,
        angles: Angles | None = None,
        turned_q: torch.Tensor | None = None,
        sinks: torch.Tensor | None = None,
        watch: Watch | None = None,
    ) -> torch.Tensor:
        part = Stretch(0, q.shape[0], kv, start, None, watch)
        return self.attention_each(q, [part], window, scale, softcap, [angles], turned_q, sinks)

    def attention_each(
        self,
        q: torch.Tensor,
        parts: Sequence[Stretch],
        window: int,
        scale: float,
        softcap: float,
        angles: Sequence[Angles | None],
        turned_q: torch.Tensor | None,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """See `attend.attention_each`; in one call, whose threads share the work of all parts."""
        t, heads = q.shape[0], q.shape[1]
        out = self._new(t, heads * parts[0].kv.record.dim_v)
        second = (None, 0) if turned_q is None else (turned_q.data_ptr(), turned_q.stride(0))
        there = self._parts(parts, angles)
        self._lib.kv_attention(
            q.data_ptr(), q.stride(0), *second, heads, window, scale, softcap, _address(sinks), there.buffer_info()[0],
            len(parts), out.data_ptr(),
        )  # fmt: skip
        return out

    def attend(self, qkv: torch.Tensor, parts: Sequence[Stretch], layer: AttentionLayer) -> torch.Tensor:
        """See `kernels.attend`."""
        return attend(self, qkv, parts, layer)
