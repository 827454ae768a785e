"""Hunyuan-MoE (arXiv 2411.02265): the norms of q and k come after RoPE."""

from __future__ import annotations

from kvcli.runtime.config import HEAD, Block
from kvcli.runtime.model.architecture import Architecture, Mixture

ARCHITECTURE = Architecture(
    gguf=("hunyuan-moe",),
    hf=("hunyuan_v1_moe",),
    block=Block(qk_norm=HEAD, qk_norm_last=True),
    experts=Mixture(normed=True),
)
