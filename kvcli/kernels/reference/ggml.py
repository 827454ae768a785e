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
from typing import NamedTuple

import torch
from torch import Tensor


class Decoder(NamedTuple):
    """`blocks` turns uint8 [..., n, bytes] into float32 [..., n, elements]."""

    elements: int
    bytes: int
    blocks: Callable[[Tensor], Tensor]


def decode(type: str, blocks: Tensor) -> Tensor:
    """Expand packed blocks of the GGML format `type` to float32.

    `blocks`: uint8 [..., n * bytes], last dim contiguous, address a multiple of 4 (2 for all but F32).
    Returns a new float32 tensor [..., n * elements] on the same device (for F32 it may be a view). Raises
    ValueError for a format without a decoder, another dtype, or a length that is no whole number of blocks.
    """
    decoder = DECODERS.get(type)
    if decoder is None:
        raise ValueError(f"no decoder for the block format {type!r}; there are {', '.join(DECODERS)}")
    if blocks.dtype != torch.uint8 or blocks.dim() == 0 or blocks.shape[-1] % decoder.bytes:
        shape = tuple(blocks.shape)
        raise ValueError(f"{type} blocks are uint8 [..., n * {decoder.bytes}], not {blocks.dtype} {shape}")
    return decoder.blocks(blocks.unflatten(-1, (-1, decoder.bytes))).flatten(-2)


def _f16(field: Tensor) -> Tensor:
    """uint8 [..., 2 * n] -> float32 [..., n]."""
    return field.view(torch.float16).float()


def nibbles(qs: Tensor) -> Tensor:
    """uint8 [..., b] -> [..., 2 * b]: all low halves, then all high halves."""
    return torch.cat((qs & 15, qs >> 4), -1)


def planes(packed: Tensor, bits: int) -> Tensor:
    """uint8 [..., b] -> [..., 8 / bits, b]: plane j holds bits [j * bits, (j + 1) * bits) of each byte."""
    mask = (1 << bits) - 1
    return torch.stack([(packed >> shift) & mask for shift in range(0, 8, bits)], -2)


def fifth_bits(qh: Tensor) -> Tensor:
    """uint8 [..., 4] -> [..., 32]: 16 where bit i of the little-endian word is set."""
    return planes(qh, 1).transpose(-1, -2).flatten(-2) << 4


def six_bit_scales(packed: Tensor) -> tuple[Tensor, Tensor]:
    """uint8 [..., 12] -> scales and minima, both float32 [..., 8, 1], of Q4_K and Q5_K.

    Bytes 0-3: scales 0-3 in the low 6 bits; 4-7: minima 0-3 likewise. Bytes 8-11: the low 4 bits of scales
    4-7 in the low, of minima 4-7 in the high half; their upper 2 bits are the upper 2 bits of bytes 0-3 and
    4-7.
    """
    first, second, low = packed[..., 0:4], packed[..., 4:8], packed[..., 8:12]
    scales = torch.cat((first & 63, (low & 15) | ((first >> 6) << 4)), -1)
    minima = torch.cat((second & 63, (low >> 4) | ((second >> 6) << 4)), -1)
    return scales.float().unsqueeze(-1), minima.float().unsqueeze(-1)


def _f32(b: Tensor) -> Tensor:
    """4 bytes: one float32."""
    return b.view(torch.float32)


def _f16_values(b: Tensor) -> Tensor:
    """2 bytes: one float16, widened."""
    return _f16(b)


def _bf16(b: Tensor) -> Tensor:
    """2 bytes: one bfloat16, widened (the upper half of a float32)."""
    return b.view(torch.bfloat16).float()


def _q4_0(b: Tensor) -> Tensor:
    """18 bytes, 32 elements: f16 d, qs[16] nibbles. Value: d * (q - 8)."""
    q = nibbles(b[..., 2:18]).to(torch.int8) - 8
    return _f16(b[..., 0:2]) * q.float()


def _q4_1(b: Tensor) -> Tensor:
    """20 bytes, 32 elements: f16 d, f16 m, qs[16] nibbles. Value: (d * q) + m."""
    q = nibbles(b[..., 4:20])
    return _f16(b[..., 0:2]) * q.float() + _f16(b[..., 2:4])


def _q5_0(b: Tensor) -> Tensor:
    """22 bytes, 32 elements: f16 d, u32 qh (bit i tops element i), qs[16] nibbles. Value: d * (q - 16)."""
    q = (nibbles(b[..., 6:22]) | fifth_bits(b[..., 2:6])).to(torch.int8) - 16
    return _f16(b[..., 0:2]) * q.float()


