"""Gemma 3n: four residual streams of which layers see one, a product of low rank beside attention, gates of the first
layers mostly closed, an embedding for each layer; the last layers read the rows of earlier ones.
"""

from __future__ import annotations

from kvcli.runtime.config import HEAD, Block
from kvcli.runtime.model.architecture import Architecture, Windows

ARCHITECTURE = Architecture(
    gguf=("gemma3n",),
    hf=("gemma3n_text", "gemma3n"),
    block=Block("gelu", qk_norm=HEAD, post_norms=True, v_norm=True),
    windows=Windows(every=5, rope_base=10000.0, scaled=False),
    embed_scale=lambda d_model: d_model**0.5,
    query_dim=lambda config: 1,
    tokens_each=True,
    altup=True,
)
