"""What interfaces have in common when they read a call: JSON into a struct, messages, options of sampling."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import msgspec

from kvcli.errors import UsageError
from kvcli.options import ChatOptions, SampleOptions
from kvcli.runtime.engine import samplesettings
from kvcli.runtime.engine.prompt import Prompt
from kvcli.runtime.text import grammar
from kvcli.runtime.text.modeltext import ModelText
from kvcli.runtime.text.tools.use import ToolUse
from kvcli.serve.calls import Asked

Call = TypeVar("Call", bound=msgspec.Struct)
Json = dict[str, Any]


def decoded(body: bytes, kind: type[Call]) -> Call:
    """The call in a body. Raises UsageError with the path of what is wrong."""
    try:
        return msgspec.json.decode(body, type=kind)
    except msgspec.ValidationError as error:
        raise UsageError(_told(str(error))) from None
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise UsageError(f"the body is not JSON: {error}") from None


_KINDS = {
    "int": "an integer", "float": "a number", "str": "a text", "bool": "true or false", "array": "a list",
    "object": "an object", "null": "null",
}  # fmt: skip
_WRONG = re.compile(r"Expected (?P<wanted>.+?)(?:, got `(?P<got>\w+)`)?(?: - at (?P<path>`.+`))?")

_KEY = re.compile(
    r"Object (?P<what>contains unknown|missing required) field `(?P<key>.+?)`(?: - at `\$\.?(?P<path>.+)`)?"
)


def _told(problem: str) -> str:
    """What is wrong with a call, in our words.

    >>> _told("Expected `str | array | null`, got `int` - at `$.stop`"), _told("Expected `int` >= 1 - at `$.n`")
    ('`stop` must be a text or a list, not an integer', '`n` must be an integer >= 1')
    >>> _told("Object contains unknown field `seeds` - at `$.options`")
    '`options.seeds` is unknown'
    """
    if key := _KEY.fullmatch(problem):
        path = key["path"] + "." if key["path"] else ""
        return f"`{path}{key['key']}` is {'missing' if key['what'] == 'missing required' else 'unknown'}"
    if not (found := _WRONG.fullmatch(problem)):
        return problem.replace("`$.", "`")
    kinds = re.search("`(.+?)`", found["wanted"])
    if not kinds:
        return problem.replace("`$.", "`")
    named = [_KINDS.get(kind, kind) for kind in kinds[1].split(" | ") if kind != "null"]
    wanted = found["wanted"].replace(kinds[0], " or ".join(named))
    path = (found["path"] or "the body").replace("`$.", "`").replace("`$[", "`[")
    return f"{path} must be {wanted}" + (f", not {_KINDS.get(found['got'], found['got'])}" if found["got"] else "")


class Part(msgspec.Struct):
    """A piece of a message; what is no text has other keys, which nobody reads."""

    type: str
    text: str = ""


Content = str | list[Part] | None
TEXTS = ("text", "input_text", "output_text")


def plain(content: Content, path: str) -> str:
    """The text of a message. Raises UsageError for what is none."""
    if content is None or isinstance(content, str):
        return content or ""
    for part in content:
        if part.type not in TEXTS:
            raise UsageError(f"{path} has a part of type {part.type!r}", "the model reads text only")
    return "".join(part.text for part in content)


def refuse(given: Mapping[str, Any], why: str) -> None:
    """Raises UsageError for the first key that says something."""
    for name, value in given.items():
        if value:
            raise UsageError(f"`{name}` {why}")


def options(base: SampleOptions, **said: Any) -> SampleOptions:
    """The options with what is said of them; None = nothing. Raises UsageError."""
    found = replace(base, **{name: value for name, value in said.items() if value is not None})
    samplesettings.check(found)
    return found


def stops(value: str | list[str] | None) -> tuple[str, ...] | None:
    """Raises UsageError for an empty one."""
    found = (value,) if isinstance(value, str) else tuple(value or ())
    if "" in found:
        raise UsageError("`stop` has an empty text")
    return found or None


def bias(given: Mapping[str, float] | None) -> dict[int, float] | None:
    """By token ids, which JSON has as texts. Raises UsageError."""
    for token in given or ():
        if not (token.isascii() and token.isdigit() and len(token) < 10):
            raise UsageError(f"`logit_bias` is by token ids, not {token[:40]!r}")
    return {int(token): float(value) for token, value in given.items()} if given else None


@dataclass(frozen=True)
class Shape:
    """Makes the grammar of answers that are JSON of a schema; `called`: the key that has it."""

    schema: Json
    called: str

    def __call__(self) -> str:
        """Raises UsageError."""
        return grammar.json_schema(self.schema, f"`{self.called}`")


def shaped(schema: Json | None, called: str) -> Shape | None:
    """None = answers of any form."""
    return None if schema is None else Shape(schema, called)


@dataclass(frozen=True)
class Thinking:
    """How the use of a template is changed; None = not."""

    mode: str | None = None
    budget: int | None = None
    variables: Json | None = None

    def __call__(self, own: ChatOptions) -> ChatOptions:
        return replace(
            own,
            reasoning=own.reasoning if self.mode is None else self.mode,
            budget=own.budget if self.budget is None else self.budget,
            variables={**own.variables, **(self.variables or {})},
        )


def reasoning(mode: str | None, budget: int | None = None, variables: Json | None = None) -> Thinking | None:
    """None = not at all."""
    return Thinking(mode, budget, variables) if mode is not None or budget is not None or variables else None


@dataclass(frozen=True)
class Chat:
    """Makes the prompt of a conversation. `lead`: the beginning of the answer; `tools`: which may be called."""

    messages: list[Json]
    lead: str
    thinking: Thinking | None
    tools: Asked | None

    def __call__(self, text: ModelText) -> Prompt:
        """Raises UsageError, TemplateError."""
        if text.template is None:
            raise UsageError("this model has no chat template: it continues texts", "ask for completions instead")
        changed = self.thinking(text.template.options) if self.thinking else None
        tools = self.tools
        use = ToolUse.of(text.template, text.tokenizer, tools.tools, tools.choice) if tools else None
        return Prompt.of_chat(text.tokenizer, text.template, self.messages, changed, self.lead, use)


def chat(messages: list[Json], thinking: Thinking | None = None, tools: Asked | None = None) -> Chat:
    """A last message of the assistant is the beginning of the answer. Raises UsageError."""
    if not messages:
        raise UsageError("`messages` is empty", 'give at least {"role": "user", "content": "..."}')
    last = messages[-1]
    lead = last["content"] if last["role"] == "assistant" and not last.get("tool_calls") else ""
    return Chat(messages[:-1] if lead else messages, lead, thinking, tools)


def chars(messages: list[Json]) -> int:
    """Of text in all of them, with what was thought and the arguments of calls."""
    told = (function["arguments"] for message in messages for function in _functions(message))
    arguments = sum(len(each) if isinstance(each, str) else len(json.dumps(each, ensure_ascii=False)) for each in told)
    return arguments + sum(len(each["content"]) + len(each.get("reasoning_content") or "") for each in messages)


def _functions(message: Json) -> list[Json]:
    return [call["function"] for call in message.get("tool_calls") or ()]


@dataclass(frozen=True)
class Raw:
    """Makes the prompt of a text to be continued, or of token ids as they are."""

    prompt: str | list[int]

    def __call__(self, text: ModelText) -> Prompt:
        """Raises UsageError."""
        if isinstance(self.prompt, str):
            return Prompt(text.tokenizer.encode(self.prompt, add_bos=True))
        check_ids(self.prompt, text.tokenizer.vocab_size, "prompt")
        return Prompt(self.prompt)


def check_ids(ids: list[int], size: int, key: str) -> None:
    """Raises UsageError for a token that a vocabulary of this size does not have."""
    if wrong := [token for token in ids if not 0 <= token < size]:
        raise UsageError(f"`{key}` has the token {wrong[0]}, the vocabulary is 0 to {size - 1}")
