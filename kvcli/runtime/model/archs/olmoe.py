"""OLMoE (arXiv 2409.02060): norms over all heads of q and of k."""

from __future__ import annotations

from kvcli.runtime.config import ALL, Block
from kvcli.runtime.model.architecture import Architecture, Mixture

ARCHITECTURE = Architecture(
    gguf=("olmoe",),
    hf=("olmoe",),
    block=Block(qk_norm=ALL),
    experts=Mixture(),
)
