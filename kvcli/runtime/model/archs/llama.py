"""Llama and everything built like it: Mistral, InternLM2 (arXiv 2302.13971, 2310.06825, 2403.17297), and with experts
Mixtral (arXiv 2401.04088)."""

from __future__ import annotations

from kvcli.runtime.config import Block
from kvcli.runtime.model.architecture import Architecture, Mixture

ARCHITECTURE = Architecture(
    gguf=("llama", "internlm2"),
    hf=("llama", "mistral", "mixtral"),
    block=Block(rope_pairs=True),
    experts=Mixture(normed=True),
)
