"""Hostile calls on a server: what breaks it, what it tells, how long it takes, and whether others notice.

    python benchmarks/abuse.py --port 8080 [--count 10000] [--seed 1] [--threads 8] [--pid PID]

Values of wrong types at every key, broken encodings, sizes, schemas that explode, streams that are not read, calls that
come byte by byte. Meanwhile an ordinary client asks one question again and again, whose answer must not change. With
--pid the memory of the server is watched. Prints findings, then a table; the exit code is 1 where there are findings.
"""

from __future__ import annotations

import argparse
import copy
import json
import random
import socket
import statistics
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

Address = tuple[str, int]
SLOW_S = 60.0  # in which a call has to be over
FINE = {200, 204, 400, 401, 403, 404, 405, 408, 413, 429, 431, 501, 503}  # that a hostile call may get
LEAKS = b"Traceback", b'File "', b"site-packages", b"internal error", b"Internal Server Error"

_TOOL = {
    "type": "function",
    "function": {"name": "f", "parameters": {"type": "object", "properties": {"a": {"type": "string"}}}},
}
_TURNS = [
    {"role": "user", "content": "Hi"},
    {"role": "assistant", "content": "Ho"},
    {"role": "user", "content": [{"type": "text", "text": "x"}]},
]
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {
        "messages": _TURNS, "max_tokens": 2, "temperature": 1, "top_p": 0.9, "top_k": 5, "min_p": 0.1,
        "seed": 1, "n": 2, "stop": ["a"], "logprobs": True, "top_logprobs": 2, "stream": False,
        "logit_bias": {"5": 1}, "model": "",
        "presence_penalty": 0.1, "frequency_penalty": 0.1, "repeat_penalty": 1.1, "reasoning_effort": "low",
        "chat_template_kwargs": {"a": 1}, "response_format": {"type": "json_object"}, "tools": [_TOOL],
        "tool_choice": "none", "parallel_tool_calls": True, "stream_options": None, "user": "u", "ignore_eos": False,
    },
    "/v1/completions": {
        "prompt": ["Hi", "Ho"], "max_tokens": 2, "temperature": 1, "n": 1, "logprobs": 2, "echo": False, "stop": "a",
        "stream": True, "seed": -3, "best_of": 1, "suffix": None,
    },
    "/v1/responses": {
        "input": [*_TURNS[:2], {"type": "function_call", "call_id": "a", "name": "f", "arguments": "{}"},
                  {"type": "function_call_output", "call_id": "a", "output": "1"}],
        "max_output_tokens": 2, "instructions": "x", "temperature": 1, "stream": False, "reasoning": {"effort": "low"},
        "text": {"format": {"type": "json_schema", "schema": {"type": "integer"}}}, "tools": [], "metadata": {"a": "b"},
    },
    "/v1/messages": {
        "messages": [*_TURNS[:2], {"role": "user", "content": [{"type": "text", "text": "x"}]}], "max_tokens": 2,
        "system": [{"type": "text", "text": "s"}], "stop_sequences": ["a"], "temperature": 1, "top_k": 3,
        "stream": False, "thinking": {"type": "enabled", "budget_tokens": 5}, "metadata": {}, "tools": [],
        "tool_choice": {"type": "auto"},
    },
    "/v1/messages/count_tokens": {"messages": _TURNS[:1], "system": "s"},
    "/api/chat": {"messages": _TURNS[:2], "stream": False, "format": "json",
                  "options": {"num_predict": 2, "stop": ["a"], "seed": 1}},
    "/api/generate": {"prompt": "Hi", "stream": False, "system": "s", "raw": False,
                      "options": {"num_predict": 2, "temperature": 1}},
    "/tokenize": {"content": "Hi", "add_special": True, "with_pieces": True},
    "/detokenize": {"tokens": [1, 2, 3]},
    "/api/show": {"model": ""},
}  # fmt: skip
VALUES: list[Any] = [
    None, True, False, 0, -1, 1, 2**31, 2**63, 2**64, 10**40, -(2**70), 0.5, -0.0, 1e308, float("nan"), float("inf"),
    "", "x", " ", "\x00", "\ud800", "�" * 50, "a" * 100_000, "\U0001f600" * 2000, "<|im_end|>" * 50, "{{ 7*7 }}",
    "../../etc", [], {}, [[]], [None], {"": None}, {"a": {"b": []}}, [1] * 5000, ["x"] * 3000, "none", "required",
    "json_object",
]  # fmt: skip


def _deep(text: str, inner: str, behind: str, count: int) -> bytes:
    return (text * count + inner + behind * count).encode()


def _nested(count: int) -> Any:
    """A schema in a schema in a schema."""
    found: Any = {"type": "integer"}
    for _ in range(count):
        found = {"type": "object", "properties": {"a": found, "b": found}, "required": ["a"]}
    return found


