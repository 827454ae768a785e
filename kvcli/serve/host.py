"""`Host`: the models that are loaded, and how a question finds its one; `EngineReply`: answers as they are written."""

from __future__ import annotations

import asyncio
import math
import threading
import time
import weakref
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import anyio

from kvcli.errors import DoesNotFit, KVError
from kvcli.options import SampleOptions
from kvcli.runtime.engine.events import End, Event
from kvcli.runtime.engine.prompt import Prompt
from kvcli.runtime.headers.facts import weight_type
from kvcli.runtime.host.memory import release
from kvcli.runtime.promptcache import fingerprint
from kvcli.runtime.text import grammar
from kvcli.serve.replies import PING_S, NoModel, Question, Reply, untagged
from kvcli.serve.worker import Busy, Stopped, Work, Worker

if TYPE_CHECKING:
    from kvcli.runtime.text.modeltext import ModelText

LET_GO_S = 1.0  # that answers may take to let go of a model that is unloaded
PATIENCE_S = 20.0  # that what makes a prompt slowly may wait for others of its kind
Made = TypeVar("Made")


async def _aside(make: Callable[[], Made]) -> Made:
    """What `make` returns, which may take minutes: in a thread that nobody waits for when the process ends. Raises what
    it does."""
    made = Future[Made]()
    made.set_running_or_notify_cancel()  # it ends even where nobody waits for it any more

    def run() -> None:
        try:
            made.set_result(make())
        except BaseException as error:
            made.set_exception(error)

    threading.Thread(target=run, name="kv-load", daemon=True).start()
    return await asyncio.wrap_future(made)


def _end(leaving: list[Served]) -> None:
    """Stop the one model of this list, and give its memory back when whoever was answered has let go of it."""
    gone = weakref.ref(leaving[0].worker.engine.loaded)
    leaving.pop().worker.stop(0.0)
    until = time.monotonic() + LET_GO_S
    release()
    while gone() is not None and time.monotonic() < until:
        time.sleep(0.05)
        release()


class EngineReply(Reply):
    """Answers that a worker writes."""

    def __init__(self, served: Served, prompt: Prompt, options: list[SampleOptions]) -> None:
        """Raises what `Worker.submit` does."""
        super().__init__(served.name, served.worker.engine.ctx_size, len(prompt.ids), options)
        loop, events = asyncio.get_running_loop(), asyncio.Queue[tuple[int, Event | KVError]]()
        self.served, self._events = served, events
        self._left = len(options)

        def deliver(number: int, event: Event | KVError) -> None:  # knows no reply, which goes when nobody has it
            if not loop.is_closed():
                loop.call_soon_threadsafe(events.put_nowait, (number, event))

        self._work = Work(prompt, options, deliver)
        served.worker.submit(self._work)

    async def events(self, silence: float = PING_S) -> AsyncIterator[tuple[int, Event] | None]:
        while self._left:
            try:
                with anyio.fail_after(silence):
                    number, event = await self._events.get()
            except TimeoutError:
                yield None
                continue
            if isinstance(event, KVError):
                raise event
            self._left -= isinstance(event, End)
            yield number, event

    def close(self) -> None:
        if self._left:
            self.served.worker.cancel(self._work)


def facts_of(arch: str, size: int, digest: str, parameters: int, weight_type: str, path: Path | None) -> dict[str, Any]:
    """What lists tell of a model, loaded or not. `path`: of its file or folder."""
    return {
        "arch": arch, "file_bytes": size, "digest": digest, "parameters": parameters, "weight_type": weight_type,
        "format": "gguf" if path is None or path.suffix == ".gguf" else "safetensors",
        "modified": int(path.stat().st_mtime) if path is not None and path.exists() else 0,
    }  # fmt: skip


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
        count = sum(prod(tensor.shape) for tensor in file.tensors.values())
        digest = fingerprint.model_hashes(file)["weights"]
        kind = weight_type(file.path.name, file.metadata, file.tensors)
        return facts_of(arch, file.size, digest, count, kind, file.path)

    def as_object(self) -> dict[str, Any]:
        """What lists of models tell."""
        engine = self.worker.engine
        type_k, type_v = engine.loaded.cache_types
        return {
            "name": self.name,
            "created": self.created,
            "loaded": True,
            "title": engine.loaded.title,
            "ctx_size": engine.ctx_size,
            "type_k": type_k,
            "type_v": type_v,
            "device": str(engine.device),
            "parallel": self.worker.parallel,
            **self.facts,
        }


