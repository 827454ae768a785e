"""Command R and Aya (arXiv 2405.15032): attention and feed-forward part side by side, layer norms without biases."""

from __future__ import annotations

from kvcli.runtime.config import LAYER, Block
from kvcli.runtime.model.architecture import Architecture

ARCHITECTURE = Architecture(
    gguf=("command-r",),
    hf=("cohere",),
    block=Block(norm=LAYER, parallel=True, rope_pairs=True),
    logit_scale=lambda factor: factor,
)
