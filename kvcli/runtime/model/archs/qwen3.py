"""Qwen3, the dense models (arXiv 2505.09388)."""

from __future__ import annotations

from kvcli.runtime.config import Block
from kvcli.runtime.model.architecture import Architecture

ARCHITECTURE = Architecture(gguf=("qwen3",), hf=("qwen3",), block=Block("silu", qk_norm=True))
