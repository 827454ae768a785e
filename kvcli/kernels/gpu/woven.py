"""Products of packed matrices with woven rows: weights are decoded in the registers that tensor cores read.

A product may have its columns in any order, if both sides have the same. Four groups of a packed row, 128 columns, come
out of their words so that each thread has what it needs of the tensor cores' operand: two float16 at a time from the
bytes 0 and 2, or 1 and 3, of a word of one group. Rows that are multiplied with them are woven alike: element
32 t + 16 h + 4 w + b of 128 stands at 64 h + 16 w + 8 (b % 2) + 2 t + b // 2. Woven rows have whole blocks of 128
columns; what is behind the last column is 0.
"""

# mypy: disable-error-code="no-untyped-def,misc"

from __future__ import annotations

import triton
import triton.language as tl

from kvcli.kernels.gpu.codes import D_M, E4M3, OF_16, PAIR, QUARTERS, factors, load_planar, unpack, values_of
from kvcli.kernels.gpu.language import INTERPRET, fence_copies, finished, half_of, load_in_place

BLOCK = 128  # columns
SCALED = tl.constexpr(2)  # blocks of a woven row that have a scale, where they have
GROUPS = tl.constexpr(4)  # as many groups
WARPS = tl.constexpr(4)  # of a program: a warp group


