"""LFM2 with experts (8B-A1B): sigmoid routing with a bias, dense layers first."""

from __future__ import annotations

from kvcli.routing import SIGMOID
from kvcli.runtime.config import HEAD, Block
from kvcli.runtime.model.architecture import Architecture
from kvcli.runtime.model.expertkeys import Mixture
from kvcli.runtime.model.mixerkeys import short_convs

ARCHITECTURE = Architecture(
    gguf=("lfm2moe",),
    hf=("lfm2_moe",),
    block=Block(qk_norm=HEAD, last_norm="token_embd_norm"),
    experts=Mixture(gating=SIGMOID, normed=True),
    mixers=short_convs,
)
