"""EXAONE 4 (arXiv 2507.11407): norms only behind either part; where layers slide, the others have no RoPE."""

from __future__ import annotations

from kvcli.runtime.config import HEAD, Block
from kvcli.runtime.model.architecture import Architecture, Windows

ARCHITECTURE = Architecture(
    gguf=("exaone4",),
    hf=("exaone4",),
    block=Block(pre_norms=False, post_norms=True, qk_norm=HEAD),
    windows=Windows(every=4, optional=True, full_rope=False),
)
