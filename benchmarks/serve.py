"""Load on `kv serve`, or on llama-server: tokens a second and time to the first token, for some numbers of clients.

python benchmarks/serve.py MODEL [--llama-server PROGRAM] [--clients 1,4,16,64] [--prompt 200] [--tokens 32]
    [--rounds 2] [--settle 0] [--verify] [-- OPTIONS]

OPTIONS are those of the server; llama-server's `-c` is of all `-np` slots together, kv's of each answer. Every client
asks one question after the other, each about another text; the beginning of all is the same system message. Before each
measurement all clients ask once for nothing. The first token is the first text that comes. "in all": tokens over all
the time, prompts included; "decoding": between the first and the last token, the median of the answers times those that
are written at a time.
--settle: seconds that the server is left alone first, in which it makes itself ready on a GPU.
--verify asks everything again, one question at a time, and counts the answers that differ.
"""

from __future__ import annotations

import argparse
import http.client
import itertools
import json
import re
import socket
import statistics
import subprocess
import sys
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from urllib.request import urlopen

WORDS = (Path(__file__).resolve().parent.parent / "docs" / "architecture.md").read_text("utf-8").split()


@dataclass(frozen=True)
class Answered:
    """One streamed answer: seconds to its first token, seconds in all, tokens, text."""

    first_s: float
    whole_s: float
    tokens: int
    text: str

    @property
    def decode_tps(self) -> float:
        return (self.tokens - 1) / max(1e-9, self.whole_s - self.first_s)


def ask(port: int, number: int, prompt: int, tokens: int) -> Answered:
    """The answer to question `number`."""
    start = number * 37 % (len(WORDS) - prompt)
    messages = [
        {"role": "system", "content": "You answer questions about the text that follows, in a few words."},
        {"role": "user", "content": f"{number}: {' '.join(WORDS[start : start + prompt // 2])}"},
    ]
    asked = {"messages": messages, "stream": True, "max_tokens": tokens, "temperature": 0, "ignore_eos": True}
    began, chunks = time.perf_counter(), list[tuple[float, str]]()
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=600)
    connection.request("POST", "/v1/chat/completions", json.dumps(asked | {"stream_options": {"include_usage": True}}))
    for line in connection.getresponse():
        if line.startswith(b"data: {"):
            chunks.append((time.perf_counter() - began, line.decode().removeprefix("data: ")))
    took, found = time.perf_counter() - began, [(at, json.loads(each)) for at, each in chunks]
    texts = [(at, choice["delta"].get("content") or "") for at, each in found for choice in each["choices"]]
    first = next((at for at, text in texts if text), took)
    return Answered(first, took, found[-1][1]["usage"]["completion_tokens"], "".join(text for _, text in texts))


def load(port: int, clients: int, rounds: int, prompt: int, tokens: int, base: int) -> dict[int, Answered]:
    """The answers to the questions from `base` on, by number."""
    found: dict[int, Answered] = {}

    def client(number: int) -> None:
        for each in range(base + number * rounds, base + (number + 1) * rounds):
            found[each] = ask(port, each, prompt, tokens)

    threads = [threading.Thread(target=client, args=(number,)) for number in range(clients)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


def row(clients: int, slots: int, found: list[Answered], took: float, again: list[Answered]) -> str:
    """A row of the table. `slots`: most answers that are written at a time; `again`: the same answers, written alone,
    [] = they were not."""
    firsts = sorted(each.first_s for each in found)
    late = firsts[min(len(firsts) - 1, int(0.95 * len(firsts)))]
    decode = min(clients, slots) * statistics.median(each.decode_tps for each in found)
    differ = sum(one.text != other.text for one, other in zip(found, again, strict=False))
    verified = f"{differ} of {len(again)}" if again else "-"
    rates = f"{sum(each.tokens for each in found) / took:,.1f} | {decode:,.1f}"
    return f"| {clients} | {rates} | {statistics.median(firsts):.2f} | {late:.2f} | {verified} |"


def slots_of(options: list[str]) -> int:
    """How many answers a server with these options writes at a time."""
    return next((int(n) for name, n in itertools.pairwise(options) if name in ("--parallel", "-np")), 8)


def begun(model: str, llama: str | None, options: list[str]) -> tuple[subprocess.Popen[str], int]:
    """A server that answers, and its port."""
    if llama is None:
        words = [sys.executable, "-m", "kvcli", "serve", "-m", model, "--port", "0", "--no-cache", *options]
        server = subprocess.Popen(words, stderr=subprocess.PIPE, text=True)
        assert server.stderr is not None
        while line := server.stderr.readline():
            if address := re.search(r"http://127\.0\.0\.1:(\d+)", line):
                return server, int(address[1])
        sys.exit("the server did not start")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = int(free.getsockname()[1])
    words = [llama, "-m", model, "--port", str(port), *options]
    server = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, text=True)
    while server.poll() is None:
        with suppress(OSError), urlopen(f"http://127.0.0.1:{port}/health") as answer:
            if answer.status == 200:
                return server, port
        time.sleep(0.1)
    sys.exit(f"{llama} ended with exit code {server.returncode}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--llama-server", metavar="PROGRAM", help="measured in place of kv serve")
    parser.add_argument("--clients", default="1,4,16,64")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--prompt", type=int, default=200, help="about so many tokens")
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--settle", type=float, default=0.0)
    parser.add_argument("--verify", action="store_true")
    own, options = sys.argv[1:], list[str]()
    if "--" in own:
        own, options = own[: own.index("--")], own[own.index("--") + 1 :]
    flags = parser.parse_args(own)
    server, port = begun(flags.model, flags.llama_server, options)
    try:
        time.sleep(flags.settle)
        print("| clients | tok/s in all | decoding | TTFT p50, s | p95, s | differ |\n|---:|---:|---:|---:|---:|---:|")
        for number, clients in enumerate(map(int, flags.clients.split(","))):
            how, base = (flags.prompt, flags.tokens), 10_000 * number
            load(port, clients, 1, flags.prompt, 8, base + 5000)
            began = time.perf_counter()
            found = load(port, clients, flags.rounds, *how, base)
            took = time.perf_counter() - began
            again = [ask(port, each, *how) for each in found] if flags.verify else []
            print(row(clients, slots_of(options), list(found.values()), took, again), flush=True)
    finally:
        server.terminate()
        server.wait()


if __name__ == "__main__":
    main()
