"""Qwen3-Next: as qwen35moe.py, but that value heads of gated delta networks have the key head of their neighbours."""

from __future__ import annotations

from dataclasses import replace

from kvcli.runtime.model.archs import qwen35moe
from kvcli.runtime.model.mixerkeys import neighbouring_delta_nets

ARCHITECTURE = replace(
    qwen35moe.ARCHITECTURE, gguf=("qwen3next",), hf=("qwen3_next",), mixers=neighbouring_delta_nets, of_images=()
)
