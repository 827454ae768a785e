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

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
INTERPRET = tl.constexpr(INTERPRETED)


@triton.jit
def wait_for_previous(PDL: tl.constexpr):
    """Wait until the kernel before this one has written all, then let the next one start its loads of weights."""
    if PDL:
        gdc_wait()
        gdc_launch_dependents()


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


@triton.jit
def quantize_group(v, NGROUPS: tl.constexpr):
    """float32 [NGROUPS * 32] -> codes float32 [NGROUPS, 32] in -127..127, scales [NGROUPS], 16-sums [NGROUPS, 2]."""
    rows = tl.reshape(v, (NGROUPS, 32))
    largest = tl.max(tl.abs(rows), 1)
    scale = largest / 127.0
    codes = tl.floor(rows * tl.where(largest > 0, 127.0 / largest, 0.0)[:, None] + 0.5)
    sums = tl.sum(tl.reshape(codes, (NGROUPS, 2, 16)), 2) * scale[:, None]
    return codes, scale, sums


@triton.jit
def store_activations(v, first, CODES, SCALES, SUMS, VALUES, NGROUPS: tl.constexpr, KEEP: tl.constexpr):
    """Write elements [first, first + 32 NGROUPS) of an activation vector: int8 codes, scales, sums, and as they are."""
    codes, scale, sums = quantize_group(v, NGROUPS)
    g, e = tl.arange(0, NGROUPS), tl.arange(0, 32)
    tl.store(CODES + first + g[:, None] * 32 + e[None, :], codes.to(tl.int8))
    tl.store(SCALES + first // 32 + g, scale)
    tl.store(SUMS + first // 16 + g[:, None] * 2 + tl.arange(0, 2)[None, :], sums)
    if KEEP:
        tl.store(VALUES + first + tl.arange(0, NGROUPS * 32), v)
