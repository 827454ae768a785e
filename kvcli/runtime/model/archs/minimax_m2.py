"""MiniMax-M2: norms over all heads of q and of k, RoPE of a part of each head."""

from __future__ import annotations

from kvcli.routing import SIGMOID
from kvcli.runtime.config import ALL, Block
from kvcli.runtime.model.architecture import Architecture, Mixture

ARCHITECTURE = Architecture(
    gguf=("minimax-m2",),
    hf=("minimax_m2",),
    block=Block(qk_norm=ALL),
    experts=Mixture(SIGMOID, normed=True),
)
