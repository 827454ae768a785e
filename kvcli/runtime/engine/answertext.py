"""`AnswerText`: from the ids of an answer to what may be shown of it, told apart from thinking, up to a stop string."""

from __future__ import annotations

from kvcli.runtime.text.reasoning import Style, Thinking
from kvcli.runtime.text.stops import StopMatcher
from kvcli.runtime.text.tokenizer import StreamDecoder, Tokenizer


class AnswerText:
    """Text comes as a pair: of the answer, in which stop strings are looked for, and of the thinking."""

    def __init__(self, tokenizer: Tokenizer, thinking: Thinking | None, stops: tuple[str, ...]) -> None:
        self._splitter = thinking.splitter() if thinking else None
        self._decoder = StreamDecoder(tokenizer, True, thinking.marks if thinking else frozenset())
        self._matcher = StopMatcher(stops)

    @property
    def style(self) -> Style | None:
        """How the thinking is marked that the newest token belongs to; None = it belongs to none."""
        return self._splitter.style if self._splitter else None

    @property
    def stop(self) -> str | None:
        """The stop string that was found."""
        return self._matcher.stop

    @property
    def raw(self) -> str:
        """The answer with its thinking and the marks of it; "" = nothing was told apart."""
        return self._splitter.raw if self._splitter else ""

    def push(self, token: int) -> tuple[str, str]:
        """What may be shown now that this token has come."""
        return self.given(self._decoder.push(token))

    def given(self, text: str) -> tuple[str, str]:
        """The same of a text."""
        answer, reasoning = self._splitter.push(text) if self._splitter else (text, "")
        return self._matcher.push(answer), reasoning

    def rest(self, whole: bool) -> tuple[str, str]:
        """What was held back. An answer that is not `whole` may end inside a character, which is no text yet."""
        text, reasoning = self.given(self._decoder.flush() if whole else "")
        if self._splitter:
            more, thought = self._splitter.flush()
            text, reasoning = text + self._matcher.push(more), reasoning + thought
        return text + self._matcher.flush(), reasoning