@dataclass(frozen=True)
class Known:
    """A model that can be loaded. `size`: bytes of its file, `digest`: SHA-256 of it; 0 and "" = not known."""

    name: str
    size: int = 0
    arch: str = ""
    digest: str = ""
    parameters: int = 0
    weight_type: str = ""
    path: Path | None = None

    @property
    def facts(self) -> dict[str, Any]:
        return facts_of(self.arch, self.size, self.digest, self.parameters, self.weight_type, self.path)


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
        self._leaving: dict[Served, asyncio.Future[None]] = {}  # as soon as they write no answer
        self._ending: list[threading.Thread] = []  # of models that are let go of
        self._texts = ThreadPoolExecutor(1, "kv-text")  # templates and tokenizers, beside the event loop
        self._slow_texts = ThreadPoolExecutor(2, "kv-slow-text")  # and those that others do not wait for

    def _meant(self, name: str) -> str:
        """The name without Ollama's `:latest`; that of the first model for its aliases."""
        bare = untagged(name, self._names_of_first)
        return self._first if bare in self._names_of_first else bare

    def find(self, name: str) -> Served | None:
        """The loaded model that a name means; "" is the first one."""
        name = self._meant(name)
        return next((each for each in self.loaded if name in (each.name, *each.aliases)), None)

    async def served(self, name: str) -> Served:
        """The model of this name, loaded first where it is not. Raises ModelError for none that is here, DoesNotFit."""
        if (found := self.find(name)) is not None:
            return found
        return await asyncio.shield(self._loaded(name))  # goes on for others where the one who asked goes away

    def _check(self, name: str) -> str:
        """The name of a model that can be loaded. Raises NoModel for one that is not here."""
        known = [each.name for each in self.known()]
        name = self._meant(name)
        if name not in (self._first, *known):
            there = ", ".join(dict.fromkeys([*(each.name for each in self.loaded), *known]))
            raise NoModel(f"there is no model {name[:200]!r} here", f"there are {there}")
        return name

    async def _loaded(self, name: str) -> Served:
        async with self._lock:
            if (found := self.find(name)) is not None:
                return found
            name = self._check(name)
            while True:
                while len(self.loaded) >= self.most:
                    await self._unload_one()
                await self._ended()
                try:
                    found = await _aside(lambda: self._load(name))
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
        self._retired(min(idle, key=lambda each: each.worker.used))  # else it was asked meanwhile

    async def unload(self, name: str) -> None:
        served = self.find(name)
        if served is None:
            self._check(name)
        elif not self._retired(served):
            self._leaving[served] = asyncio.ensure_future(self._leave(served))

    async def _leave(self, served: Served) -> None:
        """Let go of it as soon as it writes no answer."""
        while served in self.loaded and not self._retired(served):
            await asyncio.sleep(0.05)
        self._leaving.pop(served, None)

    def _retired(self, served: Served) -> bool:
        """Let go of it, if it writes no answer; whether that is so."""
        if not served.worker.retire():
            return False
        self.loaded.remove(served)
        self._ending = [each for each in self._ending if each.is_alive()]
        self._ending.append(threading.Thread(target=_end, args=([served],), name="kv-unload", daemon=True))
        self._ending[-1].start()
        return True

    async def _ended(self) -> None:
        """Wait for models that were let go of: another one may need their memory."""
        for each in self._ending:
            await asyncio.get_running_loop().run_in_executor(None, each.join)

    async def prompt(self, question: Question) -> tuple[Served, Prompt, SampleOptions]:
        """The model that is asked, its tokens of the question, and the options with the grammar. Raises KVError."""
        served = await self.served(question.model)
        engine = served.worker.engine
        engine.terms.check_text(question.chars, engine.tokenizer.longest)

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
        wait for it. Raises what it does; Busy where it was not begun in time."""
        pool, until = (self._slow_texts, time.monotonic() + PATIENCE_S) if slow else (self._texts, math.inf)

        def begun() -> Made:
            if time.monotonic() > until:  # its turn came too late: whoever waits behind it has a turn sooner
                raise Busy("calls with schemas, tools or long prompts wait for each other", "ask again later")
            return make()

        return await asyncio.get_running_loop().run_in_executor(pool, begun)

    async def count(self, question: Question) -> int:
        return len((await self.prompt(question))[1].ids)

    async def load(self, name: str) -> bool:
        return (await self.served(name)).text.template is not None

    def named(self, name: str) -> str:
        served = self.find(name)
        return served.name if served else name

    def models(self) -> list[dict[str, Any]]:
        found = [each.as_object() for each in self.loaded]
        there = {each["name"]: each for each in found}
        for known in self.known():
            if known.name not in there:
                found.append({"name": known.name, "created": 0, "loaded": False, **known.facts})
            elif known.digest:
                there[known.name]["digest"] = known.digest  # as it was before it was loaded
        return found

    async def ask(self, question: Question) -> Reply:
        while True:
            served, prompt, options = await self.prompt(question)
            try:
                return EngineReply(served, prompt, served.worker.settled(options, question.count))
            except Stopped:
                if served in self.loaded:
                    raise  # else it had to make room for another one meanwhile

    def stop(self, seconds: float) -> None:
        """See `Worker.stop`, for all at once. Texts that are at work are not waited for."""
        stops = [threading.Thread(target=each.worker.stop, args=(seconds,), daemon=True) for each in self.loaded]
        for each in stops:
            each.start()
        for each in stops:
            each.join()
        for each in self._ending:  # they may write caches
            each.join()
        for pool in (self._texts, self._slow_texts):
            pool.shutdown(wait=False, cancel_futures=True)
