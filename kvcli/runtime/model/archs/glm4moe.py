"""GLM-4.5 to 4.7 (arXiv 2508.06471): RoPE of half a head, dense layers first. Only the larger models have norms of q
and k. The norm before the feed-forward part has another name."""

from __future__ import annotations

from kvcli.routing import SIGMOID
from kvcli.runtime.config import HEAD, Block
from kvcli.runtime.model.architecture import Architecture, Mixture

ARCHITECTURE = Architecture(
    gguf=("glm4moe",),
    hf=("glm4_moe",),
    block=Block(qk_norm=HEAD, ffn_norm="post_attention_norm"),
    qk_norm_optional=True,
    experts=Mixture(SIGMOID, normed=True),
)
