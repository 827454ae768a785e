"""DeepSeek V2 and V3 (arXiv 2405.04434, 2412.19437) and what is built like them: attention over latents, dense layers
first, then experts beside one that every token has. V2 chooses groups by the best expert of each, V3 by the two best.
"""

from __future__ import annotations

from kvcli.runtime.config import Block
from kvcli.runtime.model.architecture import Architecture, Mixture

ARCHITECTURE = Architecture(
    gguf=("deepseek2",),
    hf=("deepseek_v2", "deepseek_v3", "glm4_moe_lite", "kimi_k2"),
    block=Block(rope_pairs=True),
    latents=True,
    tempered=True,
    experts=Mixture(best=1),
)
