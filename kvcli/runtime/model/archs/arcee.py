"""AFM by Arcee: a Llama without gates, with squared ReLU."""

from __future__ import annotations

from kvcli.runtime.config import Block
from kvcli.runtime.model.architecture import Architecture

ARCHITECTURE = Architecture(gguf=("arcee",), hf=("arcee",), block=Block("relu2", gated=False, rope_pairs=True))
