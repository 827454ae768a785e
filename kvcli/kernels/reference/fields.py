"""Fields of packed blocks: float16 scales, nibbles, planes of bits. All take and give tensors [..., n]."""

from __future__ import annotations

import torch
from torch import Tensor


def f16(field: Tensor) -> Tensor:
    """uint8 [..., 2 * n] -> float32 [..., n]."""
    return field.view(torch.float16).float()


def nibbles(qs: Tensor) -> Tensor:
    """uint8 [..., b] -> [..., 2 * b]: all low halves, then all high halves."""
    return torch.cat((qs & 15, qs >> 4), -1)


def alternating(packed: Tensor) -> Tensor:
    """uint8 [..., b] -> [..., 2 * b]: low half, high half of each byte in turn."""
    return torch.stack((packed & 15, packed >> 4), -1).flatten(-2)


def planes(packed: Tensor, bits: int) -> Tensor:
    """uint8 [..., b] -> [..., 8 / bits, b]: plane j holds bits [j * bits, (j + 1) * bits) of each byte."""
    mask = (1 << bits) - 1
    return torch.stack([(packed >> shift) & mask for shift in range(0, 8, bits)], -2)


def in_turn(packed: Tensor, bits: int) -> Tensor:
    """uint8 [..., b] -> [..., 8 / bits * b]: all fields of a byte, lowest first, then those of the next."""
    return planes(packed, bits).transpose(-1, -2).flatten(-2)


def u16(field: Tensor) -> Tensor:
    """uint8 [..., 2 * n] -> int32 [..., n], little-endian."""
    pairs = field.unflatten(-1, (-1, 2)).int()
    return pairs[..., 0] | pairs[..., 1] << 8


def fifth_bits(qh: Tensor) -> Tensor:
    """uint8 [..., 4] -> [..., 32]: 16 where bit i of the little-endian word is set."""
    return in_turn(qh, 1) << 4


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


def base_3(qs: Tensor) -> Tensor:
    """uint8 [..., 52] -> int32 [..., 256], 0 to 2: the elements of TQ1_0.

    The digits in base 3 of a byte, first one first, are the upper byte of 3 * (byte * 3^k mod 256). Element 32 k + l,
    k < 5: digit k of qs[l]; element 160 + 16 k + l, k < 5: of qs[32 + l]; element 240 + 4 k + l, k < 4: of qs[48 + l].
    """
    powers = torch.tensor([1, 3, 9, 27, 81], dtype=torch.uint8, device=qs.device)[:, None]
    runs = [qs[..., None, lo:hi] * powers[:n] for lo, hi, n in ((0, 32, 5), (32, 48, 5), (48, 52, 4))]
    return torch.cat([run.flatten(-2) for run in runs], -1).int() * 3 >> 8
