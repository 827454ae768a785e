"""Qwen3.5 and 3.6 with experts (35B-A3B, 122B-A10B): as qwen35; one expert more that every token has, behind a gate."""

from __future__ import annotations

from kvcli.runtime.config import HEAD, Block
from kvcli.runtime.model.architecture import Architecture
from kvcli.runtime.model.expertkeys import Mixture
from kvcli.runtime.model.mixerkeys import delta_nets

ARCHITECTURE = Architecture(
    gguf=("qwen35moe",),
    hf=("qwen3_5_moe_text",),
    block=Block(qk_norm=HEAD, output_gate=True, ffn_norm="post_attention_norm"),
    experts=Mixture(normed=True),
    mixers=delta_nets,
    of_images=("rope.dimension_sections",),
)
