"""What interfaces ask, and what they are answered, whoever answers: `Question`, `Reply`, `Answers`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Collection
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from kvcli.errors import ModelError
from kvcli.options import SampleOptions
from kvcli.runtime.engine.events import End, Event, Logprobs, Token
from kvcli.runtime.engine.prompt import Prompt
from kvcli.serve.calls import Calls

if TYPE_CHECKING:
    from kvcli.runtime.text.modeltext import ModelText

LONG = 50_000  # characters of a prompt that take a while to tokenize
PING_S = 10.0  # of silence, after which a stream says that it is alive


def untagged(name: str, known: Collection[str]) -> str:
    """A name without the `:latest` that Ollama's clients write behind it, unless it is known with it."""
    return name if name in known else name.removesuffix(":latest")


class NoModel(ModelError):
    """A name that means no model of this server."""


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


class Reply(ABC):
    """The events of the answers to one question, one for each of `options`, of a model in a context of `ctx_size`.
    Close it, or use it in an `async with`: what nobody reads any more is not computed."""

    def __init__(self, model: str, ctx_size: int, prompt_tokens: int, options: list[SampleOptions]) -> None:
        self.model, self.ctx_size, self.prompt_tokens, self.options = model, ctx_size, prompt_tokens, options

    @abstractmethod
    def events(self, silence: float = PING_S) -> AsyncIterator[tuple[int, Event] | None]:
        """(number of the answer, event) as they come; None after so many seconds without any. Raises KVError."""

    @abstractmethod
    def close(self) -> None:
        """Nobody reads any more of it."""

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
        self.close()


class Answers(Protocol):
    """Whoever answers questions: models of this process, or another program."""

    async def ask(self, question: Question) -> Reply:
        """Begin to answer. Raises KVError."""

    async def count(self, question: Question) -> int:
        """Tokens of the prompt. Raises KVError."""

    async def load(self, name: str) -> bool:
        """Have the model of that name ready, "" = the first one; whether it has a chat template. Raises KVError."""

    async def unload(self, name: str) -> None:
        """Let go of the model of that name as soon as it writes no answer. Raises NoModel, Refused where it stays."""

    def named(self, name: str) -> str:
        """The model's own name where it is an alias of a loaded one."""

    def models(self) -> list[dict[str, Any]]:
        """Those that are loaded, with what is known of them, then those that can be loaded."""
