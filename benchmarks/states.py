"""What states in 16 bits cost: the next token's distribution with live states, or checkpoints, that are rounded.

    python benchmarks/states.py                  # models of random weights, 4,096 tokens; some minutes of one core
    python benchmarks/states.py --tokens 1024 --shapes delta

Models have the layers of Qwen3.5 (gated delta networks) and of Granite 4 H (Mamba-2), heads of the real sizes, and
random weights; heads forget a half in some ten tokens, or in thousands. A live state is rounded behind every token, as
one that is stored so would be; a checkpoint once, behind the first half of the text. Columns: KL divergence from
float32 of the next token's distribution, in nats, the median, the mean and the greatest; how often the most likely
token is the same. What cache types cost the same model (their rows alone) is beside it.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from dataclasses import replace
from pathlib import Path

import torch
from synthetic import SHAPES, write

from kvcli.options import CacheOptions, LoadOptions
from kvcli.runtime.cache.sequence import Sequence
from kvcli.runtime.engine.engine import Engine

NARROW = {"hidden": 512, "ffn": 1024, "vocab": 2048}
MODELS = {
    "delta": replace(SHAPES["9b-delta"], layers=8, heads=4, kv_heads=1, head_dim=128, delta=(4, 8, 128), **NARROW),
    "mamba": replace(SHAPES["granite-h-3b"], layers=10, heads=8, kv_heads=2, mamba=(16, 64, 1, 128), **NARROW),
}
TYPES = {"bf16": torch.bfloat16, "f16": torch.float16}


def state_of(seq: Sequence) -> torch.Tensor:
    """The state behind the last row, as float32."""
    assert seq.states is not None
    page = seq.states._page(seq.states._now)
    assert page is not None
    return page.view(torch.float32)


@torch.inference_mode()
def logits(engine: Engine, ids: list[int], kind: str = "", every: int = 0, at: int = 0) -> torch.Tensor:
    """Of all rows; the state is rounded to the type of that name behind each `every` rows, or behind `at` alone."""
    seq, found = engine.new_sequence(), []
    step = every or at or 512
    for start in range(0, len(ids), step):
        for first in range(start, min(start + step, len(ids)), 512):
            part = ids[first : min(first + 512, start + step)]
            found.append(engine.logits(engine.forward(seq, part)))
        if kind and (every or seq.length == at):
            state = state_of(seq)
            state.copy_(state.to(TYPES[kind]).float())
    seq.close()
    return torch.cat(found)


def compared(exact: torch.Tensor, found: torch.Tensor) -> str:
    p, q = (x.double().log_softmax(-1) for x in (exact, found))
    kl = (p.exp() * (p - q)).sum(-1)
    same = (exact.argmax(-1) == found.argmax(-1)).double().mean().item()
    return f"{kl.median():.1e} | {kl.mean():.1e} | {kl.max():.1e} | {100 * same:.2f} %"


def measure(name: str, tokens: int, folder: Path) -> None:
    path = folder / f"{name}.gguf"
    write(path, MODELS[name], "Q8_0")
    load, half = LoadOptions(name, 1), tokens // 2
    engine = Engine.open(path, load, CacheOptions(tokens, "f32", "f32"))
    ids = torch.randint(2000, (tokens,), generator=torch.manual_seed(1)).tolist()
    exact = logits(engine, ids)
    print(f"| {name}: {engine.layout.state_bytes:,} B | entropy {entropy(exact):.2f} nats | | | |", flush=True)
    print(f"| live, f32 | row by row | {compared(exact, logits(engine, ids, '', 1))} |", flush=True)
    for kind in TYPES:
        live = logits(engine, ids, kind, 1)
        print(f"| live, {kind} | all rows | {compared(exact, live)} |")
        print(f"| live, {kind} | last quarter | {compared(exact[-half // 2 :], live[-half // 2 :])} |", flush=True)
        kept = logits(engine, ids, kind, 0, half)
        near = slice(half, half + 64)
        print(f"| checkpoint, {kind} | first 64 rows behind it | {compared(exact[near], kept[near])} |")
        print(f"| checkpoint, {kind} | all rows behind it | {compared(exact[half:], kept[half:])} |", flush=True)
    for kind in ("f16", "int8", "int4"):
        other = engine.beside(CacheOptions(tokens, kind, kind))
        print(f"| rows, {kind} | all rows | {compared(exact, logits(other, ids))} |", flush=True)


def entropy(x: torch.Tensor) -> float:
    p = x.double().log_softmax(-1)
    return statistics.fmean((-(p.exp() * p).sum(-1)).tolist())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--shapes", default=",".join(MODELS))
    options = parser.parse_args()
    print("| state | where | median | mean | greatest | same token |\n|---|---|---:|---:|---:|---:|")
    with tempfile.TemporaryDirectory() as folder:
        for name in options.shapes.split(","):
            measure(name, options.tokens, Path(folder))


if __name__ == "__main__":
    main()
