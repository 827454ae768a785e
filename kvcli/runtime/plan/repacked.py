"""How many bytes weights take where they lie in other arrays than in the file. No torch.

The arrays are described in `kvcli/kernels/gpu/formats.py` and `kvcli/kernels/cpu/cpu_interleave.h`; this is their size,
which a plan needs before anything is loaded.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from typing import Protocol

from kvcli.blockformats import FORMS, INTERLEAVED, INTERLEAVED_ROWS
from kvcli.runtime.config import ModelConfig

MOST_HEAD_DIM = 512
VECTOR_BYTES = 4  # norms and other vectors are kept as float32


class _Tensor(Protocol):
    @property
    def type(self) -> str: ...
    @property
    def shape(self) -> tuple[int, ...]: ...


def matrix_types(tensors: Mapping[str, _Tensor]) -> dict[str, str]:
    """The types of the matrices among these tensors, as `unfit` takes them."""
    return {name: tensor.type for name, tensor in tensors.items() if len(tensor.shape) > 1}


def unfit(config: ModelConfig, types: Mapping[str, str]) -> str:
    """Why a model with matrices of these types (by tensor name) cannot be computed on a GPU; "" = it can."""
    for name, type_ in types.items():
        if type_ not in FORMS:
            return f"{name} is stored as {type_}"
    for layer in config.layers:
        for dim in (layer.dim_k, layer.dim_v):
            if dim % 8 or dim > MOST_HEAD_DIM:
                return f"a head dim of {dim}; it must be a multiple of 8 up to {MOST_HEAD_DIM}"
    for i in range(config.n_layers):
        kind = "_exps" if config.has_experts(i) else ""
        gate, up = (types.get(f"blk.{i}.ffn_{x}{kind}.weight") for x in ("gate", "up"))
        if gate and gate != up:
            return f"gate and up of layer {i} are stored as {gate} and {up}"
    return ""


def device_bytes(type_: str, shape: tuple[int, ...], in_file: int) -> int:
    """Bytes of a tensor on a GPU; those of the file for a type that a GPU cannot hold."""
    if len(shape) == 1:
        return VECTOR_BYTES * prod(shape)
    form = FORMS.get(type_)
    return int(form.bits_per_weight * prod(shape) / 8) if form else in_file


def interleaved_bytes(type_: str, shape: tuple[int, ...], in_file: int) -> int:
    """Bytes of a matrix, or of one of each expert, on a CPU that interleaves rows, in whole groups; 0 = it stays as in
    the file."""
    if type_ not in INTERLEAVED or len(shape) < 2:
        return 0
    rows = shape[-2]
    return in_file // rows * (-(-rows // INTERLEAVED_ROWS) * INTERLEAVED_ROWS)
