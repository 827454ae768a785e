"""ERNIE 4.5, the dense models."""

from __future__ import annotations

from kvcli.runtime.config import Block
from kvcli.runtime.model.architecture import Architecture

ARCHITECTURE = Architecture(gguf=("ernie4_5",), hf=("ernie4_5",), block=Block(rope_pairs=True))
