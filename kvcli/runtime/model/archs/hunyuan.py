"""Hunyuan, the dense models: the norms of q and k come after RoPE."""

from __future__ import annotations

from kvcli.runtime.config import HEAD, Block
from kvcli.runtime.model.architecture import Architecture

ARCHITECTURE = Architecture(
    gguf=("hunyuan-dense",), hf=("hunyuan_v1_dense",), block=Block(qk_norm=HEAD, qk_norm_last=True)
)
