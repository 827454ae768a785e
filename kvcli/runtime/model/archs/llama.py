"""Llama and everything built like it, Mistral and InternLM2 too (arXiv 2302.13971, 2310.06825, 2403.17297)."""

from __future__ import annotations

from kvcli.runtime.config import Block
from kvcli.runtime.model.architecture import Architecture

ARCHITECTURE = Architecture(gguf=("llama", "internlm2"), hf=("llama", "mistral"), block=Block(rope_pairs=True))
