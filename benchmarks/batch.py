"""Tokens a second of N answers decoded together, against one alone, taken in turns: `python benchmarks/batch.py MODEL`.

Each round decodes one answer, then N together; the best round of each counts, for other programs only take time away.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from kvcli.options import CacheOptions, LoadOptions, SampleOptions
from kvcli.runtime.engine.engine import Engine
from kvcli.runtime.engine.scheduler import Scheduler


def decode(engine: Engine, count: int, depth: int, tokens: int, clock: Callable[[], float]) -> float:
    """Tokens a second of `count` answers behind different prompts of `depth` tokens, all prompts read before."""
    options = SampleOptions(max_tokens=tokens, ignore_eos=True, seed=1, loop_stop=False, spec="off")
    scheduler, requests = Scheduler(engine, count), []
    for number in range(count):
        ids = random.Random(number).choices(range(engine.config.vocab_size), k=depth)
        requests.append(engine.request(engine.new_sequence(), ids, replace(options, sequence=number)))
        scheduler.submit(requests[-1])
    while not all(request.answering for request in requests):
        scheduler.step()
    before, began = sum(len(request.history) for request in requests), clock()
    while not scheduler.idle:
        scheduler.step()
    rate = (sum(len(request.history) for request in requests) - before) / (clock() - began)
    for request in requests:
        request.seq.close()
    return rate


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("-ct", default="f16", help="cache type")
    parser.add_argument("-t", type=int, default=2, help="threads")
    parser.add_argument("-N", type=int, default=8, help="answers at a time")
    parser.add_argument("-d", type=int, default=200, help="tokens of each prompt")
    parser.add_argument("-n", type=int, default=48, help="tokens of each answer")
    parser.add_argument("-r", type=int, default=5, help="rounds")
    parser.add_argument("--backend", default="native")
    parser.add_argument("--cpu", action="store_true", help="count the processor's time, for busy machines; with -t 1")
    args = parser.parse_args()
    clock = time.process_time if args.cpu else time.perf_counter
    load = LoadOptions(str(args.model), args.t, args.backend, device="cpu")
    engine = Engine.open(args.model, load, CacheOptions(args.d + args.n + 64, args.ct, args.ct))
    rates = [[decode(engine, count, args.d, args.n, clock) for count in (1, args.N)] for _ in range(args.r)]
    one, many = (max(each) for each in zip(*rates, strict=True))
    print(f"{args.ct}: 1 answer {one:.1f} tok/s, {args.N} together {many:.1f} tok/s: {many / one:.2f} times")


if __name__ == "__main__":
    main()
