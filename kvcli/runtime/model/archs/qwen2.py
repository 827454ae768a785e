"""Qwen2 and Qwen2.5, the dense models (arXiv 2407.10671, 2412.15115): biases of queries, keys and values."""

from __future__ import annotations

from kvcli.runtime.model.architecture import Architecture

ARCHITECTURE = Architecture(gguf=("qwen2",), hf=("qwen2",))
