"""Qwen3.5 and 3.6 with experts (35B-A3B, 122B-A10B): as qwen35; one expert more that every token has, behind a gate."""

from __future__ import annotations

from dataclasses import replace

from kvcli.runtime.model.archs import qwen35
from kvcli.runtime.model.expertkeys import Mixture

ARCHITECTURE = replace(qwen35.ARCHITECTURE, gguf=("qwen35moe",), hf=("qwen3_5_moe_text",), experts=Mixture(normed=True))
