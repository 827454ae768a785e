"""`CallReader`: calls of tools told apart from the text of an answer, as it comes. No torch."""

from __future__ import annotations

import re
from collections.abc import Mapping

from kvcli.runtime.text.reasoning import first_of, overlap
from kvcli.runtime.text.tools.forms import Form
from kvcli.runtime.text.tools.parts import CallPart
from kvcli.runtime.text.tools.schemas import Schema
from kvcli.runtime.text.tools.source import Ended, Mismatch, Reading, Source

NAME = re.compile(r"[\w.-]+", re.A)
_WORDS = {"id": re.compile(r"[\w-]+", re.A), "number": re.compile(r"[0-9]+")}


Shown = tuple[str, tuple[CallPart, ...]]


class CallReader:
    """Feed text with `push`: what may be shown of it now, and what came of calls. White space before a call is left
    out. What begins like a call and is of none of these tools, or not in the form, is text."""

    def __init__(self, form: Form, tools: Mapping[str, Schema]) -> None:
        """`tools`: the schema of the arguments of each, by name."""
        self._form, self._tools = form, tools
        self._marks = form.marks(list(tools))
        self._source = Source()
        self._text: list[str] = []
        self._parts: list[CallPart] = []
        self._number = -1  # of the newest call
        self._told = False  # anything of the call that is being read
        self._gap = ""  # white space before it
        self._fresh = True  # nothing but white space has come
        self.whole = 0  # calls that have come to their ends
        self.begun = ""
        """All that came since the newest mark of a call, when it was found; "" = none was, or it was of none."""
        self._run = self._read()
        next(self._run)

    def push(self, text: str) -> Shown:
        self._source.held += text
        if text:
            next(self._run)
        return self._shown()

    def flush(self) -> Shown:
        """What was held back. A call that is not whole stays as it is."""
        self._source.closed = True
        next(self._run, None)
        return self._shown()

    def _shown(self) -> Shown:
        text, parts = "".join(self._text), tuple(self._parts)
        self._text.clear()
        self._parts.clear()
        return text, parts

    def _read(self) -> Reading[None]:
        source = self._source
        try:
            while True:
                yield from self._answer()
                self.begun = source.held
                yield from self._calls()
        except Ended:
            self._text.append("" if self._told else self._gap + source.taken + source.held)

    def _answer(self) -> Reading[None]:
        """Text, up to the mark of a call."""
        source = self._source
        source.begin()
        while True:
            held, blank = source.held, not source.held.strip()
            marks = self._marks if self._fresh or not self._form.first else []
            at, mark = first_of(held, marks)
            if mark and (not self._form.first or not held[:at].strip()):
                text = source.take(at)
                self._gap = text[len(text.rstrip()) :]
                self._show(text.rstrip())
                source.begin()
                return
            kept = overlap(held, marks)
            if self._form.first and held[: len(held) - kept].strip():
                self._fresh, kept = False, 0
            self._show(source.take(0 if blank else len(held[: len(held) - kept].rstrip())))
            source.begin()
            yield from source.more()

    def _show(self, text: str) -> None:
        self._text.append(text)
        self._fresh = self._fresh and not text.strip()

    def _calls(self) -> Reading[None]:
        """Calls that stand together; their mark has come."""
        source, form = self._source, self._form
        try:
            yield from source.literal(form.opens)
            while True:
                yield from self._call()
                if not form.closes:
                    return
                if (yield from source.begins(form.closes.strip())):
                    yield from source.literal(form.closes)
                    return
                yield from source.literal(form.between)
        except Mismatch:
            self._show("" if self._told else self._gap + source.taken)
            self._told, self._gap, self.begun = False, "", ""

    def _call(self) -> Reading[None]:
        source, tool = self._source, ""
        for piece in self._form.pieces:
            field = piece[1:-1] if piece.startswith("«") else ""
            if field == "name":
                tool = yield from source.word(NAME)
                if tool not in self._tools:
                    raise Mismatch
            elif field == "arguments":
                name = tool

                def tell(arguments: str, name: str = name) -> None:
                    self._number += not self._told
                    self._parts.append(CallPart(self._number, "" if self._told else name, arguments))
                    self._told, self._gap = True, ""

                yield from self._form.arguments.read(source, self._tools[tool], tell)
            elif field:
                yield from source.word(_WORDS[field])
            else:
                yield from source.literal(piece)
        self._parts.append(CallPart(self._number, "", "", whole=True))
        self.whole += 1
        self._fresh, self._told = False, False
        source.begin()
