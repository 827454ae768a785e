"""Chat templates: messages -> the text a model was trained on, with what users wrote kept apart. No torch."""

from __future__ import annotations

import re
import traceback
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import copy
from functools import cached_property
from itertools import accumulate, takewhile
from typing import TYPE_CHECKING, Any

from kvcli.errors import ModelError
from kvcli.options import MODELS_OWN, ChatOptions
from kvcli.runtime.text.provenance import parts_of, trust
from kvcli.runtime.text.reasoning import Thinking

if TYPE_CHECKING:
    from kvcli.runtime.text.tokenizer import Tokenizer

ROLES = frozenset({"system", "developer", "user", "assistant", "tool"})

# Templates for architectures whose files often lack one, by general.architecture.
DEFAULT_TEMPLATES = {
    "gemma3": r"""
{{- bos_token -}}
{%- set preface = '' -%}
{%- set turns = messages -%}
{%- if messages and messages[0].role == 'system' -%}
    {%- set preface = messages[0].content ~ '\n\n' -%}
    {%- set turns = messages[1:] -%}
{%- endif -%}
{%- for turn in turns -%}
    {%- if turn.role != ('assistant' if loop.index0 is odd else 'user') -%}
        {{- raise_exception('user and assistant take turns, and the user begins') -}}
    {%- endif -%}
    {{- '<start_of_turn>' ~ ('user' if turn.role == 'user' else 'model') ~ '\n' -}}
    {{- preface if loop.first else '' -}}
    {{- turn.content | trim ~ '<end_of_turn>\n' -}}
{%- endfor -%}
{{- '<start_of_turn>model\n' if add_generation_prompt else '' -}}
""",
}


# Variables by which templates turn thinking on and off; None = there is no such value.
_SWITCHES: dict[str, tuple[Any, Any]] = {
    "enable_thinking": (True, False),  # Qwen 3, SmolLM3, GLM, Hunyuan, EXAONE 4, Gemma 4
    "thinking": (True, False),  # Granite, DeepSeek 3.1
    "reasoning": (True, False),  # Command A
    "thinking_mode": ("enabled", "disabled"),  # MiniMax M3
    "thinking_budget": (None, 0),  # Seed OSS
}

# What templates call the thinking of a message.
_REASONING_KEYS = ("reasoning_content", "reasoning", "thinking")
_TAKES_REASONING = re.compile(rf"""(?:\.|\[["']|\(["']|["'])(?:{"|".join(_REASONING_KEYS)})\b(?!\w)""")

_KEY = "tokenizer.chat_template"
_NAMES = ("general.name", "general.basename", "general.finetune")
_CHAT_WORDS = {"it", "instruct", "instruction", "chat", "assistant"}  # of names of models that were trained to chat


def _named_chat(metadata: Mapping[str, Any], file_name: str) -> bool:
    names = [file_name, *(str(metadata.get(key, "")) for key in _NAMES)]
    return any(word in _CHAT_WORDS for name in names for word in re.split(r"[^a-z0-9]+", name.lower()))


def template_note(metadata: Mapping[str, Any], file_name: str) -> str:
    """What `ChatTemplate.from_gguf` found out about a file without a template of its own; "" = it has one."""
    arch = metadata.get("general.architecture", "")
    if metadata.get(_KEY) is not None:
        return ""
    if not _named_chat(metadata, file_name):
        return "base model: no chat template in the file; it continues the text"
    if arch not in DEFAULT_TEMPLATES:
        return f"no chat template in the file, and kv has none for {arch}; the text is continued as it is"
    return f"no chat template in the file; its name says that it can chat, so kv's own for {arch} is used"


class TemplateError(ModelError):
    """A template that is broken or refuses the messages. `reason` is its raise_exception text, '' if none."""

    def __init__(self, message: str, hint: str = "", reason: str = "") -> None:
        super().__init__(message, hint)
        self.reason = reason


