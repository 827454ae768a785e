"""Tiles of cached rows: device functions that load rows of every codec as 16-bit operands of matrix products.

A tile comes in *parts*, each with a run of a row's elements, so that nothing has to be shuffled:

| bits | parts | part i holds elements |
|---|---|---|
| 32, 16 | 1 | all |
| 8 | 2 | i, i + 2, i + 4, ... |
| fewer | 4 | i * dim / 4 and on |

CODEC is the `Numbers` of a cache type (kvcli/codecs.py): kernels are compiled for these, and know no names.

Codes become float16 exactly (unpacking.py). Scales, offsets and factors are left to the caller, which has them act on
scores and probabilities.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

from kvcli.codecs import HEAD, Codec
from kvcli.kernels.gpu.language import INTERPRETED, fence_copies
from kvcli.kernels.gpu.unpacking import (
    unpack4,
    unpack4_lifted,
    unpack5,
    unpack6,
    unpack8,
    unpack_e4m3,
    unpack_e5m2,
)

LARGEST_HALF = tl.constexpr(65504.0)


def tile_parts(codec: Codec) -> int:
    """In how many parts its tiles come."""
    return 1 if codec.bits >= 16 else 2 if codec.bits == 8 else 4


def left_centre(codec: Codec) -> float:
    """What is to be taken from codes as they are unpacked here: those of 8 bits come centred."""
    return (codec.lowest + (1 << codec.bits) - 1) / 2 if codec.grid and codec.bits < 8 else 0.0


def head_factor(codec: Codec) -> float:
    """What 8-bit floats as they are unpacked here, with the exponent's bits of a half, lack; 0 = they are none."""
    return 2.0 ** (16 - (1 << (6 - codec.mantissa))) if codec.scale == HEAD else 0.0


def launch_options(pdl: int, warps: int, registers: int = 0) -> dict[str, Any]:
    """Keywords of a launch. `pdl`: see `language.SERIAL`; others want compute capability 9.0. `registers`: of a thread,
    at most; 0 = as many as the compiler takes."""
    found: dict[str, Any] = {"num_warps": warps}
    if not INTERPRETED:
        found |= ({"launch_pdl": True} if pdl else {}) | ({"maxnreg": registers} if registers else {})
    return found


if INTERPRETED:

    def bound(x: Any) -> Any:
        """A loop bound; the interpreter's ranges want plain integers."""
        return int(x.handle.data.item()) if isinstance(x, tl.tensor) else int(x)

else:

    @triton.jit
    def bound(x):
        return x


