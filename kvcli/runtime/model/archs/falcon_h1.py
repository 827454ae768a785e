"""Falcon-H1 (arXiv 2507.22448): in every layer Mamba-2 beside attention, over the same normed input.

The multipliers of its config.json are in the matrices of files.
"""

from __future__ import annotations

from kvcli.runtime.model.architecture import Architecture
from kvcli.runtime.model.mixerkeys import mambas_beside

ARCHITECTURE = Architecture(gguf=("falcon-h1",), hf=("falcon_h1",), mixers=mambas_beside, beside=True)
