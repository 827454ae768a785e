"""The flags that say what a model is asked, and `Question`, what they come to. Never imports torch."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Annotated

import typer

from kvcli.cli import render
from kvcli.cli.flags.shared import SystemFlags
from kvcli.cli.helptext import PROMPT
from kvcli.cli.inputs import argument, assemble_prompt
from kvcli.cli.invocation import Invocation
from kvcli.errors import UsageError
from kvcli.runtime.promptcache.marks import Mark
from kvcli.runtime.promptcache.prefixpages import common_length

if TYPE_CHECKING:
    from kvcli.options import LoadOptions
    from kvcli.runtime.text.modeltext import ModelText
    from kvcli.runtime.text.reasoning import Thinking

    _Rendered = tuple[list[tuple[str, bool]], Thinking | None]

_option = partial(typer.Option, rich_help_panel=PROMPT)
_ASKED = "Who?", "1", '"'  # of three kinds: what follows a text may change its last token


@dataclass(frozen=True)
class PromptFlags:
    """What the model is asked."""

    prompt: Annotated[str | None, _option("-p", "--prompt", metavar="TEXT", help="Same as PROMPT.")] = None
    file: Annotated[
        list[str],
        _option(
            "-f", "--file", metavar="FILE", help="File with text that comes before the prompt; - = stdin (repeatable)."
        ),
    ] = field(default_factory=list)
    file_names: Annotated[
        bool,
        _option("--file-names", help="Put a line with its name above each file's text: ==> FILE <==."),
    ] = False
    no_stdin: Annotated[
        bool,
        _option(
            "--no-stdin",
            help="Do not read stdin, e.g. in a loop that reads it; -f - still does.",
        ),
    ] = False
    raw: Annotated[
        bool | None,
        _option(
            "--raw/--no-raw",
            help="Continue the text, without a chat template; --no-raw chats even with a base model.",
            show_default="on for base models",
        ),
    ] = None
    special: Annotated[bool, _option("--special", help="With --raw: parse special tokens in the text.")] = False
    assistant: Annotated[
        str | None,
        _option("--assistant", metavar="TEXT", help="Beginning of the answer, which the model goes on with."),
    ] = None

    @property
    def source(self) -> str:
        """Where the text is from, for people: the names of files."""
        return ", ".join("stdin" if name == "-" else os.path.basename(name) for name in self.file)

    def loading(self, options: LoadOptions) -> LoadOptions:
        """With the chat template that --no-raw demands."""
        return replace(options, chat_anyway=self.raw is False)

    def question(
        self, instruction: str | None, system: SystemFlags, invocation: Invocation, chat: bool = False
    ) -> Question:
        """What is asked. `chat`: who has no prompt may have meant kv chat. Raises UsageError, InputBytesError."""
        if self.prompt is not None and instruction is not None:
            raise UsageError("the prompt is given twice, as -p and as an argument")
        if self.special and not self.raw:
            raise UsageError("--special needs --raw", "a chat template brings its own special tokens")
        if self.raw and self.assistant is not None:
            raise UsageError("--raw and --assistant cannot be used together", "put it at the end of the text")
        tell = render.telling(invocation)
        message = system.text(tell)
        text = instruction if self.prompt is None else self.prompt
        text, ends = assemble_prompt(text, self.file, tell, not self.no_stdin, self.file_names, chat)
        begins = argument(self.assistant or "", "the beginning of the answer", "--assistant", tell)
        return Question(message, text, self.raw, self.special, begins, ends)


@dataclass(frozen=True)
class Question:
    """What is asked, as text. `raw`: no template, None = as the model is; `special`: the raw text may hold special
    tokens; `begins`: what the answer begins with."""

    system: str | None
    prompt: str
    raw: bool | None
    special: bool
    begins: str = ""
    ends: tuple[tuple[str, int], ...] = ()  # where in the prompt the text of each file ends
    _renderings: dict[str, _Rendered] = field(init=False, default_factory=dict, compare=False, repr=False)

    def __post_init__(self) -> None:
        if self.raw and self.system is not None:
            raise UsageError("--raw has no system message", "put it into the text, or leave --raw out")

    def of(self, model: ModelText, invocation: Invocation) -> Question:
        """What is asked of this model, and a word where its file has no chat template. Raises UsageError for a system
        message without one."""
        if self.raw is None and model.note:
            render.notice(model.note, invocation)
        raw = self.raw or model.template is None
        if raw and (self.system is not None or self.begins):
            what = "answer to begin" if self.system is None else "system message"
            raise UsageError(
                f"this model has no chat template, so there is no {what}",
                "put it into the text; --no-raw chats all the same where kv has a template for the architecture",
            )
        return replace(self, raw=raw)

    def ids(self, model: ModelText) -> list[int]:
        """Token ids of the whole prompt. Raises TemplateError."""
        return model.tokenizer.encode_segments(self.segments(model, self.prompt), add_bos=True)

    def shared(self, model: ModelText, ids: list[int]) -> list[int]:
        """The first of these ids, those of the prompt, that are also of prompts with a question behind its text."""
        for asked in _ASKED:
            other = self.segments(model, f"{self.prompt}\n\n{asked}")
            ids = ids[: common_length(ids, model.tokenizer.encode_segments(other, add_bos=True))]
        return ids

    def text(self, model: ModelText, ids: list[int]) -> tuple[int, int]:
        """Which of these ids, [start, end), are what the user wrote, and not template or system message."""
        frame = model.tokenizer.encode_segments(self.segments(model, ""), add_bos=True)
        start = common_length(ids, frame)
        return start, len(ids) - common_length(ids[start:][::-1], frame[start:][::-1])

    def marks(self, model: ModelText, ids: list[int], texts: Sequence[str] = (), flag: str = "") -> list[Mark]:
        """Where later prompts may start from: the end of the system message, of each file, and of each of `texts`,
        wherever it stands; these are values of `flag`. Raises UsageError for one that the prompt does not have."""
        from kvcli.runtime.promptcache import marks

        found = []
        for text in texts:
            if not (places := marks.behind_text(model.tokenizer, ids, text)):
                raise UsageError(f"{flag}: the prompt does not contain {text!r}", "give a text as it stands there")
            found += places
        if self.system is None and not self.ends:
            return found
        start, _ = self.text(model, ids)
        if self.system is not None:
            found.append(Mark(start, marks.SYSTEM))
        ends = marks.behind(model.tokenizer, ids, start, self.prompt, [end for _, end in self.ends])
        files = zip(self.ends, ends, strict=True)
        return [*found, *(Mark(at, marks.FILE, os.path.basename(name)) for (name, _), at in files if at is not None)]

    def documents(self, model: ModelText) -> list[tuple[str, list[int]]]:
        """The name of each file, and its text as a prompt of its own."""
        starts = [0, *(end for _, end in self.ends)]
        texts = [self.prompt[start:end].lstrip("\n") for start, (_, end) in zip(starts, self.ends, strict=False)]
        return [(name, model.tokenizer.encode(text)) for (name, _), text in zip(self.ends, texts, strict=True)]

    def thinking(self, model: ModelText) -> Thinking | None:
        """How the answer is told apart from what the model thinks; None = it is not. Raises TemplateError."""
        return self._rendered(model, self.prompt)[1]

    def segments(self, model: ModelText, text: str) -> list[tuple[str, bool]]:
        """The prompt with `text` in place of its own, as `ChatTemplate.render_segments` gives it, and the beginning of
        the answer. Raises TemplateError."""
        segments, thinking = self._rendered(model, text)
        return [*segments, *(thinking.given if thinking and self.begins else [])]

    def _rendered(self, model: ModelText, text: str) -> _Rendered:
        if self.raw or model.template is None:
            return [(text, self.special)], None
        if text not in self._renderings:
            self._renderings[text] = self._render(model, text)
        return self._renderings[text]

    def _render(self, model: ModelText, text: str) -> _Rendered:
        assert model.template is not None
        messages = [] if self.system is None else [{"role": "system", "content": self.system}]
        segments = model.template.render_segments([*messages, {"role": "user", "content": text}])
        return segments, model.template.thinking(segments, model.tokenizer, self.begins)
