"""kill -9 of a server under load: its clients get an error, and what is stored is whole.

    python benchmarks/kills.py MODEL [--kills 5] [--port 8090]

Starts `kv serve` with a folder of its own for stored prompts, asks it with four clients, kills it, and has `kv cache
verify` look at every file. Prints a row for each kill; the exit code is 1 where a client waits in vain or a file is
bad.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import random
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

WORDS = (Path(__file__).resolve().parent.parent / "docs" / "architecture.md").read_text("utf-8").split()
WAITS_S = 20.0  # that a client may wait behind the kill


def client(port: int, number: int, ends: list[str]) -> None:
    """Ask until something is wrong, and note what that was."""
    draw = random.Random(number)
    while True:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=120)
        try:
            start = draw.randrange(len(WORDS) - 700)
            text = " ".join(WORDS[start : start + 700])  # more than 1,024 tokens, which are stored
            asked = {"messages": [{"role": "user", "content": text}], "max_tokens": 20, "stream": draw.random() < 0.5}
            connection.request("POST", "/v1/chat/completions", json.dumps(asked))
            answer = connection.getresponse()
            answer.read()
            assert answer.status == 200, answer.status
        except (OSError, http.client.HTTPException) as error:
            ends.append(type(error).__name__)
            return
        finally:
            connection.close()


def ready(port: int) -> None:
    for _ in range(600):
        try:
            connection = http.client.HTTPConnection("127.0.0.1", port, timeout=2)
            connection.request("GET", "/health")
            connection.getresponse().read()
            return
        except OSError:
            time.sleep(0.1)
    raise SystemExit("the server does not begin")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--kills", type=int, default=5)
    parser.add_argument("--port", type=int, default=8090)
    given = parser.parse_args()
    draw, failed = random.Random(1), False
    print("| kill | clients ended with | within | stored | kv cache verify |\n|---:|---|---:|---:|---:|")
    with tempfile.TemporaryDirectory() as folder:
        environment = {**os.environ, "XDG_CACHE_HOME": folder}
        kv = [sys.executable, "-m", "kvcli"]
        for number in range(given.kills):
            words = [*kv, "serve", "-m", given.model, "-c", "4k", "--port", str(given.port), "--parallel", "4"]
            server = subprocess.Popen(words, env=environment, stderr=subprocess.DEVNULL)
            ready(given.port)
            ends: list[str] = []
            threads = [
                threading.Thread(target=client, args=(given.port, 10 * number + each, ends)) for each in range(4)
            ]
            for thread in threads:
                thread.start()
            time.sleep(draw.uniform(10, 25))
            server.kill()
            server.wait()
            killed = time.monotonic()
            for thread in threads:
                thread.join(WAITS_S)
            waited = time.monotonic() - killed
            found = subprocess.run([*kv, "cache", "verify", "--json"], env=environment, capture_output=True, text=True)
            stored = sum(path.stat().st_size for path in Path(folder).rglob("*") if path.is_file()) >> 20
            told = ", ".join(sorted(ends))
            print(f"| {number + 1} | {told} | {waited:.1f} s | {stored} MiB | {found.returncode} |", flush=True)
            failed |= len(ends) < 4 or found.returncode != 0
    sys.exit(failed)


if __name__ == "__main__":
    main()
