"""Qwen2 and Qwen2.5, the dense models (arXiv 2407.10671, 2412.15115), and the text part of Qwen2-VL and Qwen2.5-VL
(arXiv 2409.12191): biases of queries, keys and values."""

from __future__ import annotations

from kvcli.runtime.model.architecture import Architecture

ARCHITECTURE = Architecture(
    gguf=("qwen2", "qwen2vl"),
    hf=("qwen2", "qwen2_vl_text", "qwen2_5_vl_text"),
    of_images=("rope.dimension_sections", "n_deepstack_layers"),
)
