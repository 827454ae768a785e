"""Granite, the dense models: embeddings, scores, what layers add, and logits have multipliers of their own."""

from __future__ import annotations

from kvcli.runtime.config import Block
from kvcli.runtime.model.architecture import Architecture

ARCHITECTURE = Architecture(
    gguf=("granite",),
    hf=("granite",),
    block=Block(rope_pairs=True),
    logit_scale=lambda divisor: 1 / divisor,
    rope_switch="rope.scaling.finetuned",
)
