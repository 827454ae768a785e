"""Load on `kv serve`: tokens a second and time to the first token, for some numbers of clients at a time.

python benchmarks/serve.py MODEL [--clients 1,4,16,64] [--prompt 200] [--tokens 32] [--rounds 2] [-- OPTIONS]

OPTIONS are those of kv serve. Every client asks one question after the other, each about another text; the beginning of
all is the same system message.
"""

from __future__ import annotations

import argparse
import http.client
import json
import re
import statistics
import subprocess
import sys
import threading
import time
from pathlib import Path

WORDS = (Path(__file__).resolve().parent.parent / "docs" / "architecture.md").read_text("utf-8").split()


def ask(port: int, number: int, prompt: int, tokens: int) -> tuple[float, float, int]:
    """One streamed answer: seconds to its first token, seconds in all, tokens."""
    start = number * 37 % (len(WORDS) - prompt)
    messages = [
        {"role": "system", "content": "You answer questions about the text that follows, in a few words."},
        {"role": "user", "content": f"{number}: {' '.join(WORDS[start : start + prompt // 2])}"},
    ]
    asked = {"messages": messages, "stream": True, "max_tokens": tokens, "temperature": 0, "ignore_eos": True}
    began, first, last = time.perf_counter(), 0.0, ""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=600)
    connection.request("POST", "/v1/chat/completions", json.dumps(asked | {"stream_options": {"include_usage": True}}))
    for line in connection.getresponse():
        if line.startswith(b"data: {"):
            first = first or time.perf_counter() - began
            last = line.decode()
    found = json.loads(last.removeprefix("data: "))
    return first, time.perf_counter() - began, found["usage"]["completion_tokens"]


def load(port: int, clients: int, rounds: int, prompt: int, tokens: int, base: int) -> str:
    """A row of the table."""
    firsts: list[float] = []
    made = [0] * clients

    def client(number: int) -> None:
        for each in range(rounds):
            first, _, count = ask(port, base + number * rounds + each, prompt, tokens)
            firsts.append(first)
            made[number] += count

    threads = [threading.Thread(target=client, args=(number,)) for number in range(clients)]
    began = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    took = time.perf_counter() - began
    late = sorted(firsts)[min(len(firsts) - 1, int(0.95 * len(firsts)))]
    return f"| {clients} | {sum(made) / took:,.1f} | {statistics.median(firsts):.2f} | {late:.2f} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--clients", default="1,4,16,64")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--prompt", type=int, default=200, help="about so many tokens")
    parser.add_argument("--tokens", type=int, default=32)
    own, options = sys.argv[1:], list[str]()
    if "--" in own:
        own, options = own[: own.index("--")], own[own.index("--") + 1 :]
    flags = parser.parse_args(own)
    words = [sys.executable, "-m", "kvcli", "serve", "-m", flags.model, "--port", "0", "--no-cache", *options]
    server = subprocess.Popen(words, stderr=subprocess.PIPE, text=True)
    assert server.stderr is not None
    try:
        line = ""
        while (address := re.search(r"http://127\.0\.0\.1:(\d+)", line)) is None:
            line = server.stderr.readline()
            if not line:
                sys.exit("the server did not start")
        port = int(address[1])
        ask(port, 9999, flags.prompt, flags.tokens)
        print("| clients | tok/s | TTFT p50, s | p95, s |\n|---:|---:|---:|---:|")
        for number, clients in enumerate(map(int, flags.clients.split(","))):
            print(load(port, clients, flags.rounds, flags.prompt, flags.tokens, 1000 * number), flush=True)
    finally:
        server.terminate()
        server.wait()


if __name__ == "__main__":
    main()
