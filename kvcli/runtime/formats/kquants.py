"""Weights packed in the K formats of GGML, whose layouts stand in kernels/reference/ggml.py. No torch.

A block of 256 has small blocks with scales of 4 to 8 bits. The scale (and shift) of a small block is searched:
of some candidates for the largest code, the one whose weighted least-squares fit errs least, where large weights count
more. fits.c has this search compiled; numpy takes six times as long.
"""

from __future__ import annotations

import ctypes
import functools

import numpy as np

from kvcli.runtime.formats.libraries import compiled

_SEARCH = {2: (-0.5, 16), 4: (-1.0, 20), 5: (-0.5, 16)}  # bits -> where the candidates begin, and how many there are


def pack(type: str, values: np.ndarray) -> np.ndarray:
    """float32 [..., 256 n] -> uint8 [..., bytes]; `type` is Q2_K to Q6_K."""
    blocks = np.ascontiguousarray(values, np.float32).reshape(-1, 256)
    packers = {"Q2_K": _two_bits, "Q3_K": _three_bits, "Q6_K": _signed}
    packed = packers[type](blocks) if type in packers else _shifted(blocks, int(type[1]))
    return packed.reshape(*values.shape[:-1], -1)


def _shifted(blocks: np.ndarray, bits: int) -> np.ndarray:
    """Q4_K and Q5_K: x = d * scale * q - dmin * low, of small blocks of 32."""
    top, n = (1 << bits) - 1, len(blocks)
    scale, low = (each.reshape(n, 8) for each in fit_shifted(blocks.reshape(-1, 32), top, *_SEARCH[bits]))
    d, codes = _whole(scale, 63)
    dmin, lows = _whole(np.where(codes > 0, low, 0), 63)  # numbers too small for any scale are 0
    step, shift = d.astype(np.float32) * codes, dmin.astype(np.float32) * lows
    small = blocks.reshape(n, 8, 32)
    with np.errstate(divide="ignore", invalid="ignore"):
        q = np.rint((small + shift[..., None]) / step[..., None])
    q = np.clip(np.where(step[..., None] > 0, q, 0), 0, top).astype(np.uint8)
    pairs = (q & 15).reshape(n, 4, 2, 32)
    nibbles = (pairs[:, :, 0] | pairs[:, :, 1] << 4).reshape(n, 128)
    fifth = (q >> 4 << np.arange(8, dtype=np.uint8)[:, None]).sum(1, dtype=np.uint8)
    head = [d.view(np.uint8).reshape(n, 2), dmin.view(np.uint8).reshape(n, 2), _six_bit_pairs(codes, lows)]
    return np.concatenate([*head, *([fifth] if bits == 5 else []), nibbles], 1)


def _two_bits(blocks: np.ndarray) -> np.ndarray:
    """Q2_K: x = d * scale * q - dmin * low, of small blocks of 16."""
    n = len(blocks)
    scale, low = (each.reshape(n, 16) for each in fit_shifted(blocks.reshape(-1, 16), 3, *_SEARCH[2]))
    d, codes = _whole(scale, 15)
    dmin, lows = _whole(low, 15)
    step, shift = d.astype(np.float32) * codes, dmin.astype(np.float32) * lows
    with np.errstate(divide="ignore", invalid="ignore"):
        q = np.rint((blocks.reshape(n, 16, 16) + shift[..., None]) / step[..., None])
    q = np.clip(np.where(step[..., None] > 0, q, 0), 0, 3).astype(np.uint8)
    head = [codes | lows << 4, _quarters(q)]
    return np.concatenate([*head, d.view(np.uint8).reshape(n, 2), dmin.view(np.uint8).reshape(n, 2)], 1)


