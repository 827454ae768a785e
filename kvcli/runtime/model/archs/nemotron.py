"""Nemotron 4 and Minitron (arXiv 2402.16819): layer norms, squared ReLU without gates, RoPE of a part of each head.

Norm weights in the file already hold 1 + w.
"""

from __future__ import annotations

from kvcli.runtime.config import LAYER, Block
from kvcli.runtime.model.architecture import Architecture

ARCHITECTURE = Architecture(gguf=("nemotron",), hf=("nemotron",), block=Block("relu2", gated=False, norm=LAYER))
