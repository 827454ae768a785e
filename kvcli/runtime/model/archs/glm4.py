"""GLM-4 of 2025, the dense models (arXiv 2406.12793): RoPE of half a head, norms before and behind either part."""

from __future__ import annotations

from kvcli.runtime.config import Block
from kvcli.runtime.model.architecture import Architecture

ARCHITECTURE = Architecture(
    gguf=("glm4",),
    hf=("glm4",),
    block=Block(post_norms=True, rope_pairs=True),
)