def _three_bits(blocks: np.ndarray) -> np.ndarray:
    """Q3_K: x = d * scale * q with q from -4 to 3, of small blocks of 16."""
    n = len(blocks)
    d, codes, q = _scaled(blocks, 4, 31)
    q = (q + 4).astype(np.uint8)
    bits = (q >> 2).reshape(n, 8, 32) << np.arange(8, dtype=np.uint8)[:, None]
    scales = (codes + 32).astype(np.uint8)
    upper = (scales >> 4).reshape(n, 4, 4) << np.arange(0, 8, 2, dtype=np.uint8)[:, None]
    nibbles = (scales[:, :8] & 15) | (scales[:, 8:] & 15) << 4
    fields = [bits.sum(1, dtype=np.uint8), _quarters(q & 3), nibbles, upper.sum(1, dtype=np.uint8)]
    return np.concatenate([*fields, d.view(np.uint8).reshape(n, 2)], 1)


def _quarters(q: np.ndarray) -> np.ndarray:
    """256 numbers of 2 bits in 64 bytes, those 32 apart in one byte."""
    return (
        (q.reshape(-1, 2, 4, 32) << np.arange(0, 8, 2, dtype=np.uint8)[:, None]).sum(2, dtype=np.uint8).reshape(-1, 64)
    )


def _whole(scales: np.ndarray, most: int) -> tuple[np.ndarray, np.ndarray]:
    """Scales [n, k], none negative, as float16 [n, 1] times whole numbers up to `most` [n, k]."""
    scales = np.maximum(scales, 0)
    unit = (scales.max(1, keepdims=True) / most).astype(np.float16)
    wide = unit.astype(np.float32)
    with np.errstate(divide="ignore", invalid="ignore"):
        codes = np.where(wide > 0, np.rint(scales / wide), 0)
    return unit, np.clip(codes, 0, most).astype(np.uint8)


def _six_bit_pairs(scales: np.ndarray, lows: np.ndarray) -> np.ndarray:
    """Two times eight numbers of 6 bits in 12 bytes."""
    first = scales[:, :4] | scales[:, 4:] >> 4 << 6
    second = lows[:, :4] | lows[:, 4:] >> 4 << 6
    return np.concatenate([first, second, (scales[:, 4:] & 15) | (lows[:, 4:] & 15) << 4], 1)


def _signed(blocks: np.ndarray) -> np.ndarray:
    """Q6_K: x = d * scale * q with q from -32 to 31, of small blocks of 16."""
    n = len(blocks)
    d, codes, q = _scaled(blocks, 32, 127)
    q = (q + 32).astype(np.uint8).reshape(n, 2, 4, 32)
    low, high = q & 15, q >> 4
    nibbles = np.stack([low[:, :, 0] | low[:, :, 2] << 4, low[:, :, 1] | low[:, :, 3] << 4], 2).reshape(n, 128)
    tops = (high << np.arange(0, 8, 2, dtype=np.uint8)[:, None]).sum(2, dtype=np.uint8).reshape(n, 64)
    return np.concatenate([nibbles, tops, codes.astype(np.int8).view(np.uint8), d.view(np.uint8).reshape(n, 2)], 1)


