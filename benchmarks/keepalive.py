"""What --keep-alive is worth: `kv run -n 1` with and without a process that keeps the model, and many runs at a time.

    python benchmarks/keepalive.py MODEL [--runs 200] [--at-once 4] [--device cpu]
    python benchmarks/keepalive.py MODEL --brief              # few runs, for a model that takes seconds to load

Prints wall time (medians), time to the first token as the engine tells it, how long after that and the start of Python
it is on stdout, a second behind the run before and at once behind it, how long the process takes until it has the
model, the memory of the caller, whether all answers are those of a run without, and the memory of the process before
and after, on a GPU that of the card, too. Needs Linux.
Everything is in a folder of its own, and `kv` is the one that is installed for the Python that runs this.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

COMMAND = [sys.executable, "-c", "from kvcli.__main__ import main; main()"]
MOST_S = 120  # until the process must have the model
PAUSE_S = 1.0  # in which the process gets ready for the next command, as it is where a person types
PROMPTS = ["Why is the sky blue?", "Name three rivers.", "What is 2+2?", "Say hello in French."]


class Kv:
    """Runs `kv` with a folder for sockets that nobody else has."""

    def __init__(self, model: str, device: str, folder: str) -> None:
        self.model = str(Path(model).absolute()) if Path(model).exists() else model
        self.folder, self.environment = folder, os.environ | {"XDG_RUNTIME_DIR": folder, "KV_DEVICE": device}

    def run(self, *args: str) -> bytes:
        stdout, _ = (process := self.start(*args)).communicate()
        if process.returncode:
            raise subprocess.CalledProcessError(process.returncode, process.args)
        return stdout

    def start(self, *args: str) -> subprocess.Popen[bytes]:
        """`python -c` takes modules from the folder that it is in first: it is in one that has none."""
        words = [*COMMAND, *args]
        return subprocess.Popen(
            words, env=self.environment, cwd=self.folder, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE
        )

    def ask(self, prompt: str, tokens: int, *args: str) -> bytes:
        return self.run("run", "-m", self.model, "--no-cache", "-s", "1", "-n", str(tokens), *args, prompt)

    def processes(self) -> list[dict[str, Any]]:
        return json.loads(self.run("ps", "--json"))["processes"]

    def timed(self, count: int, *args: str) -> tuple[float, float]:
        """Median seconds of a whole run of one token, and until its first token as it tells them."""
        walls, firsts = [], []
        for _ in range(count):
            began = time.perf_counter()
            told = json.loads(self.ask(PROMPTS[0], 1, "--json", *args))
            walls.append(time.perf_counter() - began)
            firsts.append(told["timings"]["ttft_s"])
        return statistics.median(walls), statistics.median(firsts)

    def said(self, pause: float) -> tuple[float, float]:
        """Behind a pause, seconds of the engine's until a first token, and all others until it is on stdout."""
        time.sleep(pause)
        began = time.perf_counter()
        process = self.start("run", "-m", self.model, "--no-cache", "-s", "1", "-n", "1", "--jsonl", PROMPTS[0])
        assert process.stdout
        took, first = 0.0, 0.0
        for line in process.stdout:
            told = json.loads(line)
            if told["event"] == "token":
                took = time.perf_counter() - began
            first = told.get("timings", {}).get("ttft_s", 0.0)
        process.wait()
        return first, took - first

    def beside(self, count: int, pause: float) -> tuple[float, float, float]:
        """Median seconds that Python takes to start, that the engine takes to a first token, and that pass until it is
        on stdout besides, with so many seconds before each run."""
        starts = [started(pause) for _ in range(count)]
        said = [self.said(pause) for _ in range(count)]
        firsts, others = zip(*said, strict=True)
        start = statistics.median(starts)
        return start, statistics.median(firsts), statistics.median(others) - start

    def caller_bytes(self) -> int:
        """The most memory that the caller's process had."""
        process = self.start("run", "-m", self.model, "--no-cache", "-n", "64", "--ignore-eos", PROMPTS[0])
        assert process.stdout
        process.stdout.read(1)
        status = Path(f"/proc/{process.pid}/status").read_text()
        process.stdout.read()
        process.wait()
        return int(status.partition("VmHWM:")[2].split()[0]) << 10


def started(pause: float) -> float:
    """Behind a pause, seconds that Python takes to do nothing."""
    time.sleep(pause)
    began = time.perf_counter()
    subprocess.run([sys.executable, "-c", "pass"], stdin=subprocess.DEVNULL, check=True, capture_output=True)
    return time.perf_counter() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--runs", type=int)
    parser.add_argument("--at-once", type=int, default=4)
    parser.add_argument("--repeat", type=int)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--brief", action="store_true")
    asked = parser.parse_args()
    runs, repeat, prompts = (12, 3, 2) if asked.brief else (200, 9, len(PROMPTS))
    with tempfile.TemporaryDirectory() as folder:
        kv = Kv(asked.model, asked.device, folder)
        measure(kv, asked.runs or runs, asked.at_once, asked.repeat or repeat, PROMPTS[:prompts])


def ready(kv: Kv) -> list[dict[str, Any]]:
    return [each for each in kv.processes() if each["state"] == "ready"]


def measure(kv: Kv, runs: int, at_once: int, repeat: int, prompts: list[str]) -> None:
    print(f"load {os.getloadavg()[0]:.1f} on {len(os.sched_getaffinity(0))} CPUs")
    wall, first = kv.timed(repeat, "--keep-alive", "0")
    print(f"without: {wall:.3f} s, first token {1000 * first:.0f} ms")
    alone = {prompt: kv.ask(prompt, 8, "--keep-alive", "0") for prompt in prompts}
    kv.ask(prompts[0], 1, "--keep-alive", "1h")
    began = time.perf_counter()
    while not ready(kv) and time.perf_counter() - began < MOST_S:
        time.sleep(0.1)
    try:
        took = time.perf_counter() - began
        print(f"there after {took:.1f} s" if ready(kv) else "it does not stay: see ~/.local/state/kv/keep-alive.log")
        wall, _ = kv.timed(repeat)
        print(f"with:    {wall:.3f} s")
        for pause, how in ((PAUSE_S, "with pauses"), (0.0, "run after run")):
            start, first, more = (1000 * seconds for seconds in kv.beside(repeat, pause))
            print(f"         {how}: Python {start:.0f} ms, first token {first:.0f} ms, out {more:.0f} ms behind both")
        print(f"caller:  {kv.caller_bytes() / (1 << 20):.0f} MiB")
        before, began = kv.processes()[0], time.perf_counter()
        with ThreadPoolExecutor(at_once) as pool:
            asked = [prompts[i % len(prompts)] for i in range(runs)]
            same = sum(pool.map(lambda prompt: kv.ask(prompt, 8) == alone[prompt], asked))
        after, took = kv.processes()[0], time.perf_counter() - began
        print(f"{runs} runs of 8 tokens, {at_once} at a time: {took:.1f} s, {same} answers as without")
        print(f"answered by the process: {after['answered'] - before['answered']}")
        sizes = [f"{each['memory_bytes'] / (1 << 20):.1f}" for each in (before, after)]
        print(f"its memory: {sizes[0]} MiB before, {sizes[1]} MiB after")
        print(f"on {after['device']}: {after['gpu_bytes'] / (1 << 20):.0f} MiB of a GPU")
    finally:
        kv.run("stop", "--all")


if __name__ == "__main__":
    main()
