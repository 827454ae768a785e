"""LFM2 and LFM2.5 (arXiv 2511.23404): short convolutions, and attention in a few layers."""

from __future__ import annotations

from kvcli.runtime.config import HEAD, Block
from kvcli.runtime.model.architecture import Architecture
from kvcli.runtime.model.mixerkeys import short_convs

ARCHITECTURE = Architecture(
    gguf=("lfm2",),
    hf=("lfm2",),
    block=Block(qk_norm=HEAD, last_norm="token_embd_norm"),
    mixers=short_convs,
)
