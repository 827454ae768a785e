"""Which tools an answer may call, and how: `Tool`, `ToolChoice`, and `ToolUse` for one model. No torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from kvcli.errors import UsageError
from kvcli.runtime.text import grammar
from kvcli.runtime.text.tools.forms import Form, form_of
from kvcli.runtime.text.tools.reader import NAME, CallReader
from kvcli.runtime.text.tools.rules import Rules
from kvcli.runtime.text.tools.schemas import Schema

if TYPE_CHECKING:
    from kvcli.runtime.text.template import ChatTemplate
    from kvcli.runtime.text.tokenizer import Tokenizer

NO_ARGUMENTS: Schema = {"type": "object", "properties": {}}


@dataclass(frozen=True)
class Tool:
    """`parameters`: the schema of its arguments, which an object of them follows. `called`: the key that the schema has
    in what was asked. `strict`: all of the schema is followed, or it is refused; else what can be followed of it."""

    name: str
    description: str = ""
    parameters: Schema = field(default_factory=lambda: NO_ARGUMENTS)
    strict: bool = False
    called: str = "`parameters`"

    def __post_init__(self) -> None:
        if not (found := NAME.match(self.name)) or found[0] != self.name:
            raise UsageError(f"{self.name[:80]!r} is no name of a tool", "letters, digits, _, . and - can be in one")
        if not isinstance(self.parameters, Mapping) or self.parameters.get("type", "object") != "object":
            raise UsageError(f"{self.called} must be the schema of an object")

    @classmethod
    def of(cls, given: Any, called: str) -> Tool:
        """Of OpenAI's form, {"type": "function", "function": {...}}, or of what is in `function` there. `called`: the
        key that has it. Raises UsageError."""
        if isinstance(given, Mapping) and isinstance(given.get("function"), Mapping):
            given, called = {"type": given.get("type", "function"), **given["function"]}, f"{called}.function"
        if not isinstance(given, Mapping) or given.get("type", "function") != "function":
            raise UsageError(
                f"`{called}` must be a function", 'such as {"type": "function", "function": {"name": ...}}'
            )
        if not isinstance(name := given.get("name"), str):
            raise UsageError(f"`{called}.name` is missing")
        for key, kind, what in (("description", str, "a text"), ("strict", bool, "true or false")):
            if not isinstance(given.get(key), (kind, type(None))):
                raise UsageError(f"`{called}.{key}` must be {what}")
        parameters = given.get("parameters")
        schema: Any = NO_ARGUMENTS if parameters is None or parameters == {} else parameters
        return cls(name, given.get("description") or "", schema, bool(given.get("strict")), f"`{called}.parameters`")

    @property
    def told(self) -> dict[str, Any]:
        """As chat templates take it."""
        function = {"name": self.name, "description": self.description, "parameters": self.parameters}
        return {"type": "function", "function": function}


def tools_of(given: Any) -> tuple[Tool, ...]:
    """Of a list of them. Raises UsageError."""
    if not isinstance(given, list):
        raise UsageError("`tools` must be a list of tools")
    found = tuple(Tool.of(each, f"tools[{number}]") for number, each in enumerate(given))
    check_names(found)
    return found


def check_names(tools: Sequence[Tool]) -> None:
    """Raises UsageError for two tools of one name."""
    names = [tool.name for tool in tools]
    if twice := [name for name in names if names.count(name) > 1]:
        raise UsageError(f"two tools have the name {twice[0]!r}")


@dataclass(frozen=True)
class ToolChoice:
    """`must`: the answer is a call; `names`: of one of these tools, () = of any; `several`: it may be several calls."""

    must: bool = False
    names: tuple[str, ...] = ()
    several: bool = True


@dataclass(frozen=True)
class ToolUse:
    """What an answer of one model may call: of the tools that it is told of (`listed`) some. `free`: it may be a text,
    too."""

    form: Form
    listed: tuple[Tool, ...]
    tools: tuple[Tool, ...]
    free: bool
    rules: Rules
    marks: frozenset[int]
    """Control tokens that are part of calls."""

    @classmethod
    def of(cls, template: ChatTemplate, tokenizer: Tokenizer, tools: Sequence[Tool], choice: ToolChoice) -> ToolUse:
        """Raises UsageError for a template that knows no tools, or writes calls in no known form, for a tool that there
        is not, and for schemas that cannot be followed."""
        form = form_of(template.tool_source) if template.takes_tools else None
        if form is None:
            what = "no tools" if not template.takes_tools else "tools, but writes calls in no form that kv knows"
            raise UsageError(f"the chat template of this model takes {what}", "give another template (`chat_template`)")
        if missing := set(choice.names) - {tool.name for tool in tools}:
            raise UsageError(f"there is no tool {min(missing)[:80]!r} to be called")
        chosen = [tool for tool in tools if not choice.names or tool.name in choice.names]
        rules = _rules(form, chosen, choice.several and not form.single, tokenizer)
        written = "".join([form.opens, form.call, form.closes])
        ids = {
            tokenizer.encode_segments([(token, True)], add_bos=False)[-1] for _, token in tokenizer.controls(written)
        }
        return cls(form, tuple(tools), tuple(chosen), not choice.must, rules, frozenset(ids - tokenizer.eog_ids))

    def reader(self) -> CallReader:
        """One for an answer."""
        return CallReader(self.form, {tool.name: tool.parameters for tool in self.tools})

    def followed(self, shape: str) -> tuple[str, bool]:
        """What an answer follows that otherwise has this form ("" = any), and whether it does so only from the mark of
        its first call on."""
        lazy = self.free and not shape
        return self.rules.source(shape if self.free else ""), lazy


def _rules(form: Form, tools: Sequence[Tool], several: bool, tokenizer: Tokenizer) -> Rules:
    """The grammar of one or more calls, and of what stands around them."""
    rules, calls = Rules(tokenizer), []
    rules.named("start", "")  # comes first
    for tool in tools:
        rules.begin(tool.called, tool.strict)
        grammar.json_schema(tool.parameters, tool.called, not tool.strict)  # whatever the form makes of it
        fields = {
            "name": rules.text(tool.name), "id": "/[a-zA-Z0-9]{9}/", "number": "/[0-9]{1,4}/",
            "arguments": form.arguments.rule(rules, tool.parameters),
        }  # fmt: skip
        pieces = (fields[piece[1:-1]] if piece.startswith("«") else rules.text(piece) for piece in form.pieces)
        calls.append(rules.add(" ".join(pieces)))
    call = rules.add(" | ".join(calls))
    more = f"({rules.text(form.between)} {call})*" if several else ""
    rules.named("start", f"{rules.text(form.opens)} {call} {more} {rules.text(form.closes)}")
    return rules
