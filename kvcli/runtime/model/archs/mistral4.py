"""Mistral Small 4: attention over latents, with queries that grow with the logarithm of their position, and experts."""

from __future__ import annotations

from kvcli.runtime.config import Block
from kvcli.runtime.model.architecture import Architecture, Mixture

ARCHITECTURE = Architecture(
    gguf=("mistral4",),
    hf=("mistral4",),
    block=Block(rope_pairs=True),
    latents=True,
    tempered=True,
    experts=Mixture(),
)
