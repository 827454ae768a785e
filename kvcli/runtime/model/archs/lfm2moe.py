"""LFM2 with experts (8B-A1B): sigmoid routing with a bias, dense layers first; else as lfm2.py."""

from __future__ import annotations

from dataclasses import replace

from kvcli.routing import SIGMOID
from kvcli.runtime.model.archs import lfm2
from kvcli.runtime.model.expertkeys import Mixture

ARCHITECTURE = replace(
    lfm2.ARCHITECTURE, gguf=("lfm2moe",), hf=("lfm2_moe",), experts=Mixture(gating=SIGMOID, normed=True)
)
