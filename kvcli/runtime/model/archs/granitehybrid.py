"""Granite 4 H, with experts or without: Mamba-2, and attention in a few layers, mostly without RoPE; see granite.py."""

from __future__ import annotations

from dataclasses import replace

from kvcli.runtime.model.archs import granite
from kvcli.runtime.model.expertkeys import Mixture
from kvcli.runtime.model.mixerkeys import mambas

ARCHITECTURE = replace(
    granite.ARCHITECTURE,
    gguf=("granitehybrid",),
    hf=("granitemoehybrid",),
    experts=Mixture(normed=True),
    mixers=mambas,
)