@triton.jit
def elements(i: tl.constexpr, PARTS: tl.constexpr, DIM: tl.constexpr, PAD: tl.constexpr):
    """int32 [PAD / PARTS]: which elements part i holds; DIM or more where there is none."""
    j = tl.arange(0, PAD // PARTS)
    if PARTS == 1:
        return j
    elif PARTS == 2:
        return 2 * j + i
    elif DIM == PAD:
        return i * (DIM // 4) + j
    else:
        return tl.where(j < DIM // 4, i * (DIM // 4) + j, DIM)


@triton.jit
def column(x, TURNED: tl.constexpr):
    """Numbers [n] as [n, 1]; TURNED: as [1, n]."""
    if TURNED:
        return x[None, :]
    else:
        return x[:, None]


@triton.jit
def load_units(
    units, rows, seen, PITCH: tl.constexpr, N: tl.constexpr, PAD: tl.constexpr, MASKED: tl.constexpr,
    TURNED: tl.constexpr,
):  # fmt: skip
    """The first N units of rows [BN], which are PITCH units apart, from pointer `units` -> [BN, PAD]; TURNED:
    transposed, which a product takes from the left as it is, while the compiler does not copy ahead what is transposed
    afterwards.

    Columns beyond N are 0; with MASKED also the rows that are not `seen` [BN].
    """
    j = tl.arange(0, PAD)
    p = units + column(rows, TURNED) * PITCH + column(j, not TURNED)
    if MASKED:
        if N == PAD:
            return tl.load(p, mask=column(seen, TURNED), other=0)
        else:
            return tl.load(p, mask=column(seen, TURNED) & column(j < N, not TURNED), other=0)
    elif N == PAD:
        return tl.load(p)
    else:
        return tl.load(p, mask=column(j < N, not TURNED), other=0)


@triton.jit
def load_bytes(
    at, rows, seen, columns, PITCH: tl.constexpr, N: tl.constexpr, MASKED: tl.constexpr, TURNED: tl.constexpr
):
    """Bytes `columns` [n] below N of rows [BN], as uint16 [BN, n]; see `load_units`."""
    mask = column(columns < N, not TURNED)
    if MASKED:
        mask = mask & column(seen, TURNED)
    p = at.to(tl.pointer_type(tl.uint8)) + column(rows, TURNED) * PITCH + column(columns, not TURNED)
    return tl.load(p, mask=mask, other=0).to(tl.uint16)


@triton.jit
def plain_tile(at, rows, seen, PITCH: tl.constexpr, DIM: tl.constexpr, PAD: tl.constexpr, CODEC: tl.constexpr,
               MASKED: tl.constexpr, AT: tl.constexpr = 0, TURNED: tl.constexpr = False):  # fmt: skip
    """Rows of f32, f16 or bf16 (PITCH bytes each), from AT bytes behind an address on, as float16 [BN, PAD]; what is
    beyond its range is clamped.

    Here and below the hint is at the address to which AT, which keeps it, is added as to a pointer: where numbers are
    added, the compiler makes a pointer of the first one, without the hint, and reads element by element, none ahead.
    """
    if CODEC.mantissa == 10:
        return load_units(
            tl.multiple_of(at.to(tl.pointer_type(tl.float16)), 16) + AT // 2, rows, seen, PITCH // 2, DIM, PAD, MASKED,
            TURNED,
        )  # fmt: skip
    elif CODEC.mantissa == 7:
        bits = load_units(
            tl.multiple_of(at.to(tl.pointer_type(tl.uint16)), 16) + AT // 2, rows, seen, PITCH // 2, DIM, PAD, MASKED,
            TURNED,
        )  # fmt: skip
        x = (bits.to(tl.uint32) << 16).to(tl.float32, bitcast=True)
        return tl.clamp(x, -LARGEST_HALF, LARGEST_HALF).to(tl.float16)
    else:
        tl.static_assert(CODEC.mantissa == 23, "no such floats")
        x = load_units(
            tl.multiple_of(at.to(tl.pointer_type(tl.float32)), 16) + AT // 4, rows, seen, PITCH // 4, DIM, PAD, MASKED,
            TURNED,
        )  # fmt: skip
        return tl.clamp(x, -LARGEST_HALF, LARGEST_HALF).to(tl.float16)


@triton.jit
def pair_tile(at, rows, seen, PITCH: tl.constexpr, DIM: tl.constexpr, PAD: tl.constexpr, CODEC: tl.constexpr,
              MASKED: tl.constexpr, AT: tl.constexpr = 0, TURNED: tl.constexpr = False):  # fmt: skip
    """Rows of one byte an element as two parts, float16 [BN, PAD / 2] each. Here and below `at` may be the address of
    each row's page, [BN, 1], or [1, BN] where they are TURNED."""
    PAIRS: tl.constexpr = len(at.shape) == 2
    words = tl.multiple_of(at.to(tl.pointer_type(tl.uint16)), (16, 16) if PAIRS else 16) + AT // 2
    w = load_units(words, rows, seen, PITCH // 2, DIM // 2, PAD // 2, MASKED, TURNED)
    if CODEC.mantissa == 0:
        return unpack8(w)
    elif CODEC.mantissa == 3:
        return unpack_e4m3(w)
    else:
        tl.static_assert(CODEC.mantissa == 2, "no such 8-bit floats")
        return unpack_e5m2(w)


@triton.jit
def quarter_tile(at, rows, seen, PITCH: tl.constexpr, DIM: tl.constexpr, PAD: tl.constexpr, CODEC: tl.constexpr,
                 MASKED: tl.constexpr, AT: tl.constexpr = 0, TURNED: tl.constexpr = False,
                 LIFTED: tl.constexpr = False):  # fmt: skip
    """Rows of codes of fewer than 8 bits as four parts, float16 [BN, PAD / 4] each; those of 4 bits may be LIFTED."""
    if PITCH % 2 == 0:
        PAIRS: tl.constexpr = len(at.shape) == 2
        words = tl.multiple_of(at.to(tl.pointer_type(tl.uint16)), (16, 16) if PAIRS else 16) + AT // 2
        w = load_units(words, rows, seen, PITCH // 2, DIM // 4, PAD // 4, MASKED, TURNED)
    else:  # rows do not begin where words may
        j = 2 * tl.arange(0, PAD // 4)
        low = load_bytes(at + AT, rows, seen, j, PITCH, DIM // 2, MASKED, TURNED)
        w = low | (load_bytes(at + AT, rows, seen, j + 1, PITCH, DIM // 2, MASKED, TURNED) << 8)
    if CODEC.bits == 4 and LIFTED:
        return unpack4_lifted(w)
    elif CODEC.bits == 4:
        return unpack4(w)
    else:
        j = tl.arange(0, PAD // 4)
        if CODEC.bits == 6:
            return unpack6(w, load_bytes(at + AT + DIM // 2, rows, seen, j, PITCH, DIM // 4, MASKED, TURNED))
        else:
            tl.static_assert(CODEC.bits == 5, "codes of that width are not unpacked")
            HALF: tl.constexpr = DIM // 8
            there = tl.where(j < 2 * HALF, j % HALF, HALF)
            h = load_bytes(at + AT + DIM // 2, rows, seen, there, PITCH, HALF, MASKED, TURNED)
            return unpack5(w, h >> column((j // HALF * 4).to(tl.uint16), not TURNED))


@triton.jit
def times(x, y, z, LEFT: tl.constexpr):
    """x [M, K] times y [K, N], plus z, if there is one -> float32 [M, N]. LEFT: z and the result are transposed, and y
    is the left side: tensor cores have 16 rows there, but 8 columns on the right, and a token's queries are few."""
    if LEFT:
        return tl.dot(tl.trans(y), tl.trans(x), z)
    else:
        return tl.dot(x, y, z)


@triton.jit
def add_product(sums, decay, w, v, LEFT: tl.constexpr):
    """Sums times decay [M], plus w [M, BN] times v [BN, N]; LEFT (see `times`): all are transposed."""
    if LEFT:
        return tl.dot(v, w, sums * decay[None, :])
    else:
        return tl.dot(w, v, sums * decay[:, None])


@triton.jit
def dot_keys(q0, q1, q2, q3, at, rows, seen, PITCH: tl.constexpr, DIM: tl.constexpr, PAD: tl.constexpr,
             CODEC: tl.constexpr, PARTS: tl.constexpr, MASKED: tl.constexpr, LEFT: tl.constexpr):  # fmt: skip
    """Parts of queries, float16 [M, PAD / PARTS], times the codes of rows -> float32 [M, BN]; LEFT: see `times`. Codes
    of 4 bits are lifted."""
    if PARTS == 1:
        k = plain_tile(at, rows, seen, PITCH, DIM, PAD, CODEC, MASKED)
        fence_copies(q0.shape[0])
        return times(q0, tl.trans(k), None, LEFT)
    elif PARTS == 2:
        k0, k1 = pair_tile(at, rows, seen, PITCH, DIM, PAD, CODEC, MASKED)
        return times(q1, tl.trans(k1), times(q0, tl.trans(k0), None, LEFT), LEFT)
    else:
        k0, k1, k2, k3 = quarter_tile(at, rows, seen, PITCH, DIM, PAD, CODEC, MASKED, LIFTED=True)
        s = times(q1, tl.trans(k1), times(q0, tl.trans(k0), None, LEFT), LEFT)
        return times(q3, tl.trans(k3), times(q2, tl.trans(k2), s, LEFT), LEFT)


@triton.jit
def add_values(w, decay, a0, a1, a2, a3, at, rows, seen, PITCH: tl.constexpr, DIM: tl.constexpr, PAD: tl.constexpr,
               CODEC: tl.constexpr, PARTS: tl.constexpr, MASKED: tl.constexpr, AT: tl.constexpr,
               LEFT: tl.constexpr):  # fmt: skip
    """Each part's sum, float32 [M, PAD / PARTS], times decay [M], plus weights float16 [M, BN] times the codes of rows
    AT bytes behind the address. LEFT: see `times`; weights and sums are transposed. Codes of 4 bits are lifted."""
    if PARTS == 1:
        v0 = plain_tile(at, rows, seen, PITCH, DIM, PAD, CODEC, MASKED, AT, LEFT)
        fence_copies(w.shape[0])
        a0 = add_product(a0, decay, w, v0, LEFT)
    elif PARTS == 2:
        v0, v1 = pair_tile(at, rows, seen, PITCH, DIM, PAD, CODEC, MASKED, AT, LEFT)
        a0 = add_product(a0, decay, w, v0, LEFT)
        a1 = add_product(a1, decay, w, v1, LEFT)
    else:
        v0, v1, v2, v3 = quarter_tile(at, rows, seen, PITCH, DIM, PAD, CODEC, MASKED, AT, LEFT, True)
        a0 = add_product(a0, decay, w, v0, LEFT)
        a1 = add_product(a1, decay, w, v1, LEFT)
        a2 = add_product(a2, decay, w, v2, LEFT)
        a3 = add_product(a3, decay, w, v3, LEFT)
    return a0, a1, a2, a3
