"""Gemma 3 text models (arXiv 2503.19786). Norm weights in the file already hold 1 + w.

Files may lack the pattern of windows and their RoPE base: the published models have five sliding layers to one that
sees everything, and base 10,000 where they slide.
"""

from __future__ import annotations

from kvcli.runtime.config import HEAD, Block, ModelConfig
from kvcli.runtime.model.architecture import Architecture, Windows


def _query_dim(config: ModelConfig) -> int:
    """The 27B model divides scores by the square root of d_model / n_heads, which is not its head dim."""
    return config.d_model // config.n_heads if config.n_layers == 62 else config.layers[0].dim_k


ARCHITECTURE = Architecture(
    gguf=("gemma3",),
    hf=("gemma3", "gemma3_text"),
    block=Block("gelu", qk_norm=HEAD, post_norms=True),
    windows=Windows(every=6, rope_base=10000.0, scaled=False),
    embed_scale=lambda d_model: d_model**0.5,
    query_dim=_query_dim,
)
