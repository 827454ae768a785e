"""`Answer`: text that is generated while it is read. No torch."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator

from kvcli.options import SampleOptions
from kvcli.runtime.engine.events import End, Event, Logprobs, Timings, Token, Usage


class Answer:
    """One answer of a model. Iterate over it for pieces of text as they come, once, or over `parts` for those of the
    thinking, too; its properties hold the whole.

    A property that needs the end generates what is left, so `model.generate("...").text` is all of the text.
    `close`, or the end of a `with`, ends it early. Whatever the model raises comes out of the call that generates.
    """

    def __init__(
        self, prompt_tokens: int, sampling: SampleOptions, start: Callable[[Callable[[], bool]], Iterator[Event]]
    ) -> None:
        """`start(cancelled)` begins the generation; `sampling` has every value in force."""
        self.prompt_tokens, self.sampling = prompt_tokens, sampling
        self._stopped = stopped = [False]
        self._pieces: list[str] = []
        self._thoughts: list[str] = []
        self._logprobs: list[Logprobs] = []
        self._waiting: deque[tuple[str, str]] = deque()  # pieces that nobody was given yet
        self._end: End | None = None
        self._events = start(lambda: stopped[0])  # without a circle: an answer that nobody has is gone at once
        self._failed = False

    def __iter__(self) -> Iterator[str]:
        return self

    def __next__(self) -> str:
        """The next piece of text, which is never empty."""
        for kind, piece in self.parts():
            if kind == "text":
                return piece
        raise StopIteration

    def parts(self) -> Iterator[tuple[str, str]]:
        """Pieces as they come, of the thinking, too: ("reasoning", piece) and ("text", piece)."""
        while self._waiting or not self.done:
            if not self._waiting:
                self._take()
                continue
            yield self._waiting.popleft()

    def _take(self) -> None:
        """Let the model go on by one event."""
        try:
            event = next(self._events)
        except BaseException:
            self._failed = True
            raise
        if isinstance(event, End):
            self._end = event
        if isinstance(event, Token) and event.logprobs is not None:
            self._logprobs.append(event.logprobs)
        if isinstance(event, (Token, End)):
            for kind, piece, whole in (
                ("reasoning", event.reasoning, self._thoughts), ("text", event.text, self._pieces)
            ):  # fmt: skip
                if piece:
                    whole.append(piece)
                    self._waiting.append((kind, piece))

    def close(self) -> None:
        """End the answer where it is; its text so far stays, and `finish_reason` is "interrupted"."""
        self._stopped[0] = True
        self._result()

    def __enter__(self) -> Answer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def done(self) -> bool:
        """Whether nothing more will come."""
        return self._end is not None or self._failed

    @property
    def text(self) -> str:
        """All of the text."""
        self._result()
        return "".join(self._pieces)

    @property
    def reasoning(self) -> str:
        """What the model thought before it answered; "" = nothing that is told apart."""
        self._result()
        return "".join(self._thoughts)

    @property
    def logprobs(self) -> list[Logprobs]:
        """Of each token, where `logprobs` was asked for."""
        self._result()
        return list(self._logprobs)

    @property
    def ids(self) -> list[int]:
        """The ids of all tokens that were generated."""
        return self._result().ids

    @property
    def finish_reason(self) -> str:
        """ "stop", "length", "context", "repetition" or "interrupted"; see `kvcli.runtime.engine.events.End`."""
        return self._result().finish_reason

    @property
    def usage(self) -> Usage:
        """Counts of tokens, also of those that were not prefilled again."""
        return self._result().usage

    @property
    def timings(self) -> Timings:
        """Seconds of prefill and decoding, and tokens a second."""
        return self._result().timings

    @property
    def losses(self) -> tuple[str, ...]:
        """Why the cache is not what 16 bits and all tokens would give; () = it is."""
        return self._result().losses

    def _result(self) -> End:
        for _ in self:
            pass
        if self._end is None:
            raise RuntimeError("the answer ended with an error")
        return self._end

    def __repr__(self) -> str:
        state = f"finish_reason={self._end.finish_reason!r}" if self._end else "not done"
        return f"<Answer {''.join(self._pieces)[:40]!r}, {state}>"
