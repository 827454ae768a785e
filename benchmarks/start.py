"""How long a command takes from its first instruction to its last, and the most memory that it has resident.

    python benchmarks/start.py run -m smollm2 -n 1 --temp 0 hi
    python benchmarks/start.py --kv kv --kv OTHER/bin/kv run -m smollm2 -n 1 --temp 0 hi

Several programs take turns, so that both meet the same load of the machine. Medians, and the least and most of times.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import time


def run(words: list[str]) -> tuple[float, float]:
    """Seconds and MiB of one process."""
    began = time.perf_counter()
    process = subprocess.Popen(words, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise SystemExit(f"{' '.join(words)}: exit code {process.returncode}")
    return time.perf_counter() - began, usage.ru_maxrss / 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kv", action="append", help="a program to run; several take turns")
    parser.add_argument("--runs", type=int, default=11)
    parser.add_argument("words", nargs=argparse.REMAINDER, help="the words of the command")
    options = parser.parse_args()
    programs = options.kv or ["kv"]
    found: dict[str, list[tuple[float, float]]] = {program: [] for program in programs}
    for _ in range(1 + options.runs):
        for program in programs:
            found[program].append(run([program, *options.words]))
    for program, runs in found.items():
        seconds, mebibytes = zip(*runs[1:], strict=True)  # the first one may have written Python's caches
        spread = f"{min(seconds):.2f} to {max(seconds):.2f}"
        print(f"{program}: {statistics.median(seconds):.2f} s ({spread}), {statistics.median(mebibytes):.0f} MiB")


if __name__ == "__main__":
    main()
