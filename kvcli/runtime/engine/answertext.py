"""`AnswerText`: from the ids of an answer to what may be shown of it, told apart from thinking and from calls of tools,
up to a stop string."""

from __future__ import annotations

from typing import NamedTuple

from kvcli.runtime.text.reasoning import Style, Thinking
from kvcli.runtime.text.stops import StopMatcher
from kvcli.runtime.text.tokenizer import StreamDecoder, Tokenizer
from kvcli.runtime.text.tools.parts import CallPart
from kvcli.runtime.text.tools.use import ToolUse


class Shown(NamedTuple):
    """Text of the answer, in which stop strings are looked for; text of the thinking; what came of calls."""

    text: str
    reasoning: str
    calls: tuple[CallPart, ...]


class AnswerText:
    """What may be shown of an answer, as its tokens come."""

    def __init__(
        self, tokenizer: Tokenizer, thinking: Thinking | None, stops: tuple[str, ...], tools: ToolUse | None = None
    ) -> None:
        self._splitter = thinking.splitter(tools is not None) if thinking else None
        marks = (thinking.marks if thinking else frozenset()) | (tools.marks if tools else frozenset())
        self._decoder = StreamDecoder(tokenizer, True, marks)
        self._reader = tools.reader() if tools else None
        self._matcher = StopMatcher(stops)

    @property
    def style(self) -> Style | None:
        """How the thinking is marked that the newest token belongs to; None = it belongs to none."""
        return self._splitter.style if self._splitter else None

    @property
    def thinks(self) -> bool:
        """Whether the newest token is thinking."""
        return self.style is not None

    @property
    def stop(self) -> str | None:
        """The stop string that was found."""
        return self._matcher.stop

    @property
    def raw(self) -> str:
        """The answer with its thinking and the marks of it; "" = nothing was told apart."""
        return self._splitter.raw if self._splitter else ""

    @property
    def calls_begun(self) -> str:
        """All text since the newest mark of a call, when it was found; "" = none was, or it was of none."""
        return self._reader.begun if self._reader else ""

    @property
    def calls(self) -> int:
        """Calls that have come to their ends."""
        return self._reader.whole if self._reader else 0

    def push(self, token: int) -> Shown:
        """What may be shown now that this token has come."""
        return self.given(self._decoder.push(token))

    def given(self, text: str) -> Shown:
        """The same of a text."""
        answer, reasoning = self._splitter.push(text) if self._splitter else (text, "")
        return self._told(answer, reasoning)

    def rest(self, whole: bool) -> Shown:
        """What was held back. An answer that is not `whole` may end inside a character, which is no text yet."""
        text, reasoning, calls = self.given(self._decoder.flush() if whole else "")
        if self._splitter:
            held = self._told(*self._splitter.flush())
            text, reasoning, calls = text + held.text, reasoning + held.reasoning, calls + held.calls
        if self._reader:
            more, parts = self._reader.flush()
            text, calls = text + self._matcher.push(more), calls + parts
        return Shown(text + self._matcher.flush(), reasoning, calls)

    def _told(self, answer: str, reasoning: str) -> Shown:
        calls: tuple[CallPart, ...] = ()
        if self._reader:
            answer, calls = self._reader.push(answer)
        return Shown(self._matcher.push(answer), reasoning, calls)
