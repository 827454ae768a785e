"""What guesses cost where layers keep a state: steps of several rows, and going back from them to some of the rows.

    python benchmarks/synthetic.py 9b-delta delta.gguf --layers 8 --vocab 8192
    python benchmarks/taken_back.py delta.gguf --threads 2

Times are medians in milliseconds, behind `--depth` tokens: of a step of so many rows, computed as those of a prompt are
and as those of guesses are, whose states can be had again; and of having the state behind all but the last of them
again. `in steps`: a step that checks guesses and goes back, in steps of one row.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch

from kvcli.options import CacheOptions, LoadOptions
from kvcli.runtime.cache.sequence import Sequence
from kvcli.runtime.engine.engine import Engine

ROWS = (2, 4, 8, 16)


def timed(engine: Engine, run: Callable[[], object]) -> float:
    engine.synchronize()
    began = time.perf_counter()
    run()
    engine.synchronize()
    return 1e3 * (time.perf_counter() - began)


@torch.inference_mode()
def step(engine: Engine, seq: Sequence, rows: int, guessed: bool) -> tuple[float, float]:
    """Of a step with its logits, and of going back to all rows but the last; the sequence is then as it was."""
    start = seq.length
    if guessed:
        assert seq.states is not None and seq.states.can_guess()
        seq.certain = start
    took = timed(engine, lambda: engine.logits(engine.forward(seq, list(range(5, 5 + rows)), rows == 1)))
    back = timed(engine, lambda: seq.rewind(start + rows - 1)) if guessed else 0.0
    if guessed:
        seq.rewind(start)
    seq.certain = None
    return took, back


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--depth", type=int, default=256)
    parser.add_argument("--repeats", type=int, default=9)
    asked = parser.parse_args()
    engine = Engine.open(asked.model, LoadOptions(asked.model.name, asked.threads), CacheOptions(asked.depth + 256))
    seq = engine.new_sequence()
    engine.forward(seq, [7 + i % 900 for i in range(asked.depth)])
    twin = seq.fork()
    one = statistics.median([step(engine, twin, 1, False)[0] for _ in range(2 + asked.repeats)][2:])
    print(f"state of {engine.layout.state_bytes:,} B; a step of one row takes {one:.2f} ms")
    print("| rows | as of a prompt | as of guesses | going back | in steps |\n|---|---|---|---|---|")
    for rows in ROWS:
        found = [step(engine, seq, rows, True) for _ in range(2 + asked.repeats)][2:]
        took, back = (statistics.median(each) for each in zip(*found, strict=True))
        plain = []
        for _ in range(asked.repeats):
            twin.close()
            twin = seq.fork()
            plain.append(step(engine, twin, rows, False)[0])
        print(f"| {rows} | {statistics.median(plain):.2f} | {took:.2f} | {back:.2f} | {(took + back) / one:.2f} |")


if __name__ == "__main__":
    main()
