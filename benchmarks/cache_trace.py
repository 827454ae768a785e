"""A trace of a store of prompt caches, for tests/promptcache/test_pruning.py: which prompt was asked when, how many
bytes its rows take on disk, and how many seconds they took to compute.

Sizes and seconds are measured: every prompt is computed once, by the model that it belongs to, and written. The order
is drawn, with a fixed seed: some documents are asked about again and again (by a power law), most of them several times
in the same hours; each with one model and one cache type.

    python benchmarks/cache_trace.py smollm2.gguf gemma3.gguf -o tests/data/cache_trace.csv docs/*.md
"""

from __future__ import annotations

import argparse
import csv
import random
import tempfile
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from kvcli.notices import Tell
from kvcli.options import CacheOptions, LoadOptions, PromptCacheOptions, SampleOptions
from kvcli.runtime.engine.engine import Engine
from kvcli.runtime.promptcache.store import entries, folders

SILENT = Tell(*(lambda message: None for _ in range(3)))
LOOKUPS, HOURS = 400, 72.0


@dataclass(frozen=True)
class Prompt:
    name: str
    nbytes: int
    seconds: float


def measure(engine: Engine, name: str, ids: list[int]) -> Prompt:
    """Compute a prompt as a process of its own would, and look at what it left."""
    with tempfile.TemporaryDirectory() as folder:
        options = PromptCacheOptions(store=Path(folder), min_tokens=1)
        seq = engine.new_sequence()
        with closing(engine.prompt_caches(options, SILENT)) as caches:
            *_, end = engine.generate(seq, ids, SampleOptions(temperature=0.0, max_tokens=1), caches=caches)
        seq.close()
        size = sum(entry.size for each in folders(Path(folder)) for entry in entries(each))
    return Prompt(name, size, end.timings.prefill_s)


def prompts(model: Path, kind: str, texts: list[str], lengths: list[int]) -> list[Prompt]:
    """One of each length from each text, as far as the text has that many tokens, with a cache type."""
    options = CacheOptions(max(lengths) + 8, kind, kind, force_types=True)
    engine = Engine.open(model, LoadOptions(str(model)), options)
    found = []
    for number, text in enumerate(texts):
        ids = engine.tokenizer.encode(text)
        for length in lengths:
            if len(ids) >= length:
                found.append(measure(engine, f"{model.stem}{kind}{number}at{length}", ids[:length]))
                print(found[-1], flush=True)
    return found


def order(found: list[Prompt]) -> list[tuple[float, Prompt]]:
    """When they are asked, in seconds."""
    chance = random.Random(0)
    shuffled = chance.sample(found, len(found))
    weights = [1 / (1 + rank) for rank in range(len(shuffled))]
    asked = []
    while len(asked) < LOOKUPS:
        prompt, at = chance.choices(shuffled, weights)[0], chance.uniform(0, HOURS)
        for _ in range(chance.choice((1, 1, 2, 4))):  # questions about the same thing, one soon after the other
            asked.append((at * 3600, prompt))
            at += chance.expovariate(4)
    return sorted(asked, key=lambda each: each[0])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs=2, type=Path)
    parser.add_argument("texts", nargs="+", type=Path)
    parser.add_argument("-o", "--output", type=Path, required=True)
    parser.add_argument("--lengths", default="512,1024,2048")
    parser.add_argument("--types", default="f16,int4")
    asked = parser.parse_args()
    texts = [path.read_text("utf-8") for path in asked.texts]
    lengths = [int(word) for word in asked.lengths.split(",")]
    kinds = [(model, kind) for kind in asked.types.split(",") for model in asked.models]
    found = [prompt for model, kind in kinds for prompt in prompts(model, kind, texts, lengths)]
    with asked.output.open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(["at_s", "prompt", "bytes", "compute_s"])
        writer.writerows([f"{at:.0f}", p.name, p.nbytes, f"{p.seconds:.3f}"] for at, p in order(found))


if __name__ == "__main__":
    main()
