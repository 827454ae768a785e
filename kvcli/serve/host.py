"""`Host`: the models that are loaded, and how a question finds its one; `Reply`: the answers while they are written."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, TypeVar

from kvcli.errors import DoesNotFit, KVError, ModelError
from kvcli.options import SampleOptions
from kvcli.runtime.engine.events import End, Event, Logprobs, Token
from kvcli.runtime.engine.prompt import Prompt
from kvcli.runtime.promptcache import fingerprint
from kvcli.runtime.text import grammar
from kvcli.serve.calls import Calls
from kvcli.serve.worker import Stopped, Work, Worker

if TYPE_CHECKING:
    from kvcli.runtime.text.modeltext import ModelText

LONG = 50_000  # characters of a prompt that take a while to tokenize
Made = TypeVar("Made")
PING_S = 10.0  # of silence, after which a stream says that it is alive


@dataclass(frozen=True)
class Question:
    """What one call of an interface asks. `model`: "" = the first one; `prompt` makes its tokens; `count`: answers."""

    model: str
    prompt: Callable[[ModelText], Prompt]
    options: SampleOptions
    count: int = 1
    grammar: Callable[[], str] | None = None  # makes `options.grammar`, which may take a while
    tools: bool = False  # the prompt has a grammar of its own
    chars: int = 0  # of text in it

    @property
    def slow(self) -> bool:
        """Whether its prompt may take seconds to make, for which others do not wait."""
        return self.grammar is not None or self.tools or self.chars > LONG


@dataclass
class Answer:
    """One whole answer."""

    parts: list[str] = field(default_factory=list)
    thoughts: list[str] = field(default_factory=list)
    logprobs: list[Logprobs] = field(default_factory=list)
    calls: Calls = field(default_factory=Calls)
    ended: End | None = None

    def take(self, event: Event) -> None:
        if isinstance(event, (Token, End)):
            self.parts.append(event.text)
            self.thoughts.append(event.reasoning)
            for _ in self.calls.take(event.calls):
                pass
        if isinstance(event, Token) and event.logprobs is not None:
            self.logprobs.append(event.logprobs)
        if isinstance(event, End):
            self.ended = event

    @property
    def text(self) -> str:
        return "".join(self.parts)

    @property
    def reasoning(self) -> str:
        return "".join(self.thoughts)

    @property
    def end(self) -> End:
        assert self.ended is not None
        return self.ended


class Reply:
    """The events of the answers to one question. Close it, or use it in an `async with`: what nobody reads any more is
    not computed."""

    def __init__(self, served: Served, prompt: Prompt, options: list[SampleOptions]) -> None:
        """Raises what `Worker.submit` does."""
        loop, self._events = asyncio.get_running_loop(), asyncio.Queue[tuple[int, Event | KVError]]()
        self.served, self.prompt, self.options = served, prompt, options
        self._left = len(options)

        def deliver(number: int, event: Event | KVError) -> None:
            if not loop.is_closed():
                loop.call_soon_threadsafe(self._events.put_nowait, (number, event))

        self._work = Work(prompt, options, deliver)
        served.worker.submit(self._work)

    async def events(self) -> AsyncIterator[tuple[int, Event] | None]:
        """(number of the answer, event) as they come; None after PING_S without any. Raises KVError."""
        while self._left:
            try:
                number, event = await asyncio.wait_for(self._events.get(), PING_S)
            except asyncio.TimeoutError:
                yield None
                continue
            if isinstance(event, KVError):
                raise event
            self._left -= isinstance(event, End)
            yield number, event

    async def whole(self) -> list[Answer]:
        """All answers to their ends. Raises KVError."""
        answers = [Answer() for _ in self.options]
        async for found in self.events():
            if found is not None:
                answers[found[0]].take(found[1])
        return answers

    async def __aenter__(self) -> Reply:
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._left:
            self.served.worker.cancel(self._work)


@dataclass(eq=False)
class Served:
    """A loaded model under its name; `aliases` are others that mean it."""

    name: str
    worker: Worker
    aliases: tuple[str, ...] = ()
    created: int = field(default_factory=lambda: int(time.time()))

    @property
    def text(self) -> ModelText:
        return self.worker.engine.loaded.text

    @cached_property
    def facts(self) -> dict[str, Any]:
        """What is known of its file. `digest`: of its weights."""
        file = self.worker.engine.loaded.file
        arch = str(file.metadata.get("general.architecture", ""))
        return {"arch": arch, "file_bytes": file.size, "digest": fingerprint.model_hashes(file)["weights"]}


@dataclass(frozen=True)
class Known:
    """A model that can be loaded. `size`: bytes of its file, `digest`: SHA-256 of it; 0 and "" = not known."""

    name: str
    size: int = 0
    arch: str = ""
    digest: str = ""


class Host:
    """The models of a server. Others than the first are loaded when they are asked for, at most `most` at a time: one
    that has not been used for the longest, and writes no answer, makes room."""

    def __init__(
        self, first: Served, load: Callable[[str], Served], known: Callable[[], list[Known]], most: int
    ) -> None:
        """`load` opens a model by its name and may take long; it raises KVError. `known`: those that it can."""
        self.loaded, self.known, self.most = [first], known, most
        self._first = first.name
        self._names_of_first = ("", first.name, *first.aliases)
        self._load, self._lock = load, asyncio.Lock()
        self._texts = ThreadPoolExecutor(1, "kv-text")  # templates and tokenizers, beside the event loop
        self._slow_texts = ThreadPoolExecutor(2, "kv-slow-text")  # and those that others do not wait for

    def find(self, name: str) -> Served | None:
        """The loaded model that a name means; "" is the first one."""
        name = self._first if name in self._names_of_first else name
        return next((each for each in self.loaded if name in (each.name, *each.aliases)), None)

    async def served(self, name: str) -> Served:
        """The model of this name, loaded first where it is not. Raises ModelError for none that is here, DoesNotFit."""
        if (found := self.find(name)) is not None:
            return found
        return await asyncio.shield(self._loaded(name))  # goes on for others where the one who asked goes away

    async def _loaded(self, name: str) -> Served:
        async with self._lock:
            if (found := self.find(name)) is not None:
                return found
            known = [each.name for each in self.known()]
            name = self._first if name in self._names_of_first else name
            if name not in (self._first, *known):
                there = ", ".join(dict.fromkeys([*(each.name for each in self.loaded), *known]))
                raise NoModel(f"there is no model {name[:200]!r} here", f"there are {there}")
            while True:
                while len(self.loaded) >= self.most:
                    await self._unload_one()
                try:
                    found = await asyncio.get_running_loop().run_in_executor(None, self._load, name)
                except DoesNotFit:
                    if not self.loaded:
                        raise
                    await self._unload_one()
                    continue
                self.loaded.append(found)
                return found

    async def _unload_one(self) -> None:
        """Let go of the model that was used the longest ago, as soon as one writes no answer."""
        while not (idle := [each for each in self.loaded if each.worker.idle]):
            await asyncio.sleep(0.05)
        oldest = min(idle, key=lambda each: each.worker.used)
        if not oldest.worker.retire():
            return  # it was asked meanwhile
        self.loaded.remove(oldest)
        await asyncio.get_running_loop().run_in_executor(None, oldest.worker.stop, 0.0)

    async def prompt(self, question: Question) -> tuple[Served, Prompt, SampleOptions]:
        """The model that is asked, its tokens of the question, and the options with the grammar. Raises KVError."""
        served = await self.served(question.model)
        served.worker.engine.check_text(question.chars)

        def make() -> tuple[Served, Prompt, SampleOptions]:
            options = question.options
            if question.grammar is not None:
                options = replace(options, grammar=question.grammar())
            prompt = question.prompt(served.text)
            source = prompt.tools.followed(options.grammar)[0] if prompt.tools else options.grammar
            if source:
                grammar.ready(source, served.text.tokenizer)
            return served, prompt, options

        return await self.beside(make, question.slow)

    async def beside(self, make: Callable[[], Made], slow: bool = False) -> Made:
        """What `make` returns, which works on texts: not in the event loop, and if it is `slow` where others do not
        wait for it. Raises what it does."""
        pool = self._slow_texts if slow else self._texts
        return await asyncio.get_running_loop().run_in_executor(pool, make)

    async def ask(self, question: Question) -> Reply:
        """Begin to answer. Raises KVError."""
        while True:
            served, prompt, options = await self.prompt(question)
            try:
                return Reply(served, prompt, served.worker.settled(options, question.count))
            except Stopped:
                if served in self.loaded:
                    raise  # else it had to make room for another one meanwhile

    def stop(self, seconds: float) -> None:
        """See `Worker.stop`, for all. Texts that are at work are not waited for."""
        for served in self.loaded:
            served.worker.stop(seconds)
        for pool in (self._texts, self._slow_texts):
            pool.shutdown(wait=False, cancel_futures=True)


class NoModel(ModelError):
    """A name that means no model of this server."""
