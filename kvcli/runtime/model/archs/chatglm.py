"""GLM-4 of 2024 and GLM-Edge (arXiv 2406.12793): RoPE of half a head; q, k and v are one matrix, with a bias."""

from __future__ import annotations

from kvcli.runtime.config import Block
from kvcli.runtime.model.architecture import Architecture

ARCHITECTURE = Architecture(gguf=("chatglm",), hf=("chatglm", "glm"), block=Block(rope_pairs=True))
