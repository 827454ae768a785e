"""SmolLM3: every fourth layer has no RoPE (as in arXiv 2501.18795)."""

from __future__ import annotations

from kvcli.runtime.config import Block
from kvcli.runtime.model.architecture import Architecture

ARCHITECTURE = Architecture(gguf=("smollm3",), hf=("smollm3",), block=Block(rope_pairs=True), no_rope_every=4)
