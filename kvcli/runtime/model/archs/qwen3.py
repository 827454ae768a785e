"""Qwen3, the dense models (arXiv 2505.09388), and the text part of Qwen3-VL (arXiv 2511.21631).

Its RoPE turns sections of a head by time, height and width, which are one position where there is only text.
"""

from __future__ import annotations

from kvcli.runtime.config import HEAD, Block
from kvcli.runtime.model.architecture import Architecture

ARCHITECTURE = Architecture(
    gguf=("qwen3", "qwen3vl"),
    hf=("qwen3", "qwen3_vl_text"),
    block=Block(qk_norm=HEAD),
    of_images=("rope.dimension_sections", "n_deepstack_layers"),
)
