"""Granite 4 H, with experts or without: Mamba-2, and attention in a few layers, mostly without RoPE; see granite.py."""

from __future__ import annotations

from kvcli.runtime.config import Block
from kvcli.runtime.model.architecture import Architecture, Mixture
from kvcli.runtime.model.mixerkeys import mambas

ARCHITECTURE = Architecture(
    gguf=("granitehybrid",),
    hf=("granitemoehybrid",),
    block=Block(rope_pairs=True),
    logit_scale=lambda divisor: 1 / divisor,
    rope_switch="rope.scaling.finetuned",
    experts=Mixture(normed=True),
    mixers=mambas,
)
