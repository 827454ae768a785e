"""What the kernel tests compute on: backends by name, packed matrices, and pages full of NaN."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from kvcli.blockformats import FORMATS
from kvcli.codecs import CODECS, Codec, Section
from kvcli.errors import KVError, UsageError
from kvcli.kernels import NEVER, Backend, Entries, Into, PagedKV, QuantTensor, RecordLayout
from kvcli.kernels.cpu.backend import NativeBackend
from kvcli.kernels.cpu.library import ISAS, library
from kvcli.kernels.reference import codecs
from kvcli.kernels.reference.backend import ReferenceBackend
from kvcli.runtime.host.cores import physical_cores

# Where the half-precision scales stand in a block, if not at its start.
_SCALES = {
    "Q4_1": (0, 2), "Q5_1": (0, 2), "Q2_K": (80, 82), "Q3_K": (108,), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,),
    "TQ1_0": (52,), "TQ2_0": (64,), "IQ1_M": (), "MXFP4": (), "NVFP4": (),
}  # fmt: skip
PLAIN = {
    "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "F64": torch.float64, "I8": torch.int8,
    "I16": torch.int16, "I32": torch.int32, "I64": torch.int64,
}  # fmt: skip


def need_native() -> None:
    """Skip where the kernels could not be compiled; with a compiler at hand their absence is a failure."""
    try:
        library()
    except KVError as e:
        if shutil.which(os.environ.get("CC", "cc")):
            raise
        pytest.skip(e.message)


def native(isa: str = "", threads: int = 2) -> NativeBackend:
    """The compiled backend, with that instruction set for the whole process; skips where there is none."""
    need_native()
    try:
        return NativeBackend(threads, isa)
    except KVError as e:
        assert isa != ISAS[-1], f"{isa} kernels must run everywhere"
        pytest.skip(e.message)


def backends_of(isas: Sequence[str], threads: Sequence[int]) -> Iterator[NativeBackend]:
    """The compiled backend with each of these instruction sets that this processor has, on each number of threads.
    Each is to be used before the next one is asked for. Skips where it has none of them."""
    need_native()
    there = 0
    for isa in isas:
        for count in threads:
            with suppress(UsageError):  # this processor lacks it
                ops = NativeBackend(count, isa)
                there += 1
                yield ops
    if not there:
        pytest.skip(f"this processor has none of the instruction sets {', '.join(isas)}")


def in_files(ops: NativeBackend) -> NativeBackend:
    """The backend, which takes all weights for those of files; skips where it interleaves none."""
    if ops.exact:
        pytest.skip("nothing is interleaved on this processor")
    ops.mapped = lambda address, nbytes: True
    return ops


def in_file(w: Any, path: Path) -> Any:
    """A matrix, or one of each expert, whose blocks are those of a mapped file at `path`."""
    path.write_bytes(w.blocks.numpy().tobytes())
    blocks = torch.from_file(str(path), shared=True, size=w.blocks.numel(), dtype=torch.uint8)
    return replace(w, blocks=blocks.view(w.blocks.shape))


@contextmanager
def one_thread() -> Iterator[None]:
    """torch on one thread: on small tensors its threads wait for each other longer than they work.

    Afterwards the compiled backend, which is the process's, is back at its best.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
    with suppress(KVError):
        NativeBackend(physical_cores())


def backend(name: str) -> Backend:
    """ "reference", or an instruction set of the compiled backend ("" = the best here)."""
    return ReferenceBackend() if name == "reference" else native(name)


