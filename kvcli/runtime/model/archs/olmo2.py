"""OLMo 2 and 3 (arXiv 2501.00656, 2512.13961): norms only behind either part, and over all heads of q and of k."""

from __future__ import annotations

from kvcli.runtime.config import ALL, Block
from kvcli.runtime.model.architecture import Architecture, Windows

ARCHITECTURE = Architecture(
    gguf=("olmo2",),
    hf=("olmo2", "olmo3"),
    block=Block(pre_norms=False, post_norms=True, qk_norm=ALL),
    windows=Windows(every=4, optional=True, scaled=False),
)
