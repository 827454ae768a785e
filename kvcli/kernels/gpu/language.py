"""What the kernels share: integer dot products, programmatic dependent launch, and the switch of the interpreter.

With TRITON_INTERPRET=1 kernels run on a CPU, where inline assembly and the launch controls of sm_90 do not exist.
"""

# triton.jit functions are compiled, not called: their arguments carry no types
# mypy: disable-error-code="no-untyped-def,misc"

from __future__ import annotations

import os

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
from triton.language.target_info import cuda_capability_geq

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
INTERPRET = tl.constexpr(INTERPRETED)
UNFENCED = tl.constexpr(not INTERPRETED and tuple(map(int, triton.__version__.split(".")[:2])) < (3, 8))


# How a kernel stands to the one launched before it. AFTER: it starts early, and waits for it before it reads what that
# one wrote; the next may stand ready from the first on. LEADING: so too, but the next starts when this one has waited.
# That one may then run BESIDE it: it needs only what this one waits for, and waits at its end. TRAILING: as AFTER, but
# the next starts when this one is done: its programs find all multiprocessors free, and are dealt out evenly.
SERIAL, AFTER, LEADING, BESIDE, TRAILING = 0, 1, 2, 3, 4
_SERIAL, _AFTER, _LEADING, _BESIDE, _TRAILING = map(tl.constexpr, (SERIAL, AFTER, LEADING, BESIDE, TRAILING))


@triton.jit
def wait_for_previous(PDL: tl.constexpr):
    """Before a kernel first reads what others of the token wrote, and before it writes; on every way through it.

    The next one may be launched, and may well stand ready while several before it run: when one is done, so are all
    before it, since each waits for the one before.
    """
    if PDL == _TRAILING:
        gdc_wait()
    elif PDL > _SERIAL:
        if PDL == _LEADING:
            gdc_wait()
        gdc_launch_dependents()
        if PDL == _AFTER:
            gdc_wait()


@triton.jit
def wait_at_end(PDL: tl.constexpr):
    """The last thing of a kernel that runs beside the one before it: whoever waits for this one waits for both."""
    if PDL == _BESIDE:
        gdc_wait()


@triton.jit
def fence_copies(M: tl.constexpr):
    """Between loads in a loop and a product of M rows that reads what was loaded from shared memory.

    The compiler makes such loads copies into shared memory. From 64 rows on products go by warp groups (sm_90) or
    tensor memory (sm_100), which read it by another way than copies are written: without a fence they may find what was
    there before, and now and then a tile of the sum is wrong. Triton has put one there since 3.8 only
    (triton-lang/triton#9610).
    """
    if UNFENCED and M >= 64 and cuda_capability_geq(9, 0):
        tl.inline_asm_elementwise(
            "fence.proxy.async.shared::cta; // $0", "=r", [], dtype=tl.int32, is_pure=False, pack=1
        )  # fmt: skip


@triton.jit
def finished(acc):
    """The float32 result of a product whose left side was made in registers, in a loop: when it is there.

    Else the compiler (Triton 3.6) leaves the last product of a turn running into the next one, which makes the next
    left side in the same registers while they may still be read.
    """
    if INTERPRET:
        return acc
    else:
        return tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [acc], dtype=tl.float32, is_pure=True, pack=1)


@triton.jit
def summed(x, i, seen, parts_apart, PARTS: tl.constexpr):
    """Elements i of x, where `seen`, summed over its parts, which stand so far apart."""
    v = tl.load(x + i, mask=seen, other=0.0)
    for part in tl.static_range(1, PARTS):
        v += tl.load(x + part * parts_apart + i, mask=seen, other=0.0)
    return v


@triton.jit
def load_in_place(at):
    """float32 from these addresses, all of which are read. In a loop that is pipelined: without a copy in shared
    memory, which a few numbers are not worth."""
    if INTERPRET:
        return tl.load(at)
    else:
        return tl.inline_asm_elementwise(  # not pure: it stays behind `wait_for_previous`
            "ld.global.f32 $0, [$1];", "=f,l", [at], dtype=tl.float32, is_pure=False, pack=1
        )


