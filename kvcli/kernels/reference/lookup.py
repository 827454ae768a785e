"""GGML block formats whose codes are looked up: torch decode to float32. ggml.py says how fields are described.

IQ formats keep several weights as one number of an entry of a grid (see kernels/grids.py), with signs apart: bit i of
a byte of signs is set where element i of eight is negative. Seven bits of signs stand for eight: the number of
negative ones is even.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from kvcli.kernels.grids import DOUBLED_E2M1, NONLINEAR, grids
from kvcli.kernels.reference.fields import alternating, f16, in_turn, nibbles, u16

DELTA = 0.125  # what IQ1 formats add to a weight, or take from it


@functools.cache
def _grid(name: str, device: torch.device) -> Tensor:
    """float32 [entries, size]."""
    return torch.from_numpy(grids()[name]).to(device).float()


def _of_16(values: tuple[int, ...], codes: Tensor) -> Tensor:
    """Numbers of 16 values -> those, float32."""
    return torch.tensor(values, dtype=torch.float32, device=codes.device)[codes.int()]


def eight_signs(seven: Tensor) -> Tensor:
    """int32 [...], their low seven bits -> eight, whose sum is even."""
    seven = seven & 127
    parity = seven ^ seven >> 4
    parity = parity ^ parity >> 2
    return seven | ((parity ^ parity >> 1) & 1) << 7


def _signed(name: str, index: Tensor, signs: Tensor) -> Tensor:
    """Entries `index` int32 [..., n] of a grid, with a byte of `signs` for each eight elements: float32 [..., m, 8]."""
    bits = signs.unsqueeze(-1) >> torch.arange(8, device=signs.device, dtype=signs.dtype) & 1
    return _grid(name, index.device)[index].flatten(-2).unflatten(-1, (-1, 8)) * (1.0 - 2.0 * bits.float())


def _scaled(d: Tensor, factors: Tensor, unit: float, weights: Tensor) -> Tensor:
    """(d * (s + 0.5) * unit) * w, for `factors` s [..., runs] and weights [..., n, 8]: float32 [..., elements]."""
    step = d * (factors.float() + 0.5) * unit
    return (step.unsqueeze(-1) * weights.flatten(-2).unflatten(-1, (factors.shape[-1], -1))).flatten(-2)


def words_of_signs(words: Tensor) -> tuple[Tensor, Tensor]:
    """uint8 [..., 32], 8 words of four seven-bit signs and a scale above them -> signs [..., 32], scales [..., 8]."""
    halves = u16(words).unflatten(-1, (-1, 2))
    word = halves[..., 0] | halves[..., 1] << 16
    shift = torch.tensor([0, 7, 14, 21], dtype=torch.int32, device=words.device)
    return eight_signs(word.unsqueeze(-1) >> shift).flatten(-2), word >> 28 & 15


def _iq2_xxs(b: Tensor) -> Tensor:
    """66 bytes, 256 elements: f16 d, then 8 times idx[4] and a word of signs. Value: (d * (s + 0.5) / 4) * (+-g).

    A run of 32 elements has four entries g of 8; in its word, bits [7 i, 7 i + 7) are the signs of entry i, the upper
    four are s.
    """
    runs = b[..., 2:66].unflatten(-1, (8, 8))
    signs, scales = words_of_signs(runs[..., 4:8].flatten(-2))
    return _scaled(f16(b[..., 0:2]), scales, 0.25, _signed("IQ2_XXS", runs[..., 0:4].flatten(-2).int(), signs))


def _iq2_xs(b: Tensor) -> Tensor:
    """74 bytes, 256 elements: f16 d, u16 idx[32], sc[8]. Value: (d * (s + 0.5) / 4) * (+-g).

    idx: the lower nine bits are the entry of 8 elements, the others their signs. The s of 16 runs of 16 elements are
    the low and high halves of sc in turn.
    """
    index = u16(b[..., 2:66])
    weights = _signed("IQ2_XS", index & 511, eight_signs(index >> 9))
    return _scaled(f16(b[..., 0:2]), alternating(b[..., 66:74]), 0.25, weights)


def _iq2_s(b: Tensor) -> Tensor:
    """82 bytes, 256 elements: f16 d, idx[32], signs[32], qh[8], sc[8]. Value: (d * (s + 0.5) / 4) * (+-g).

    Bits [2 i, 2 i + 2) of qh[r] are above idx[4 r + i]; sc as in IQ2_XS.
    """
    index = b[..., 2:34].int() | in_turn(b[..., 66:74], 2).int() << 8
    weights = _signed("IQ2_S", index, b[..., 34:66].int())
    return _scaled(f16(b[..., 0:2]), alternating(b[..., 74:82]), 0.25, weights)


def _iq3_xxs(b: Tensor) -> Tensor:
    """98 bytes, 256 elements: f16 d, idx[64], 8 words of signs (as in IQ2_XXS). Value: (d * (s + 0.5) / 2) * (+-g).

    Entries have four elements; a run of 32 has eight of them and a word.
    """
    signs, scales = words_of_signs(b[..., 66:98])
    return _scaled(f16(b[..., 0:2]), scales, 0.5, _signed("IQ3_XXS", b[..., 2:66].int(), signs))


def _iq3_s(b: Tensor) -> Tensor:
    """110 bytes, 256 elements: f16 d, idx[64], qh[8], signs[32], sc[4]. Value: (d * (1 + 2 s)) * (+-g).

    Bit i of qh[r] is above idx[8 r + i]; entries have four elements. The s of 8 runs of 32 elements are the low and
    high halves of sc in turn.
    """
    index = b[..., 2:66].int() | in_turn(b[..., 66:74], 1).int() << 8
    weights = _signed("IQ3_S", index, b[..., 74:106].int())
    return _scaled(f16(b[..., 0:2]), alternating(b[..., 106:110]), 2.0, weights)


def _ternary(d: Tensor, factors: Tensor, index: Tensor, down: Tensor) -> Tensor:
    """(d * (2 s + 1)) * (g +- 1/8), minus where `down` (of each entry of 8) is set: float32 [..., 256]."""
    delta = (DELTA - 2 * DELTA * down.float()).unsqueeze(-1)
    weights = (_grid("IQ1_S", index.device)[index] + delta).flatten(-2).unflatten(-1, (factors.shape[-1], -1))
    return ((d * (2 * factors + 1).float()).unsqueeze(-1) * weights).flatten(-2)


def _iq1_s(b: Tensor) -> Tensor:
    """50 bytes, 256 elements: f16 d, idx[32], u16 qh[8]. Value: (d * (2 s + 1)) * (g +- 1/8).

    Run r of 32 elements: bits [3 i, 3 i + 3) of qh[r] are above idx[4 r + i], bits 12 to 14 are s, and 1/8 is
    subtracted where bit 15 is set.
    """
    qh = u16(b[..., 34:50])
    above = qh.unsqueeze(-1) >> torch.tensor([0, 3, 6, 9], dtype=torch.int32, device=b.device) & 7
    down = (qh >> 15).unsqueeze(-1).expand(above.shape).flatten(-2)
    return _ternary(f16(b[..., 0:2]), qh >> 12 & 7, b[..., 2:34].int() | above.flatten(-2) << 8, down)


def iq1_m_scales(b: Tensor) -> tuple[Tensor, Tensor]:
    """Blocks of IQ1_M -> d, uint8 [..., 2], and s, int32 [..., 16]."""
    parts = b[..., 49:56:2] >> 4
    shift = torch.tensor([0, 3, 6, 9], dtype=torch.int32, device=b.device)
    return parts[..., 0::2] | parts[..., 1::2] << 4, (u16(b[..., 48:56]).unsqueeze(-1) >> shift & 7).flatten(-2)


def _iq1_m(b: Tensor) -> Tensor:
    """56 bytes, 256 elements: idx[32], qh[16], u16 sc[4]. Value: (d * (2 s + 1)) * (g +- 1/8).

    Entry i of 8 elements: the low (i even) or high half of qh[i / 2] has three bits above idx[i] and, uppermost,
    whether 1/8 is subtracted. Run r of 16 elements: s is bits [3 (r % 4), 3 (r % 4) + 3) of sc[r / 4]. The upper four
    bits of sc[0] to sc[3], lowest first, are the f16 d.
    """
    above, (d, factors) = alternating(b[..., 32:48]).int(), iq1_m_scales(b)
    return _ternary(f16(d), factors, b[..., 0:32].int() | (above & 7) << 8, above >> 3)


def _iq4_nl(b: Tensor) -> Tensor:
    """18 bytes, 32 elements: f16 d, qs[16] nibbles. Value: d * (one of 16 values)."""
    return f16(b[..., 0:2]) * _of_16(NONLINEAR, nibbles(b[..., 2:18]))


def iq4_xs_scales(b: Tensor) -> Tensor:
    """Blocks of IQ4_XS -> their scales less 32, int8 [..., 8]."""
    return (alternating(b[..., 4:8]) | in_turn(b[..., 2:4], 2) << 4).to(torch.int8) - 32


def _iq4_xs(b: Tensor) -> Tensor:
    """136 bytes, 256 elements: f16 d, u16 sh, sl[4], qs[128]. Value: (d * (s - 32)) * (one of 16 values).

    8 runs of 32 elements, with 16 bytes of nibbles each. The low four bits of their s are the low and high halves of
    sl in turn, the upper two are bits [2 r, 2 r + 2) of sh.
    """
    values = _of_16(NONLINEAR, nibbles(b[..., 8:136].unflatten(-1, (8, 16))))
    step = f16(b[..., 0:2]) * iq4_xs_scales(b).float()
    return (step.unsqueeze(-1) * values).flatten(-2)


def _mxfp4(b: Tensor) -> Tensor:
    """17 bytes, 32 elements: e, qs[16] nibbles. Value: 2^(e - 128) * (one of 16 values: e2m1, doubled)."""
    e = b[..., 0:1].int()
    d = torch.where(e < 2, 0x00200000 << e.clamp(max=1), e - 1 << 23).view(torch.float32)
    return d * _of_16(DOUBLED_E2M1, nibbles(b[..., 1:17]))


def _nvfp4(b: Tensor) -> Tensor:
    """36 bytes, 64 elements: sc[4], qs[32]. Value: (sc / 2) * (one of 16 values: e2m1, doubled).

    Four runs of 16 elements, whose first eight are the low and whose others the high halves of 8 bytes of qs. A scale
    is an unsigned e4m3: (1 + m / 8) * 2^(e - 7), or m * 2^-9 where e = 0; 0x7F is 0. Its uppermost bit says nothing.
    """
    scale = b[..., 0:4]
    e, m = (scale >> 3 & 15).int(), (scale & 7).float()
    normal = (1 + m / 8) * (e + 120 << 23).view(torch.float32)
    d = torch.where(e == 0, m * 2.0**-9, normal) * 0.5 * (scale != 0x7F)
    values = _of_16(DOUBLED_E2M1, nibbles(b[..., 4:36].unflatten(-1, (4, 8))))
    return (d.unsqueeze(-1) * values).flatten(-2)


DECODERS = {
    "IQ1_S": _iq1_s,
    "IQ1_M": _iq1_m,
    "IQ2_XXS": _iq2_xxs,
    "IQ2_XS": _iq2_xs,
    "IQ2_S": _iq2_s,
    "IQ3_XXS": _iq3_xxs,
    "IQ3_S": _iq3_s,
    "IQ4_NL": _iq4_nl,
    "IQ4_XS": _iq4_xs,
    "MXFP4": _mxfp4,
    "NVFP4": _nvfp4,
}
