"""Command R7B and Command A (arXiv 2504.00698): attention and feed-forward part side by side, layer norms without
biases; layers that see everything have no RoPE."""

from __future__ import annotations

from kvcli.runtime.config import LAYER, Block
from kvcli.runtime.model.architecture import Architecture, Windows

ARCHITECTURE = Architecture(
    gguf=("cohere2",),
    hf=("cohere2",),
    block=Block(norm=LAYER, parallel=True, rope_pairs=True),
    windows=Windows(every=4, full_rope=False),
    logit_scale=lambda factor: factor,
)
