"""Weights of four bits whose numbers stand in a table, of NVFP4 and of bitsandbytes, as float32. No torch."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from kvcli.errors import ModelError
from kvcli.runtime.formats.boundedjson import load_object
from kvcli.runtime.formats.ggufvalues import DAMAGED

NVFP4_BLOCK, MX_BLOCK = 16, 32  # elements that share a scale
STATES = ("nf4", "fp4")  # kinds of bitsandbytes
STATE = ".quant_state.bitsandbytes__"
# What stands beside a weight of bitsandbytes, behind its name.
BESIDE = (".absmax", ".quant_map", ".nested_absmax", ".nested_quant_map", *(STATE + kind for kind in STATES))
INT8_BESIDE = ("SCB", "weight_format")
# Numbers of four bits with two for the exponent (OCP Microscaling Formats, E2M1): the sign is the highest bit.
_E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
_E2M1 = np.concatenate([_E2M1, -_E2M1])


def e2m1(pairs: np.ndarray, scales: np.ndarray, block: int) -> np.ndarray:
    """Pairs uint8 [rows, n], the first in the lower bits, and scales float32 [rows, 2n / block] -> float32 [rows,
    2n]."""
    codes = np.stack([pairs & 15, pairs >> 4], -1).reshape(len(pairs), -1)
    return _E2M1[codes] * np.repeat(scales, block, 1)


@dataclass(frozen=True)
class State:
    """How bitsandbytes packed a matrix. `nested`: elements that share a scale of scales, 0 = these are floats."""

    shape: tuple[int, ...]
    block: int
    nested: int
    offset: float

    @classmethod
    def of(cls, raw: bytes, label: str) -> State:
        """From its JSON. Raises ModelError."""
        found = load_object(raw, label)
        shape: Any = found.get("shape") if isinstance(found.get("shape"), list) else [0]
        block: Any = found.get("blocksize")
        nested, offset = found.get("nested_blocksize", 0), found.get("nested_offset", 0.0)
        sizes = [*shape, block, nested or 1]
        if not all(type(n) is int and 0 < n < 1 << 40 for n in sizes) or not isinstance(offset, (int, float)):
            raise ModelError(f"{label} does not say how the weight was packed", DAMAGED)
        return cls(tuple(shape), block, nested or 0, float(offset))

    @property
    def elements(self) -> int:
        return math.prod(self.shape)

    @property
    def codes(self) -> tuple[str, ...]:
        """The parts whose bytes are places in tables; the others are numbers."""
        return ("", ".absmax") if self.nested else ("",)

    @property
    def blocks(self) -> int:
        """How many scales there are."""
        return -(-self.elements // self.block)

    def values(self, parts: Mapping[str, Any]) -> np.ndarray:
        """float32 [*shape] from the elements of the parts: "" = pairs uint8, the first in the upper bits."""
        scales = parts[".absmax"]
        if scales.ndim == 2:  # saved when a CPU had computed with them, which wants the scales of a row apart
            scales = scales.T
        scales = scales.reshape(-1)
        if self.nested:
            wide = np.repeat(parts[".nested_absmax"].reshape(-1), self.nested)[: self.blocks]
            scales = parts[".nested_quant_map"].reshape(-1)[scales] * wide + np.float32(self.offset)
        pairs = parts[""].reshape(-1)
        codes = np.stack([pairs >> 4, pairs & 15], -1).reshape(-1)[: self.elements]
        values = parts[".quant_map"].reshape(-1)[codes] * np.repeat(scales, self.block)[: self.elements]
        return values.reshape(self.shape)
