"""Granite-MoE, with what every token has besides or without; see granite.py."""

from __future__ import annotations

from dataclasses import replace

from kvcli.runtime.model.archs import granite
from kvcli.runtime.model.expertkeys import Mixture

ARCHITECTURE = replace(
    granite.ARCHITECTURE,
    gguf=("granitemoe",),
    hf=("granitemoe", "granitemoeshared"),
    experts=Mixture(normed=True),
)
