"""Qwen3.5, 3.6 and 3.8, the dense models: gated delta networks, and in every fourth layer attention behind a gate.

Its RoPE turns a quarter of each head, sections of it by time, height and width, which are one position where there is
only text. The layer that predicts a further token has attention.
"""

from __future__ import annotations

from kvcli.runtime.config import HEAD, Block
from kvcli.runtime.model.architecture import Architecture
from kvcli.runtime.model.mixerkeys import delta_nets

ARCHITECTURE = Architecture(
    gguf=("qwen35",),
    hf=("qwen3_5_text",),
    block=Block(qk_norm=HEAD, output_gate=True, ffn_norm="post_attention_norm"),
    mixers=delta_nets,
    of_images=("rope.dimension_sections",),
)
