"""Gemma 2 (arXiv 2408.00118): soft caps of scores and of logits. Norm weights in the file already hold 1 + w."""

from __future__ import annotations

from kvcli.runtime.config import Block, ModelConfig
from kvcli.runtime.model.architecture import Architecture, Windows


def _query_dim(config: ModelConfig) -> int:
    """The 27B model divides scores by the square root of d_model / n_heads, which is not its head dim."""
    return config.d_model // config.n_heads if config.n_layers == 46 else config.layers[0].dim_k


ARCHITECTURE = Architecture(
    gguf=("gemma2",),
    hf=("gemma2",),
    block=Block("gelu", post_norms=True),
    windows=Windows(every=2, size=4096),
    embed_scale=lambda d_model: d_model**0.5,
    query_dim=_query_dim,
)
