"""How weights are stored: the registry of GGML block formats, in files and on a GPU.

A format is one row of `FORMATS`. Derived from it are the table of the GGUF reader, which files run, what a plan counts,
and what tests run. Beside the row a format needs a decoder in kernels/reference (ggml.py, lookup.py), one in
kernels/cpu/cpu_blocks.h, and in kernels/gpu/formats.py the way from blocks to its form. No torch.
"""

from __future__ import annotations

from fractions import Fraction
from typing import NamedTuple

GROUP = 32  # weights
SUPER = 8  # groups that share an entry of `supers`

# How a form's scales are kept; constants of the kernels, described in kernels/gpu/formats.py. The order counts: D_M to
# QUARTERS have minima, QUARTERS to E4M3 scales for each 16 weights.
PLAIN, D, EXPONENT, D_M, PAIR, QUARTERS, HALVES, NIBBLES, E4M3, BYTE = range(10)
SCALE_BITS = {  # of a group, and of the entry that eight groups share
    PLAIN: (0, 0), D: (16, 0), EXPONENT: (8, 0), D_M: (32, 0), PAIR: (16, 32), QUARTERS: (16, 32), HALVES: (16, 16),
    NIBBLES: (8, 16), E4M3: (16, 0), BYTE: (8, 16),
}  # fmt: skip

# How a form's codes are kept: integers of so many bits (1 to 6, 8), or numbers of what is in a table; constants of the
# kernels, too. From EIGHTS_HIGH on, some bits are kept apart.
OF_16, EIGHTS, FOURS, EIGHTS_HIGH, FOURS_HIGH, TERNARY, FLOATS_16, FLOATS_32 = range(10, 18)
CODE_BITS = {  # int32 words of a group, and bits that are kept apart
    1: (1, 0), 2: (2, 0), 3: (2, 32), 4: (4, 0), 5: (4, 32), 6: (4, 64), 8: (8, 0), OF_16: (4, 0),
    EIGHTS: (2, 0), EIGHTS_HIGH: (2, 8), FOURS: (3, 0), FOURS_HIGH: (3, 8), TERNARY: (1, 16),
    FLOATS_16: (16, 0), FLOATS_32: (32, 0),
}  # fmt: skip


class Form(NamedTuple):
    """How a GPU holds weights, in groups of 32: their `coding`, and the `kind` of scales.

    `offset` is subtracted from codes; `span` groups share an entry of `scales` (kind D); scales are multiples of
    `unit`; `table` names what codes are looked up in, or the type of floats.
    """

    coding: int
    kind: int
    offset: int = 0
    span: int = 1
    unit: float = 1.0
    table: str = ""

    @property
    def words(self) -> int:
        """int32 words of codes of a group."""
        return CODE_BITS[self.coding][0]

    @property
    def high(self) -> int:
        """Bits of codes of a group beside `words`."""
        return CODE_BITS[self.coding][1]

    @property
    def bits_per_weight(self) -> Fraction:
        """With scales, as resident."""
        scale, above = SCALE_BITS[self.kind]
        return Fraction(32 * self.words + self.high, GROUP) + Fraction(scale, GROUP * self.span) + Fraction(above, 256)


class BlockFormat(NamedTuple):
    """`elements` values are stored in `bytes` bytes; `id` is the number of the format in a file.

    `form`: how a GPU holds such weights; None for formats of activations, which no tensor of a model has.
    """

    id: int
    elements: int
    bytes: int
    form: Form | None


_FLOAT32 = Form(FLOATS_32, PLAIN, table="float32")
_TWO_BITS = Form(2, D, offset=1, span=8)
FORMATS: dict[str, BlockFormat] = {
    "F32": BlockFormat(0, 1, 4, _FLOAT32),
    "F16": BlockFormat(1, 1, 2, Form(FLOATS_16, PLAIN, table="float16")),
    "Q4_0": BlockFormat(2, 32, 18, Form(4, D, offset=8)),
    "Q4_1": BlockFormat(3, 32, 20, Form(4, D_M)),
    "Q5_0": BlockFormat(6, 32, 22, Form(5, D, offset=16)),
    "Q5_1": BlockFormat(7, 32, 24, Form(5, D_M)),
    "Q8_0": BlockFormat(8, 32, 34, Form(8, D)),
    "Q8_1": BlockFormat(9, 32, 40, None),
    "Q2_K": BlockFormat(10, 256, 84, Form(2, QUARTERS)),
    "Q3_K": BlockFormat(11, 256, 110, Form(3, HALVES, offset=4)),
    "Q4_K": BlockFormat(12, 256, 144, Form(4, PAIR)),
    "Q5_K": BlockFormat(13, 256, 176, Form(5, PAIR)),
    "Q6_K": BlockFormat(14, 256, 210, Form(6, HALVES, offset=32)),
    "Q8_K": BlockFormat(15, 256, 292, None),
    "IQ2_XXS": BlockFormat(16, 256, 66, Form(EIGHTS, NIBBLES, unit=1 / 8, table="IQ2_XXS")),
    "IQ2_XS": BlockFormat(17, 256, 74, Form(EIGHTS_HIGH, NIBBLES, unit=1 / 8, table="IQ2_XS")),
    "IQ3_XXS": BlockFormat(18, 256, 98, Form(FOURS, NIBBLES, unit=1 / 4, table="IQ3_XXS")),
    "IQ1_S": BlockFormat(19, 256, 50, Form(TERNARY, NIBBLES, offset=9, unit=1 / 8, table="IQ1_S")),
    "IQ4_NL": BlockFormat(20, 32, 18, Form(OF_16, D, table="NONLINEAR")),
    "IQ3_S": BlockFormat(21, 256, 110, Form(FOURS_HIGH, NIBBLES, table="IQ3_S")),
    "IQ2_S": BlockFormat(22, 256, 82, Form(EIGHTS_HIGH, NIBBLES, unit=1 / 8, table="IQ2_S")),
    "IQ4_XS": BlockFormat(23, 256, 136, Form(OF_16, BYTE, table="NONLINEAR")),
    "I8": BlockFormat(24, 1, 1, _FLOAT32),
    "I16": BlockFormat(25, 1, 2, _FLOAT32),
    "I32": BlockFormat(26, 1, 4, _FLOAT32),
    "I64": BlockFormat(27, 1, 8, _FLOAT32),
    "F64": BlockFormat(28, 1, 8, _FLOAT32),
    "IQ1_M": BlockFormat(29, 256, 56, Form(TERNARY, NIBBLES, offset=9, unit=1 / 8, table="IQ1_S")),
    "BF16": BlockFormat(30, 1, 2, Form(FLOATS_16, PLAIN, table="bfloat16")),
    "TQ1_0": BlockFormat(34, 256, 54, _TWO_BITS),
    "TQ2_0": BlockFormat(35, 256, 66, _TWO_BITS),
    "MXFP4": BlockFormat(39, 32, 17, Form(OF_16, EXPONENT, table="DOUBLED_E2M1")),
    "NVFP4": BlockFormat(40, 64, 36, Form(OF_16, E4M3, table="DOUBLED_E2M1")),
    "Q1_0": BlockFormat(41, 128, 18, Form(1, D, offset=1, span=4)),
}
INTERLEAVED = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K")
"""Formats of which a CPU keeps `INTERLEAVED_ROWS` rows side by side: see kernels/cpu/cpu_interleave.h."""
INTERLEAVED_ROWS = 16
FORMS = {name: row.form for name, row in FORMATS.items() if row.form is not None}
WEIGHT_FORMATS = tuple(FORMS)
