"""`Host`: the models that are loaded, and how a question finds its one; `Reply`: the answers while they are written."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from kvcli.errors import DoesNotFit, KVError, ModelError
from kvcli.options import SampleOptions
from kvcli.runtime.engine.events import End, Event, Logprobs, Token
from kvcli.runtime.engine.prompt import Prompt
from kvcli.runtime.text import grammar
from kvcli.serve.calls import Calls
from kvcli.serve.worker import Stopped, Work, Worker

if TYPE_CHECKING:
    from kvcli.runtime.text.modeltext import ModelText

PING_S = 10.0  # of silence, after which a stream says that it is alive


@dataclass(frozen=True)
class Question:
    """What one call of an interface asks. `model`: "" = the first one; `prompt` makes its tokens; `count`: answers."""

    model: str
    prompt: Callable[[ModelText], Prompt]
    options: SampleOptions
    count: int = 1
    grammar: Callable[[], str] | None = None  # makes `options.grammar`, which may take a while


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


class Host:
    """The models of a server. Others than the first are loaded when they are asked for, at most `most` at a time: one
    that has not been used for the longest, and writes no answer, makes room."""

    def __init__(self, first: Served, load: Callable[[str], Served], known: Callable[[], list[str]], most: int) -> None:
        """`load` opens a model by its name and may take long; it raises KVError. `known`: names that it can load."""
        self.loaded, self.known, self.most = [first], known, most
        self._first = first.name
        self._names_of_first = ("", first.name, *first.aliases)
        self._load, self._lock = load, asyncio.Lock()
        self._texts = ThreadPoolExecutor(1, "kv-text")  # templates and tokenizers, beside the event loop

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
            known = self.known()
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

        def make() -> tuple[Served, Prompt, SampleOptions]:
            options = question.options
            if question.grammar is not None:
                grammar.known(served.text.tokenizer)
                options = replace(options, grammar=question.grammar())
            return served, question.prompt(served.text), options

        return await asyncio.get_running_loop().run_in_executor(self._texts, make)

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
        """See `Worker.stop`, for all."""
        for served in self.loaded:
            served.worker.stop(seconds)
        self._texts.shutdown()


class NoModel(ModelError):
    """A name that means no model of this server."""
