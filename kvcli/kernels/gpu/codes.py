"""Codes that are not of four bits or more: from the arrays of a packed matrix (formats.py) to signed bytes; and scales.

Codes become words int32 [R, C, 4], two for each group of a tensor [R, C] of groups: byte j of word b is element 4b + j
in the first one, element 16 + 4b + j in the second.
"""

# mypy: disable-error-code="no-untyped-def,misc"

from __future__ import annotations

import triton
import triton.language as tl

from kvcli import blockformats
from kvcli.kernels.gpu.formats import TURN
from kvcli.kernels.gpu.language import INTERPRET, half_of

OF_16, EIGHTS_HIGH, FOURS_HIGH, TERNARY = (
    tl.constexpr(getattr(blockformats, name)) for name in ("OF_16", "EIGHTS_HIGH", "FOURS_HIGH", "TERNARY")
)
D, EXPONENT, D_M, PAIR, QUARTERS, HALVES, NIBBLES, E4M3, BYTE = (
    tl.constexpr(getattr(blockformats, name))
    for name in ("D", "EXPONENT", "D_M", "PAIR", "QUARTERS", "HALVES", "NIBBLES", "E4M3", "BYTE")
)
SPREAD = tl.constexpr(0x00204081)  # times four bits: bit i is the lowest of byte i
_TURN = tl.constexpr(TURN)


