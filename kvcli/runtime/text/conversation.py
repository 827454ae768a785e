"""A chat as messages and as token ids: each turn keeps the ids that the cache already holds.

A template renders the whole conversation anew every turn. The rendering is cut into chunks (a prompt, its
answer, the next prompt, ...), each with the text it stands for and the ids that went through the model. As
long as the new rendering begins with the same text, the old ids are kept, answers exactly as they were
generated, and only the text behind them is tokenized. Where a template rewrites history (drops old
thinking, trims an answer), the chunks before that point are kept.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING, Any

from kvcli.errors import UsageError

if TYPE_CHECKING:
    from kvcli.runtime.text.reasoning import Thinking
    from kvcli.runtime.text.template import ChatTemplate
    from kvcli.runtime.text.tokenizer import Tokenizer

Segments = list[tuple[str, bool]]  # (text, trusted): special tokens are parsed in trusted text only


@dataclass(frozen=True)
class _Chunk:
    """A stretch of the rendering and its ids. Trusted text never equals other text, whatever the letters."""

    segments: Segments
    ids: list[int]


Snapshot = tuple[list[dict[str, str]], list[_Chunk], "str | None"]


class Conversation:
    """The messages of one chat, without the sequence that caches them.

    Turns alternate: a user message, then an answer (perhaps a partial one). A method that raises changes
    nothing.
    """

    def __init__(self, tokenizer: Tokenizer, template: ChatTemplate, system: str | None = None) -> None:
        self.tokenizer, self.template = tokenizer, template
        self.system = system
        self.messages: list[dict[str, str]] = []  # without the system message
        self._chunks: list[_Chunk] = []
        self._rendered: Segments = []  # the prompt that was made last

    @property
    def tokens(self) -> list[int]:
        """All ids so far: what the cache holds after a turn, but for the last one or two."""
        return [token for chunk in self._chunks for token in chunk.ids]

    @property
    def turns(self) -> int:
        """Answered messages."""
        return sum(message["role"] == "assistant" for message in self.messages)

    def add_user(self, text: str) -> list[int]:
        """Append the user's message; the ids of the whole prompt. Raises TemplateError."""
        return self._prompt([*self.messages, {"role": "user", "content": text}])

    def alone(self, text: str) -> int:
        """Tokens of a prompt that has the system message and this message only. Raises TemplateError."""
        rendering = self._render([{"role": "user", "content": text}])
        return len(self.tokenizer.encode_segments(rendering, add_bos=True))

    def turn_ends(self) -> list[int]:
        """How many tokens there are up to the end of each answer, as far as the next message is tokenized apart."""
        ends = accumulate(len(chunk.ids) for chunk in self._chunks)
        return [end for end, chunk in zip(ends, self._chunks, strict=True) if not any(own for _, own in chunk.segments)]

    def system_tokens(self) -> int:
        """How many tokens every prompt begins with, whatever the first message is: the system message, if any.
        Raises TemplateError."""
        one, other = (self._render([{"role": "user", "content": text}]) for text in ("a", "b"))
        ids = (self.tokenizer.encode_segments(rendering, add_bos=True) for rendering in (one, other))
        return next(i for i, (x, y) in enumerate(zip(*ids, strict=False)) if x != y)

    def thinking(self) -> Thinking | None:
        """How the answer to the prompt is told apart from thinking."""
        return self.template.thinking(self._rendered, self.tokenizer)

    def record_answer(self, text: str, ids: list[int], reasoning: str = "", raw: str = "") -> None:
        """Append the answer that was shown, whole or partial, and the ids generated for it. `raw`: with its thinking
        and the marks of it, where there was any."""
        end = len(ids)
        while end and ids[end - 1] in self.tokenizer.eog_ids:
            end -= 1  # the template writes the end of the turn
        kept = {"reasoning_content": reasoning, "raw": raw} if reasoning else {}
        self.messages.append({"role": "assistant", "content": text, **kept})
        text = self._as_template_takes(self.messages[-1])["content"]
        # Ids that say more than what was shown (a stop string or an incomplete character was cut off) are not kept.
        for length in range(end, max(-1, end - 4), -1):
            if text in (self.tokenizer.decode(ids[:length]), self.tokenizer.decode(ids[:length], continues=True)):
                self._chunks.append(_Chunk([(text, False)] if text else [], ids[:length]))
                break

    def regen(self) -> list[int]:
        """Take the last answer back; the prompt's ids again. Raises UsageError if there is none."""
        if not self.turns:
            raise UsageError("there is no answer to regenerate")
        return self._prompt(self.messages[:-1])

    def undo(self) -> str:
        """Take the last message and its answer back: the message's text. UsageError if there is none."""
        if not self.messages:
            raise UsageError("there is no turn to undo")
        keep = len(self.messages) - (2 if self.messages[-1]["role"] == "assistant" else 1)
        before, self.messages = self.messages, self.messages[:keep]
        try:
            self.refresh()
        except BaseException:
            self.messages = before
            raise
        return before[keep]["content"]

    def snapshot(self) -> Snapshot:
        """The state that `restore` brings back."""
        return self.messages.copy(), self._chunks.copy(), self.system

    def restore(self, snapshot: Snapshot) -> None:
        """Go back to a snapshot of this conversation."""
        self.messages, self._chunks, self.system = snapshot[0].copy(), snapshot[1].copy(), snapshot[2]

    def state(self) -> dict[str, Any]:
        """All of it as plain values, for JSON."""
        chunks = [{"segments": [list(s) for s in chunk.segments], "ids": chunk.ids} for chunk in self._chunks]
        return {"system": self.system, "messages": self.messages.copy(), "chunks": chunks}

    def set_state(self, state: dict[str, Any]) -> None:
        """Take over what `state` gave; without chunks the text is tokenized again. Raises ValueError for nonsense, and
        TemplateError."""
        try:
            system = state["system"]
            messages = [_message(m) for m in state["messages"]]
            chunks = [
                _Chunk([(str(text), bool(trusted)) for text, trusted in c["segments"]], [int(i) for i in c["ids"]])
                for c in state["chunks"]
            ]
        except (KeyError, TypeError) as error:
            raise ValueError(f"not a conversation: {error}") from None
        roles = [m["role"] for m in messages]
        texts = [system, *(text for m in messages for text in m.values())]
        if roles != (["user", "assistant"] * len(roles))[: len(roles)] or not all(
            isinstance(text, str) for text in texts if text is not None
        ):
            raise ValueError("not a conversation: its roles do not alternate")
        if any(not 0 <= i < self.tokenizer.vocab_size for c in chunks for i in c.ids):
            raise ValueError("not a conversation: its tokens are not this model's")
        before = self.snapshot()
        self.restore((messages, chunks, system))
        try:
            if not chunks:
                self.refresh()
        except BaseException:
            self.restore(before)
            raise

    def clear(self) -> None:
        """A new conversation with the same system message."""
        self.messages.clear()
        self._chunks.clear()

    def set_system(self, text: str | None) -> None:
        """Replace the system message and keep the turns; the first ids differ. Raises TemplateError."""
        before, self.system = self.system, text
        try:
            self.refresh() if self.messages else self.alone("")
        except BaseException:
            self.system = before
            raise

    def refresh(self) -> None:
        """Bring the ids in line with the system message and the messages. Raises TemplateError."""
        rendering = self._render(self.messages, generation_prompt=False) if self.messages else []
        kept, rest = self._match(rendering)
        del self._chunks[kept:]
        if not all(trusted for _, trusted in rest):  # more than what the template puts behind the last answer
            self._chunks.append(_Chunk(rest, self.tokenizer.encode_segments(rest, add_bos=kept == 0)))

    def _render(self, messages: list[dict[str, str]], generation_prompt: bool = True) -> Segments:
        system = [] if self.system is None else [{"role": "system", "content": self.system}]
        given = [self._as_template_takes(message) for message in messages]
        segments = self.template.render_segments([*system, *given], add_generation_prompt=generation_prompt)
        return _merged(segments)

    def _as_template_takes(self, message: dict[str, str]) -> dict[str, str]:
        if "reasoning_content" not in message:
            return message
        return self.template.answered(message["content"], message["reasoning_content"], message["raw"])

    def _match(self, rendering: Segments) -> tuple[int, Segments]:
        """How many chunks the rendering begins with, and what follows them."""
        for kept, chunk in enumerate(self._chunks):
            rest = _without_prefix(rendering, chunk.segments)
            if rest is None:
                return kept, rendering
            rendering = rest
        return len(self._chunks), rendering

    def _prompt(self, messages: list[dict[str, str]]) -> list[int]:
        """Render `messages`, keep the chunks that they begin with, tokenize the rest as a new one."""
        self._rendered = self._render(messages)
        kept, rest = self._match(self._rendered)
        new = self.tokenizer.encode_segments(rest, add_bos=kept == 0) if rest else []
        self._chunks[kept:] = [_Chunk(rest, new)]
        self.messages = messages
        return self.tokens


_KEYS = ("role", "content")
_KEYS_OF_THINKING = ("reasoning_content", "raw")


def _message(value: dict[str, Any]) -> dict[str, str]:
    """A message of a state: what belongs to it. Raises KeyError, TypeError."""
    thought = all(key in value for key in _KEYS_OF_THINKING)
    return {key: value[key] for key in (*_KEYS, *(_KEYS_OF_THINKING if thought else ()))}


def _merged(segments: Segments) -> Segments:
    """Neighbours of equal trust become one segment; empty ones vanish."""
    result: Segments = []
    for text, trusted in segments:
        if result and result[-1][1] == trusted:
            result[-1] = (result[-1][0] + text, trusted)
        elif text:
            result.append((text, trusted))
    return result


def _without_prefix(segments: Segments, prefix: Segments) -> Segments | None:
    """`segments` less `prefix`; None if they do not begin with it. Both are merged."""
    rest = list(segments)
    for text, trusted in prefix:
        if not rest or rest[0][1] != trusted or not rest[0][0].startswith(text):
            return None
        tail = rest[0][0][len(text) :]
        rest[:1] = [(tail, trusted)] if tail else []
    return rest