class ChatTemplate:
    """One template. It is compiled when first rendered, so that runs without one do not import jinja2."""

    def __init__(self, source: str, bos: str = "", eos: str = "", origin: str = "file", with_tools: str = "") -> None:
        """`bos`, `eos`: the texts of those tokens. `origin`: "file", "built-in" or "given". `with_tools`: the template
        that is used in place of this one where there are tools; "" = there is none."""
        self.source, self.bos, self.eos, self.origin = source, bos, eos, origin
        self._with_tools = with_tools
        self.special: Mapping[str, str] = {}  # texts of other tokens, by the names that templates have for them
        self.options = MODELS_OWN
        self._controls: Callable[[str], list[tuple[int, str]]] = lambda text: []
        self._tell: Callable[[str], None] = lambda token: None

    @classmethod
    def from_gguf(cls, metadata: Mapping[str, Any], bos: str, eos: str, file_name: str = "") -> ChatTemplate | None:
        """The file's template; where it has none and names say that the model can chat, the architecture's built-in
        one; else None: a base model has no use for any."""
        source = metadata.get(_KEY)
        if source is None:
            return cls.built_in(metadata, bos, eos) if _named_chat(metadata, file_name) else None
        if not isinstance(source, str):
            raise ModelError("tokenizer.chat_template is not a string", "the file is damaged")
        with_tools = metadata.get(f"{_KEY}.tool_use")
        return cls(source, bos, eos, with_tools=with_tools if isinstance(with_tools, str) else "")

    @classmethod
    def built_in(cls, metadata: Mapping[str, Any], bos: str, eos: str) -> ChatTemplate | None:
        """The one of the file's architecture, whatever the file; None where kv has none."""
        source = DEFAULT_TEMPLATES.get(metadata.get("general.architecture", ""))
        return None if source is None else cls(source, bos, eos, "built-in")

    def with_options(self, options: ChatOptions) -> ChatTemplate:
        """The same template with other variables, and another use of thinking. Raises TemplateError."""
        self.compile()  # once for both
        other = copy(self)
        other.options = options
        for name in ("switch", "_tool_use"):
            other.__dict__.pop(name, None)
        return other

    def compile(self) -> None:
        """Do now what else the first rendering does. Raises TemplateError."""
        assert self._compiled

    def watch(self, controls: Callable[[str], list[tuple[int, str]]], tell: Callable[[str], None]) -> None:
        """From now on tell of control tokens that the template spells in a way that hides that they are its own.

        `controls(text)`: where control tokens stand in a text, and which. `tell(token)` is called while rendering for
        each one that would become letters although no message holds it.
        """
        self._controls, self._tell = controls, tell

    def render(
        self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool = True, **variables: Any
    ) -> str:
        """The text for `messages`, each {"role": ..., "content": ...}. Raises TemplateError."""
        segments = self.render_segments(messages, add_generation_prompt, **variables)
        return "".join(text for text, _ in segments)

    def render_segments(
        self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool = True, **variables: Any
    ) -> list[tuple[str, bool]]:
        """The same text as (text, trusted) segments for `Tokenizer.encode_segments`.

        Trusted is what the template itself wrote, the BOS and EOS texts and the names of ROLES; all else, the
        contents first of all, is not, whatever the template did with it. Raises TemplateError.
        """
        if self._with_tools and (variables.get("tools") or self.options.variables.get("tools")):
            return self._tool_use.render_segments(messages, add_generation_prompt, **variables)
        tokens = {"bos_token": self.bos, "eos_token": self.eos, **self.special}
        names = {name: trust(text) for name, text in tokens.items()}
        values = {"tools": None, "documents": None} | names | self.switch | dict(self.options.variables) | variables
        values["messages"] = [_with_trusted_role(message) for message in messages]
        values["add_generation_prompt"] = add_generation_prompt
        segments = list(parts_of(self._run(values)))
        for token in self._lost(
            segments, [*_strings(messages), *_strings(self.options.variables), *_strings(variables)]
        ):
            self._tell(token)
        return segments

    # --- thinking

    def thinking(self, segments: Sequence[tuple[str, bool]], tokenizer: Tokenizer, lead: str = "") -> Thinking | None:
        """How the answer to a rendered prompt is told apart from thinking; None for a model that marks none. `lead`:
        what the answer begins with, which is given."""
        tail = "".join(text for text, _ in reversed(list(takewhile(lambda each: each[1], reversed(segments)))))

        def ids(text: str) -> list[int]:
            return tokenizer.encode_segments([(text, True)], add_bos=False)

        found = Thinking.of(self.source, tokenizer.vocabulary, ids, tail, lead, self.budget)
        return found if found.styles or lead else None

    @property
    def budget(self) -> int:
        """Most tokens of thinking, -1 = as many as the model likes. Where there shall be none and the template has no
        switch for that, thinking is ended as it begins."""
        off = self.options.reasoning == "off" and not self.switch
        return 0 if off and self.options.budget < 0 else self.options.budget

    @cached_property
    def switch(self) -> dict[str, Any]:
        """The variables by which this template turns thinking on or off, with their values."""
        if self.options.reasoning == "auto":
            return {}
        from kvcli.runtime.text import sandbox

        read = sandbox.variables_of(self.source) if self._compiled else set()
        on = self.options.reasoning == "on"
        values = {name: when_on if on else when_off for name, (when_on, when_off) in _SWITCHES.items() if name in read}
        return {name: value for name, value in values.items() if value is not None}

    @property
    def unread(self) -> list[str]:
        """Variables that were given and that this template never reads."""
        from kvcli.runtime.text import sandbox

        given = self.options.variables
        sources = [self.source, self._with_tools] if given else []
        return sorted(set(given).difference(*(sandbox.variables_of(source) for source in sources)))

    # --- tools

    @property
    def tool_source(self) -> str:
        """The text of the template that is used where there are tools."""
        return self._with_tools or self.source

    @cached_property
    def takes_tools(self) -> bool:
        """Whether it reads what tools there are."""
        from kvcli.runtime.text import sandbox

        return "tools" in sandbox.variables_of(self.tool_source)

    @cached_property
    def takes_objects(self) -> bool:
        """Whether it takes the arguments of a call as an object; else as the text of one."""
        function = {"name": "f", "arguments": {"k": "v"}}
        call = {"id": "a12345678", "type": "function", "function": function}
        asked: list[dict[str, Any]] = [
            {"role": "user", "content": ""},
            {"role": "assistant", "content": "", "tool_calls": [call]},
        ]
        try:
            text = self.render(asked, False, tools=[{"type": "function", "function": {**function, "parameters": {}}}])
        except TemplateError:
            return False
        return "{'k': 'v'}" not in text

    def answered(self, text: str, reasoning: str, raw: str) -> dict[str, str]:
        """An answer as a message for this template: with its thinking apart where it knows that, else as it was written
        (`raw`), so that the template strips or keeps it. Marks that are control tokens would become letters in a
        content: then the thinking is left out."""
        message = {"role": "assistant", "content": text}
        if reasoning and _TAKES_REASONING.search(self.source):
            return {**message, **dict.fromkeys(_REASONING_KEYS, reasoning)}
        return {**message, "content": raw} if reasoning and not self._controls(raw) else message

    def _lost(self, segments: list[tuple[str, bool]], given: list[str]) -> list[str]:
        """Control tokens that the text spells outside of trusted segments and that are in none of the `given` texts."""
        ends = list(accumulate(len(text) for text, _ in segments))
        found = self._controls("".join(text for text, _ in segments))
        spelled = {token for start, token in found if not _own(segments, ends, start, start + len(token))}
        return sorted(token for token in spelled if not any(token in text for text in given))

    @cached_property
    def _tool_use(self) -> ChatTemplate:
        other = ChatTemplate(self._with_tools, self.bos, self.eos, self.origin)
        other.options, other.special = self.options, self.special
        other.watch(self._controls, self._tell)
        return other

    @cached_property
    def _compiled(self) -> Any:
        if not self.source.strip():
            raise TemplateError("the chat template of the file is empty", _GO_WITHOUT)
        from kvcli.runtime.text import sandbox

        try:
            return sandbox.compile_template(self.source)
        except sandbox.TemplateSyntaxError as error:
            raise TemplateError(
                f"the chat template is broken in line {error.lineno}: {error.message}", _GO_WITHOUT
            ) from None
        except RecursionError:
            raise TemplateError("the chat template is nested too deeply", _GO_WITHOUT) from None

    def _run(self, values: dict[str, Any]) -> str:
        compiled = self._compiled
        from kvcli.runtime.text import sandbox

        try:
            return compiled.render(values)
        except sandbox.Refused as error:
            raise TemplateError(f"the chat template refused: {error}", _GO_WITHOUT, str(error)) from None
        except sandbox.SecurityError as error:
            raise TemplateError(f"the chat template tried something forbidden: {error}", _GO_WITHOUT) from error
        except Exception as error:  # a template is a program: any error can come out of it
            lines = [at.lineno for at in traceback.extract_tb(error.__traceback__) if at.filename == "<template>"]
            where = f" in line {lines[-1]}" if lines else ""
            what = f"{type(error).__name__}: {error}"
            raise TemplateError(f"the chat template failed{where}: {what}", _GO_WITHOUT) from error


def _own(segments: list[tuple[str, bool]], ends: list[int], start: int, stop: int) -> bool:
    """Whether [start, stop) of the text lies in one trusted segment. `ends`: where the segments end."""
    number = bisect_right(ends, start)
    return segments[number][1] and stop <= ends[number]


def _strings(value: Any) -> Iterator[str]:
    """Every string in lists and dictionaries."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for inner in (*value.keys(), *value.values()):
            yield from _strings(inner)
    elif isinstance(value, (list, tuple)):
        for inner in value:
            yield from _strings(inner)


_GO_WITHOUT = "text can be continued without a template (`raw`)"


def _with_trusted_role(message: Mapping[str, Any]) -> dict[str, Any]:
    """A copy whose role, if it is a known one, may become part of a control token ('<|' + role + '|>')."""
    role = message.get("role")
    return {**message, "role": trust(role)} if role in ROLES else dict(message)
