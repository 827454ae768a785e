"""How weights are stored: the registry of GGML block formats.

A format is one row of `FORMATS`. Derived from it are the table of the GGUF reader, which files run, what a plan counts,
and what tests run. Beside the row a format needs a decoder in kernels/reference (ggml.py, lookup.py) and in
kernels/cpu/blocks.h. No torch.
"""

from __future__ import annotations

from typing import NamedTuple


class BlockFormat(NamedTuple):
    """`elements` values are stored in `bytes` bytes; `id` is the number of the format in a file.

    `weights`: whether tensors of a model are stored so; the others are formats of activations, and never in a file.
    """

    id: int
    elements: int
    bytes: int
    weights: bool = True


FORMATS: dict[str, BlockFormat] = {
    "F32": BlockFormat(0, 1, 4),
    "F16": BlockFormat(1, 1, 2),
    "Q4_0": BlockFormat(2, 32, 18),
    "Q4_1": BlockFormat(3, 32, 20),
    "Q5_0": BlockFormat(6, 32, 22),
    "Q5_1": BlockFormat(7, 32, 24),
    "Q8_0": BlockFormat(8, 32, 34),
    "Q8_1": BlockFormat(9, 32, 40, weights=False),
    "Q2_K": BlockFormat(10, 256, 84),
    "Q3_K": BlockFormat(11, 256, 110),
    "Q4_K": BlockFormat(12, 256, 144),
    "Q5_K": BlockFormat(13, 256, 176),
    "Q6_K": BlockFormat(14, 256, 210),
    "Q8_K": BlockFormat(15, 256, 292, weights=False),
    "IQ2_XXS": BlockFormat(16, 256, 66),
    "IQ2_XS": BlockFormat(17, 256, 74),
    "IQ3_XXS": BlockFormat(18, 256, 98),
    "IQ1_S": BlockFormat(19, 256, 50),
    "IQ4_NL": BlockFormat(20, 32, 18),
    "IQ3_S": BlockFormat(21, 256, 110),
    "IQ2_S": BlockFormat(22, 256, 82),
    "IQ4_XS": BlockFormat(23, 256, 136),
    "I8": BlockFormat(24, 1, 1),
    "I16": BlockFormat(25, 1, 2),
    "I32": BlockFormat(26, 1, 4),
    "I64": BlockFormat(27, 1, 8),
    "F64": BlockFormat(28, 1, 8),
    "IQ1_M": BlockFormat(29, 256, 56),
    "BF16": BlockFormat(30, 1, 2),
    "TQ1_0": BlockFormat(34, 256, 54),
    "TQ2_0": BlockFormat(35, 256, 66),
    "MXFP4": BlockFormat(39, 32, 17),
    "NVFP4": BlockFormat(40, 64, 36),
    "Q1_0": BlockFormat(41, 128, 18),
}
WEIGHT_FORMATS = tuple(name for name, row in FORMATS.items() if row.weights)
