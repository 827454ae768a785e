"""`Presented`: a tensor of a safetensors model as a GGUF file would have it, made when it is read. No torch."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from kvcli.runtime.formats.elements import widened
from kvcli.runtime.formats.packedweights import Source

# Small, and much rests on them.
_FLOAT32 = re.compile(r"\.(ffn_gate_inp|ffn_gate_inp_shexp|shortconv\.conv|ssm_conv1d)\.weight$")


@dataclass(frozen=True)
class Presented:
    """A tensor under llama.cpp's name. `read()`: its elements in the memory of `type` (see `elements`)."""

    name: str
    shape: tuple[int, ...]
    type: str
    read: Callable[[], np.ndarray]
    direct: bool

    @classmethod
    def of(cls, name: str, source: Source) -> Presented:
        """A source as it is, vectors as float32."""
        if source.type == "F32" or (len(source.shape) > 1 and not _FLOAT32.search(name)):
            return cls(name, source.shape, source.type, source.read, source.direct)
        return cls(name, source.shape, "F32", lambda: widened(source.type, source.read()), False)

    def then(
        self, change: Callable[[np.ndarray], np.ndarray], shape: tuple[int, ...] | None = None, name: str = ""
    ) -> Presented:
        """This tensor with its elements changed: moved, or computed with where they are float32."""
        changed = replace(self, name=name or self.name, shape=shape or self.shape, direct=False)
        return replace(changed, read=lambda: change(self.read()))
