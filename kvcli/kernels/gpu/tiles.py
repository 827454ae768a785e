"""Tiles of cached rows: device functions that load rows of every codec as 16-bit operands of matrix products.

A tile comes in *parts*, each with a run of a row's elements, so that nothing has to be shuffled:

| bits | parts | part i holds elements |
|---|---|---|
| 32, 16 | 1 | all |
| 8 | 2 | i, i + 2, i + 4, ... |
| fewer | 4 | i * dim / 4 and on |

CODEC is the `Numbers` of a cache type (kvcli/codecs.py): kernels are compiled for these, and know no names.

Codes become float16 exactly, by setting the mantissa of 1024 (integers) or by moving bits (fp8; e4m3 comes 2**8 too
small). Scales, offsets and that factor are left to the caller, which has them act on scores and probabilities.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

from kvcli.codecs import HEAD, Codec
from kvcli.kernels.gpu.language import INTERPRET, INTERPRETED, fence_copies

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
def unpack4(w):
    """uint16 -> its four nibbles from the lowest up, float16 0..15 each."""
    if INTERPRET:
        u0 = (((w & 0xF) | 0x6400).to(tl.float16, bitcast=True) - 1024.0).to(tl.float16)
        u1 = ((((w >> 4) & 0xF) | 0x6400).to(tl.float16, bitcast=True) - 1024.0).to(tl.float16)
        u2 = ((((w >> 8) & 0xF) | 0x6400).to(tl.float16, bitcast=True) - 1024.0).to(tl.float16)
        u3 = (((w >> 12) | 0x6400).to(tl.float16, bitcast=True) - 1024.0).to(tl.float16)
        return u0, u1, u2, u3
    else:
        return tl.inline_asm_elementwise(
            """{ .reg .b32 t, m, k, z;
            mov.b32 m, 0x64006400; mov.b32 k, 0x2c002c00; mov.b32 z, 0xd400d400;
            lop3.b32 $0, $4, 0x000f000f, m, 0xea;
            lop3.b32 $1, $4, 0x00f000f0, m, 0xea;
            shr.u32  t, $4, 8;
            lop3.b32 $2, t, 0x000f000f, m, 0xea;
            lop3.b32 $3, t, 0x00f000f0, m, 0xea;
            sub.f16x2 $0, $0, m;
            fma.rn.f16x2 $1, $1, k, z;
            sub.f16x2 $2, $2, m;
            fma.rn.f16x2 $3, $3, k, z; }""",
            "=&r,=&r,=&r,=&r,r",
            [w],
            dtype=(tl.float16, tl.float16, tl.float16, tl.float16),
            is_pure=True,
            pack=2,
        )


@triton.jit
def unpack5(w, h):
    """uint16 of four low nibbles and uint16 0..15 of four high bits -> float16 0..31, four times."""
    if INTERPRET:
        u0 = (((w & 0xF) | ((h & 1) << 4) | 0x6400).to(tl.float16, bitcast=True) - 1024.0).to(tl.float16)
        u1 = ((((w >> 4) & 0xF) | ((h & 2) << 3) | 0x6400).to(tl.float16, bitcast=True) - 1024.0).to(tl.float16)
        u2 = ((((w >> 8) & 0xF) | ((h & 4) << 2) | 0x6400).to(tl.float16, bitcast=True) - 1024.0).to(tl.float16)
        u3 = (((w >> 12) | ((h & 8) << 1) | 0x6400).to(tl.float16, bitcast=True) - 1024.0).to(tl.float16)
        return u0, u1, u2, u3
    else:
        return tl.inline_asm_elementwise(
            """{ .reg .b32 a, t, m;
            mov.b32 m, 0x64006400;
            shl.b32 a, $5, 4;
            lop3.b32 a, a, 0x00100010, m, 0xea;
            lop3.b32 $0, $4, 0x000f000f, a, 0xea;
            shl.b32 a, $5, 3;
            shr.u32 t, $4, 4;
            lop3.b32 a, a, 0x00100010, m, 0xea;
            lop3.b32 $1, t, 0x000f000f, a, 0xea;
            shl.b32 a, $5, 2;
            shr.u32 t, $4, 8;
            lop3.b32 a, a, 0x00100010, m, 0xea;
            lop3.b32 $2, t, 0x000f000f, a, 0xea;
            shl.b32 a, $5, 1;
            shr.u32 t, $4, 12;
            lop3.b32 a, a, 0x00100010, m, 0xea;
            lop3.b32 $3, t, 0x000f000f, a, 0xea;
            sub.f16x2 $0, $0, m;
            sub.f16x2 $1, $1, m;
            sub.f16x2 $2, $2, m;
            sub.f16x2 $3, $3, m; }""",
            "=&r,=&r,=&r,=&r,r,r",
            [w, h],
            dtype=(tl.float16, tl.float16, tl.float16, tl.float16),
            is_pure=True,
            pack=2,
        )


@triton.jit
def unpack6(w, h):
    """uint16 of four low nibbles and uint16 0..255 of four high pairs of bits -> float16 0..63, four times."""
    if INTERPRET:
        u0 = (((w & 0xF) | ((h & 3) << 4) | 0x6400).to(tl.float16, bitcast=True) - 1024.0).to(tl.float16)
        u1 = ((((w >> 4) & 0xF) | ((h & 12) << 2) | 0x6400).to(tl.float16, bitcast=True) - 1024.0).to(tl.float16)
        u2 = ((((w >> 8) & 0xF) | (h & 48) | 0x6400).to(tl.float16, bitcast=True) - 1024.0).to(tl.float16)
        u3 = (((w >> 12) | ((h & 192) >> 2) | 0x6400).to(tl.float16, bitcast=True) - 1024.0).to(tl.float16)
        return u0, u1, u2, u3
    else:
        return tl.inline_asm_elementwise(
            """{ .reg .b32 a, t, m;
            mov.b32 m, 0x64006400;
            shl.b32 a, $5, 4;
            lop3.b32 a, a, 0x00300030, m, 0xea;
            lop3.b32 $0, $4, 0x000f000f, a, 0xea;
            shl.b32 a, $5, 2;
            shr.u32 t, $4, 4;
            lop3.b32 a, a, 0x00300030, m, 0xea;
            lop3.b32 $1, t, 0x000f000f, a, 0xea;
            shr.u32 t, $4, 8;
            lop3.b32 a, $5, 0x00300030, m, 0xea;
            lop3.b32 $2, t, 0x000f000f, a, 0xea;
            shr.u32 a, $5, 2;
            shr.u32 t, $4, 12;
            lop3.b32 a, a, 0x00300030, m, 0xea;
            lop3.b32 $3, t, 0x000f000f, a, 0xea;
            sub.f16x2 $0, $0, m;
            sub.f16x2 $1, $1, m;
            sub.f16x2 $2, $2, m;
            sub.f16x2 $3, $3, m; }""",
            "=&r,=&r,=&r,=&r,r,r",
            [w, h],
            dtype=(tl.float16, tl.float16, tl.float16, tl.float16),
            is_pure=True,
            pack=2,
        )


@triton.jit
def unpack8(w):
    """uint16 of two codes 1..255 -> float16 code - 128, the low byte's and the high byte's."""
    if INTERPRET:
        u0 = (((w & 0xFF) | 0x6400).to(tl.float16, bitcast=True) - 1152.0).to(tl.float16)
        u1 = (((w >> 8) | 0x6400).to(tl.float16, bitcast=True) - 1152.0).to(tl.float16)
        return u0, u1
    else:
        return tl.inline_asm_elementwise(
            """{ .reg .b32 m, z;
            mov.b32 m, 0x64646464; mov.b32 z, 0x64806480;
            prmt.b32 $0, $2, m, 0x4240;
            prmt.b32 $1, $2, m, 0x4341;
            sub.f16x2 $0, $0, z;
            sub.f16x2 $1, $1, z; }""",
            "=&r,=&r,r",
            [w],
            dtype=(tl.float16, tl.float16),
            is_pure=True,
            pack=2,
        )


@triton.jit
def unpack_e4m3(w):
    """uint16 of two e4m3 -> float16 of 2**-8 times them."""
    if INTERPRET:
        u0 = (((w & 0x80) << 8) | ((w & 0x7F) << 7)).to(tl.float16, bitcast=True)
        u1 = ((w & 0x8000) | ((w >> 1) & 0x3F80)).to(tl.float16, bitcast=True)
        return u0, u1
    else:
        return tl.inline_asm_elementwise(
            """{ .reg .b32 a, s;
            shl.b32 a, $2, 7;
            shl.b32 s, $2, 8;
            and.b32 s, s, 0x80008000;
            lop3.b32 $0, a, 0x3f803f80, s, 0xea;
            shr.u32 a, $2, 1;
            and.b32 s, $2, 0x80008000;
            lop3.b32 $1, a, 0x3f803f80, s, 0xea; }""",
            "=&r,=&r,r",
            [w],
            dtype=(tl.float16, tl.float16),
            is_pure=True,
            pack=2,
        )


@triton.jit
def unpack_e5m2(w):
    """uint16 of two e5m2 -> float16."""
    if INTERPRET:
        return ((w & 0xFF) << 8).to(tl.float16, bitcast=True), (w & 0xFF00).to(tl.float16, bitcast=True)
    else:
        return tl.inline_asm_elementwise(
            """{ shl.b32 $0, $2, 8;
            and.b32 $0, $0, 0xff00ff00;
            and.b32 $1, $2, 0xff00ff00; }""",
            "=&r,=&r,r",
            [w],
            dtype=(tl.float16, tl.float16),
            is_pure=True,
            pack=2,
        )


@triton.jit
def load_units(units, rows, seen, PITCH: tl.constexpr, N: tl.constexpr, PAD: tl.constexpr, MASKED: tl.constexpr):
    """The first N units of rows [BN], which are PITCH units apart, from pointer `units` -> [BN, PAD].

    Columns beyond N are 0; with MASKED also the rows that are not `seen` [BN].
    """
    j = tl.arange(0, PAD)
    p = units + rows[:, None] * PITCH + j[None, :]
    if MASKED:
        if N == PAD:
            return tl.load(p, mask=seen[:, None], other=0)
        else:
            return tl.load(p, mask=seen[:, None] & (j < N)[None, :], other=0)
    elif N == PAD:
        return tl.load(p)
    else:
        return tl.load(p, mask=(j < N)[None, :], other=0)


@triton.jit
def load_bytes(at, rows, seen, columns, PITCH: tl.constexpr, N: tl.constexpr, MASKED: tl.constexpr):
    """Bytes `columns` [n] below N of rows [BN], as uint16 [BN, n]; see `load_units`."""
    mask = (columns < N)[None, :]
    if MASKED:
        mask = mask & seen[:, None]
    p = at.to(tl.pointer_type(tl.uint8)) + rows[:, None] * PITCH + columns[None, :]
    return tl.load(p, mask=mask, other=0).to(tl.uint16)


@triton.jit
def plain_tile(at, rows, seen, PITCH: tl.constexpr, DIM: tl.constexpr, PAD: tl.constexpr, CODEC: tl.constexpr,
               MASKED: tl.constexpr, AT: tl.constexpr = 0):  # fmt: skip
    """Rows of f32, f16 or bf16 (PITCH bytes each), from AT bytes behind an address on, as float16 [BN, PAD]; what is
    beyond its range is clamped.

    Here and below the hint is at the address to which AT, which keeps it, is added as to a pointer: where numbers are
    added, the compiler makes a pointer of the first one, without the hint, and reads element by element, none ahead.
    """
    if CODEC.mantissa == 10:
        return load_units(
            tl.multiple_of(at.to(tl.pointer_type(tl.float16)), 16) + AT // 2, rows, seen, PITCH // 2, DIM, PAD, MASKED
        )
    elif CODEC.mantissa == 7:
        bits = load_units(
            tl.multiple_of(at.to(tl.pointer_type(tl.uint16)), 16) + AT // 2, rows, seen, PITCH // 2, DIM, PAD, MASKED
        )
        x = (bits.to(tl.uint32) << 16).to(tl.float32, bitcast=True)
        return tl.clamp(x, -LARGEST_HALF, LARGEST_HALF).to(tl.float16)
    else:
        tl.static_assert(CODEC.mantissa == 23, "no such floats")
        x = load_units(
            tl.multiple_of(at.to(tl.pointer_type(tl.float32)), 16) + AT // 4, rows, seen, PITCH // 4, DIM, PAD, MASKED
        )
        return tl.clamp(x, -LARGEST_HALF, LARGEST_HALF).to(tl.float16)


@triton.jit
def pair_tile(at, rows, seen, PITCH: tl.constexpr, DIM: tl.constexpr, PAD: tl.constexpr, CODEC: tl.constexpr,
              MASKED: tl.constexpr, AT: tl.constexpr = 0):  # fmt: skip
    """Rows of one byte an element as two parts, float16 [BN, PAD / 2] each."""
    words = tl.multiple_of(at.to(tl.pointer_type(tl.uint16)), 16) + AT // 2
    w = load_units(words, rows, seen, PITCH // 2, DIM // 2, PAD // 2, MASKED)
    if CODEC.mantissa == 0:
        return unpack8(w)
    elif CODEC.mantissa == 3:
        return unpack_e4m3(w)
    else:
        tl.static_assert(CODEC.mantissa == 2, "no such 8-bit floats")
        return unpack_e5m2(w)


@triton.jit
def quarter_tile(at, rows, seen, PITCH: tl.constexpr, DIM: tl.constexpr, PAD: tl.constexpr, CODEC: tl.constexpr,
                 MASKED: tl.constexpr, AT: tl.constexpr = 0):  # fmt: skip
    """Rows of codes of fewer than 8 bits as four parts, float16 [BN, PAD / 4] each."""
    if PITCH % 2 == 0:
        words = tl.multiple_of(at.to(tl.pointer_type(tl.uint16)), 16) + AT // 2
        w = load_units(words, rows, seen, PITCH // 2, DIM // 4, PAD // 4, MASKED)
    else:  # rows do not begin where words may
        j = 2 * tl.arange(0, PAD // 4)
        low = load_bytes(at + AT, rows, seen, j, PITCH, DIM // 2, MASKED)
        w = low | (load_bytes(at + AT, rows, seen, j + 1, PITCH, DIM // 2, MASKED) << 8)
    if CODEC.bits == 4:
        return unpack4(w)
    else:
        j = tl.arange(0, PAD // 4)
        if CODEC.bits == 6:
            return unpack6(w, load_bytes(at + AT + DIM // 2, rows, seen, j, PITCH, DIM // 4, MASKED))
        else:
            tl.static_assert(CODEC.bits == 5, "codes of that width are not unpacked")
            HALF: tl.constexpr = DIM // 8
            there = tl.where(j < 2 * HALF, j % HALF, HALF)
            h = load_bytes(at + AT + DIM // 2, rows, seen, there, PITCH, HALF, MASKED)
            return unpack5(w, h >> (j // HALF * 4).to(tl.uint16)[None, :])


@triton.jit
def dot_keys(q0, q1, q2, q3, at, rows, seen, PITCH: tl.constexpr, DIM: tl.constexpr, PAD: tl.constexpr,
             CODEC: tl.constexpr, PARTS: tl.constexpr, MASKED: tl.constexpr):  # fmt: skip
    """Parts of queries, float16 [M, PAD / PARTS], times the codes of rows -> float32 [M, BN]."""
    if PARTS == 1:
        k = plain_tile(at, rows, seen, PITCH, DIM, PAD, CODEC, MASKED)
        fence_copies(q0.shape[0])
        return tl.dot(q0, tl.trans(k))
    elif PARTS == 2:
        k0, k1 = pair_tile(at, rows, seen, PITCH, DIM, PAD, CODEC, MASKED)
        return tl.dot(q1, tl.trans(k1), tl.dot(q0, tl.trans(k0)))
    else:
        k0, k1, k2, k3 = quarter_tile(at, rows, seen, PITCH, DIM, PAD, CODEC, MASKED)
        s = tl.dot(q1, tl.trans(k1), tl.dot(q0, tl.trans(k0)))
        return tl.dot(q3, tl.trans(k3), tl.dot(q2, tl.trans(k2), s))


@triton.jit
def add_values(w, decay, a0, a1, a2, a3, at, rows, seen, PITCH: tl.constexpr, DIM: tl.constexpr, PAD: tl.constexpr,
               CODEC: tl.constexpr, PARTS: tl.constexpr, MASKED: tl.constexpr, AT: tl.constexpr):  # fmt: skip
    """Each part's sum, float32 [M, PAD / PARTS], times decay [M], plus weights float16 [M, BN] times the codes of rows
    AT bytes behind the address."""
    if PARTS == 1:
        v0 = plain_tile(at, rows, seen, PITCH, DIM, PAD, CODEC, MASKED, AT)
        fence_copies(w.shape[0])
        a0 = tl.dot(w, v0, a0 * decay[:, None])
    elif PARTS == 2:
        v0, v1 = pair_tile(at, rows, seen, PITCH, DIM, PAD, CODEC, MASKED, AT)
        a0 = tl.dot(w, v0, a0 * decay[:, None])
        a1 = tl.dot(w, v1, a1 * decay[:, None])
    else:
        v0, v1, v2, v3 = quarter_tile(at, rows, seen, PITCH, DIM, PAD, CODEC, MASKED, AT)
        a0 = tl.dot(w, v0, a0 * decay[:, None])
        a1 = tl.dot(w, v1, a1 * decay[:, None])
        a2 = tl.dot(w, v2, a2 * decay[:, None])
        a3 = tl.dot(w, v3, a3 * decay[:, None])
    return a0, a1, a2, a3
