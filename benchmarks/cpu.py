"""Load time, time to first token, prefill and decode speed and peak memory of `kv run`, as a user gets them.

    python benchmarks/cpu.py TEXT_FILE [--model smollm2] [--tokens 512] [--predict 128] [--runs 5]
        [--cache-type auto]

TEXT_FILE is cut to about `--tokens` tokens of prompt. Every run is its own process. Prints a table of medians and one
JSON line last. Also times a one-token run, start-up included.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import time
from pathlib import Path

ENVIRONMENT = os.environ | {"KV_CONFIG": "none"}  # settings of the user do not count


def run(arguments: list[str], prompt: str) -> tuple[dict, float]:
    """One `kv run --json` -> its object, and the wall seconds of the whole process."""
    began = time.perf_counter()
    done = subprocess.run(
        [sys.executable, "-m", "kvcli", "run", "--json", "--raw", *arguments],
        input=prompt.encode(), capture_output=True, check=False, env=ENVIRONMENT,
    )  # fmt: skip
    wall = time.perf_counter() - began
    if done.returncode:
        sys.exit(f"kv run failed with exit code {done.returncode}: {done.stdout.decode()}{done.stderr.decode()}")
    return json.loads(done.stdout), wall


def cut(text: str, tokens: int, model: str) -> str:
    """The first `tokens` tokens of `text`, by `kv tokenize`."""
    done = subprocess.run(
        [sys.executable, "-m", "kvcli", "tokenize", "--json", "-m", model],
        input=text[: tokens * 12].encode(), capture_output=True, check=True, env=ENVIRONMENT,
    )  # fmt: skip
    pieces = json.loads(done.stdout)["pieces"][:tokens]
    return "".join(pieces)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("text", type=Path)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--predict", type=int, default=128)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--cache-type", default="auto", help="as -ct of kv run takes it")
    options = parser.parse_args()
    prompt = cut(options.text.read_text(), options.tokens, options.model)
    arguments = ["-m", options.model, "-ct", options.cache_type, "--temp", "0", "--ignore-eos", "-n"]
    rows = [run([*arguments, str(options.predict)], prompt)[0] for _ in range(options.runs)]
    walls = [run([*arguments, "1"], "Hello")[1] for _ in range(options.runs)]
    median = {key: statistics.median(r["timings"][key] for r in rows) for key in rows[0]["timings"]}
    result = {
        "model": options.model,
        "cache_type": options.cache_type,
        "prompt_tokens": rows[0]["usage"]["prompt_tokens"],
        **median,
        "peak_bytes": statistics.median(r["memory"]["peak_bytes"] for r in rows),
        "one_token_run_s": statistics.median(walls),
        "one_token_run_peak_bytes": resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024,
    }
    print("| what | median |\n|---|---:|")
    for key, value in result.items():
        print(f"| {key} | {value:,.3f} |" if isinstance(value, float) else f"| {key} | {value} |")
    print(json.dumps(result))


if __name__ == "__main__":
    main()
