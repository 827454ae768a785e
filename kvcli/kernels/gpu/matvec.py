"""Products of a packed matrix with one activation vector, with what follows fused behind them.

A program owns `BN` rows. The vector stays in registers, and the program walks over its rows, `RC` at a time, with the
next ones on the way. Activations are integers with a scale for each 32 elements, so that integer dot products cost
about two instructions a weight: 8 bits (one plane, as in GGML's own kernels), or 16 in two planes of 8, where
that costs next to nothing. The norm before a product is folded: the producer of a vector multiplies by the
norm's weights, and the consumer multiplies its result by 1 / rms(x), from partial sums of squares that are added in a
fixed order, so replays are bit-identical.
"""

# mypy: disable-error-code="no-untyped-def,misc"

from __future__ import annotations

import triton
import triton.language as tl

from kvcli.kernels.gpu.codes import (
    D_M,
    E4M3,
    HALVES,
    OF_16,
    PAIR,
    QUARTERS,
    D,
    factors,
    load_once,
    load_planar,
    stored,
    unpack,
    values_of,
)
from kvcli.kernels.gpu.language import (
    FINE,
    dot4,
    dot_nibbles,
    glu,
    half_of,
    store_activations,
    wait_at_end,
    wait_for_previous,
)

# What a program does with its rows of the product.
STORE, RESIDUAL, GATED = 0, 1, 2


