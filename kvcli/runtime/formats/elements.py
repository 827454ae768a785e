"""Elements of the tensors of safetensors files as numbers: how they lie in memory, packed words, scales of blocks. No
torch."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

# How elements of a type lie in memory: bfloat16, which numpy lacks, as the upper halves of float32.
STORAGE = {"F32": np.float32, "F16": np.float16, "BF16": np.uint16}


def widened(type: str, values: np.ndarray) -> np.ndarray:
    """Elements as float32 (a view where they are)."""
    if type == "BF16":
        return (values.astype(np.uint32) << 16).view(np.float32)
    return values.astype(np.float32, copy=False)


def narrowed(type: str, values: np.ndarray) -> np.ndarray:
    """float32 in the memory of `type`, rounded to the nearest, ties to even."""
    if type == "BF16":
        bits = np.ascontiguousarray(values).view(np.uint32)
        return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    return values.astype(STORAGE[type], copy=False)


def unpacked(words: np.ndarray, bits: int, order: tuple[int, ...] | None = None) -> np.ndarray:
    """Words int32 [..., n] -> integers uint8 [..., n * 32 / bits], the lowest bits first or as `order` says.

    Numbers of 3 bits go on from one word into the next.
    """
    if bits == 3:
        each = np.unpackbits(np.ascontiguousarray(words).view(np.uint8), axis=-1, bitorder="little")
        triples = each.reshape(*words.shape[:-1], -1, 3)
        return triples[..., 0] | triples[..., 1] << 1 | triples[..., 2] << 2
    shifts = np.arange(0, 32, bits, dtype=np.uint32)
    if order is not None:
        shifts = shifts[list(order)]
    parts = (np.ascontiguousarray(words).view(np.uint32)[..., None] >> shifts) & np.uint32((1 << bits) - 1)
    return parts.astype(np.uint8).reshape(*words.shape[:-1], -1)


def blocks_of(shape: tuple[int, ...], scales: tuple[int, ...], said: Any) -> tuple[int, ...] | None:
    """The sizes of the blocks that share a scale, None where the shapes do not fit."""
    if scales in ((), (1,)):
        return shape
    if len(scales) == len(shape) - 1 and scales == shape[:-1]:
        scales = (*scales, 1)
    if len(scales) != len(shape):
        return None
    blocks = tuple(-(-n // count) if count else 0 for n, count in zip(shape, scales, strict=True))
    if isinstance(said, list) and len(said) == 2 and all(isinstance(n, int) and n > 0 for n in said):
        blocks = (*blocks[:-2], *said)
    fits = all(block and -(-n // block) == count for n, block, count in zip(shape, blocks, scales, strict=True))
    return blocks if fits else None


def spread(scales: np.ndarray, shape: tuple[int, ...], blocks: tuple[int, ...]) -> np.ndarray:
    """Scales for each element."""
    if scales.ndim != len(shape):
        scales = scales.reshape(*scales.shape, *[1] * (len(shape) - scales.ndim))
    for axis, block in enumerate(blocks):
        if scales.shape[axis] > 1:
            scales = np.repeat(scales, block, axis)[(slice(None),) * axis + (slice(shape[axis]),)]
    return scales


@functools.cache
def fp8_values() -> np.ndarray:
    """The 256 values of F8_E4M3 (arXiv 2209.05433): no infinities, 0x7F and 0xFF are NaN."""
    codes = np.arange(256)
    exponent, mantissa = codes >> 3 & 15, codes & 7
    values = np.where(exponent > 0, (8 + mantissa) * 2.0 ** (exponent - 10), mantissa * 2.0**-9)
    values[codes & 127 == 127] = np.nan
    return np.where(codes < 128, values, -values).astype(np.float32)
