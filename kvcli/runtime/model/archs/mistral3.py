"""Mistral Small and Ministral 3, whose queries grow with the logarithm of their position."""

from __future__ import annotations

from kvcli.runtime.config import Block
from kvcli.runtime.model.architecture import Architecture

ARCHITECTURE = Architecture(
    gguf=("mistral3",), hf=("mistral3", "ministral3"), block=Block(rope_pairs=True), tempered=True
)
