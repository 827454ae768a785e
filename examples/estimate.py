"""What a model needs, before anything is loaded: python examples/estimate.py [MODEL [CONTEXT]]"""

import sys

import kvcli

name, ctx = (sys.argv[1:] + ["llama-3.1-8b", "32768"][len(sys.argv) - 1 :])[:2]
found = kvcli.estimate(name, ctx=int(ctx), memory="12G")
print(f"{found.model}: {found.weight_bytes >> 20:,} MiB of weights, {found.free_bytes >> 20:,} MiB free")
for choice in found.choices:
    fits = "fits" if choice.fits else f"up to {choice.max_ctx:,} tokens"
    cache, total = choice.cache_bytes >> 20, choice.total_bytes >> 20
    print(f"{choice.cache_type:>9} {cache:>7,} MiB of cache, {total:>7,} in all: {fits}")
if found.best:
    print(f"best: {found.best.cache_type}")
