"""Qwen3-Next: gated delta networks whose value heads have the key head of their neighbours, and in every fourth layer
attention behind a gate; experts, and one more that every token has, behind a gate. Further tokens are not predicted."""

from __future__ import annotations

from kvcli.runtime.config import HEAD, Block
from kvcli.runtime.model.architecture import Architecture
from kvcli.runtime.model.expertkeys import Mixture
from kvcli.runtime.model.mixerkeys import neighbouring_delta_nets

ARCHITECTURE = Architecture(
    gguf=("qwen3next",),
    hf=("qwen3_next",),
    block=Block(qk_norm=HEAD, output_gate=True, ffn_norm="post_attention_norm"),
    experts=Mixture(normed=True),
    mixers=neighbouring_delta_nets,
)