def packed(type: str, rows: int, cols: int, seed: int = 0, wild: bool = False) -> QuantTensor:
    """A random matrix of that format. `wild`: any finite bits; else values that sums over a row make sense of."""
    rng = np.random.default_rng([seed, rows, cols, len(type)])
    form = FORMATS[type]
    n_blocks = cols // form.elements
    assert n_blocks * form.elements == cols
    if type in PLAIN:
        return QuantTensor(type, _plain(PLAIN[type], rng, rows, cols, wild), cols)
    raw = rng.integers(0, 256, (rows, n_blocks, form.bytes), dtype=np.uint8)
    if wild:
        bits = rng.integers(0, 1 << 16, (2, rows, n_blocks)).astype(np.uint16)
        bits[bits & 0x7C00 == 0x7C00] ^= 0x4000  # no infinities, no NaN
    else:
        bits = rng.uniform(-0.02, 0.02, (2, rows, n_blocks)).astype(np.float16).view(np.uint16)
    for at, half in zip(_SCALES.get(type, (0,)), bits, strict=False):
        raw[..., at], raw[..., at + 1] = half & 255, half >> 8
    if type == "IQ1_M":  # four bits in each of four words
        raw[..., 49::2] = raw[..., 49::2] & 15 | bits[0][..., None] >> np.array([0, 4, 8, 12]) << 4 & 240
    elif type == "MXFP4":
        raw[..., 0] = rng.integers(0, 251, (rows, n_blocks)) if wild else rng.integers(119, 123, (rows, n_blocks))
    elif type == "NVFP4" and not wild:
        raw[..., :4] &= 31
    return QuantTensor(type, torch.from_numpy(raw.reshape(rows, -1)), cols)


def _plain(dtype: torch.dtype, rng: np.random.Generator, rows: int, cols: int, wild: bool) -> torch.Tensor:
    if not wild:
        factor = 1 if dtype.is_floating_point else 50
        return torch.from_numpy(factor * rng.standard_normal((rows, cols))).to(dtype).view(torch.uint8)
    words = rng.integers(0, 256, (rows, cols * dtype.itemsize), dtype=np.uint8)
    values = torch.from_numpy(words).view(dtype)
    return torch.where(values.float().isfinite(), values, torch.zeros_like(values)).view(torch.uint8)


def record(
    heads: int, dim_k: int, dim_v: int, codec_k: str = "f32", codec_v: str = "f32", page_size: int = 16
) -> RecordLayout:
    """A record with gaps before V and at its end, as an aligned layout may have."""
    k, v = CODECS[codec_k], CODECS[codec_v]
    rows = Section("k", k.row_bytes(dim_k)), Section("v", v.row_bytes(dim_v))
    sections = rows[0], Section("gap", 64, page_size), rows[1], Section("end", 128, page_size)
    return RecordLayout(page_size, heads, dim_k, dim_v, k, v, sections)


def poisoned(r: RecordLayout, first_row: int, end_row: int) -> PagedKV:
    """Pages for rows [first_row, end_row) of the second of two layers; every byte is set, so every number NaN."""
    first, end = first_row // r.page_size, -(-end_row // r.page_size)
    layer_bytes = r.kv_heads * r.record_bytes
    pages = tuple(torch.full((2, layer_bytes), 0xFF, dtype=torch.uint8) for _ in range(first, end))
    addresses = np.array([p.data_ptr() for p in pages], dtype=np.int64)
    into = Into(first * r.page_size, addresses, pages)
    return PagedKV(r, whole(into, r.page_size), into, 1, layer_bytes)


def whole(into: Into, page_size: int) -> Entries:
    """The pages that are written to, one behind the other; every query sees every row."""
    n = len(into.addresses)
    first, zeros = into.first + np.arange(n) * page_size, np.zeros(n, dtype=np.int64)
    return Entries(into.addresses, first, zeros, zeros + page_size, zeros, zeros + NEVER, zeros, into.memory)


def place(kv: PagedKV, number: int) -> int:
    """Where the list of that class of pages has page `number`."""
    return kv.entries.first.tolist().index(number * kv.record.page_size)


def page(kv: PagedKV, number: int) -> torch.Tensor:
    """The memory of page `number` in that class."""
    found = kv.entries.memory[place(kv, number)]
    assert found is not None
    return found


def stored(x: torch.Tensor, codec: Codec) -> torch.Tensor:
    """What a codec keeps of x, in float64."""
    kept = codecs.of(codec)
    return kept.decode(kept.encode(x), x.shape[-1]).double()


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.shape == b.shape and torch.equal(a.contiguous().view(torch.int32), b.contiguous().view(torch.int32))
