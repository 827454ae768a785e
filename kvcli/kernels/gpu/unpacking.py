"""Codes of cached rows as float16, in registers, exactly: by setting the mantissa of a number in which the code's
last bit is worth 1 (integers), or by moving bits (fp8; e4m3 comes 2**8 too small).
"""

# mypy: disable-error-code="no-untyped-def,misc"

from __future__ import annotations

import triton
import triton.language as tl

from kvcli.kernels.gpu.language import INTERPRET

LIFT1, LIFT2, LIFT3 = (tl.constexpr(x) for x in (64.0, 256.0, 16.0))  # see `unpack4_lifted`


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
def unpack4_lifted(w):
    """As unpack4, all but the first more by LIFT1, LIFT2 and LIFT3: a third fewer instructions, for a code that has its
    place in the mantissa of such a number costs nothing more. The lowest bits would take 1024, which sums of products
    would lose more by."""
    if INTERPRET:
        u0, u1, u2, u3 = unpack4(w)
        return u0, (u1 + LIFT1).to(tl.float16), (u2 + LIFT2).to(tl.float16), (u3 + LIFT3).to(tl.float16)
    else:
        return tl.inline_asm_elementwise(
            """{ .reg .b32 t, a, b, c, d;
            mov.b32 a, 0x64006400; mov.b32 b, 0x54005400; mov.b32 c, 0x5c005c00; mov.b32 d, 0x4c004c00;
            lop3.b32 $0, $4, 0x000f000f, a, 0xea;
            lop3.b32 $1, $4, 0x00f000f0, b, 0xea;
            shr.u32  t, $4, 6;
            lop3.b32 $2, t, 0x003c003c, c, 0xea;
            lop3.b32 $3, t, 0x03c003c0, d, 0xea;
            sub.f16x2 $0, $0, a; }""",
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
