"""How many bytes weights take on a GPU, where they lie in other arrays than in the file. No torch.

The arrays are described in `kvcli/kernels/gpu/formats.py`; this is their size, which a plan needs before anything is
loaded. Codes keep their width; what differs are the scales.
"""

from __future__ import annotations

from fractions import Fraction
from math import prod

VECTOR_BYTES = 4  # norms and other vectors are kept as float32

# Bits per weight. Codes, and for each 32 of them: d (16 bits), d and m (32), or a pair of scale bytes (16). The
# formats of 256 have besides, for all of them, d and dmin (32) or d (16).
BITS = {
    "Q4_0": 4 + Fraction(16, 32), "Q4_1": 4 + Fraction(32, 32),
    "Q5_0": 5 + Fraction(16, 32), "Q5_1": 5 + Fraction(32, 32), "Q8_0": 8 + Fraction(16, 32),
    "Q4_K": 4 + Fraction(16, 32) + Fraction(32, 256), "Q5_K": 5 + Fraction(16, 32) + Fraction(32, 256),
    "Q6_K": 6 + Fraction(16, 32) + Fraction(16, 256),
    "F16": Fraction(16), "BF16": Fraction(16), "F32": Fraction(32),
}  # fmt: skip
BITS["Q3_K"] = BITS["Q6_K"]  # which holds its codes and scales


def can_be_held(type_: str) -> bool:
    """Whether a GPU computes with matrices of this type."""
    return type_ in BITS


def device_bytes(type_: str, shape: tuple[int, ...], in_file: int) -> int:
    """Bytes of a tensor on a GPU; those of the file for a type that a GPU cannot hold."""
    if len(shape) == 1:
        return VECTOR_BYTES * prod(shape)
    return int(BITS[type_] * prod(shape) / 8) if type_ in BITS else in_file
