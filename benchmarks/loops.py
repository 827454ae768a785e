"""How many answers never end, what penalties do about it, and which of them are told to be loops.

    python benchmarks/loops.py answers [--model smollm2] [--seeds 4] [--tokens 2048]
    python benchmarks/loops.py texts FILE... [--model smollm2]

`answers`: greedy and drawn answers to every prompt below, with no penalty, `--repeat-penalty 1.1` and DRY; none is
stopped, but those that would be are counted. Said to be endless are those whose last 600 tokens `zlib` makes five times
smaller. `texts`: pieces of up to 4,096 tokens of files, in which no loop should be seen. Prints a table and one JSON
line last.
"""

from __future__ import annotations

import argparse
import json
import statistics
import zlib
from dataclasses import replace
from pathlib import Path
from typing import Any

from kvcli.options import CacheOptions, LoadOptions, SampleOptions
from kvcli.runtime.engine.engine import Engine
from kvcli.runtime.engine.events import End
from kvcli.runtime.engine.repeats import LoopDetector
from kvcli.runtime.hub.modelfiles import find_model
from kvcli.runtime.text.tokenizer import Tokenizer

PROMPTS = (
    "Why is the sky blue?", "What is the name of my cat?", "Tell me a story about a dragon.",
    "Explain quantum mechanics to a child.", "Write an essay about the sea.", "How do I learn to play the piano?",
    "What should I cook tonight?", "Write a letter to my landlord about a broken heater.", "hi",
    "Summarise the history of Rome.", "Give me advice for a job interview.", "Who was Ada Lovelace?",
    "What is the meaning of life?", "Describe a walk through a forest in autumn.", "How does a car engine work?",
    "Count from 1 to 300.", "List 80 animals, numbered.", "Write a Python class Matrix with 15 methods.",
    "Make a Markdown table of 30 countries, their capitals and populations.",
    "Write a JSON array of 40 users with id, name, email and age.", "Write a song with a chorus that comes thrice.",
    "Write the multiplication table from 1 to 12.", "Write an HTML page with a table of 20 rows.",
    "Write 20 SQL INSERT statements for a table of books.", "Print a 10 by 10 matrix of zeros in Python syntax.",
)  # fmt: skip
BEGINNINGS = (
    "The sea is", "def fibonacci(n):\n", "1, 2, 3, 4, 5,", "Once upon a time", "# Apple pie\n\n## Ingredients\n"
)  # fmt: skip
VARIANTS: dict[str, dict[str, Any]] = {
    "none": {},
    "--repeat-penalty 1.1": {"repeat_penalty": 1.1},
    "--dry-multiplier 0.8": {"dry_multiplier": 0.8},
}
PIECE_CHARACTERS, PIECE_TOKENS = 14_000, 4096


def loop_at(ids: list[int]) -> int:
    """After how many tokens an answer would be stopped; 0 = it would not."""
    detector = LoopDetector()
    return next((number for number, token in enumerate(ids, 1) if detector.push(token)), 0)


def prompts(engine: Engine) -> list[list[int]]:
    texts, template = list(BEGINNINGS), engine.loaded.text.template
    found = []
    if template is None:
        texts += PROMPTS
    else:
        messages = [[{"role": "user", "content": text}] for text in PROMPTS]
        found = [engine.tokenizer.encode_segments(template.render_segments(m), add_bos=True) for m in messages]
    return found + [engine.tokenizer.encode(text, add_bos=True) for text in texts]


def answered(engine: Engine, ids: list[int], options: SampleOptions) -> End:
    sequence = engine.new_sequence()
    *_, end = engine.generate(sequence, ids, options)
    sequence.close()
    assert isinstance(end, End)
    return end


def answers(options: argparse.Namespace) -> dict[str, Any]:
    load = LoadOptions(options.model, device=options.device)
    engine = Engine.open(find_model(options.model), load, CacheOptions(ctx_size=options.tokens + 512))
    table = []
    print("| penalty | answers | not ended | endless | stopped | of the endless | ended later | median token |")
    print("|---|---:|---:|---:|---:|---:|---:|---:|")
    for name, changes in VARIANTS.items():
        base = SampleOptions(max_tokens=options.tokens, loop_stop=False, **changes)
        ways = [replace(base, temperature=0.0), *(replace(base, seed=seed) for seed in range(options.seeds))]
        ends = [answered(engine, ids, way) for ids in prompts(engine) for way in ways]
        tails = [engine.tokenizer.decode(end.ids[-600:]).encode() for end in ends]
        endless = [
            end.finish_reason == "length" and len(zlib.compress(tail)) < len(tail) / 5
            for end, tail in zip(ends, tails, strict=True)
        ]
        stops = [loop_at(end.ids) for end in ends]
        row = {
            "penalty": name,
            "answers": len(ends),
            "not_ended": sum(end.finish_reason == "length" for end in ends),
            "endless": sum(endless),
            "stopped": sum(map(bool, stops)),
            "endless_stopped": sum(bool(stop) for stop, never in zip(stops, endless, strict=True) if never),
            "ended_stopped": sum(bool(s) and e.finish_reason == "stop" for s, e in zip(stops, ends, strict=True)),
            "median_token": int(statistics.median(filter(None, stops))) if any(stops) else None,
            "decode_tps": sum(e.timings.decode_tokens for e in ends) / sum(e.timings.decode_s for e in ends),
        }
        table.append(row)
        print(f"| {' | '.join(str(row[key]) for key in list(row)[:-1])} |", flush=True)
    return {"model": engine.config.name, "device": str(engine.device), "tokens": options.tokens, "answers": table}


def texts(options: argparse.Namespace) -> dict[str, Any]:
    from kvcli.runtime.formats.gguf import GGUFFile

    tokenizer = Tokenizer.from_gguf(GGUFFile.open(find_model(options.model)).metadata)
    pieces = stopped = 0
    for path in options.files:
        text = path.read_text("utf-8", "replace")
        for start in range(0, len(text), PIECE_CHARACTERS):
            ids = tokenizer.encode(text[start : start + PIECE_CHARACTERS], add_bos=False)[:PIECE_TOKENS]
            pieces += 1
            if at := loop_at(ids):
                stopped += 1
                print(f"{path} at character {start:,}: {tokenizer.decode(ids[at - 40 : at])!r}", flush=True)
    print(f"{stopped} of {pieces:,} pieces")
    return {"pieces": pieces, "stopped": stopped}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=("answers", "texts"))
    parser.add_argument("files", nargs="*", type=Path, metavar="FILE", help="what `texts` reads")
    parser.add_argument("--model", default="smollm2", help="a name or a file")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--seeds", type=int, default=4, help="drawn answers to each prompt, beside the greedy one")
    parser.add_argument("--tokens", type=int, default=2048, help="most of an answer")
    options = parser.parse_args()
    print(json.dumps({"answers": answers, "texts": texts}[options.what](options)))


if __name__ == "__main__":
    main()
