"""How fast a GPU would generate, from bytes, launches and what unpacking takes: a prediction, not a bound. No torch.

A token behind n others takes

    launches * LAUNCH + weights / (WEIGHTS * bandwidth) + rows / (ROWS * bandwidth) +
    elements * UNPACK / multiprocessors

seconds: `weights` and `rows` are the bytes that it reads, `elements` those of the keys and values that it sees. The
constants are fitted to what was measured on an H200 (benchmarks/predicted.py).
"""

from __future__ import annotations

from kvcli.codecs import Codec
from kvcli.runtime.cache.layout import KVLayout
from kvcli.runtime.config import LAYER, ModelConfig
from kvcli.runtime.plan.cards import Card

LEAST_CAPABILITY, AHEAD = (8, 0), (9, 0)  # of cards that kv takes; of those that launch kernels ahead of each other
NARROW = 1024  # d_model of models whose products are over before a card is busy
LAUNCH_NARROW, LAUNCH = 1.91e-6, 3.82e-6  # seconds of a kernel beside what it reads
NOT_AHEAD = 1e-6  # more where the next kernel does not stand ready, as measured on an H100
WEIGHTS, ROWS = 0.984, 0.864  # of the bandwidth
UNPACK_8, UNPACK = 4.8e-12, 1.24e-11  # seconds of a multiprocessor for an element of 8 bits, of fewer
ONCE, EACH, EACH_EXPERTS = 7, 7, 10  # kernels of a token, of a layer, of a layer with experts


def launches(config: ModelConfig) -> int:
    """Kernels of a token."""
    block, count = config.block, ONCE
    apart = block.norm == LAYER or block.parallel or not block.pre_norms or config.residual_scale != 1
    for layer in range(config.n_layers):
        count += EACH_EXPERTS if config.has_experts(layer) else EACH
        count += 2 * (apart or block.post_norms)  # a kernel between two products that else does its part in one
    return count


def token_seconds(config: ModelConfig, weights: int, layout: KVLayout, n: int, card: Card) -> float | None:
    """Of the token behind n others on that card, which reads `weights` bytes beside the cache; None for a card that kv
    does not take."""
    if card.capability < LEAST_CAPABILITY:
        return None
    each = LAUNCH_NARROW if config.d_model < NARROW else LAUNCH
    if card.capability < AHEAD:
        each += NOT_AHEAD
    rate = card.bandwidth * 1e9
    read = weights / (WEIGHTS * rate) + layout.read_bytes(n) / (ROWS * rate)
    return launches(config) * each + read + _unpacking(layout, n) / card.multiprocessors


def _unpacking(layout: KVLayout, n: int) -> float:
    """Seconds of one multiprocessor."""
    return sum(
        g.rows_seen(n) * len(g.layers) * g.kv_heads * (g.dim_k * _unpack(g.codec_k) + g.dim_v * _unpack(g.codec_v))
        for g in layout.groups
    )


def _unpack(codec: Codec) -> float:
    return 0.0 if codec.bits >= 16 else UNPACK_8 if codec.bits == 8 else UNPACK
