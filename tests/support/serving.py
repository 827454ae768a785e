"""A server in this process, over a tiny model: its address, and what the same engine answers without a server."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import httpx
import tiny

from kvcli.notices import Tell
from kvcli.options import CacheOptions, ChatOptions, LoadOptions, PromptCacheOptions, SampleOptions
from kvcli.runtime.engine.engine import Engine
from kvcli.runtime.engine.events import End
from kvcli.runtime.engine.prompt import Prompt
from kvcli.serve import server
from kvcli.serve.app import Guard, application
from kvcli.serve.host import Host, Known, Served
from kvcli.serve.serving import Serving
from kvcli.serve.worker import Worker

TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}</{{ m.role }}>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
GREEDY = SampleOptions(temperature=0.0)


def ignore(text: str) -> None:
    """Nobody is told."""


def open_engine(variant: str = "llama", parallel: int = 4, template: str = TEMPLATE, **cache: Any) -> Engine:
    """With a context of 512 and a chat template."""
    options = CacheOptions(**{"ctx_size": 512, "sequences": parallel, **cache})
    load = LoadOptions(str(tiny.make(variant).path), device="cpu", chat=ChatOptions(template))
    return Engine.open(tiny.make(variant).path, load, options)


def served(engine: Engine, name: str = "tiny", parallel: int = 4, queue: int = 64, **kept: Any) -> Served:
    caches = engine.prompt_caches(PromptCacheOptions(memory=True, **kept), Tell(ignore, ignore, ignore))
    worker = Worker(engine, caches, parallel, queue)
    worker.start()
    return Served(name, worker, ("alias",))


@dataclass
class Server:
    """`url` of it, and its first `engine`."""

    url: str
    engine: Engine
    host: Host
    stopping: threading.Event = field(default_factory=threading.Event)

    @property
    def address(self) -> tuple[str, int]:
        host, _, port = self.url.removeprefix("http://").rpartition(":")
        return host, int(port)

    def post(self, path: str, body: Any, **more: Any) -> httpx.Response:
        sent = {"content": body} if isinstance(body, bytes) else {"json": body}
        return httpx.post(self.url + path, **sent, timeout=60, trust_env=False, **more)

    def get(self, path: str, **more: Any) -> httpx.Response:
        return httpx.get(self.url + path, timeout=60, trust_env=False, **more)

    def chat(self, text: str, **more: Any) -> dict[str, Any]:
        """The first choice of a chat completion."""
        asked = {"messages": [{"role": "user", "content": text}], "max_tokens": 12, "temperature": 0, **more}
        return self.post("/v1/chat/completions", asked).raise_for_status().json()["choices"][0]


def alone(engine: Engine, text: str | list[Mapping[str, Any]], options: SampleOptions) -> tuple[str, list[int]]:
    """The answer of an engine to a conversation, by itself: its text and its ids."""
    messages = [{"role": "user", "content": text}] if isinstance(text, str) else text
    found = engine.loaded.text
    assert found.template is not None
    prompt = Prompt.of_chat(found.tokenizer, found.template, messages)
    pieces, seq = [], engine.new_sequence()
    for event in engine.generate(seq, prompt.ids, options, thinking=prompt.thinking):
        pieces.append(getattr(event, "text", ""))
    seq.close()
    assert isinstance(event, End)
    return "".join(pieces), event.ids


def until(holds: Callable[[], bool]) -> None:
    """Wait for it."""
    deadline = time.monotonic() + 30
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@contextmanager
def running(
    engine: Engine | None = None, guard: Guard | None = None, most: int = 1, others: Mapping[str, Any] | None = None,
    sampling: SampleOptions = SampleOptions(), **how: Any,
) -> Iterator[Server]:  # fmt: skip
    """A server over an engine. `others`: models that it can load, by name: what makes their engines. `sampling`:
    of calls that say nothing."""
    engine = engine or open_engine()
    first, known = served(engine, **how), dict(others or {})
    host = Host(
        first,
        lambda name: replace(served(known[name](), name), aliases=()),
        lambda: [Known(name) for name in known],
        most,
    )
    listening = server.bound("127.0.0.1", 0)
    found = Server(server.address(listening), engine, host)
    app = application(Serving(host, sampling), guard or Guard())
    thread = threading.Thread(target=server.run, args=(app, listening, found.stopping.is_set))
    thread.start()
    try:
        yield found
    finally:
        found.stopping.set()
        thread.join()
        host.stop(0.0)