def width(cols: int) -> int:
    """Columns of rows of `cols` when they are woven."""
    return -(-cols // BLOCK) * BLOCK


@triton.jit
def place(i):
    """Where element i of a row stands in a woven one."""
    b = i % 4
    return i // 128 * 128 + i // 16 % 2 * 64 + i // 4 % 4 * 16 + b % 2 * 8 + i // 32 % 4 * 2 + b // 2


@triton.jit
def woven_row(v, N: tl.constexpr):
    """Elements [N] of a row, whole blocks, in the order in which they stand in a woven one: what stores them side by
    side takes one instruction for eight, not eight."""
    v = tl.reshape(v, (N // 128, 4, 2, 4, 2, 2))
    return tl.reshape(tl.permute(v, (0, 2, 3, 5, 1, 4)), (N,))


@triton.jit
def _pair(low, high):
    """float32 -> float16 pairs in int32."""
    if INTERPRET:
        a = low.to(tl.float16).to(tl.uint16, bitcast=True).to(tl.int32)
        return a | (high.to(tl.float16).to(tl.uint16, bitcast=True).to(tl.int32) << 16)
    else:
        return tl.inline_asm_elementwise(
            "cvt.rn.f16x2.f32 $0, $2, $1;", "=r,r,r", [low, high], dtype=tl.int32, is_pure=True, pack=1
        )


@triton.jit
def _scaled(code, fm):
    """In the interpreter: an int32 code times the lower float16 of fm, plus the upper one."""
    f = (fm & 0xFFFF).to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32)
    m = ((fm >> 16) & 0xFFFF).to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32)
    return (code.to(tl.float32) * f + m).to(tl.float16)


@triton.jit
def _halves_of_nibbles(w, low, high, OFFSET: tl.constexpr):
    """Words of nibbles -> bytes 0, 2, 1, 3 of the lower ones less OFFSET, times f plus m of the pairs `low`, and of the
    upper ones, of `high`: float16."""
    if INTERPRET:
        l0, l1 = _scaled((w & 15) - OFFSET, low), _scaled(((w >> 8) & 15) - OFFSET, low)
        l2, l3 = _scaled(((w >> 16) & 15) - OFFSET, low), _scaled(((w >> 24) & 15) - OFFSET, low)
        h0, h1 = _scaled(((w >> 4) & 15) - OFFSET, high), _scaled(((w >> 12) & 15) - OFFSET, high)
        h2, h3 = _scaled(((w >> 20) & 15) - OFFSET, high), _scaled(((w >> 28) & 15) - OFFSET, high)
        return l0, l2, l1, l3, h0, h2, h1, h3
    else:  # under the exponent of 1024 a nibble is 1024 more, an upper one 1024 more than 16 times itself
        return tl.inline_asm_elementwise(
            "{.reg .b32 a, f, m, p, q, r, s; .reg .b16 x, y; shr.u32 a, $8, 8;"
            " lop3.b32 p, $8, 0x000F000F, $11, 0xEA; lop3.b32 q, a, 0x000F000F, $11, 0xEA;"
            " lop3.b32 r, $8, 0x00F000F0, $11, 0xEA; lop3.b32 s, a, 0x00F000F0, $11, 0xEA;"
            " add.rn.f16x2 p, p, $12; add.rn.f16x2 q, q, $12;"
            " fma.rn.f16x2 r, r, $13, $14; fma.rn.f16x2 s, s, $13, $14;"
            " mov.b32 {x, y}, $9; mov.b32 f, {x, x}; mov.b32 m, {y, y};"
            " fma.rn.f16x2 p, p, f, m; fma.rn.f16x2 q, q, f, m;"
            " mov.b32 {x, y}, $10; mov.b32 f, {x, x}; mov.b32 m, {y, y};"
            " fma.rn.f16x2 r, r, f, m; fma.rn.f16x2 s, s, f, m;"
            " mov.b32 {$0, $1}, p; mov.b32 {$2, $3}, q; mov.b32 {$4, $5}, r; mov.b32 {$6, $7}, s;}",
            "=&h,=&h,=&h,=&h,=&h,=&h,=&h,=&h,r,r,r,r,r,r,r",
            [w, low, high, 0x64006400, (0xE400 + OFFSET) * 0x10001 - 0x100000000, 0x2C002C00,
             (0xD400 + 16 * OFFSET) * 0x10001 - 0x100000000],
            dtype=(tl.float16,) * 8,
            is_pure=True,
            pack=1,
        )  # fmt: skip


@triton.jit
def _halves_of_bytes(w, fm, OFFSET: tl.constexpr):
    """Words of signed bytes -> bytes 0, 2, 1, 3 less OFFSET, times f plus m of the pairs `fm`: float16."""
    if INTERPRET:
        b0, b1 = _scaled(((w << 24) >> 24) - OFFSET, fm), _scaled(((w << 16) >> 24) - OFFSET, fm)
        b2, b3 = _scaled(((w << 8) >> 24) - OFFSET, fm), _scaled((w >> 24) - OFFSET, fm)
        return b0, b2, b1, b3
    else:  # the byte ^ 128 is 128 more, without a sign; 0x6480 is 1024 + 128
        return tl.inline_asm_elementwise(
            "{.reg .b32 a, f, m, p, q; .reg .b16 x, y; shr.u32 a, $4, 8;"
            " lop3.b32 p, $4, 0x00FF00FF, $6, 0x6A; lop3.b32 q, a, 0x00FF00FF, $6, 0x6A;"
            " add.rn.f16x2 p, p, $7; add.rn.f16x2 q, q, $7;"
            " mov.b32 {x, y}, $5; mov.b32 f, {x, x}; mov.b32 m, {y, y};"
            " fma.rn.f16x2 p, p, f, m; fma.rn.f16x2 q, q, f, m; mov.b32 {$0, $1}, p; mov.b32 {$2, $3}, q;}",
            "=&h,=&h,=&h,=&h,r,r,r,r",
            [w, fm, 0x64806480, (0xE480 + OFFSET) * 0x10001 - 0x100000000],
            dtype=(tl.float16,) * 4,
            is_pure=True,
            pack=1,
        )


@triton.jit
def _halves_of_merged(w, above, fm, DOWN: tl.constexpr, UP: tl.constexpr, MASK: tl.constexpr,
                      OFFSET: tl.constexpr):  # fmt: skip
    """As `_halves_of_bytes`, of codes whose lower four bits are from bit DOWN on in the bytes of w, and the others, up
    to the bits of MASK, in those of `above` << UP."""
    if INTERPRET:
        a = (((w >> DOWN) & 0x0F0F0F0F) | ((above << UP) & 0x70707070)) & (MASK * 0x01010101)
        b0, b1 = _scaled((a & 255) - OFFSET, fm), _scaled(((a >> 8) & 255) - OFFSET, fm)
        b2, b3 = _scaled(((a >> 16) & 255) - OFFSET, fm), _scaled(((a >> 24) & 255) - OFFSET, fm)
        return b0, b2, b1, b3
    else:
        return tl.inline_asm_elementwise(
            "{.reg .b32 a, f, m, p, q; .reg .b16 x, y;"
            " shl.b32 p, $5, $8; shr.u32 a, $4, $7; lop3.b32 a, a, 0x0F0F0F0F, p, 0xE2;"
            " lop3.b32 p, a, $9, $10, 0xEA; shr.u32 a, a, 8; lop3.b32 q, a, $9, $10, 0xEA;"
            " add.rn.f16x2 p, p, $11; add.rn.f16x2 q, q, $11;"
            " mov.b32 {x, y}, $6; mov.b32 f, {x, x}; mov.b32 m, {y, y};"
            " fma.rn.f16x2 p, p, f, m; fma.rn.f16x2 q, q, f, m; mov.b32 {$0, $1}, p; mov.b32 {$2, $3}, q;}",
            "=&h,=&h,=&h,=&h,r,r,r,r,r,r,r,r",
            [w, above, fm, DOWN, UP, MASK * 0x10001, 0x64006400, (0xE400 + OFFSET) * 0x10001 - 0x100000000],
            dtype=(tl.float16,) * 4,
            is_pure=True,
            pack=1,
        )


@triton.jit
def _operand(b0, b2, b1, b3, N: tl.constexpr):
    """Bytes of words [N, 4, GROUPS] -> [N, 64], woven."""
    pairs = tl.join(tl.join(b0, b2), tl.join(b1, b3))  # [N, word, group, b // 2, b % 2]
    return tl.reshape(tl.permute(pairs, (0, 1, 4, 2, 3)), (N, 16 * GROUPS))


@triton.jit
def _of_words(h0, h1, h2, h3, N: tl.constexpr):
    """[N, GROUPS] for each of four words -> [N, 4, GROUPS]."""
    return tl.permute(tl.reshape(tl.join(tl.join(h0, h2), tl.join(h1, h3)), (N, GROUPS, 4)), (0, 2, 1))


@triton.jit
def _load(at, groups, G: tl.constexpr):
    """What stands at `at` for the groups int32 [n], along the last axis; 0 for those from G on."""
    if G % 4 == 0:  # blocks are whole
        return tl.load(at)
    else:
        return tl.load(at, mask=(groups < G)[None, :], other=0)


@triton.jit
def _words(at, groups, G: tl.constexpr, N: tl.constexpr):
    """Four words of each group, which stand in one place, [N, 4, GROUPS]."""
    return tl.permute(tl.reshape(_load(at, groups, G), (N, GROUPS, 4)), (0, 2, 1))


@triton.jit
def _supers(SUPERS, row, step, G: tl.constexpr, KIND: tl.constexpr):
    """What eight groups of rows `row` int64 [N] have in common, [N, 1]; 0 where a kind has nothing. Eight are whole
    where they have."""
    if KIND < PAIR or KIND == E4M3:
        return 0
    elif KIND != PAIR and KIND != QUARTERS and G % 16 == 0:  # 16 bits alone would not be copied ahead: two are read
        both = tl.load(SUPERS.to(tl.pointer_type(tl.int32)) + (row * (G // 16) + step * GROUPS // 16))
        return half_of(both >> (step * GROUPS // 8 % 2 * 16), False)[:, None]
    else:
        return tl.load(SUPERS + (row * (G // 8) + step * GROUPS // 8))[:, None]


@triton.jit
def _scales(SCALES, row, first, COUNT: tl.constexpr, G: tl.constexpr, SPAN: tl.constexpr):
    """Those of COUNT groups of rows `row` int64 [N] from group `first` on, [N, COUNT]."""
    g = tl.arange(0, COUNT) + first
    return _load(SCALES + (row[:, None] * (G // SPAN) + g[None, :] // SPAN), g, G)


@triton.jit
def _decoded(CODES, HIGH, TABLE, s, supers, row, step, G: tl.constexpr, CODING: tl.constexpr, WORDS: tl.constexpr,
             KIND: tl.constexpr, OFFSET: tl.constexpr, UNIT: tl.constexpr, N: tl.constexpr):  # fmt: skip
    """Columns [128 step, 128 (step + 1)) of rows `row` int64 [N], dealt (see `_dealt`), in the order before that and
    woven: float16 [N, 128]. s [N, GROUPS] and `supers`: the scales of their groups, see `_scales` and `_supers`."""
    g, j = tl.arange(0, GROUPS) + step * GROUPS, tl.arange(0, 4 * GROUPS)
    of_words = j // 4 + step * GROUPS
    n = row[:, None]
    f0, m0, f1, m1 = factors(s, supers, KIND, UNIT)
    if KIND < D_M or KIND > QUARTERS:
        m0 = tl.zeros_like(f0)
        m1 = m0
    low = tl.broadcast_to(_pair(f0, -m0)[:, None, :], (N, 4, GROUPS))
    high = tl.broadcast_to(_pair(f1, -m1)[:, None, :], (N, 4, GROUPS))
    if WORDS < 4:
        w0, w1, w2, more = load_planar(CODES, HIGH, n, g[None, :], (g < G)[None, :], G, CODING, WORDS)
        a0, a1 = unpack(w0, w1, w2, more, TABLE, CODING, WORDS)
        a0, a1 = tl.permute(a0, (0, 2, 1)), tl.permute(a1, (0, 2, 1))
    else:
        w = _words(CODES + ((n * G + of_words[None, :]) * WORDS + j[None, :] % 4), of_words, G, N)
        if CODING == 4:
            b0, b2, b1, b3, c0, c2, c1, c3 = _halves_of_nibbles(w, low, high, OFFSET)
        elif CODING == OF_16:
            a0, a1 = values_of(w, TABLE)
        elif CODING == 8:
            a0 = w
            a1 = _words(CODES + ((n * G + of_words[None, :]) * WORDS + 4 + j[None, :] % 4), of_words, G, N)
        elif CODING == 5:
            h = _load(HIGH + (n * G + g[None, :]), g, G)
            above = _of_words(h, h >> 1, h >> 2, h >> 3, N)
            b0, b2, b1, b3 = _halves_of_merged(w, above, low, 0, 4, 31, OFFSET)
            c0, c2, c1, c3 = _halves_of_merged(w, above, high, 4, 0, 31, OFFSET)
        else:
            i = tl.arange(0, 2 * GROUPS)
            of_pairs = i // 2 + step * GROUPS
            pairs = _load(HIGH + ((n * G + of_pairs[None, :]) * 2 + i[None, :] % 2), of_pairs, G)
            each = tl.broadcast_to(tl.reshape(pairs, (N, GROUPS, 2))[:, :, :, None], (N, GROUPS, 2, 2))
            above = tl.permute(tl.reshape(each, (N, GROUPS, 4)), (0, 2, 1))
            above = above >> (tl.arange(0, 4) % 2 * 4)[None, :, None]
            b0, b2, b1, b3 = _halves_of_merged(w, above, low, 0, 4, 63, OFFSET)
            c0, c2, c1, c3 = _halves_of_merged(w, above, high, 4, 2, 63, OFFSET)
    if CODING < 4 or CODING > 6:
        b0, b2, b1, b3 = _halves_of_bytes(a0, low, OFFSET)
        c0, c2, c1, c3 = _halves_of_bytes(a1, high, OFFSET)
    halves = tl.join(_operand(b0, b2, b1, b3, N), _operand(c0, c2, c1, c3, N))
    w = tl.reshape(tl.permute(halves, (0, 2, 1)), (N, 128))
    w = tl.reshape(w, (N // (16 * WARPS), 2, WARPS, 8, 128))
    return tl.reshape(tl.permute(w, (0, 2, 1, 3, 4)), (N, 128))


@triton.jit
def _decoded_blocks(CODES, HIGH, SCALES, SUPERS, TABLE, row, turn, BLOCKS: tl.constexpr, G: tl.constexpr,
                    CODING: tl.constexpr, WORDS: tl.constexpr, KIND: tl.constexpr, OFFSET: tl.constexpr,
                    SPAN: tl.constexpr, UNIT: tl.constexpr, N: tl.constexpr):  # fmt: skip
    """BLOCKS (1 or 2) times 128 columns, from block BLOCKS * `turn` on: as `_decoded`, float16 [N, 128 BLOCKS]. What
    is read of scales for two blocks at once is read in longer pieces."""
    step = turn * BLOCKS
    s = _scales(SCALES, row, step * GROUPS, BLOCKS * GROUPS, G, SPAN)
    supers = _supers(SUPERS, row, step, G, KIND)  # eight groups have one
    if BLOCKS == 1:
        return _decoded(CODES, HIGH, TABLE, s, supers, row, step, G, CODING, WORDS, KIND, OFFSET, UNIT, N)
    else:
        s0, s1 = tl.split(tl.permute(tl.reshape(s, (N, 2, GROUPS)), (0, 2, 1)))
        w0 = _decoded(CODES, HIGH, TABLE, s0, supers, row, step, G, CODING, WORDS, KIND, OFFSET, UNIT, N)
        w1 = _decoded(CODES, HIGH, TABLE, s1, supers, row, step + 1, G, CODING, WORDS, KIND, OFFSET, UNIT, N)
        return tl.reshape(tl.permute(tl.join(w0, w1), (0, 2, 1)), (N, 256))


@triton.jit
def _dealt(row, N: tl.constexpr):
    """Rows [N] in the order in which they are loaded. Tensor cores want 16 rows side by side of a warp; loads give it 8
    of every 8 WARPS, and it keeps those that it loaded."""
    return tl.reshape(tl.permute(tl.reshape(row, (N // (16 * WARPS), WARPS, 2, 8)), (0, 2, 1, 3)), (N,))


@triton.jit
def woven_dot(X, X_SCALES, CODES, HIGH, SCALES, SUPERS, TABLE, row, x_row, there, first, last, G: tl.constexpr,
              CODING: tl.constexpr, WORDS: tl.constexpr, KIND: tl.constexpr, OFFSET: tl.constexpr, SPAN: tl.constexpr,
              UNIT: tl.constexpr, N: tl.constexpr, T: tl.constexpr, BLOCKS: tl.constexpr, STAGES: tl.constexpr,
              X_SCALED: tl.constexpr):  # fmt: skip
    """Rows `row` int64 [N] of a packed matrix, whole multiples of 64, times woven rows `x_row` int64 [T] of X float16,
    where `there`, over turns [first, last) of BLOCKS times 128 columns, by WARPS warps -> float32 [N, T]. Two blocks a
    turn want whole pairs of blocks (G a multiple of 8). X_SCALED: each SCALED blocks of X times one of X_SCALES.

    Weights are computed in float16, from scales rounded to it, which differ by 3e-4 (1 sigma) from exact ones."""
    COLUMNS: tl.constexpr = BLOCKS * 128
    x_at = X + x_row[:, None] * (tl.cdiv(G, GROUPS) * 128) + tl.arange(0, COLUMNS)[None, :]
    scales_at = X_SCALES + tl.where(there, x_row, 0) * tl.cdiv(G, SCALED * GROUPS)
    acc = tl.zeros((N, T), tl.float32)
    row = _dealt(row, N)
    for turn in tl.range(first, last, num_stages=STAGES):
        w = _decoded_blocks(CODES, HIGH, SCALES, SUPERS, TABLE, row, turn, BLOCKS, G, CODING, WORDS, KIND, OFFSET, SPAN,
                            UNIT, N)  # fmt: skip
        x = tl.load(x_at + turn * COLUMNS, mask=there[:, None], other=0.0)
        fence_copies(N)
        if X_SCALED:
            scale = load_in_place(scales_at + turn * BLOCKS // SCALED)
            acc += finished(tl.dot(w, tl.trans(x))) * scale[None, :]
        else:
            acc = finished(tl.dot(w, tl.trans(x), acc))
    return acc
