"""Tokens a second on this CPU beside llama.cpp's `llama-bench`, in turns.

    python benchmarks/peers.py LLAMA_BENCH MODEL.gguf [--threads 2] [--runs 5] [--prompt 512] [--tokens 64]
        [--depth 4096] [--kv KV]

A run of one is followed by a run of the other, so that both meet the same machine. Rows: a prompt, tokens with no
context, and, with --depth, tokens behind that many with caches of 16, 8 and 4 bits (f16/f16, int8/q8_0, int4/q4_0;
llama.cpp with flash attention). Prints medians, the range of ratios of neighbouring runs, and one JSON line last.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from dataclasses import dataclass

CACHES = (("f16", "f16"), ("int8", "q8_0"), ("int4", "q4_0"))  # ours, theirs


@dataclass(frozen=True)
class Case:
    """One row: so many tokens read, or written, behind `depth`."""

    prompt: int
    tokens: int
    depth: int = 0
    ours: str = "f16"
    theirs: str = "f16"

    @property
    def name(self) -> str:
        what = f"prompt of {self.prompt}" if self.prompt else f"{self.tokens} tokens"
        return f"{what} at {self.depth}, {self.ours} / {self.theirs}" if self.depth else what


def of_kv(command: list[str], model: str, threads: int, case: Case) -> float:
    """Tokens a second by `kv bench`."""
    sizes = ["-p", str(case.prompt), "-n", str(case.tokens), "-d", str(case.depth), "-ct", case.ours]
    done = [*command, "bench", "-m", model, "-t", str(threads), "--json", "-r", "1", *sizes]
    out = subprocess.run(done, capture_output=True, text=True, check=True).stdout
    return float(json.loads(out)["results"][0]["tps"])


def of_llama(bench: str, model: str, threads: int, case: Case) -> float:
    """Tokens a second by `llama-bench`."""
    sizes = ["-p", str(case.prompt), "-n", str(case.tokens), "-d", str(case.depth)]
    types = ["-ctk", case.theirs, "-ctv", case.theirs, "-fa", "1"]
    done = [bench, "-m", model, "-t", str(threads), "-o", "json", "-r", "1", *sizes, *types]
    return float(json.loads(subprocess.run(done, capture_output=True, text=True, check=True).stdout)[0]["avg_ts"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bench", metavar="LLAMA_BENCH")
    parser.add_argument("model")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--prompt", type=int, default=512)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--depth", type=int, default=0)
    parser.add_argument("--kv", help="the command to measure; this Python's kvcli if left out")
    given = parser.parse_args()
    command = [given.kv] if given.kv else [sys.executable, "-m", "kvcli"]
    cases = [Case(given.prompt, 0), Case(0, given.tokens)]
    if given.depth:
        cases += [Case(0, given.tokens, given.depth, *types) for types in CACHES]
    rows = {}
    for case in cases:
        ours, theirs = [], []
        for _ in range(given.runs):
            ours.append(of_kv(command, given.model, given.threads, case))
            theirs.append(of_llama(given.bench, given.model, given.threads, case))
        ratios = [a / b for a, b in zip(ours, theirs, strict=True)]
        middle = [statistics.median(x) for x in (ours, theirs, ratios)]
        rows[case.name] = {"kv": middle[0], "llama.cpp": middle[1], "ratio": middle[2]}
        span = f"{min(ratios):.2f} to {max(ratios):.2f}"
        print(
            f"{case.name:34} kv {middle[0]:8.1f}   llama.cpp {middle[1]:8.1f}   {middle[2]:5.2f} ({span})", flush=True
        )
    print(json.dumps(rows))


if __name__ == "__main__":
    main()
