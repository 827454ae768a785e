"""Gemma (arXiv 2403.08295). Norm weights in the file already hold 1 + w."""

from __future__ import annotations

from kvcli.runtime.config import Block
from kvcli.runtime.model.architecture import Architecture

ARCHITECTURE = Architecture(
    gguf=("gemma",), hf=("gemma",), block=Block("gelu"), embed_scale=lambda d_model: d_model**0.5
)