@triton.jit
def load_rows(CODES, HIGH, SCALES, SUPERS, n, g, G: tl.constexpr, CODING: tl.constexpr, WORDS: tl.constexpr,
              KIND: tl.constexpr, SPAN: tl.constexpr):  # fmt: skip
    """The packed groups g of rows n: three words (see `load_planar`; where a group has four or eight, these are two of
    [RC, BG, 4], the same one if it has four), high, scales, supers."""
    seen = (g < G)[None, :]
    at = tl.max_contiguous(n[:, None] * G + g[None, :], (1, 1))
    w2, high, d = 0, 0, 0
    if WORDS < 4:
        w0, w1, w2, high = load_planar(CODES, HIGH, n[:, None], g[None, :], seen, G, CODING, WORDS)
    else:
        word = tl.arange(0, 4)
        each = seen[:, :, None]
        words = CODES + (n[:, None, None] * (G * WORDS) + (g[None, :, None] * WORDS + word[None, None, :]))
        w0 = load_once(words, each)
        w1 = w0
        if WORDS == 8:
            w1 = load_once(words + 4, each)
        if CODING == 5:
            high = load_once(HIGH + at, seen)
        if CODING == 6:
            pair = tl.arange(0, 2)
            high = load_once(HIGH + (n[:, None, None] * (G * 2) + (g[None, :, None] * 2 + pair[None, None, :])), each)
    if SPAN == 1:
        s = load_once(SCALES + at, seen)
    else:
        s = load_once(SCALES + (n[:, None] * (G // SPAN) + g[None, :] // SPAN), seen)
    if KIND >= PAIR and KIND != E4M3:
        d = load_once(SUPERS + (n[:, None] * (G // 8) + g[None, :] // 8), seen)
    return w0, w1, w2, high, s, d


@triton.jit
def dot_words(a0, a1, xa, xb, TOGETHER: tl.constexpr):
    """Words a0 times xa and a1 times xb, summed over the last axis: int32; TOGETHER: both parts are in a0."""
    if TOGETHER:
        return tl.sum(dot_nibbles(a0, xa, xb), 2)
    else:
        return tl.sum(dot4(a0, xa) + dot4(a1, xb), 2)


@triton.jit
def dot_rows(w0, w1, w2, high, s, d, TABLE, xa, xb, ya, yb, xd, s0, s1, RC: tl.constexpr, BG: tl.constexpr,
             CODING: tl.constexpr, WORDS: tl.constexpr, KIND: tl.constexpr, OFFSET: tl.constexpr, UNIT: tl.constexpr,
             PLANES: tl.constexpr):  # fmt: skip
    """Packed groups [RC, BG] times the vector's groups -> float32 [RC, BG].

    xa, xb: the coarse codes of the first and second 16 elements of each group as words [BG, 4], ya, yb the fine ones
    (of two planes); xd the step, s0, s1 the sums of each 16 elements.
    """
    xa = tl.broadcast_to(xa[None], (RC, BG, 4))
    xb = tl.broadcast_to(xb[None], (RC, BG, 4))
    if PLANES == 2:
        ya = tl.broadcast_to(ya[None], (RC, BG, 4))
        yb = tl.broadcast_to(yb[None], (RC, BG, 4))
    b = tl.arange(0, 4)[None, None, :]
    a0, a1 = w0, w1
    if WORDS < 4:
        a0, a1 = unpack(w0, w1, w2, high, TABLE, CODING, WORDS)
    elif CODING == OF_16:
        a0, a1 = values_of(w0, TABLE)
    elif CODING == 5:
        h = high[:, :, None]
        a0 = (w0 & 0x0F0F0F0F) | (((h >> b) & 0x01010101) << 4)
        a1 = ((w0 >> 4) & 0x0F0F0F0F) | (((h >> (b + 4)) & 0x01010101) << 4)
    elif CODING == 6:
        h = tl.reshape(tl.broadcast_to(high[:, :, :, None], (RC, BG, 2, 2)), (RC, BG, 4)) >> ((b % 2) * 4)
        a0 = (w0 & 0x0F0F0F0F) | ((h & 0x03030303) << 4)
        a1 = ((w0 >> 4) & 0x0F0F0F0F) | ((h & 0x0C0C0C0C) << 2)
    if KIND >= QUARTERS and KIND <= E4M3:  # scales for each 16
        t0 = tl.sum(dot4(a0, xa), 2) * FINE
        t1 = tl.sum(dot4(a1, xb), 2) * FINE
        if PLANES == 2:
            t0 += tl.sum(dot4(a0, ya), 2)
            t1 += tl.sum(dot4(a1, yb), 2)
        if KIND == HALVES:  # d * s * (q - offset)
            c = s.to(tl.int32)
            c0 = ((c << 24) >> 24).to(tl.float32)
            c1 = ((c << 16) >> 24).to(tl.float32)
            scaled = c0 * t0.to(tl.float32) + c1 * t1.to(tl.float32)
            y = d.to(tl.float32) * (xd[None, :] * scaled - OFFSET * (c0 * s0[None, :] + c1 * s1[None, :]))
        else:
            f0, m0, f1, m1 = factors(s, d, KIND, UNIT)
            y = xd[None, :] * (f0 * t0.to(tl.float32) + f1 * t1.to(tl.float32))
            if OFFSET:
                y -= OFFSET * (f0 * s0[None, :] + f1 * s1[None, :])
            if KIND == QUARTERS:
                y -= m0 * s0[None, :] + m1 * s1[None, :]
    else:
        t = dot_words(a0, a1, xa, xb, CODING == 4) * FINE
        if PLANES == 2:
            t += dot_words(a0, a1, ya, yb, CODING == 4)
        if KIND == D:  # s * (q - offset)
            y = s.to(tl.float32) * (xd[None, :] * t.to(tl.float32) - OFFSET * (s0 + s1)[None, :])
        elif KIND == D_M:  # s * q + m
            y = half_of(s, False) * (xd[None, :] * t.to(tl.float32)) + half_of(s, True) * (s0 + s1)[None, :]
        elif KIND == PAIR:  # d * s * q - dmin * m; with 5 bits the product is below 2^31 yet
            c = s.to(tl.int32)
            scaled = (t * (c & 255)).to(tl.float32)
            low = half_of(d, True) * ((c >> 8) & 255).to(tl.float32)
            y = half_of(d, False) * (xd[None, :] * scaled) - low * (s0 + s1)[None, :]
        else:  # one factor, no offset
            f0, m0, f1, m1 = factors(s, d, KIND, UNIT)
            y = f0 * (xd[None, :] * t.to(tl.float32))
    return y


@triton.jit
def load_squares(SUMS, PARTS: tl.constexpr):
    """The PARTS sums of squares of a vector's pieces, padded with 0; nothing if PARTS is 0."""
    i = tl.arange(0, triton.next_power_of_2(PARTS) if PARTS > 0 else 1)
    return tl.load(SUMS + i, mask=i < PARTS, other=0.0)


@triton.jit
def inverse_rms(squares, K, eps):
    """1 / rms of a vector of K elements, from the sums of squares of its pieces."""
    return tl.rsqrt(tl.sum(squares, 0) / K + eps)


@triton.jit
def before(H, NEXT, X_SQUARES, n, ROLE: tl.constexpr, PARTS: tl.constexpr):
    """What `finish` will want, asked for while weights are on their way: the sums of squares of the vector, and for
    RESIDUAL the rows n of the residual and of the next norm's weights, float32 [BN]."""
    h, following = 0.0, 0.0
    if ROLE == 1:
        h = tl.load(H + n)
        following = tl.load(NEXT + n)
    return load_squares(X_SQUARES, PARTS), h, following


@triton.jit
def add_change(y, n, N, INNER, B, RANK: tl.constexpr):
    """Rows n of a product, y float32 [BN], plus those of B [N, RANK] times INNER [RANK]."""
    r = tl.arange(0, 16)
    for start in range(0, RANK, 16):
        seen = start + r < RANK
        inner = tl.load(INNER + start + r, mask=seen, other=0.0)
        at = B + (n[:, None] * RANK + (start + r)[None, :])
        y += tl.sum(tl.load(at, mask=(n < N)[:, None] & seen[None, :], other=0.0) * inner[None, :], 1)
    return y


@triton.jit
def finish(y, n, pid, N, K, eps, squares, h, following, OUT, H, CODES, SCALES, SUMS, VALUES, SQUARES, INNER, B,
           ROLE: tl.constexpr, PARTS: tl.constexpr, BN: tl.constexpr, SUMSQ: tl.constexpr, ACT: tl.constexpr,
           KEEP: tl.constexpr, RANK: tl.constexpr):  # fmt: skip
    """The rows n of a product, y float32 [BN], with RANK > 0 plus B times INNER, with PARTS > 0 times 1 / rms of the
    vector: stored; or added to the residual h, which goes on as the next product's vector, normed by `following`; or
    gates and gated in runs of 32, which go on as the next product's vector."""
    if RANK > 0:
        y = add_change(y, n, N, INNER, B, RANK)
    if PARTS > 0:
        y = y * inverse_rms(squares, K, eps)
    if ROLE == 0:
        tl.store(OUT + n, y, mask=n < N)
        if SUMSQ:
            tl.store(SQUARES + pid, tl.sum(tl.where(n < N, y * y, 0.0), 0))
    elif ROLE == 1:
        h = h + y
        tl.store(H + n, h)
        tl.store(SQUARES + pid, tl.sum(h * h, 0))
        store_activations(h * following, pid * BN, N, BN // 32, CODES, SCALES, SUMS, VALUES, BN // 32, KEEP)
    else:
        gate, up = tl.split(tl.permute(tl.reshape(y, (BN // 64, 2, 32)), (0, 2, 1)))
        v = tl.reshape(glu(gate, up, ACT), (BN // 2,))
        store_activations(v, pid * (BN // 2), N // 2, BN // 64, CODES, SCALES, SUMS, VALUES, BN // 64, KEEP)


@triton.jit
def load_vector(XCODES, XSCALES, XSUMS, g, plane, G: tl.constexpr, PLANES: tl.constexpr):
    """The groups g of a vector, as `dot_rows` wants them; `plane` words of codes are in each plane."""
    word = tl.arange(0, 4)
    seen = g < G
    at = XCODES + (g[:, None] * 8 + word[None, :])
    xa = tl.load(at, mask=seen[:, None], other=0)
    xb = tl.load(at + 4, mask=seen[:, None], other=0)
    ya, yb = xa, xb
    if PLANES == 2:
        ya = tl.load(at + plane, mask=seen[:, None], other=0)
        yb = tl.load(at + plane + 4, mask=seen[:, None], other=0)
    xd = tl.load(XSCALES + g, mask=seen, other=0.0)
    sums = XSUMS + (PLANES - 1) * (plane // 4) + g * 2
    s0 = tl.load(sums, mask=seen, other=0.0)
    s1 = tl.load(sums + 1, mask=seen, other=0.0)
    return xa, xb, ya, yb, xd, s0, s1


@triton.jit
def walk_packed(W, W_HIGH, W_SCALES, W_SUPERS, TABLE, first, last, w0, w1, w2, high, s, d, g, xa, xb, ya, yb, xd,
                s0, s1, G: tl.constexpr, CODING: tl.constexpr, WORDS: tl.constexpr, KIND: tl.constexpr,
                OFFSET: tl.constexpr, SPAN: tl.constexpr, UNIT: tl.constexpr, PLANES: tl.constexpr, BN: tl.constexpr,
                BG: tl.constexpr, RC: tl.constexpr, N, DEALT: tl.constexpr):  # fmt: skip
    """Rows [first, first + BN) times the vector -> float32 [BN], with the first RC of them loaded; `last` stands in for
    rows behind it. N, DEALT: see `stored`."""
    row = tl.arange(0, RC)
    NCH: tl.constexpr = BN // RC
    chunk = tl.arange(0, NCH)
    out = tl.zeros((NCH, RC), tl.float32)
    for c in range(NCH - 1):
        n = stored(tl.minimum(first + (c + 1) * RC + row, last), N, DEALT)
        v0, v1, v2, next_high, next_s, next_d = load_rows(
            W, W_HIGH, W_SCALES, W_SUPERS, n, g, G, CODING, WORDS, KIND, SPAN
        )
        y = dot_rows(w0, w1, w2, high, s, d, TABLE, xa, xb, ya, yb, xd, s0, s1, RC, BG, CODING, WORDS, KIND, OFFSET,
                     UNIT, PLANES)  # fmt: skip
        out = tl.where(chunk[:, None] == c, tl.sum(y, 1)[None, :], out)
        w0, w1, w2, high, s, d = v0, v1, v2, next_high, next_s, next_d
    y = dot_rows(w0, w1, w2, high, s, d, TABLE, xa, xb, ya, yb, xd, s0, s1, RC, BG, CODING, WORDS, KIND, OFFSET,
                 UNIT, PLANES)  # fmt: skip
    return tl.reshape(tl.where(chunk[:, None] == NCH - 1, tl.sum(y, 1)[None, :], out), (BN,))


@triton.jit
def matvec_packed(W, W_HIGH, W_SCALES, W_SUPERS, TABLE, XCODES, XSCALES, XSUMS, OUT, H, NEXT, CODES, SCALES, SUMS,
                  VALUES, X_SQUARES, SQUARES, INNER, B, N, eps, G: tl.constexpr, CODING: tl.constexpr,
                  WORDS: tl.constexpr, KIND: tl.constexpr, OFFSET: tl.constexpr, SPAN: tl.constexpr, UNIT: tl.constexpr,
                  PLANES: tl.constexpr, ROLE: tl.constexpr, PARTS: tl.constexpr, SUMSQ: tl.constexpr,
                  ACT: tl.constexpr, KEEP: tl.constexpr, RANK: tl.constexpr, BN: tl.constexpr, BG: tl.constexpr,
                  RC: tl.constexpr, DEALT: tl.constexpr, PDL: tl.constexpr):  # fmt: skip
    """One program: rows [pid * BN, + BN) of the matrix. PARTS > 0: the vector is normed by its sums of squares."""
    pid = tl.program_id(0)
    g = tl.arange(0, BG)
    first = pid * BN
    n = stored(tl.minimum(first + tl.arange(0, RC), N - 1), N, DEALT)
    w0, w1, w2, high, s, d = load_rows(W, W_HIGH, W_SCALES, W_SUPERS, n, g, G, CODING, WORDS, KIND, SPAN)
    wait_for_previous(PDL)
    xa, xb, ya, yb, xd, s0, s1 = load_vector(XCODES, XSCALES, XSUMS, g, G * 8, G, PLANES)
    mine = first + tl.arange(0, BN)
    squares, h, following = before(H, NEXT, X_SQUARES, mine, ROLE, PARTS)
    y = walk_packed(W, W_HIGH, W_SCALES, W_SUPERS, TABLE, first, N - 1, w0, w1, w2, high, s, d, g, xa, xb, ya, yb, xd,
                    s0, s1, G, CODING, WORDS, KIND, OFFSET, SPAN, UNIT, PLANES, BN, BG, RC, N, DEALT)  # fmt: skip
    finish(y, mine, pid, N, G * 32, eps, squares, h, following, OUT, H, CODES, SCALES, SUMS, VALUES, SQUARES, INNER, B,
           ROLE, PARTS, BN, SUMSQ, ACT, KEEP, RANK)  # fmt: skip
    wait_at_end(PDL)


@triton.jit
def load_plain(W, n, k, K: tl.constexpr):
    """Rows n of a matrix of floats, [RC, BK]."""
    at = W + (n.to(tl.int64)[:, None] * K + k[None, :])
    return tl.load(at, mask=(k < K)[None, :], other=0.0, eviction_policy="evict_first")


@triton.jit
def walk_plain(W, first, last, w, k, x, K: tl.constexpr, BN: tl.constexpr, RC: tl.constexpr):
    """As `walk_packed`, for a vector x float32 [BK]."""
    row = tl.arange(0, RC)
    NCH: tl.constexpr = BN // RC
    chunk = tl.arange(0, NCH)
    out = tl.zeros((NCH, RC), tl.float32)
    for c in range(NCH - 1):
        next_w = load_plain(W, tl.minimum(first + (c + 1) * RC + row, last), k, K)
        y = tl.sum(w.to(tl.float32) * x[None, :], 1)
        out = tl.where(chunk[:, None] == c, y[None, :], out)
        w = next_w
    y = tl.sum(w.to(tl.float32) * x[None, :], 1)
    return tl.reshape(tl.where(chunk[:, None] == NCH - 1, y[None, :], out), (BN,))


@triton.jit
def matvec_plain(W, X, OUT, H, NEXT, CODES, SCALES, SUMS, VALUES, X_SQUARES, SQUARES, INNER, B, N, eps,
                 K: tl.constexpr, ROLE: tl.constexpr, PARTS: tl.constexpr, SUMSQ: tl.constexpr, ACT: tl.constexpr,
                 KEEP: tl.constexpr, RANK: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, RC: tl.constexpr,
                 PDL: tl.constexpr):  # fmt: skip
    """The same for a matrix of floats, with the vector in float32."""
    pid = tl.program_id(0)
    k = tl.arange(0, BK)
    first = pid * BN
    w = load_plain(W, tl.minimum(first + tl.arange(0, RC), N - 1), k, K)
    wait_for_previous(PDL)
    x = tl.load(X + k, mask=k < K, other=0.0)
    mine = first + tl.arange(0, BN)
    squares, h, following = before(H, NEXT, X_SQUARES, mine, ROLE, PARTS)
    y = walk_plain(W, first, N - 1, w, k, x, K, BN, RC)
    finish(y, mine, pid, N, K, eps, squares, h, following, OUT, H, CODES, SCALES, SUMS, VALUES, SQUARES, INNER, B, ROLE,
           PARTS, BN, SUMSQ, ACT, KEEP, RANK)  # fmt: skip
    wait_at_end(PDL)