def _q5_1(b: Tensor) -> Tensor:
    """24 bytes, 32 elements: f16 d, f16 m, u32 qh (as in Q5_0), qs[16] nibbles. Value: (d * q) + m."""
    q = nibbles(b[..., 8:24]) | fifth_bits(b[..., 4:8])
    return _f16(b[..., 0:2]) * q.float() + _f16(b[..., 2:4])


def _q8_0(b: Tensor) -> Tensor:
    """34 bytes, 32 elements: f16 d, i8 q[32]. Value: d * q."""
    return _f16(b[..., 0:2]) * b[..., 2:34].view(torch.int8).float()


def _q2_k(b: Tensor) -> Tensor:
    """84 bytes, 256 elements: sc[16], qs[64], f16 d, f16 dmin. Value: (d * s) * q - (dmin * m).

    16 runs of 16 elements; run r: s = the low, m = the high half of sc[r]. Element 128 h + 32 j + l has bits
    [2 j, 2 j + 2) of qs[32 h + l].
    """
    q = planes(b[..., 16:80].unflatten(-1, (2, 32)), 2).flatten(-3).unflatten(-1, (16, 16))
    scales = b[..., 0:16]
    step = (_f16(b[..., 80:82]) * (scales & 15).float()).unsqueeze(-1)
    low = (_f16(b[..., 82:84]) * (scales >> 4).float()).unsqueeze(-1)
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
    step = _f16(b[..., 108:110]) * (scales.to(torch.int8) - 32).float()
    return (step.unsqueeze(-1) * q.float()).flatten(-2)


def _q4_k(b: Tensor) -> Tensor:
    """144 bytes, 256 elements: f16 d, f16 dmin, sc[12], qs[128]. Value: (d * s) * q - (dmin * m).

    8 runs of 32 elements, s and m from sc (see `six_bit_scales`); runs 2 j and 2 j + 1 are the low and high
    halves of qs[32 j : 32 j + 32].
    """
    scales, minima = six_bit_scales(b[..., 4:16])
    q = nibbles(b[..., 16:144].unflatten(-1, (4, 32))).flatten(-2).unflatten(-1, (8, 32))
    step = _f16(b[..., 0:2]).unsqueeze(-1) * scales
    low = _f16(b[..., 2:4]).unsqueeze(-1) * minima
    return (step * q.float() - low).flatten(-2)


def _q5_k(b: Tensor) -> Tensor:
    """176 bytes, 256 elements: f16 d, f16 dmin, sc[12], qh[32], qs[128]. Value: (d * s) * q - (dmin * m).

    As Q4_K; the fifth bit of element l of run r is bit r of qh[l].
    """
    scales, minima = six_bit_scales(b[..., 4:16])
    low4 = nibbles(b[..., 48:176].unflatten(-1, (4, 32))).flatten(-2).unflatten(-1, (8, 32))
    q = low4 | (planes(b[..., 16:48], 1) << 4)
    step = _f16(b[..., 0:2]).unsqueeze(-1) * scales
    low = _f16(b[..., 2:4]).unsqueeze(-1) * minima
    return (step * q.float() - low).flatten(-2)


def _q6_k(b: Tensor) -> Tensor:
    """210 bytes, 256 elements: ql[128], qh[64], i8 sc[16], f16 d. Value: (d * s) * (q - 32).

    16 runs of 16 elements, s of run r is sc[r]. Element 128 h + 32 j + l: low 4 bits from the low (j < 2)
    or high half of ql[64 h + 32 (j % 2) + l], upper 2 bits are bits [2 j, 2 j + 2) of qh[32 h + l].
    """
    low4 = nibbles(b[..., 0:128].unflatten(-1, (2, 64))).flatten(-2)
    high2 = planes(b[..., 128:192].unflatten(-1, (2, 32)), 2).flatten(-3)
    q = ((low4 | (high2 << 4)).to(torch.int8) - 32).unflatten(-1, (16, 16))
    step = _f16(b[..., 208:210]) * b[..., 192:208].view(torch.int8).float()
    return (step.unsqueeze(-1) * q.float()).flatten(-2)


DECODERS: dict[str, Decoder] = {
    "F32": Decoder(1, 4, _f32),
    "F16": Decoder(1, 2, _f16_values),
    "BF16": Decoder(1, 2, _bf16),
    "Q4_0": Decoder(32, 18, _q4_0),
    "Q4_1": Decoder(32, 20, _q4_1),
    "Q5_0": Decoder(32, 22, _q5_0),
    "Q5_1": Decoder(32, 24, _q5_1),
    "Q8_0": Decoder(32, 34, _q8_0),
    "Q2_K": Decoder(256, 84, _q2_k),
    "Q3_K": Decoder(256, 110, _q3_k),
    "Q4_K": Decoder(256, 144, _q4_k),
    "Q5_K": Decoder(256, 176, _q5_k),
    "Q6_K": Decoder(256, 210, _q6_k),
}
