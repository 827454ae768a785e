"""Thinking told apart from the answer: how families mark it, and splitters of text as it comes. No torch."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from kvcli.runtime.text.vocabulary import Vocabulary


@dataclass(frozen=True)
class Style:
    """How a family marks its thinking, which stands between one of `opens` and `close` at the beginning of an answer.

    `closing` ends thinking that has taken long enough; "" = `close`. `frames`: what the answer may stand between.
    `again`: the marks are tokens that no answer quotes, and thinking may begin anywhere. `channels`: an answer is
    messages, each with a header that names its channel (harmony).
    """

    opens: tuple[str, ...]
    close: str
    closing: str = ""
    frames: tuple[tuple[str, str], ...] = ()
    again: bool = False
    channels: bool = False

    @property
    def marks(self) -> tuple[str, ...]:
        """Every text that is none of the answer."""
        return (*self.opens, self.close, self.closing, *(mark for frame in self.frames for mark in frame))


_START, _CHANNEL, _MESSAGE, _END = "<|start|>", "<|channel|>", "<|message|>", "<|end|>"
_FUNCTION = re.compile(r"to=functions\.([\w.-]+)", re.A)
_CALL = f"{_CHANNEL}commentary to=functions.{{}} <|constrain|>json{_MESSAGE}"
_ANALYSIS, _FINAL = f"{_CHANNEL}analysis", f"{_CHANNEL}final{_MESSAGE}"


def _tag(name: str, *frames: str) -> Style:
    around = tuple((f"<{frame}>", f"</{frame}>") for frame in frames)
    return Style((f"<{name}>",), f"</{name}>", f"\n</{name}>\n\n", around)


STYLES = (
    # Qwen 3, DeepSeek R1, SmolLM3, GLM 4.5, EXAONE 4, MiniMax M2, Nemotron; Granite 3.3 and Hunyuan frame the answer
    _tag("think", "response", "answer"),
    _tag("thinking"),
    _tag("thought"),  # EXAONE Deep
    _tag("reasoning"),  # Reka
    _tag("seed:think"),  # Seed OSS
    _tag("mm:think"),  # MiniMax M3
    Style(("[THINK]",), "[/THINK]"),  # Magistral, Ministral 3
    Style(("◁think▷",), "◁/think▷"),  # Kimi VL
    Style(("<|inner_prefix|>",), "<|inner_suffix|>", again=True),  # Apertus
    Style(("<|channel>thought\n",), "<channel|>", again=True),  # Gemma 4
    Style(  # Command R7B, Command A
        *(("<|START_THINKING|>",), "<|END_THINKING|>", "<|END_THINKING|><|START_RESPONSE|>"),
        frames=(("<|START_RESPONSE|>", "<|END_RESPONSE|>"), ("<|START_TEXT|>", "<|END_TEXT|>")),
        again=True,
    ),
    Style(  # Granite 3.2
        ("Here is my thought process:", "Here's my thought process:"),
        *("Here is my response:", "\n\nHere is my response:\n"),
    ),
    Style(  # Apriel
        ("Here are my reasoning steps:",),
        *("[BEGIN FINAL RESPONSE]", "\n[BEGIN FINAL RESPONSE]\n"),
        frames=(("[BEGIN FINAL RESPONSE]", "[END FINAL RESPONSE]"),),
    ),
    Style((f"{_ANALYSIS}{_MESSAGE}",), _END, f"{_END}{_START}assistant{_FINAL}", channels=True),  # gpt-oss
)


Show = Callable[[str], None]


def styles_of(source: str, vocabulary: Vocabulary, begun: str = "") -> tuple[Style, ...]:
    """The styles that a chat template or a vocabulary knows; those, too, that an answer has `begun` with."""
    special = {vocabulary.tokens[i] for i in (*vocabulary.control, *vocabulary.user_defined)}

    def known(style: Style) -> bool:
        if style.channels:
            return {_START, _CHANNEL, _MESSAGE, _END} <= special
        return any(mark in source or mark in special or begun.lstrip().startswith(mark) for mark in style.opens)

    return tuple(style for style in STYLES if known(style))


@dataclass(frozen=True)
class Thinking:
    """How one answer is told apart.

    `tail`: what the template wrote last, behind all that users wrote; `lead`: text that the answer begins with, which
    was given. `marks`: control tokens that a splitter has to see. `ids`: those of a text with its control tokens.
    `budget`: most tokens of thinking, -1 = as many as the model likes.
    """

    styles: tuple[Style, ...]
    tail: str
    lead: str
    marks: frozenset[int]
    ids: Callable[[str], list[int]]
    budget: int = -1

    @classmethod
    def of(
        cls,
        source: str,
        vocabulary: Vocabulary,
        ids: Callable[[str], list[int]],
        tail: str = "",
        lead: str = "",
        budget: int = -1,
    ) -> Thinking:
        """For an answer to a prompt of the chat template `source`."""
        styles = styles_of(source, vocabulary, lead)
        written = [mark for style in styles for mark in style.marks]
        marks = {i for i in vocabulary.control if any(vocabulary.tokens[i] in mark for mark in written)}
        return cls(styles, tail, lead, frozenset(marks - vocabulary.eog_ids), ids, budget)

    @property
    def _lead_in(self) -> str:
        """What has to stand before `lead` so that it is the answer."""
        channels = any(style.channels for style in self.styles)
        return _FINAL if channels and self.lead and not self.tail.endswith(_MESSAGE) else ""

    @property
    def given(self) -> list[tuple[str, bool]]:
        """The beginning of the answer as (text, trusted) segments, behind those of the prompt: marks of thinking are
        tokens."""
        marks = [mark for style in self.styles for mark in (*style.opens, style.close)]
        parts = re.split(f"({'|'.join(map(re.escape, marks))})", self.lead) if marks else [self.lead]
        return [(text, trusted) for text, trusted in [(self._lead_in, True), *((p, p in marks) for p in parts)] if text]

    def splitter(self, calls: bool = False) -> Splitter:
        """One for the answer, which is behind the tail. `calls`: messages to functions keep a header."""
        for style in self.styles:
            if style.channels:
                return _Channels(style, self.tail + self._lead_in, calls)
        return Splitter(self.styles, self.tail)


class Splitter:
    """Feed text with `push`: what may be shown now of the answer, and of the thinking. What may be a mark is held back.

    `style`: the one of the thinking that the text is in; None = it is the answer. White space around thinking is left
    out. `raw`: all text so far, and the mark that the prompt ends with, where it has begun to think.
    """

    def __init__(self, styles: Iterable[Style] = (), tail: str = "") -> None:
        self._styles = tuple(styles)
        self.style: Style | None = None
        self.raw = self._held = ""
        self._begun = False  # the thinking that the text is in has any
        self._fresh = True  # nothing but white space since the beginning, or since a mark
        self._behind = False  # a mark
        self._frame_end = ""  # what the answer ends with that is none of it
        for style in self._styles:
            opened, closed = max(tail.rfind(mark) for mark in style.opens), tail.rfind(style.close)
            self._behind = self._behind or closed > opened >= 0
            if opened > closed:
                self.style, self.raw = style, tail[opened:]

    def push(self, text: str) -> tuple[str, str]:
        """Text of the answer, text of the thinking."""
        self.raw += text
        self._held += text
        answer: list[str] = []
        thinking: list[str] = []
        while self._step(answer.append, thinking.append):
            pass
        return "".join(answer), "".join(thinking)

    def flush(self) -> tuple[str, str]:
        """What was still held back: it is no mark."""
        held, self._held = self._held, ""
        if self.style is not None:
            return "", held.rstrip() if self._begun else held.strip()
        return held.lstrip() if self._fresh and self._behind else held, ""

    def _step(self, answer: Show, thinking: Show) -> bool:
        """Read on up to the next mark; whether there was one, or something else is sought now."""
        if self.style is not None:
            return self._think([self.style.close], thinking) is not None
        return self._begin() if self._fresh else self._go_on(answer)

    def _think(self, ends: list[str], thinking: Show) -> str | None:
        """Thinking up to one of `ends`, which is returned, or to where one may begin: None."""
        at, mark = first_of(self._held, ends)
        text = self._held[: at if mark else len(self._held) - overlap(self._held, ends)].rstrip()
        self._held = self._held[at + len(mark) if mark else len(text) :]
        text = text if self._begun else text.lstrip()
        thinking(text)
        self._begun = self._begun or bool(text)
        if mark and self.style:
            self._frame_end = dict(self.style.frames).get(mark, "")
            self.style, self._begun, self._fresh, self._behind = None, False, True, True
        return mark or None

    def _begin(self) -> bool:
        """See what the text begins with."""
        text = self._held.lstrip()
        frames = [frame for style in self._styles for frame in style.frames if self._behind or style.again]
        marks = [mark for style in self._styles for mark in style.opens] + [frame[0] for frame in frames]
        found = next((mark for mark in marks if text.startswith(mark)), "")
        if not found:
            if not text or any(mark.startswith(text) for mark in marks):
                return False
            self._held, self._fresh = text if self._behind else self._held, False
            return True
        self._held, self._behind = text[len(found) :], True
        self.style = next((style for style in self._styles if found in style.opens), None)
        self._frame_end = dict(frames).get(found, "")
        return True

    def _go_on(self, answer: Show) -> bool:
        """The answer, up to what ends it or to thinking that may begin anywhere."""
        opens = [mark for style in self._styles if style.again for mark in style.opens]
        ends = [*opens, *filter(None, [self._frame_end])]
        at, mark = first_of(self._held, ends)
        if not mark:
            at = len(self._held) - overlap(self._held, ends)
        answer(self._held[:at])
        self._held = self._held[at if mark in opens else at + len(mark) :]
        self._fresh = self._behind = bool(mark)
        return bool(mark)


class _Channels(Splitter):
    """Messages with headers: "<|start|>", a sender, "<|channel|>", a name, "<|message|>", text, "<|end|>". A receiver
    may stand behind the sender or the channel; with `calls` a message to a function has one form of header."""

    def __init__(self, style: Style, tail: str, calls: bool) -> None:
        super().__init__()
        self._analysis, self._calls = style, calls
        self._head = ""  # of a message to a function
        begun = tail.rfind(_CHANNEL)
        self._header = True
        if begun > max(tail.rfind(_START), tail.rfind(_END)):
            self._held = tail[begun:]  # the header as far as it was written
            self._read_header()

    def _step(self, answer: Show, thinking: Show) -> bool:
        if self._header:
            return self._read_header()
        marks = [_END, _START, _CHANNEL]
        if self.style is not None:
            mark = self._think(marks, thinking)
        else:
            at, mark = first_of(self._held, marks)
            at = at if mark else len(self._held) - overlap(self._held, marks)
            answer(self._head + self._held[:at])
            self._head, self._held = "", self._held[at + len(mark) :]
        if not mark:
            return False
        self._held = self._held if mark == _END else mark + self._held
        self._header = True
        return True

    def _read_header(self) -> bool:
        """A header is known by its end. Text that begins like none has no header."""
        header, end, rest = self._held.partition(_MESSAGE)
        if not end:
            text = self._held.lstrip()
            begins = (_START, _CHANNEL, "to=")
            if not text or any(text.startswith(mark) or mark.startswith(text) for mark in begins):
                return False
            header, rest = "", text
        called = _FUNCTION.search(header) if self._calls else None
        self._header, self._held, self._head = False, rest, _CALL.format(called[1]) if called else ""
        self.style = self._analysis if _ANALYSIS in header and not called else None
        return True


def first_of(text: str, marks: Iterable[str]) -> tuple[int, str]:
    """Where the first of the marks is, and which; "" = none is there."""
    found = [(at, mark) for mark in marks if (at := text.find(mark)) >= 0]
    return min(found, default=(len(text), ""))


def overlap(text: str, marks: Iterable[str]) -> int:
    """Length of the longest tail of the text that begins one of the marks."""
    return max((n for mark in marks for n in range(1, len(mark)) if text.endswith(mark[:n])), default=0)
