"""gpt-oss (arXiv 2508.10925): experts with clamped gates, biases everywhere, every other layer with a window, and a
logit of each head beside the scores. The norm before the feed-forward part has another name.
"""

from __future__ import annotations

from kvcli.routing import CHOSEN
from kvcli.runtime.config import Block
from kvcli.runtime.model.architecture import Architecture, Mixture, Windows

ARCHITECTURE = Architecture(
    gguf=("gpt-oss",),
    hf=("gpt_oss",),
    block=Block("clamped", sinks=True, ffn_norm="post_attention_norm"),
    windows=Windows(every=2),
    whole_ramp=False,
    experts=Mixture(CHOSEN),
)
