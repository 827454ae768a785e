"""How many bytes weights take on a GPU, where they lie in other arrays than in the file. No torch.

The arrays are described in `kvcli/kernels/gpu/formats.py`; this is their size, which a plan needs before anything is
loaded. Codes keep their width; what differs are the scales.
"""

from __future__ import annotations

from collections.abc import Mapping
from fractions import Fraction
from math import prod

from kvcli.runtime.config import ALL, ModelConfig

MOST_HEAD_DIM = 256
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


def unfit(config: ModelConfig, types: Mapping[str, str]) -> str:
    """Why a model with matrices of these types (by tensor name) cannot be computed on a GPU; "" = it can."""
    for name, type_ in types.items():
        if not can_be_held(type_):
            return f"{name} is stored as {type_}"
    for layer in config.layers:
        for dim in (layer.dim_k, layer.dim_v):
            if dim % 8 or dim > MOST_HEAD_DIM:
                return f"a head dim of {dim}; it must be a multiple of 8 up to {MOST_HEAD_DIM}"
    for i in range(config.n_layers):
        gate, up = (types.get(f"blk.{i}.ffn_{x}.weight") for x in ("gate", "up"))
        if gate and gate != up:
            return f"gate and up of layer {i} are stored as {gate} and {up}"
    return _attention_unfit(config)


def _attention_unfit(config: ModelConfig) -> str:
    """What the GPU's kernels do not do to queries and keys; "" = they do all."""
    if config.block.qk_norm == ALL:
        return "the norm of queries and keys goes over all heads"
    if config.block.qk_norm_last:
        return "the norm of queries and keys comes after RoPE"
    for layer in config.layers:
        if layer.temperature:
            return "queries have a temperature"
        if layer.rope and layer.rope.amplitude != 1 and layer.rope.dim != layer.dim_k:
            return "RoPE of a part of each head has an amplitude"
    return ""


def device_bytes(type_: str, shape: tuple[int, ...], in_file: int) -> int:
    """Bytes of a tensor on a GPU; those of the file for a type that a GPU cannot hold."""
    if len(shape) == 1:
        return VECTOR_BYTES * prod(shape)
    return int(BITS[type_] * prod(shape) / 8) if type_ in BITS else in_file
