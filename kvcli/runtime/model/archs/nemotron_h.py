"""Nemotron H (arXiv 2504.03624) and Nemotron 3: layers of Mamba-2, of attention without RoPE, and of a feed-forward
part or a mixture of experts, each alone behind its norm; squared ReLU without gates."""

from __future__ import annotations

from kvcli.routing import SIGMOID
from kvcli.runtime.config import Block
from kvcli.runtime.model.architecture import Architecture
from kvcli.runtime.model.expertkeys import Mixture
from kvcli.runtime.model.mixerkeys import mambas_alone

ARCHITECTURE = Architecture(
    gguf=("nemotron_h", "nemotron_h_moe"),
    hf=("nemotron_h", "nemotron_h_moe"),
    block=Block(activation="relu2", gated=False, alone=True, ffn_norm="attn_norm"),
    rope_switch="rope.scaling.finetuned",
    rope_usual=False,
    experts=Mixture(gating=SIGMOID, normed=True),
    mixers=mambas_alone,
)