@triton.jit
def stored(n, rows, DEALT: tl.constexpr):
    """Where rows n of a matrix stand. Programs have DEALT rows each, and read TURN of them at a time, all programs at
    the same time: so the first TURN rows of all programs come first, then the next TURN. Memory is faster where what
    is read at a time stands side by side. DEALT 0: rows stand in order."""
    if DEALT == 0:
        return n
    else:
        return (n % DEALT // _TURN * (rows // DEALT) + n // DEALT) * _TURN + n % _TURN


@triton.jit
def load_once(at, seen):
    """Weights are read once: they should not push anything out of the cache."""
    return tl.load(at, mask=seen, other=0, eviction_policy="evict_first")


@triton.jit
def load_planar(CODES, HIGH, n, g, seen, G: tl.constexpr, CODING: tl.constexpr, WORDS: tl.constexpr):
    """Up to three words of the groups g of rows n, [R, C] each, and what is kept apart; 0 where a coding has none."""
    w1, w2, high = 0, 0, 0
    words = CODES + (n * (G * WORDS) + g)
    w0 = load_once(words, seen)
    if WORDS > 1:
        w1 = load_once(words + G, seen)
    if WORDS > 2:
        w2 = load_once(words + 2 * G, seen)
    if CODING == 3 or CODING >= EIGHTS_HIGH:
        high = load_once(HIGH + (n * G + g), seen).to(tl.int32)
    return w0, w1, w2, high


@triton.jit
def values_of(w, TABLE):
    """The low and the high nibbles of the bytes of w as words of bytes, each one of 16 bytes at TABLE (int32)."""
    if INTERPRET:
        low, high = w * 0, w * 0
        for i in tl.static_range(4):
            at = (w >> (8 * i)) & 15
            low |= ((tl.load(TABLE + at // 4) >> (at % 4 * 8)) & 255) << (8 * i)
            at = (w >> (8 * i + 4)) & 15
            high |= ((tl.load(TABLE + at // 4) >> (at % 4 * 8)) & 255) << (8 * i)
        return low, high
    else:  # prmt takes a byte of eight by three bits of a nibble; the fourth then takes one of two
        t0, t1, t2, t3 = tl.load(TABLE), tl.load(TABLE + 1), tl.load(TABLE + 2), tl.load(TABLE + 3)
        return tl.inline_asm_elementwise(
            "{.reg .b32 s, p, a, b, c; and.b32 s, $2, 0x77777777; shr.u32 p, $2, 1; and.b32 p, p, 0x44444444;"
            " or.b32 p, p, 0x32103210; prmt.b32 a, $3, $4, s; prmt.b32 b, $5, $6, s; prmt.b32 c, a, b, p;"
            " shr.u32 s, s, 16; shr.u32 p, p, 16; prmt.b32 a, $3, $4, s; prmt.b32 b, $5, $6, s; prmt.b32 a, a, b, p;"
            " prmt.b32 $0, c, a, 0x6420; prmt.b32 $1, c, a, 0x7531;}",
            "=&r,=&r,r,r,r,r,r",
            [w, t0, t1, t2, t3],
            dtype=(tl.int32, tl.int32),
            is_pure=True,
            pack=1,
        )


@triton.jit
def signed(word, bits):
    """The bytes of a word, none of which is 0, negative where one of the lowest four bits is set."""
    ones = ((bits & 15) * SPREAD) & 0x01010101
    return (word ^ (ones * 255)) + ones


@triton.jit
def unpack(w0, w1, w2, high, TABLE, CODING: tl.constexpr, WORDS: tl.constexpr):
    """What `load_planar` gave -> both words of each group. Codes of one bit are 0 and 2."""
    b = tl.arange(0, 4)[None, None, :]
    w = w0[:, :, None]
    if CODING == 3 or CODING >= EIGHTS_HIGH:
        h = high[:, :, None]
    if CODING == 1:
        a0, a1 = ((w >> b) & 0x01010101) << 1, ((w >> (b + 4)) & 0x01010101) << 1
    elif CODING <= 3:
        a0, a1 = (w >> (2 * b)) & 0x03030303, (w1[:, :, None] >> (2 * b)) & 0x03030303
        if CODING == 3:
            a0 |= ((h >> b) & 0x01010101) << 2
            a1 |= ((h >> (b + 4)) & 0x01010101) << 2
    elif WORDS == 3:
        at0, at1, signs = (w >> (8 * b)) & 255, (w1[:, :, None] >> (8 * b)) & 255, w2[:, :, None] >> (4 * b)
        if CODING == FOURS_HIGH:
            at0 |= ((h >> b) & 1) << 8
            at1 |= ((h >> (b + 4)) & 1) << 8
        a0, a1 = signed(tl.load(TABLE + at0), signs), signed(tl.load(TABLE + at1), signs >> 16)
    else:  # entries of two words
        e = b // 2
        at0, at1 = (w >> (8 * e)) & 255, (w >> (8 * e + 16)) & 255
        if CODING == EIGHTS_HIGH:
            at0 |= ((h >> (2 * e)) & 3) << 8
            at1 |= ((h >> (2 * e + 4)) & 3) << 8
        if CODING == TERNARY:
            at0 |= ((h >> (4 * e)) & 7) << 8
            at1 |= ((h >> (4 * e + 8)) & 7) << 8
        a0, a1 = tl.load(TABLE + (at0 * 2 + b % 2)), tl.load(TABLE + (at1 * 2 + b % 2))
        if CODING == TERNARY:
            a0 += 0x01010101 - ((h >> (4 * e + 3)) & 1) * 0x02020202
            a1 += 0x01010101 - ((h >> (4 * e + 11)) & 1) * 0x02020202
        else:
            signs = w1[:, :, None] >> (4 * b)
            a0, a1 = signed(a0, signs), signed(a1, signs >> 16)
    return a0, a1


@triton.jit
def e4m3_halved(s):
    """Half of an unsigned e4m3 float in the lower eight bits of s int32; 0x7f is 0, the uppermost bit says nothing."""
    e, m = (s >> 3) & 15, s & 7
    normal = (((e + 119) << 23) | (m << 20)).to(tl.float32, bitcast=True)
    x = tl.where(e == 0, m.to(tl.float32) * 0.0009765625, normal)
    return tl.where((s & 255) == 127, 0.0, x)


@triton.jit
def factors(s, d, KIND: tl.constexpr, UNIT: tl.constexpr):
    """Scales s, and d that eight groups share -> f and m of the first 16 elements of a group, f and m of the others: a
    weight is f * (code - offset) - m. float32 in the shape of s; m may be 0."""
    m0, m1 = 0.0, 0.0
    if KIND == D:
        f0 = s.to(tl.float32)
        f1 = f0
    elif KIND == D_M:
        f0, m0 = half_of(s, False), -half_of(s, True)
        f1, m1 = f0, m0
    elif KIND == EXPONENT:  # 2^(s - 128)
        e = s.to(tl.int32)
        f0 = tl.where(e < 2, 0x00200000 << tl.minimum(e, 1), (e - 1) << 23).to(tl.float32, bitcast=True)
        f1 = f0
    else:
        c = s.to(tl.int32)
        if KIND == PAIR:
            f0 = half_of(d, False) * (c & 255).to(tl.float32)
            m0 = half_of(d, True) * ((c >> 8) & 255).to(tl.float32)
            f1, m1 = f0, m0
        elif KIND == HALVES:
            d = d.to(tl.float32)
            f0, f1 = d * ((c << 24) >> 24).to(tl.float32), d * ((c << 16) >> 24).to(tl.float32)
        elif KIND == QUARTERS:
            scale, low = half_of(d, False), half_of(d, True)
            f0, m0 = scale * (c & 15).to(tl.float32), low * ((c >> 4) & 15).to(tl.float32)
            f1, m1 = scale * ((c >> 8) & 15).to(tl.float32), low * ((c >> 12) & 15).to(tl.float32)
        elif KIND == NIBBLES:
            unit = d.to(tl.float32) * UNIT
            f0, f1 = unit * (2 * (c & 15) + 1).to(tl.float32), unit * (2 * (c >> 4) + 1).to(tl.float32)
        elif KIND == BYTE:
            f0 = d.to(tl.float32) * c.to(tl.float32)
            f1 = f0
        else:
            f0, f1 = e4m3_halved(c), e4m3_halved(c >> 8)
    return f0, m0, f1, m1
