"""Whether greedy answers from cached rows are those that are computed afresh, token by token.

    python benchmarks/repeats.py MODEL [-ct f16,int4] [--pairs 100] [--tokens 64] [--device cuda] [--seconds 40]

Texts are the pages of docs/. A prompt of 600 to 3,400 tokens shares 600 to 2,500 tokens, or all, with one before it,
whose rows are still in memory, or for every fifth pair on disk. Its answer from these rows is compared with the one
without. On a GPU this is done with `--strict-repeat`, too. A pair counts only where rows were reused. Prints a table,
and one JSON line last.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import tempfile
import time
from contextlib import closing
from dataclasses import asdict, dataclass, field
from pathlib import Path

import kvcli
from kvcli.notices import Tell
from kvcli.options import PromptCacheOptions, SampleOptions
from kvcli.runtime.engine.engine import Engine
from kvcli.runtime.engine.events import End
from kvcli.runtime.promptcache.caches import LIVE_ROWS, Caches

DOCS = Path(__file__).parent.parent / "docs"
LEAST, MOST_SHARED, MOST = 600, 2500, 3400
EVERY = 5  # of so many pairs one is from disk
QUIET = Tell(*(lambda _: None for _ in range(3)))


@dataclass
class Counted:
    """Pairs of one setting. `parted`: the first token in which answers differ, of each pair that does."""

    cache_type: str
    strict: bool
    pairs: int = 0
    equal: int = 0
    from_disk: int = 0
    shared: int = 0  # tokens that were reused, in all
    parted: list[int] = field(default_factory=list)


def answer(engine: Engine, prompt: list[int], tokens: int, caches: Caches = LIVE_ROWS) -> End:
    """The answer to a prompt in a context of its own."""
    with closing(engine.new_sequence()) as seq:
        *_, end = engine.generate(seq, prompt, SampleOptions(temperature=0.0, max_tokens=tokens), caches=caches)
    assert isinstance(end, End)
    return end


def reused(engine: Engine, before: list[int], prompt: list[int], tokens: int, disk: bool, folder: Path) -> End:
    """The answer from rows of a prompt before it."""
    if not disk:
        with closing(engine.prompt_caches(PromptCacheOptions(memory=True), QUIET)) as caches:
            answer(engine, before, 1, caches)
            return answer(engine, prompt, tokens, caches)
    options = PromptCacheOptions(file=folder / "rows.safetensors", replace=True)  # a named file is read in any case
    with closing(engine.prompt_caches(options, QUIET)) as caches:
        answer(engine, before, 1, caches)
    options = PromptCacheOptions(file=folder / "rows.safetensors", read_only=True)
    with closing(engine.prompt_caches(options, QUIET)) as caches:
        return answer(engine, prompt, tokens, caches)


def count(engine: Engine, ids: list[int], found: Counted, options: argparse.Namespace) -> None:
    """Compare pairs until there are enough of them, or time is up."""
    chance, began = random.Random(options.seed), time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        while found.pairs < options.pairs and time.monotonic() - began < options.seconds:
            at = chance.randrange(len(ids) - 2 * MOST)
            shared, length = chance.randint(LEAST, MOST_SHARED), chance.randint(LEAST, MOST)
            before = ids[at : at + max(shared, length)]
            prompt = (
                before if chance.random() < 0.2 else [*before[:shared], *ids[at + MOST :][: max(8, length - shared)]]
            )
            disk = found.pairs % EVERY == EVERY - 1
            cached = reused(engine, before, prompt, options.tokens, disk, Path(folder))
            if not cached.usage.cache_read_tokens:
                continue
            fresh = answer(engine, prompt, options.tokens)
            found.pairs += 1
            found.from_disk += disk
            found.shared += cached.usage.cache_read_tokens
            found.equal += cached.ids == fresh.ids
            if cached.ids != fresh.ids:
                pairs = zip(cached.ids, fresh.ids, strict=False)
                found.parted.append(next((i for i, (a, b) in enumerate(pairs) if a != b), -1))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("-ct", "--cache-type", default="f16", help="or several, with commas between")
    parser.add_argument("--pairs", type=int, default=100)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--seconds", type=float, default=600.0, help="most for each setting")
    parser.add_argument("--only", choices=("plain", "strict"))
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    text = "\n\n".join(path.read_text("utf-8") for path in sorted(DOCS.glob("*.md")))
    results, name = [], Path(options.model).name
    print("| model | cache | setting | equal | of pairs | from disk | tokens reused, mean |")
    print("|---|---|---|---:|---:|---:|---:|")
    for cache_type, strict in itertools.product(options.cache_type.split(","), (False, True)):
        if options.only and strict != (options.only == "strict"):
            continue
        how = {"cache_type": cache_type, "device": options.device, "strict_repeat": strict}
        with kvcli.load(options.model, ctx=4096, **how) as model:
            if strict and model.device == "cpu":
                continue
            ids = model.tokenize(text)
            while len(ids) < 3 * MOST:
                ids = ids + ids
            one = Counted(cache_type, strict)
            count(model.engine, ids, one, options)
            results.append(asdict(one))
            setting = "--strict-repeat" if strict else model.device
            mean = one.shared // max(1, one.pairs)
            cells = cache_type, setting, one.equal, one.pairs, one.from_disk, f"{mean:,}"
            print(f"| {name} | {' | '.join(map(str, cells))} |", flush=True)
    print(json.dumps({"model": name, "tokens": options.tokens, "results": results}))


if __name__ == "__main__":
    main()
