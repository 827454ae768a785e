"""The text part of Llama 4: layers that see chunks, and every fourth one that sees everything, without RoPE and with a
temperature (as in arXiv 2501.18795 and 2501.19399); experts whose inputs are weighted, beside one that every token has.

Queries and keys have norms without weights, but in Maverick, with its 128 experts: files do not say so.
"""

from __future__ import annotations

from kvcli.routing import SIGMOID
from kvcli.runtime.config import PLAIN, Block, Temperature
from kvcli.runtime.model.architecture import Architecture, Mixture, Windows

ARCHITECTURE = Architecture(
    gguf=("llama4",),
    hf=("llama4_text",),
    block=Block(qk_norm=PLAIN, rope_pairs=True),
    windows=Windows(every=4, size=8192, chunked=True),
    no_rope_every=4,
    temperature=Temperature(0.1, 8192, 1),
    qk_norm_but=128,
    experts=Mixture(SIGMOID, weighs_input=True, step="interleave_moe_layer_step"),
)
