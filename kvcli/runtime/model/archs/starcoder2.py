"""StarCoder2 (arXiv 2402.19173): layer norms, no gates, biases everywhere."""

from __future__ import annotations

from kvcli.runtime.config import LAYER, Block
from kvcli.runtime.model.architecture import Architecture

ARCHITECTURE = Architecture(gguf=("starcoder2",), hf=("starcoder2",), block=Block("gelu", gated=False, norm=LAYER))
