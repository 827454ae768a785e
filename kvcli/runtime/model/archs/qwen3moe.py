"""Qwen3-MoE (arXiv 2505.09388), and the text part of Qwen3-VL-MoE (arXiv 2511.21631); see qwen3.py."""

from __future__ import annotations

from kvcli.runtime.config import HEAD, Block
from kvcli.runtime.model.architecture import Architecture, Mixture

ARCHITECTURE = Architecture(
    gguf=("qwen3moe", "qwen3vlmoe"),
    hf=("qwen3_moe", "qwen3_vl_moe_text"),
    block=Block(qk_norm=HEAD),
    experts=Mixture(normed=True),
    of_images=("rope.dimension_sections", "n_deepstack_layers"),
)