def _scaled(blocks: np.ndarray, top: int, most: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Blocks as d * scale * q: float16 [n, 1], whole numbers from -most - 1 to most [n, 16], whole numbers from -top to
    top - 1 [n, 16, 16]."""
    n = len(blocks)
    scale = fit_signed(blocks.reshape(-1, 16), top).reshape(n, 16)
    largest = np.take_along_axis(scale, np.abs(scale).argmax(1)[:, None], 1)
    d = (largest / -(most + 1)).astype(np.float16)
    wide = d.astype(np.float32)
    with np.errstate(divide="ignore", invalid="ignore"):
        codes = np.clip(np.where(wide != 0, np.rint(scale / wide), 0), -most - 1, most)
        step = (wide * codes)[..., None]
        q = np.where(step != 0, np.rint(blocks.reshape(n, 16, 16) / step), 0)
    return d, codes, np.clip(q, -top, top - 1)


# --- the search ---


def fit_shifted(x: np.ndarray, top: int, first: float, steps: int) -> tuple[np.ndarray, np.ndarray]:
    """Blocks [n, 16 or 32] -> scale [n] and low [n], 0 or more: x is about scale * q - low for whole q from 0 to `top`.

    Candidates for the code of the largest element are top + first, and so on in steps of a tenth.
    """
    library = _library()
    if library is None:
        return fit_shifted_slowly(x, top, first, steps)
    scale, low = np.empty(len(x), np.float32), np.empty(len(x), np.float32)
    x = np.ascontiguousarray(x)
    library.kv_fit_shifted(x.ctypes.data, *x.shape, float(top), first, steps, scale.ctypes.data, low.ctypes.data)
    return scale, low


def fit_shifted_slowly(x: np.ndarray, top: int, first: float, steps: int) -> tuple[np.ndarray, np.ndarray]:
    """`fit_shifted` in numpy: the specification."""
    w = np.sqrt((x * x).mean(1, keepdims=True)) + np.abs(x)
    least, most = np.minimum(x.min(1, keepdims=True), 0), np.maximum(x.max(1, keepdims=True), 0)
    scale, low, best = np.zeros(len(x), np.float32), -least[:, 0], np.full(len(x), np.inf, np.float32)
    sw, swx = w.sum(1), (w * x).sum(1)
    with np.errstate(divide="ignore", invalid="ignore"):
        for step in range(steps):
            q = np.clip(np.rint((x - least) * (np.float32(top + first + 0.1 * step) / (most - least))), 0, top)
            swq, swqq, swqx = (w * q).sum(1), (w * q * q).sum(1), (w * q * x).sum(1)
            det = sw * swqq - swq * swq
            fitted = det > 0
            s = np.where(fitted, (sw * swqx - swx * swq) / det, (most - least)[:, 0] / top)
            m = np.where(fitted, (swqq * swx - swq * swqx) / det, least[:, 0])
            s, m = np.where(m > 0, swqx / swqq, s), np.minimum(m, 0)
            error = (w * (s[:, None] * q + m[:, None] - x) ** 2).sum(1)
            better = error < best
            scale, low, best = (np.where(better, *each) for each in ((s, scale), (-m, low), (error, best)))
    return scale.astype(np.float32), low.astype(np.float32)


def fit_signed(x: np.ndarray, top: int) -> np.ndarray:
    """Blocks [n, 16] -> scale [n]: x is about scale * q for whole q from -top to top - 1."""
    library = _library()
    if library is None:
        return fit_signed_slowly(x, top)
    x, scale = np.ascontiguousarray(x), np.empty(len(x), np.float32)
    library.kv_fit_signed(x.ctypes.data, len(x), float(top), scale.ctypes.data)
    return scale


def fit_signed_slowly(x: np.ndarray, top: int) -> np.ndarray:
    """`fit_signed` in numpy: the specification."""
    largest = np.take_along_axis(x, np.abs(x).argmax(1)[:, None], 1)
    w, scale, best = x * x, np.zeros(len(x), np.float32), np.zeros(len(x), np.float32)
    with np.errstate(divide="ignore", invalid="ignore"):
        for step in range(-9, 10):
            q = np.clip(np.rint(x * (np.float32(-(top + 0.1 * step)) / largest)), -top, top - 1)
            swqx, swqq = (w * q * x).sum(1), (w * q * q).sum(1)
            better = (swqq > 0) & (swqx * swqx > best * swqq)
            scale, best = np.where(better, swqx / swqq, scale), np.where(better, swqx * swqx / swqq, best)
    return scale.astype(np.float32)


@functools.cache
def _library() -> ctypes.CDLL | None:
    library = compiled("_fits")
    if library is None:
        return None
    pointer, count, number = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float
    library.kv_fit_shifted.argtypes = [pointer, count, count, number, number, count, pointer, pointer]
    library.kv_fit_signed.argtypes = [pointer, count, number, pointer]
    library.kv_fit_shifted.restype = library.kv_fit_signed.restype = None
    return library
