"""GGML block formats: torch decode to float32, the specification that faster kernels match bit for bit.

Each decoder takes packed blocks, uint8 [..., n, bytes], and returns float32 [..., n, elements]. Fields
stand in a block in the order given by its docstring, little-endian; "f16 d" is a half-precision scale.
Nibbles: byte i of `qs` holds element i in its low and element i + 16 (i + 32 in the K formats) in its high
half, unless said otherwise. Every operation below is one float32 operation rounded to nearest, in the
written order: no fused multiply-add. Scales are widened from f16 to float32 before any arithmetic; integer
parts are exact.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from kvcli.blockformats import FORMATS
from kvcli.kernels.reference import lookup
from kvcli.kernels.reference.fields import base_3, f16, fifth_bits, in_turn, nibbles, planes, six_bit_scales


def decode(type: str, blocks: Tensor) -> Tensor:
    """Expand packed blocks of the GGML format `type` to float32.

    `blocks`: uint8 [..., n * bytes], last dim contiguous; of plain numbers, the address a multiple of their size.
    Returns a new float32 tensor [..., n * elements] on the same device (for F32 it may be a view). Raises
    ValueError for a format without a decoder, another dtype, or a length that is no whole number of blocks.
    """
    decoder, form = DECODERS.get(type), FORMATS.get(type)
    if decoder is None or form is None:
        raise ValueError(f"no decoder for the block format {type!r}; there are {', '.join(DECODERS)}")
    if blocks.dtype != torch.uint8 or blocks.dim() == 0 or blocks.shape[-1] % form.bytes:
        shape = tuple(blocks.shape)
        raise ValueError(f"{type} blocks are uint8 [..., n * {form.bytes}], not {blocks.dtype} {shape}")
    return decoder(blocks.unflatten(-1, (-1, form.bytes))).flatten(-2)


def _plain(dtype: torch.dtype) -> Callable[[Tensor], Tensor]:
    """One number of that type, rounded to float32 (all but F64, I32 and I64 are exact)."""
    return lambda b: b.view(dtype).float()


def _q4_0(b: Tensor) -> Tensor:
    """18 bytes, 32 elements: f16 d, qs[16] nibbles. Value: d * (q - 8)."""
    q = nibbles(b[..., 2:18]).to(torch.int8) - 8
    return f16(b[..., 0:2]) * q.float()


def _q4_1(b: Tensor) -> Tensor:
    """20 bytes, 32 elements: f16 d, f16 m, qs[16] nibbles. Value: (d * q) + m."""
    q = nibbles(b[..., 4:20])
    return f16(b[..., 0:2]) * q.float() + f16(b[..., 2:4])


def _q5_0(b: Tensor) -> Tensor:
    """22 bytes, 32 elements: f16 d, u32 qh (bit i tops element i), qs[16] nibbles. Value: d * (q - 16)."""
    q = (nibbles(b[..., 6:22]) | fifth_bits(b[..., 2:6])).to(torch.int8) - 16
    return f16(b[..., 0:2]) * q.float()


def _q5_1(b: Tensor) -> Tensor:
    """24 bytes, 32 elements: f16 d, f16 m, u32 qh (as in Q5_0), qs[16] nibbles. Value: (d * q) + m."""
    q = nibbles(b[..., 8:24]) | fifth_bits(b[..., 4:8])
    return f16(b[..., 0:2]) * q.float() + f16(b[..., 2:4])


def _q8_0(b: Tensor) -> Tensor:
    """34 bytes, 32 elements: f16 d, i8 q[32]. Value: d * q."""
    return f16(b[..., 0:2]) * b[..., 2:34].view(torch.int8).float()


def _q2_k(b: Tensor) -> Tensor:
    """84 bytes, 256 elements: sc[16], qs[64], f16 d, f16 dmin. Value: (d * s) * q - (dmin * m).

    16 runs of 16 elements; run r: s = the low, m = the high half of sc[r]. Element 128 h + 32 j + l has bits
    [2 j, 2 j + 2) of qs[32 h + l].
    """
    q = planes(b[..., 16:80].unflatten(-1, (2, 32)), 2).flatten(-3).unflatten(-1, (16, 16))
    scales = b[..., 0:16]
    step = (f16(b[..., 80:82]) * (scales & 15).float()).unsqueeze(-1)
    low = (f16(b[..., 82:84]) * (scales >> 4).float()).unsqueeze(-1)
    return (step * q.float() - low).flatten(-2)


def _q3_k(b: Tensor) -> Tensor:
    """110 bytes, 256 elements: hmask[32], qs[64], sc[12], f16 d. Value: (d * (s - 32)) * (q - 4).

    16 runs of 16 elements. Element 128 h + 32 j + l: low 2 bits are bits [2 j, 2 j + 2) of qs[32 h + l],
    the third is bit 4 h + j of hmask[l]. The 6-bit s of run r: low 4 bits from the low (r < 8) or high half
    of sc[r % 8], upper 2 bits are bits [2 (r / 4), 2 (r / 4) + 2) of sc[8 + r % 4].
    """
    low = planes(b[..., 32:96].unflatten(-1, (2, 32)), 2).flatten(-3)
    third = planes(b[..., 0:32], 1).flatten(-2)
    q = ((low | (third << 2)).to(torch.int8) - 4).unflatten(-1, (16, 16))
    scales = nibbles(b[..., 96:104]) | (planes(b[..., 104:108], 2).flatten(-2) << 4)
    step = f16(b[..., 108:110]) * (scales.to(torch.int8) - 32).float()
    return (step.unsqueeze(-1) * q.float()).flatten(-2)


def _q4_k(b: Tensor) -> Tensor:
    """144 bytes, 256 elements: f16 d, f16 dmin, sc[12], qs[128]. Value: (d * s) * q - (dmin * m).

    8 runs of 32 elements, s and m from sc (see `six_bit_scales`); runs 2 j and 2 j + 1 are the low and high
    halves of qs[32 j : 32 j + 32].
    """
    scales, minima = six_bit_scales(b[..., 4:16])
    q = nibbles(b[..., 16:144].unflatten(-1, (4, 32))).flatten(-2).unflatten(-1, (8, 32))
    step = f16(b[..., 0:2]).unsqueeze(-1) * scales
    low = f16(b[..., 2:4]).unsqueeze(-1) * minima
    return (step * q.float() - low).flatten(-2)


def _q5_k(b: Tensor) -> Tensor:
    """176 bytes, 256 elements: f16 d, f16 dmin, sc[12], qh[32], qs[128]. Value: (d * s) * q - (dmin * m).

    As Q4_K; the fifth bit of element l of run r is bit r of qh[l].
    """
    scales, minima = six_bit_scales(b[..., 4:16])
    low4 = nibbles(b[..., 48:176].unflatten(-1, (4, 32))).flatten(-2).unflatten(-1, (8, 32))
    q = low4 | (planes(b[..., 16:48], 1) << 4)
    step = f16(b[..., 0:2]).unsqueeze(-1) * scales
    low = f16(b[..., 2:4]).unsqueeze(-1) * minima
    return (step * q.float() - low).flatten(-2)


def _q6_k(b: Tensor) -> Tensor:
    """210 bytes, 256 elements: ql[128], qh[64], i8 sc[16], f16 d. Value: (d * s) * (q - 32).

    16 runs of 16 elements, s of run r is sc[r]. Element 128 h + 32 j + l: low 4 bits from the low (j < 2)
    or high half of ql[64 h + 32 (j % 2) + l], upper 2 bits are bits [2 j, 2 j + 2) of qh[32 h + l].
    """
    low4 = nibbles(b[..., 0:128].unflatten(-1, (2, 64))).flatten(-2)
    high2 = planes(b[..., 128:192].unflatten(-1, (2, 32)), 2).flatten(-3)
    q = ((low4 | (high2 << 4)).to(torch.int8) - 32).unflatten(-1, (16, 16))
    step = f16(b[..., 208:210]) * b[..., 192:208].view(torch.int8).float()
    return (step.unsqueeze(-1) * q.float()).flatten(-2)


def _q1_0(b: Tensor) -> Tensor:
    """18 bytes, 128 elements: f16 d, qs[16]. Value: d where bit i % 8 of qs[i / 8] is set, else -d."""
    return f16(b[..., 0:2]) * (2 * in_turn(b[..., 2:18], 1).to(torch.int8) - 1).float()


def _tq1_0(b: Tensor) -> Tensor:
    """54 bytes, 256 elements: qs[52], f16 d. Value: d * (t - 1), t as `base_3` has them."""
    return f16(b[..., 52:54]) * (base_3(b[..., 0:52]) - 1).float()


def _tq2_0(b: Tensor) -> Tensor:
    """66 bytes, 256 elements: qs[64], f16 d. Value: d * (q - 1).

    Element 128 h + 32 j + l has bits [2 j, 2 j + 2) of qs[32 h + l].
    """
    q = planes(b[..., 0:64].unflatten(-1, (2, 32)), 2).flatten(-3)
    return f16(b[..., 64:66]) * (q.to(torch.int8) - 1).float()


# Blocks uint8 [..., n, bytes] to float32 [..., n, elements].
DECODERS: dict[str, Callable[[Tensor], Tensor]] = {
    "F32": _plain(torch.float32),
    "F16": _plain(torch.float16),
    "BF16": _plain(torch.bfloat16),
    "F64": _plain(torch.float64),
    "I8": _plain(torch.int8),
    "I16": _plain(torch.int16),
    "I32": _plain(torch.int32),
    "I64": _plain(torch.int64),
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
    "Q8_0": _q8_0,
    "Q2_K": _q2_k,
    "Q3_K": _q3_k,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
    "Q1_0": _q1_0,
    "TQ1_0": _tq1_0,
    "TQ2_0": _tq2_0,
    **lookup.DECODERS,
}
