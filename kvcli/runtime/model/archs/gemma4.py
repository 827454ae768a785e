"""Gemma 4: heads of other sizes where layers slide; the last layers of some read the rows of earlier ones; some layers
that see everything take their keys for values; the smaller ones have an embedding for each layer; one has experts, and
beside them a dense part.
"""

from __future__ import annotations

from kvcli.runtime.config import HEAD, Block
from kvcli.runtime.model.architecture import Architecture, Mixture, Windows

ARCHITECTURE = Architecture(
    gguf=("gemma4",),
    hf=("gemma4_text",),
    block=Block("gelu", qk_norm=HEAD, post_norms=True, v_norm=True, keys_as_values=True, layer_scale=True),
    windows=Windows(every=6, rope_base=10000.0, scaled=False),
    embed_scale=lambda d_model: d_model**0.5,
    query_dim=lambda config: 1,
    tokens_each=True,
    turned=0.25,
    experts=Mixture(normed=True, beside=True),
)
