"""Qwen1.5-MoE and Qwen2-MoE (arXiv 2407.10671): beside chosen experts one that every token has, behind a gate."""

from __future__ import annotations

from kvcli.runtime.model.architecture import Architecture, Mixture

ARCHITECTURE = Architecture(
    gguf=("qwen2moe",),
    hf=("qwen2_moe",),
    experts=Mixture(),
)
