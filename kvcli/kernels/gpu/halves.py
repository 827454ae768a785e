"""Packed weights decoded, and products of them with a few rows, for which they are decoded on their way to the tensor
cores.

Codes become float16 two at a time: a byte under the exponent of 1024 is 1024 + the byte.
"""

# mypy: disable-error-code="no-untyped-def,misc"

from __future__ import annotations

import triton
import triton.language as tl

from kvcli.kernels.gpu.codes import (
    D_M,
    E4M3,
    OF_16,
    PAIR,
    QUARTERS,
    factors,
    load_planar,
    unpack,
    values_of,
)
from kvcli.kernels.gpu.language import INTERPRET


@triton.jit
def bytes_of(words, P: tl.constexpr):
    """Words int32 [P, 1, 4] -> their bytes, int8 [P, 16]."""
    shift = 8 * tl.arange(0, 4)
    return tl.reshape(words[:, :, :, None] >> shift[None, None, None, :], (P, 16)).to(tl.int8)


@triton.jit
def halves_of_bytes(codes, OFFSET: tl.constexpr):
    """int8 codes less OFFSET (up to 64): float16, exact."""
    if INTERPRET:
        return (codes.to(tl.int32) - OFFSET).to(tl.float16)
    else:  # the byte ^ 128 is 128 more, without a sign; 0x6480 is 1024 + 128 in float16
        return tl.inline_asm_elementwise(
            "{.reg .b32 a; xor.b32 a, $2, 0x80808080; prmt.b32 $0, a, 0x64646464, 0x4140;"
            " prmt.b32 $1, a, 0x64646464, 0x4342; add.rn.f16x2 $0, $0, $3; add.rn.f16x2 $1, $1, $3;}",
            "=&r,=&r,r,r,r,r,r",
            [codes, (0xE480 + OFFSET) * 0x10001 - 0x100000000],
            dtype=tl.float16,
            is_pure=True,
            pack=4,
        )


@triton.jit
def halves_of_nibbles(codes, OFFSET: tl.constexpr):
    """The lower and the upper four bits of int8 codes, less OFFSET (up to 64): float16, exact."""
    if INTERPRET:
        low, upper = (codes & 15).to(tl.int32), ((codes >> 4) & 15).to(tl.int32)
        return (low - OFFSET).to(tl.float16), (upper - OFFSET).to(tl.float16)
    else:
        return tl.inline_asm_elementwise(
            "{.reg .b32 a, b; and.b32 a, $4, 0x0F0F0F0F; shr.u32 b, $4, 4; and.b32 b, b, 0x0F0F0F0F;"
            " prmt.b32 $0, a, 0x64646464, 0x4140; prmt.b32 $1, a, 0x64646464, 0x4342;"
            " prmt.b32 $2, b, 0x64646464, 0x4140; prmt.b32 $3, b, 0x64646464, 0x4342;"
            " add.rn.f16x2 $0, $0, $5; add.rn.f16x2 $1, $1, $5; add.rn.f16x2 $2, $2, $5; add.rn.f16x2 $3, $3, $5;}",
            "=&r,=&r,=&r,=&r,r,r,r,r,r",
            [codes, (0xE400 + OFFSET) * 0x10001 - 0x100000000],
            dtype=(tl.float16, tl.float16),
            is_pure=True,
            pack=4,
        )


@triton.jit
def decode_groups(CODES, HIGH, SCALES, SUPERS, TABLE, row, g, seen, TO: tl.constexpr, G: tl.constexpr,
                  CODING: tl.constexpr, WORDS: tl.constexpr, KIND: tl.constexpr, OFFSET: tl.constexpr,
                  SPAN: tl.constexpr, UNIT: tl.constexpr, P: tl.constexpr):  # fmt: skip
    """Groups `g` of rows `row`, int64 [P] each, where `seen`: their first and last 16 elements, [P, 16] each, as floats
    of the type TO, computed in it, too.

    CODES and HIGH as bytes where codes are integers of four bits or more.
    """
    at = row * G + g
    i = tl.arange(0, 16)[None, :]
    if CODING == 4:
        codes = tl.load(CODES + at[:, None] * 16 + i, mask=seen[:, None], other=0).to(tl.int8, bitcast=True)
        low, high = halves_of_nibbles(codes, OFFSET)
    else:
        if WORDS < 4:
            w0, w1, w2, high = load_planar(CODES, HIGH, row[:, None], g[:, None], seen[:, None], G, CODING, WORDS)
            a0, a1 = unpack(w0, w1, w2, high, TABLE, CODING, WORDS)
            low, high = bytes_of(a0, P), bytes_of(a1, P)
        elif CODING == OF_16:
            words = CODES + at[:, None, None] * 4 + tl.arange(0, 4)[None, None, :]
            a0, a1 = values_of(tl.load(words, mask=seen[:, None, None], other=0), TABLE)
            low, high = bytes_of(a0, P), bytes_of(a1, P)
        elif CODING == 8:
            low = tl.load(CODES + at[:, None] * 32 + i, mask=seen[:, None], other=0).to(tl.int8, bitcast=True)
            high = tl.load(CODES + at[:, None] * 32 + 16 + i, mask=seen[:, None], other=0).to(tl.int8, bitcast=True)
        else:
            codes = tl.load(CODES + at[:, None] * 16 + i, mask=seen[:, None], other=0).to(tl.int32)
            low, high = codes & 15, codes >> 4
            b, j = i // 4, i % 4
            if CODING == 5:
                bits = tl.load(HIGH + at[:, None] * 4 + j, mask=seen[:, None], other=0).to(tl.int32)
                low += ((bits >> b) & 1) << 4
                high += ((bits >> (b + 4)) & 1) << 4
            else:
                bits = tl.load(HIGH + at[:, None] * 8 + (b // 2) * 4 + j, mask=seen[:, None], other=0).to(tl.int32)
                bits = bits >> ((b % 2) * 4)
                low += (bits & 3) << 4
                high += ((bits >> 2) & 3) << 4
            low, high = low.to(tl.int8), high.to(tl.int8)
        low, high = halves_of_bytes(low, OFFSET), halves_of_bytes(high, OFFSET)
    s = tl.load(SCALES + (row * (G // SPAN) + g // SPAN), mask=seen, other=0)
    d = s
    if KIND >= PAIR and KIND != E4M3:
        d = tl.load(SUPERS + (row * (G // 8) + g // 8), mask=seen, other=0)
    f0, m0, f1, m1 = factors(s, d, KIND, UNIT)
    low, high = f0.to(TO)[:, None] * low.to(TO), f1.to(TO)[:, None] * high.to(TO)
    if KIND >= D_M and KIND <= QUARTERS:
        low, high = low - m0.to(TO)[:, None], high - m1.to(TO)[:, None]
    return low, high
