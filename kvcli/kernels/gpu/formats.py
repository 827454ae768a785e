"""How weights lie in GPU memory: repacked from GGML blocks into arrays that a kernel reads in whole words.

A row is cut into groups of 32 elements. A weight is f * (code - offset) - m, with f and m from the scales of its group.
What a format's arrays are is its `Form` (kvcli/blockformats.py):

| array | holds |
|---|---|
| codes | int32 words, by the form's coding: see below |
| high | bits of codes above those |
| scales | an entry a group, or one for `span` groups |
| supers | one entry for 8 groups: d, or d and dmin as a float16 pair |

| coding | words of a group |
|---|---|
| 4, OF_16 | four: byte j of word b has element 4b + j low, 16 + 4b + j high; OF_16: the number of one of 16 values |
| 5, 6 | so, and in `high` the bits above: one or two words |
| 8 | eight, of bytes |
| 2 | two, for 16 elements each: bits [2b, 2b + 2) of byte j are element 4b + j |
| 1 | one: bit b of byte j is element 4b + j |
| 3 | as 2, and in `high` a word as for 5 |
| EIGHTS | the numbers of four entries of 8 elements (a byte each; two more bits each in `high`), and a word of signs |
| FOURS | the numbers of eight entries of 4 (two words; a bit more each in `high`), and a word of signs |
| TERNARY | the numbers of four entries of 8; in `high` three more bits each, and whether an eighth is subtracted |

Codings of one to three words keep the first words of all groups of a row before the second ones.

| kind | scales of a group |
|---|---|
| D, D_M | float16 d; a pair of d and minus m |
| PAIR | bytes s and m, of d and dmin |
| HALVES | signed bytes, a scale for each 16 elements, of d |
| QUARTERS | the same of nibbles s and m, of d and dmin |
| NIBBLES | two nibbles s, a scale 2 s + 1 for each 16 elements, of d * unit |
| BYTE | a signed byte, of d |
| EXPONENT | a byte e: 2^(e - 128) |
| E4M3 | two 8-bit floats, one for each 16 elements |

Nothing is rounded but numbers of more than 24 bits to float32: weights are those of the file.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate

import torch
from torch import Tensor

from kvcli.blockformats import (
    BYTE,
    D_M,
    E4M3,
    EXPONENT,
    FORMATS,
    FORMS,
    GROUP,
    HALVES,
    NIBBLES,
    PAIR,
    PLAIN,
    QUARTERS,
    SUPER,
    D,
    Form,
)
from kvcli.kernels import grids
from kvcli.kernels.gpu.entries import ENTRIES, Arrays, flat, half
from kvcli.kernels.reference import fields, ggml, lookup
from kvcli.kernels.reference.matmul import QuantTensor

TURN = 4  # rows that a program of a product with one vector reads at a time
REPACK_BYTES = 16 << 20  # packed bytes on the device at a time; on the way they take about ten times that
SCALES = {
    D: torch.float16, D_M: torch.int32, PAIR: torch.int16, HALVES: torch.int16, QUARTERS: torch.int16,
    NIBBLES: torch.uint8, BYTE: torch.int8, EXPONENT: torch.uint8, E4M3: torch.int16,
}  # fmt: skip
SUPERS = {
    PAIR: torch.int32, QUARTERS: torch.int32, HALVES: torch.float16, NIBBLES: torch.float16, BYTE: torch.float16,
}  # fmt: skip
HIGH = {8: torch.uint8, 16: torch.int16, 32: torch.int32, 64: torch.int32}  # by bits a group


def constants(form: Form) -> dict[str, int | float]:
    """What kernels are compiled for."""
    return {
        "CODING": form.coding, "WORDS": form.words, "KIND": form.kind, "OFFSET": form.offset, "SPAN": form.span,
        "UNIT": form.unit,
    }  # fmt: skip


@functools.cache
def table(name: str, device: torch.device) -> Tensor:
    """What codes are looked up in, as int32 words of signed bytes; one word where there is nothing to look up."""
    if name in grids.GRIDS:
        entries = torch.from_numpy(grids.grids()[name])
        if name == "IQ1_S":  # in eighths, and none negative: a form's offset makes up for it
            entries = entries * 8 + 9
    else:
        entries = torch.tensor(getattr(grids, name, (0,) * 4), dtype=torch.int8)
    return entries.contiguous().view(torch.int32).flatten().to(device)


@dataclass(frozen=True)
class Change:
    """What is added to a matrix [rows, cols]: b . a, of `a` [rank, cols] and `b` float32 [rows, rank].

    `inner`: room for a . x of one vector, float32 [rank].
    """

    a: DeviceMatrix
    b: Tensor
    inner: Tensor


@dataclass(frozen=True)
class DeviceMatrix:
    """A matrix [rows, cols] on a GPU. `paired`: rows alternate in runs of 32, gates then what they gate.

    `dealt`: of how many rows each the turns are dealt out (see `codes.stored`); 0 = rows stand in order.
    """

    format: Form
    rows: int
    cols: int
    codes: Tensor
    high: Tensor
    scales: Tensor
    supers: Tensor
    paired: bool = False
    dealt: int = 0
    change: Change | None = None

    @property
    def nbytes(self) -> int:
        return sum(x.numel() * x.element_size() for x in self.arrays)

    @property
    def arrays(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        return self.codes, self.high, self.scales, self.supers

    @property
    def table(self) -> Tensor:
        """What codes are looked up in; see `table`."""
        return table(self.format.table, self.codes.device)

    @property
    def unchanged(self) -> DeviceMatrix:
        """Without its change."""
        return replace(self, change=None) if self.change else self

    @property
    def groups(self) -> int:
        return self.cols // GROUP


def dealt(parts: tuple[QuantTensor, ...], paired: bool) -> int:
    """Of how many rows each the turns of such matrices are dealt out: as many as a program has of gates, or of a second
    feed-forward matrix and others with more columns than rows; 0 = rows stand in order."""
    rows = sum(p.rows for p in parts)
    if FORMS[parts[0].type].kind == PLAIN or any(p.rows % GROUP for p in parts):
        return 0
    return 2 * GROUP if paired else GROUP if parts[0].cols > rows else 0


def repack(parts: tuple[QuantTensor, ...], device: torch.device, paired: bool = False, dealt: int = 0) -> DeviceMatrix:
    """Stack matrices of one type on the device, or pair the rows of two of the same shape, and deal rows out.

    Done in slices, so that the packed form never stands whole beside the other one.
    """
    first = parts[0]
    form = FORMS[first.type]
    rows = sum(p.rows for p in parts)
    matrix = replace(empty_matrix(form, rows, first.cols, device, paired), dealt=dealt)
    step = max(GROUP, REPACK_BYTES // first.blocks.shape[1] // GROUP * GROUP)
    done = 0
    for number, part in enumerate(parts):
        for start in range(0, part.rows, step):
            arrays = _convert(first.type, part.blocks[start : start + step].to(device))
            for whole, piece in zip(matrix.arrays, arrays, strict=True):
                if piece is not None:
                    _target(whole, matrix, number, start, done, piece.shape[0]).copy_(_cut(piece, matrix))
        done += part.rows
    return replace(matrix, change=_change(parts, device, paired))


def _change(parts: tuple[QuantTensor, ...], device: torch.device, paired: bool) -> Change | None:
    """The changes of stacked matrices as one, whose `b` has columns for each `a`, which parts of a matrix share."""
    ends = list(accumulate(part.rows for part in parts))
    changes = [(each, end - part.rows, end) for part, end in zip(parts, ends, strict=True) for each in part.changes]
    if not changes:
        return None
    firsts = {id(each.a): each.a for each, _, _ in changes}
    last = dict(zip(firsts, accumulate(each.rows for each in firsts.values()), strict=True))
    rank = sum(each.rows for each in firsts.values())
    a, b = torch.cat([each.decode() for each in firsts.values()]), torch.zeros(ends[-1], rank)
    for each, start, end in changes:
        column = last[id(each.a)]
        b[start:end, column - each.a.rows : column] = each.b.decode() * each.scale
    if paired:
        b = b.unflatten(0, (2, -1, GROUP)).transpose(0, 1).flatten(0, 2)
    whole = repack((QuantTensor("F32", a.view(torch.uint8), parts[0].cols),), device)
    return Change(whole, b.to(device), torch.zeros(rank, device=device))


def _target(whole: Tensor, matrix: DeviceMatrix, number: int, start: int, done: int, count: int) -> Tensor:
    """Where rows [start, start + count) of a part go, the part of that number, with `done` rows before it."""
    if not matrix.paired:
        number, start = 0, done + start
    if matrix.dealt:
        programs = matrix.rows // matrix.dealt
        runs = whole.view(-1, GROUP // TURN, programs, TURN, whole.shape[1]).permute(2, 0, 1, 3, 4)
    elif matrix.paired:
        runs = whole.view(-1, 2, GROUP, whole.shape[1])
    else:
        return whole[start : start + count]
    return runs[start // GROUP : (start + count) // GROUP, number]


def _cut(piece: Tensor, matrix: DeviceMatrix) -> Tensor:
    if matrix.dealt:
        return piece.unflatten(0, (-1, GROUP // TURN, TURN))
    return piece.unflatten(0, (-1, GROUP)) if matrix.paired else piece


def empty_matrix(form: Form, rows: int, cols: int, device: torch.device, paired: bool) -> DeviceMatrix:
    make = partial(torch.empty, device=device)
    if form.kind == PLAIN:
        none = make(0, 1, dtype=torch.int32)
        codes = make(rows, cols, dtype=getattr(torch, form.table))
        return DeviceMatrix(form, rows, cols, codes, none, none, none, paired)
    groups, high, above = cols // GROUP, HIGH.get(form.high, torch.int32), form.kind in SUPERS
    return DeviceMatrix(
        form, rows, cols,
        make(rows, groups * form.words, dtype=torch.int32),
        make(rows if form.high else 0, max(1, groups * form.high // (8 * high.itemsize)), dtype=high),
        make(rows, groups // form.span, dtype=SCALES[form.kind]),
        make(rows if above else 0, max(1, groups // SUPER), dtype=SUPERS.get(form.kind, torch.int32)),
        paired,
    )  # fmt: skip


def _convert(type_: str, blocks: Tensor) -> Arrays:
    """uint8 [n, row bytes] of GGML blocks -> codes, high, scales, supers of those rows."""
    form = FORMS[type_]
    if form.kind == PLAIN:
        return ggml.decode(type_, blocks.contiguous()).to(getattr(torch, form.table)), None, None, None
    b = blocks.unflatten(-1, (-1, FORMATS[type_].bytes))
    if type_ in ENTRIES:
        words, high, scales, supers = ENTRIES[type_](b)
        return _planar(words), high, scales, supers
    codes, scales, supers = _PARTS[type_](b)
    codes = codes.flatten(1)
    if form.coding == 8:
        return flat(b[..., 2:34], torch.int32), None, scales, supers
    if form.coding < 4:
        high = _high_bits(codes >> 2, 1) if form.coding == 3 else None
        return _planar(_few_bits(codes, form.coding)), high, scales, supers
    return _words(codes), _high_bits(codes >> 4, form.high // 32) if form.high else None, scales, supers


def _planar(words: Tensor) -> Tensor:
    """int32 [n, groups, words] -> [n, words * groups], the first ones of all groups before the second ones."""
    return words.transpose(1, 2).flatten(1)


def _few_bits(codes: Tensor, bits: int) -> Tensor:
    """Codes uint8 [n, cols], their low bits (one; of two or three, two) -> int32 [n, groups, words]."""
    kept = min(bits, 2)
    c = codes.unflatten(1, (-1, kept, 8 // kept, 4)) & (1 << kept) - 1  # [n, groups, word, b, j]
    shift = torch.arange(0, 8, kept, dtype=torch.uint8, device=codes.device)[:, None]
    return (c << shift).sum(3, dtype=torch.uint8).contiguous().view(torch.int32).squeeze(-1)


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
    return flat(torch.cat((scales, minima), -1).to(torch.uint8).flatten(-2), torch.int16)


def _q4_k(b: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    codes = fields.nibbles(b[..., 16:144].unflatten(-1, (4, 32))).flatten(-2)
    return codes, _six_bits(b), flat(b[..., 0:4], torch.int32)


def _q5_k(b: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    low = fields.nibbles(b[..., 48:176].unflatten(-1, (4, 32))).flatten(-2)
    high = fields.planes(b[..., 16:48], 1).flatten(-2)
    return low | high << 4, _six_bits(b), flat(b[..., 0:4], torch.int32)


def _q6_k(b: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    low = fields.nibbles(b[..., 0:128].unflatten(-1, (2, 64))).flatten(-2)
    high = fields.planes(b[..., 128:192].unflatten(-1, (2, 32)), 2).flatten(-3)
    return low | high << 4, flat(b[..., 192:208], torch.int16), flat(b[..., 208:210], torch.float16)


def _q3_k(b: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    low = fields.planes(b[..., 32:96].unflatten(-1, (2, 32)), 2).flatten(-3)
    codes = low | fields.planes(b[..., 0:32], 1).flatten(-2) << 2
    scales = fields.nibbles(b[..., 96:104]) | fields.planes(b[..., 104:108], 2).flatten(-2) << 4
    return codes, flat(scales - 32, torch.int16), flat(b[..., 108:110], torch.float16)


def _q2_k(b: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    codes = fields.planes(b[..., 16:80].unflatten(-1, (2, 32)), 2).flatten(-3)
    return codes, flat(b[..., 0:16], torch.int16), flat(b[..., 80:84], torch.int32)


def _iq4_xs(b: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    codes = fields.nibbles(b[..., 8:136].unflatten(-1, (8, 16))).flatten(-2)
    return codes, lookup.iq4_xs_scales(b).flatten(1), flat(b[..., 0:2], torch.float16)


# Codes uint8 [n, blocks, elements] (of Q8_0: none), scales, supers.
_PARTS = {
    "Q4_0": lambda b: (fields.nibbles(b[..., 2:18]), half(b[..., 0:2]), None),
    "Q4_1": lambda b: (fields.nibbles(b[..., 4:20]), flat(b[..., 0:4], torch.int32), None),
    "Q5_0": lambda b: (fields.nibbles(b[..., 6:22]) | fields.fifth_bits(b[..., 2:6]), half(b[..., 0:2]), None),
    "Q5_1": lambda b: (
        fields.nibbles(b[..., 8:24]) | fields.fifth_bits(b[..., 4:8]), flat(b[..., 0:4], torch.int32), None
    ),
    "Q8_0": lambda b: (b[..., 2:34], half(b[..., 0:2]), None),
    "Q2_K": _q2_k, "Q3_K": _q3_k, "Q4_K": _q4_k, "Q5_K": _q5_k, "Q6_K": _q6_k,
    "Q1_0": lambda b: (fields.in_turn(b[..., 2:18], 1), half(b[..., 0:2]), None),
    "TQ1_0": lambda b: (fields.base_3(b[..., 0:52]).byte(), half(b[..., 52:54]), None),
    "TQ2_0": lambda b: (
        fields.planes(b[..., 0:64].unflatten(-1, (2, 32)), 2).flatten(-3), half(b[..., 64:66]), None
    ),
    "IQ4_NL": lambda b: (fields.nibbles(b[..., 2:18]), half(b[..., 0:2]), None),
    "IQ4_XS": _iq4_xs,
    "MXFP4": lambda b: (fields.nibbles(b[..., 1:17]), b[..., 0], None),
    "NVFP4": lambda b: (
        fields.nibbles(b[..., 4:36].unflatten(-1, (4, 8))).flatten(-2), flat(b[..., 0:4], torch.int16), None
    ),
}  # fmt: skip