SCHEMAS: list[Callable[[], Any]] = [
    lambda: {"type": "string", "pattern": "(a{1,1000}){1,1000}"},
    lambda: {"type": "string", "pattern": "(x+x+)+y" * 30},
    lambda: {"type": "string", "minLength": 10**9},
    lambda: {"type": "array", "items": {"type": "integer"}, "minItems": 10**8},
    lambda: {"enum": [f"value {number}" for number in range(30_000)]},
    lambda: _nested(12),
    lambda: {"anyOf": [{"type": "string", "pattern": f"[a-z]{{{n},{n + 50}}}"} for n in range(300)]},
    lambda: {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}},
    lambda: {"$ref": "#/$defs/a", "$defs": {"a": {"anyOf": [{"$ref": "#/$defs/a"}, {"$ref": "#/$defs/a"}]}}},
    lambda: {"type": "object", "properties": {f"k{number}": {"type": "string"} for number in range(5000)}},
    lambda: {"allOf": [{"type": "string", "pattern": f".{{{n}}}"} for n in range(50)]},
    lambda: {"$ref": "file:///etc/passwd"},
    lambda: {"type": "integer", "multipleOf": 0},
    lambda: {"type": "number", "minimum": 1e308, "maximum": -1e308},
    lambda: {"type": "object", "patternProperties": {"^(a|b)*c{1,500}$": {"type": "object"}}},
]


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The path of everything in a body."""
    yield path
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, each in inner:
        yield from places(each, (*path, key))


def put(body: Any, path: tuple[Any, ...], value: Any) -> Any:
    if not path:
        return value
    found = copy.deepcopy(body)
    holder = found
    for key in path[:-1]:
        holder = holder[key]
    holder[path[-1]] = value
    return found


@dataclass(frozen=True)
class Hostile:
    """`data`: all that is sent, in pieces with `pause` seconds between them; `read`: bytes that are read of the answer,
    None = all."""

    what: str
    data: list[bytes]
    pause: float = 0.0
    read: int | None = None


def call(path: str, body: bytes, what: str, method: str = "POST", head: str = "", **how: Any) -> Hostile:
    lead = f"{method} {path} HTTP/1.1\r\nhost: 127.0.0.1\r\nconnection: close\r\n"
    length = (
        ""
        if "content-length" in head.lower() or "transfer-encoding" in head.lower()
        else f"content-length: {len(body)}\r\n"
    )
    return Hostile(what, [f"{lead}{length}{head}\r\n".encode("latin-1", "replace") + body], **how)


def wrong_value(draw: random.Random) -> Hostile:
    path = draw.choice(list(BODIES))
    body = BODIES[path]
    at = draw.choice(list(places(body)))
    value = draw.choice(VALUES)
    changed = put(body, at, value) if draw.random() < 0.9 or not at else put(body, at[:-1], {"unknown": value})
    where = ".".join(map(str, at)) or "the body"
    return call(path, json.dumps(changed).encode(), f"{path} with {str(value)[:30]!r} at {where}")


def schema(draw: random.Random) -> Hostile:
    number = draw.randrange(len(SCHEMAS))
    found = SCHEMAS[number]()
    ways: list[tuple[str, Any]] = [
        ("/v1/chat/completions", {"response_format": {"type": "json_schema", "json_schema": {"schema": found}}}),
        ("/v1/responses", {"text": {"format": {"type": "json_schema", "schema": found}}}),
        ("/api/chat", {"format": found}),
        ("/v1/chat/completions", {"tools": [{"function": {"name": "f", "parameters": {"properties": {"a": found}}}}]}),
    ]  # fmt: skip
    path, more = draw.choice(ways)
    body = {
        key: value
        for key, value in BODIES[path].items()
        if key in ("messages", "input", "max_tokens", "max_output_tokens", "stream", "options")
    }
    return call(path, json.dumps({**body, **more}).encode(), f"{path} with the schema {number}")


def broken(draw: random.Random) -> Hostile:
    path = draw.choice(list(BODIES))
    whole = json.dumps(BODIES[path]).encode()
    ways: list[tuple[str, bytes, str]] = [
        ("cut", whole[: draw.randrange(len(whole))], ""),
        ("not UTF-8", whole.replace(b"Hi", b"\xff\xfe\xc0"), ""),
        ("UTF-16", whole.decode().encode("utf-16"), ""),
        ("a mark of byte order", b"\xef\xbb\xbf" + whole, ""),
        ("nested lists", _deep("[", "", "]", 100_000), ""),
        ("nested objects", _deep('{"messages":', "1", "}", 50_000), ""),
        ("nested in a message", b'{"messages":[{"role":"user","content":' + _deep("[", "", "]", 20_000) + b"}]}", ""),
        ("nothing", b"", ""),
        ("a large number", b'{"max_tokens":' + b"9" * 100_000 + b"}", ""),
        ("bytes", bytes(draw.randrange(256) for _ in range(200)), ""),
        ("gzip", b"\x1f\x8b" + whole, "content-encoding: gzip\r\n"),
        ("a key twice", whole[:-1] + b',"max_tokens":1}', ""),
        ("another length", whole, f"content-length: {len(whole) + draw.choice([-5, 5, 10**9])}\r\n"),
        ("a length that is none", whole, "content-length: -5\r\n"),
        ("two lengths", whole, "content-length: 5\r\ncontent-length: 7\r\n"),
        ("chunks", b"5\r\nabc", "transfer-encoding: chunked\r\n"),
        ("chunks of nonsense", b"zz\r\nabc\r\n", "transfer-encoding: chunked\r\n"),
        ("a long head", whole, f"x-long: {'a' * 70_000}\r\n"),
        ("many heads", whole, "".join(f"x-{number}: a\r\n" for number in range(500))),
        ("a wrong host", whole, "host: evil.example\r\n"),
        ("an origin", whole, "origin: http://evil.example\r\n"),
        ("expect", whole, "expect: 100-continue\r\n"),
        ("upgrade", whole, "upgrade: websocket\r\nconnection: upgrade\r\n"),
    ]  # fmt: skip
    what, body, head = draw.choice(ways)
    return call(path, body, f"{path}: {what}", head=head, pause=0.0)


PATHS = [
    "/", "/v1/models/" + "a" * 3000, "/v1/models/%00", "/../etc/passwd", "/v1//chat", "/%ff%fe", "*", "http://a/b",
    "/metrics", "/slots", "/v1/models", "/api/tags", "/api/ps", "/health", "/api/embed",
]  # fmt: skip


def odd_route(draw: random.Random) -> Hostile:
    path = draw.choice(PATHS)
    method = draw.choice(["GET", "POST", "PUT", "DELETE", "OPTIONS", "HEAD", "TRACE", "FOO", "G\x00T", "get"])
    return call(path, draw.choice([b"", b"{}", b"x"]), f"{method} {path[:30]}", method)


def unread(draw: random.Random) -> Hostile:
    body = {"messages": _TURNS[:1], "stream": True, "max_tokens": draw.choice([5, 400]), "ignore_eos": True}
    return call(
        "/v1/chat/completions", json.dumps(body).encode(), "a stream that is left", read=draw.choice([0, 1, 300])
    )


def slowly(draw: random.Random) -> Hostile:
    whole = call("/v1/chat/completions", json.dumps(BODIES["/v1/chat/completions"]).encode(), "byte by byte").data[0]
    begun = whole[: draw.choice([10, 60, len(whole) - 20])]
    return Hostile("byte by byte, and never whole", [bytes([byte]) for byte in begun[:40]] + [begun[40:]], 0.01, 0)


def large(draw: random.Random) -> Hostile:
    text = draw.choice(["word ", "é", "\n", "<", "a"]) * draw.choice([50_000, 400_000])
    path = draw.choice(["/v1/chat/completions", "/tokenize", "/v1/completions"])
    body = {"messages": [{"role": "user", "content": text}]} if "chat" in path else {"content": text, "prompt": text}
    body = {"content": text} if path == "/tokenize" else body
    body.pop("content", None) if path == "/v1/completions" else None
    return call(path, json.dumps(body).encode(), f"{path} with {len(text):,} characters")


KINDS: list[tuple[Callable[[random.Random], Hostile], int]] = [
    (wrong_value, 60), (broken, 15), (odd_route, 8), (schema, 5), (unread, 6), (slowly, 4), (large, 2),
]  # fmt: skip


def hostile(draw: random.Random) -> Hostile:
    makes, weights = zip(*KINDS, strict=True)
    return draw.choices(makes, weights)[0](draw)


def attempt(address: Address, each: Hostile) -> tuple[int, float, str]:
    """The status of the answer (0 = there was none), seconds, and what was wrong with it ("" = nothing)."""
    began, answer = time.perf_counter(), bytearray()
    try:
        with socket.create_connection(address, timeout=SLOW_S) as connection:
            try:
                for piece in each.data:
                    connection.sendall(piece)
                    if each.pause:
                        time.sleep(each.pause)
                while each.read is None or len(answer) < each.read:
                    if not (found := connection.recv(65536)):
                        break
                    answer += found
            except (ConnectionError, BrokenPipeError):
                pass  # the server may have had enough
    except TimeoutError:
        return 0, time.perf_counter() - began, f"{each.what}: no end within {SLOW_S:.0f} s"
    except OSError as error:
        return 0, time.perf_counter() - began, f"{each.what}: {error}"
    if answer.startswith(b"HTTP/1.1 100"):
        del answer[: answer.find(b"\r\n\r\n") + 4]
    took, status = time.perf_counter() - began, int(answer[9:12]) if answer[9:12].isdigit() else 0
    if leaked := [leak for leak in LEAKS if leak in answer]:
        return status, took, f"{each.what}: status {status}, {leaked[0].decode()} in {bytes(answer[-300:])!r}"
    if status and status not in FINE:
        return status, took, f"{each.what}: status {status}: {bytes(answer[-300:])!r}"
    body = answer.partition(b"\r\n\r\n")[2]
    if status >= 400 and body and b"application/json" in answer:
        json.loads(body)
    return status, took, ""


@dataclass
class Bystander:
    """An ordinary client, whose answer must not change."""

    address: Address
    times: list[float] = field(default_factory=list)
    findings: list[str] = field(default_factory=list)
    over: threading.Event = field(default_factory=threading.Event)

    def run(self) -> None:
        asked = {"messages": [{"role": "user", "content": "Count to ten."}], "max_tokens": 12, "temperature": 0}
        sent = call("/v1/chat/completions", json.dumps(asked).encode(), "the bystander")
        first = None
        while not self.over.is_set():
            status, took, wrong = attempt(self.address, sent)
            text = ask(self.address, asked) if first is None else first
            first = first or text
            if status == 429:
                time.sleep(0.5)
                continue
            if status != 200 or wrong:
                self.findings.append(f"the bystander got status {status} {wrong}")
            elif (again := ask(self.address, asked)) not in (first, ""):
                self.findings.append(f"the bystander got {again[:80]!r}, not {first[:80]!r}")
            self.times.append(took)


def ask(address: Address, asked: dict[str, Any]) -> str:
    """The text of an answer; "" where the server is too busy."""
    import http.client

    connection = http.client.HTTPConnection(*address, timeout=SLOW_S)
    try:
        connection.request("POST", "/v1/chat/completions", json.dumps(asked))
        answer = connection.getresponse()
        data = answer.read()
    except OSError as error:
        return f"no answer: {error}"
    finally:
        connection.close()
    return str(json.loads(data)["choices"][0]["message"]["content"]) if answer.status == 200 else ""


def storm(
    address: Address, count: int, seed: int, threads: int
) -> tuple[list[str], Counter[int], list[float], Bystander]:
    """Findings, how often each status came, seconds of each call, and what the bystander saw."""
    draw = random.Random(seed)
    bystander = Bystander(address)
    thread = threading.Thread(target=bystander.run)
    thread.start()
    with ThreadPoolExecutor(threads) as pool:
        found = list(pool.map(lambda each: attempt(address, each), (hostile(draw) for _ in range(count))))
    bystander.over.set()
    thread.join()
    findings = [wrong for _, _, wrong in found if wrong] + bystander.findings
    return findings, Counter(status for status, _, _ in found), [took for _, took, _ in found], bystander


def resident(pid: int) -> int:
    """MiB of memory of a process."""
    lines = Path(f"/proc/{pid}/status").read_text("utf-8").splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmRSS:")) >> 10


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--port", type=int, default=8080)
    parser.add_argument("--count", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--threads", type=int, default=8)
    parser.add_argument("--pid", type=int)
    given = parser.parse_args()
    memory = [resident(given.pid)] if given.pid else []
    rounds = max(1, given.count // 1000)
    findings, statuses, times, others = list[str](), Counter[int](), list[float](), list[float]()
    for number in range(rounds):
        some = storm(("127.0.0.1", given.port), given.count // rounds, given.seed + number, given.threads)
        findings, statuses, times = findings + some[0], statuses + some[1], times + some[2]
        others += some[3].times
        memory += [resident(given.pid)] if given.pid else []
        print(f"{len(times):,} calls, {len(findings)} findings", file=sys.stderr)
    for told, often in Counter(findings).most_common(40):
        print(f"{often} x {told}")
    print("\n| calls | findings | statuses | median | worst | bystander, median | worst | MiB before, then |")
    print("|---:|---:|---|---:|---:|---:|---:|---|")
    seen = ", ".join(f"{status or 'none'}: {count}" for status, count in sorted(statuses.items()))
    print(
        f"| {len(times):,} | {len(findings)} | {seen} | {1e3 * statistics.median(times):.0f} ms | {max(times):.1f} s "
        f"| {1e3 * statistics.median(others):.0f} ms | {max(others):.1f} s | {', '.join(map(str, memory))} |"
    )
    sys.exit(bool(findings))


if __name__ == "__main__":
    main()
