"""How weights lie in GPU memory: repacked from GGML blocks into arrays that a kernel reads 16 bytes at a time.

A row is cut into groups of 32 elements. Every format is w = s * q + m with q an integer of 4 to 8 bits:

| array | holds |
|---|---|
| codes | int32 words: in 4-bit parts byte j of word b has element 4b + j low, 16 + 4b + j high; else bytes |
| high | the bits above 4: one word a group for 5-bit codes, two for 6-bit ones |
| scales | one entry a group: float16 d, or d and m as a float16 pair, or two bytes that `supers` multiplies |
| supers | one entry for 8 groups: d and dmin as a float16 pair, or d |

Nothing is rounded: the numbers are those of the file.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from kvcli import blockformats
from kvcli.errors import ModelError
from kvcli.kernels.reference import fields
from kvcli.kernels.reference.matmul import QuantTensor

GROUP = 32  # elements
SUPER = 8  # groups that share an entry of `supers`
REPACK_BYTES = 16 << 20  # packed bytes on the device at a time; on the way they take about ten times that

# How scales are kept; constants of the kernels.
PLAIN, D, D_M, PAIR, HALVES = 0, 1, 2, 3, 4


@dataclass(frozen=True)
class Format:
    """`bits` a code, the kind of scales, and what is subtracted from codes (kinds D and HALVES)."""

    name: str
    bits: int
    kind: int
    offset: int = 0

    @property
    def bits_per_weight(self) -> float:
        """With scales, as resident."""
        extra = {PLAIN: 0, D: 16, D_M: 32, PAIR: 16 + 32 / SUPER, HALVES: 16 + 16 / SUPER}[self.kind]
        return self.bits + extra / GROUP


FORMATS = {
    f.name: f
    for f in (
        Format("Q4_0", 4, D, 8), Format("Q4_1", 4, D_M), Format("Q5_0", 5, D, 16), Format("Q5_1", 5, D_M),
        Format("Q8_0", 8, D), Format("Q4_K", 4, PAIR), Format("Q5_K", 5, PAIR), Format("Q6_K", 6, HALVES, 32),
        Format("F16", 16, PLAIN), Format("BF16", 16, PLAIN), Format("F32", 32, PLAIN),
    )
}  # fmt: skip
STORED_AS = {"Q3_K": "Q6_K"}  # formats that another one holds without loss


@dataclass(frozen=True)
class DeviceMatrix:
    """A matrix [rows, cols] on a GPU. `paired`: rows alternate in runs of 32, gates then what they gate."""

    format: Format
    rows: int
    cols: int
    codes: Tensor
    high: Tensor
    scales: Tensor
    supers: Tensor
    paired: bool = False

    @property
    def nbytes(self) -> int:
        return sum(x.numel() * x.element_size() for x in self.arrays)

    @property
    def arrays(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        return self.codes, self.high, self.scales, self.supers

    @property
    def groups(self) -> int:
        return self.cols // GROUP


def repack(parts: tuple[QuantTensor, ...], device: torch.device, paired: bool = False) -> DeviceMatrix:
    """Stack matrices of one type on the device, or pair the rows of two of the same shape.

    Done in slices, so that the packed form never stands whole beside the other one. Raises ModelError for a type that
    has no form here.
    """
    first = parts[0]
    fmt = FORMATS.get(STORED_AS.get(first.type, first.type))
    if fmt is None or (fmt.kind != PLAIN and first.cols % GROUP):
        raise ModelError(
            f"weights stored as {first.type} cannot be computed with on a GPU",
            f"use `device=cpu`, or a file of {', '.join((*FORMATS, *STORED_AS))}",
        )
    rows = sum(p.rows for p in parts)
    matrix = empty_matrix(fmt, rows, first.cols, device, paired)
    step = max(GROUP, REPACK_BYTES // first.blocks.shape[1] // GROUP * GROUP)
    done = 0
    for number, part in enumerate(parts):
        for start in range(0, part.rows, step):
            arrays = _convert(first.type, part.blocks[start : start + step].to(device))
            for whole, piece in zip(matrix.arrays, arrays, strict=True):
                if piece is not None:
                    _target(whole, paired, number, start, done, piece.shape[0]).copy_(_cut(piece, paired))
        done += part.rows
    return matrix


def _target(whole: Tensor, paired: bool, number: int, start: int, done: int, count: int) -> Tensor:
    if not paired:
        return whole[done + start : done + start + count]
    return whole.view(-1, 2, GROUP, whole.shape[1])[start // GROUP : (start + count) // GROUP, number]


def _cut(piece: Tensor, paired: bool) -> Tensor:
    return piece.unflatten(0, (-1, GROUP)) if paired else piece


def empty_matrix(fmt: Format, rows: int, cols: int, device: torch.device, paired: bool) -> DeviceMatrix:
    make = partial(torch.empty, device=device)
    if fmt.kind == PLAIN:
        dtype = {"F16": torch.float16, "BF16": torch.bfloat16, "F32": torch.float32}[fmt.name]
        none = make(0, 1, dtype=torch.int32)
        return DeviceMatrix(fmt, rows, cols, make(rows, cols, dtype=dtype), none, none, none, paired)
    groups = cols // GROUP
    words, extra = (8, 0) if fmt.bits == 8 else (4, fmt.bits - 4)
    scale = {D: torch.float16, D_M: torch.int32, PAIR: torch.int16, HALVES: torch.int16}[fmt.kind]
    above = {D: 0, D_M: 0, PAIR: groups // SUPER, HALVES: groups // SUPER}[fmt.kind]
    return DeviceMatrix(
        fmt, rows, cols,
        make(rows, groups * words, dtype=torch.int32),
        make(rows if extra else 0, max(1, groups * extra), dtype=torch.int32),
        make(rows, groups, dtype=scale),
        make(rows if above else 0, max(1, above), dtype=torch.float16 if fmt.kind == HALVES else torch.int32),
        paired,
    )  # fmt: skip


Arrays = tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]


def _convert(type_: str, blocks: Tensor) -> Arrays:
    """uint8 [n, row bytes] of GGML blocks -> codes, high, scales, supers of those rows."""
    if type_ in ("F16", "BF16", "F32"):
        dtype = {"F16": torch.float16, "BF16": torch.bfloat16, "F32": torch.float32}[type_]
        return blocks.contiguous().view(dtype), None, None, None
    b = blocks.unflatten(-1, (-1, blockformats.FORMATS[type_].bytes))
    codes, scales, supers = _PARTS[type_](b)
    fmt = FORMATS[STORED_AS.get(type_, type_)]
    words = _words(codes.flatten(1)) if fmt.bits < 8 else _flat(codes, torch.int32)
    high = None if fmt.bits in (4, 8) else _high_bits(codes.flatten(1) >> 4, fmt.bits - 4)
    return words, high, scales, supers


def _flat(fields: Tensor, dtype: torch.dtype) -> Tensor:
    """uint8 [n, blocks, bytes] -> [n, all of them as dtype]."""
    return fields.contiguous().view(dtype).flatten(1)


def _words(codes: Tensor) -> Tensor:
    """Codes uint8 [n, cols] -> int32 [n, cols / 8], their low four bits."""
    c = codes.unflatten(1, (-1, 2, 16)) & 15
    return (c[:, :, 0] | c[:, :, 1] << 4).contiguous().view(torch.int32).flatten(1)


def _high_bits(high: Tensor, bits: int) -> Tensor:
    """What is above four bits, uint8 [n, cols] -> int32 [n, cols / 32 * bits].

    One bit: byte j has bit b of element 4b + j and bit 4 + b of element 16 + 4b + j. Two bits: word p, byte j has those
    of elements 4b + j and 16 + 4b + j, for b = 2p and then 2p + 1.
    """
    h = high.unflatten(1, (-1, 2, 4, 4))  # [n, groups, half, b, j]
    if bits == 1:
        shift = torch.arange(4, dtype=torch.uint8, device=h.device)[:, None]
        packed = (h[:, :, 0] << shift | h[:, :, 1] << shift + 4).sum(2, dtype=torch.uint8)  # [n, groups, j]
    else:
        both = h[:, :, 0] | h[:, :, 1] << 2
        packed = both[:, :, 0::2] | both[:, :, 1::2] << 4  # [n, groups, p, j]
    return packed.contiguous().view(torch.int32).flatten(1)


def _six_bits(b: Tensor) -> Tensor:
    """The scale and minimum bytes of Q4_K and Q5_K: int16 [n, groups]."""
    scales, minima = fields.six_bit_scales(b[..., 4:16])
    return _flat(torch.cat((scales, minima), -1).to(torch.uint8).flatten(-2), torch.int16)


def _q4_k(b: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    codes = fields.nibbles(b[..., 16:144].unflatten(-1, (4, 32))).flatten(-2)
    return codes, _six_bits(b), _flat(b[..., 0:4], torch.int32)


def _q5_k(b: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    low = fields.nibbles(b[..., 48:176].unflatten(-1, (4, 32))).flatten(-2)
    high = fields.planes(b[..., 16:48], 1).flatten(-2)
    return low | high << 4, _six_bits(b), _flat(b[..., 0:4], torch.int32)


def _q6_k(b: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    low = fields.nibbles(b[..., 0:128].unflatten(-1, (2, 64))).flatten(-2)
    high = fields.planes(b[..., 128:192].unflatten(-1, (2, 32)), 2).flatten(-3)
    return low | high << 4, _flat(b[..., 192:208], torch.int16), _flat(b[..., 208:210], torch.float16)


def _q3_k(b: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """As Q6_K: codes - 4 and scales - 32 both fit."""
    low = fields.planes(b[..., 32:96].unflatten(-1, (2, 32)), 2).flatten(-3)
    codes = (low | fields.planes(b[..., 0:32], 1).flatten(-2) << 2) + 28
    scales = fields.nibbles(b[..., 96:104]) | fields.planes(b[..., 104:108], 2).flatten(-2) << 4
    return codes, _flat(scales - 32, torch.int16), _flat(b[..., 108:110], torch.float16)


_PARTS = {
    "Q4_0": lambda b: (fields.nibbles(b[..., 2:18]), _flat(b[..., 0:2], torch.float16), None),
    "Q4_1": lambda b: (fields.nibbles(b[..., 4:20]), _flat(b[..., 0:4], torch.int32), None),
    "Q5_0": lambda b: (
        fields.nibbles(b[..., 6:22]) | fields.fifth_bits(b[..., 2:6]), _flat(b[..., 0:2], torch.float16), None
    ),
    "Q5_1": lambda b: (
        fields.nibbles(b[..., 8:24]) | fields.fifth_bits(b[..., 4:8]), _flat(b[..., 0:4], torch.int32), None
    ),
    "Q8_0": lambda b: (b[..., 2:34], _flat(b[..., 0:2], torch.float16), None),
    "Q3_K": _q3_k, "Q4_K": _q4_k, "Q5_K": _q5_k, "Q6_K": _q6_k,
}  # fmt: skip
