"""Prompts whose rows have the same bits whatever is computed beside them, on a GPU. No torch.

Products there are sums in another order for another number of rows, so rows that are found and rows that are computed
differ in last bits, and an answer may part at a near tie. With `strict_repeat` all products of prompts are of BLOCK
rows, and a step begins at a multiple of it: then each row stands at the same place of a product of the same shape.
What is not known to hold is refused.
"""

from __future__ import annotations

from kvcli.errors import UsageError
from kvcli.options import CacheOptions, LoadOptions
from kvcli.runtime.config import CHUNKED, FULL, SLIDING, ModelConfig

BLOCK = 512  # rows of a product: with 256 a card is less busy, with 1,024 few new rows take longer


def check(load: LoadOptions, cache: CacheOptions, config: ModelConfig) -> None:
    """Raises UsageError where rows would depend on others all the same."""
    kinds = {layer.kind for layer in config.layers}
    reasons = {
        "`exact`: each token is a prompt of one row there": load.exact,
        "`lora`: products of adapters are of other shapes": bool(load.lora),
        f"`tail={cache.tail}`: rows are sealed one by one": not cache.tail,
        f"`ubatch={cache.ubatch}`: a step has at least {BLOCK} rows": 0 < cache.ubatch < BLOCK,
        "`prefill_sparse`: what a row reads depends on its step": cache.attend.sparse,
        "latents or states: how they are computed follows the rows of a step": not kinds <= {FULL, SLIDING, CHUNKED},
        "a mixture of experts: how many rows an expert has depends on the others": config.experts is not None,
    }
    for reason in (reason for reason, is_so in reasons.items() if is_so):
        raise UsageError(f"`strict_repeat` is not possible with {reason}", "leave it out")
