"""Granite-MoE, with what every token has besides or without; see granite.py."""

from __future__ import annotations

from kvcli.runtime.config import Block
from kvcli.runtime.model.architecture import Architecture, Mixture

ARCHITECTURE = Architecture(
    gguf=("granitemoe",),
    hf=("granitemoe", "granitemoeshared"),
    block=Block(rope_pairs=True),
    logit_scale=lambda divisor: 1 / divisor,
    rope_switch="rope.scaling.finetuned",
    experts=Mixture(normed=True),
)
