"""StableLM 3B and 2 1.6B (arXiv 2402.17834): layer norms, RoPE of a quarter of each head.

The 12B model, whose parts stand side by side, is refused by its key.
"""

from __future__ import annotations

from kvcli.runtime.config import LAYER, Block
from kvcli.runtime.model.architecture import Architecture

ARCHITECTURE = Architecture(gguf=("stablelm",), hf=("stablelm",), block=Block(norm=LAYER))