@triton.jit
def dot4(a, b):
    """int32 words as four signed bytes each -> their dot product, int32."""
    if INTERPRET:
        total = a * 0
        for i in tl.static_range(4):
            total += ((a << (24 - 8 * i)) >> 24) * ((b << (24 - 8 * i)) >> 24)
        return total
    else:
        return tl.inline_asm_elementwise(
            "{mov.b32 $0, 0; dp4a.s32.s32 $0, $1, $2, $0;}", "=&r,r,r", [a, b], dtype=tl.int32, is_pure=True, pack=1
        )


@triton.jit
def dot_nibbles(w, low, high):
    """Low nibbles of the bytes of w times `low`, high nibbles times `high` (signed bytes) -> their sum, int32."""
    if INTERPRET:
        return dot4(w & 0x0F0F0F0F, low) + dot4((w >> 4) & 0x0F0F0F0F, high)
    else:
        return tl.inline_asm_elementwise(
            "{.reg .b32 a, b; and.b32 a, $1, 0x0F0F0F0F; shr.u32 b, $1, 4; and.b32 b, b, 0x0F0F0F0F;"
            " mov.b32 $0, 0; dp4a.s32.s32 $0, a, $2, $0; dp4a.s32.s32 $0, b, $3, $0;}",
            "=&r,r,r,r",
            [w, low, high],
            dtype=tl.int32,
            is_pure=True,
            pack=1,
        )


@triton.jit
def half_of(pair, HIGH: tl.constexpr):
    """One float16 of a pair in an int32, as float32."""
    bits = (pair >> 16) if HIGH else pair
    return (bits & 0xFFFF).to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32)


ACTS = {"silu": 0, "gelu": 1, "clamped": 2}


@triton.jit
def glu(gate, up, ACT: tl.constexpr):
    """The activated gate times `up`; ACT: see ACTS, and `glu` of reference/pointwise.py."""
    inner = gate  # of the sigmoid
    if ACT == 1:
        inner = (gate + gate * gate * gate * 0.044715) * 1.5957691216057308
    if ACT == 2:
        gate = tl.minimum(gate, 7.0)
        inner, up = 1.702 * gate, tl.clamp(up, -7.0, 7.0) + 1.0
    return gate / (1.0 + tl.exp(-inner)) * up


FINE = tl.constexpr(254)  # fine steps in a coarse one


@triton.jit
def store_activations(v, first, n, there, CODES, SCALES, SUMS, VALUES, NGROUPS: tl.constexpr, KEEP: tl.constexpr):
    """Write elements [first, first + 32 NGROUPS) of a vector of n, the first `there` groups of them, as `Activations`
    (products.py)."""
    rows = tl.reshape(v, (NGROUPS, 32))
    largest = tl.max(tl.abs(rows), 1)
    scaled = rows * tl.where(largest > 1e-30, 127.0 / largest, 0.0)[:, None]
    coarse = tl.floor(scaled + 0.5)
    fine = tl.floor((scaled - coarse) * FINE + 0.5)
    step = largest / (127.0 * FINE)
    g, e = tl.arange(0, NGROUPS), tl.arange(0, 32)
    at = CODES + first + g[:, None] * 32 + e[None, :]
    keep = (g < there)[:, None]
    tl.store(at, coarse.to(tl.int8), mask=keep)
    tl.store(at + n, fine.to(tl.int8), mask=keep)
    tl.store(SCALES + first // 32 + g, step, mask=g < there)
    at = SUMS + first // 16 + g[:, None] * 2 + tl.arange(0, 2)[None, :]
    coarse_sums = tl.sum(tl.reshape(coarse * FINE, (NGROUPS, 2, 16)), 2)
    both_sums = coarse_sums + tl.sum(tl.reshape(fine, (NGROUPS, 2, 16)), 2)
    tl.store(at, coarse_sums * step[:, None], mask=keep)
    tl.store(at + n // 16, both_sums * step[:, None], mask=keep)
    if KEEP:
        i = tl.arange(0, NGROUPS * 32)
        tl.store(VALUES + first + i, v, mask=i < there * 32)
