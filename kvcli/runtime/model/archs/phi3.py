"""Phi-3, Phi-3.5 and Phi-4, the dense models (arXiv 2404.14219, 2412.08905). Files have q, k and v as one matrix, and
so gates and what they gate."""

from __future__ import annotations

from kvcli.runtime.model.architecture import Architecture

ARCHITECTURE = Architecture(gguf=("phi3",), hf=("phi3",))
