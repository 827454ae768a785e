"""The flags of chat templates and of thinking. Never imports torch."""

from __future__ import annotations

import functools
import json
from dataclasses import dataclass, field
from typing import Annotated, Any

import typer

from kvcli.cli.flags.checks import checked, file_name, number, one_of
from kvcli.cli.helptext import PROMPT
from kvcli.cli.inputs import read_file
from kvcli.errors import UsageError
from kvcli.options import ChatOptions

_option = functools.partial(typer.Option, rich_help_panel=PROMPT)


def parse_variable(text: str) -> tuple[str, Any]:
    """'KEY=JSON' -> name and value. Raises UsageError."""
    name, equals, value = text.partition("=")
    if not equals or not name.strip().isidentifier():
        raise UsageError(f"--template-var must be KEY=JSON, not '{text}'", "such as enable_thinking=false")
    try:
        return name.strip(), json.loads(value)
    except ValueError:
        raise UsageError(
            f"the value of --template-var {name.strip()} is not JSON: {value}", f"""a text has quotes: '{name}="..."'"""
        ) from None


@dataclass(frozen=True)
class TemplateFlags:
    """Which chat template is used, and with what."""

    chat_template: Annotated[
        str | None,
        file_name(PROMPT, "--chat-template", help="File with a chat template (Jinja) in place of the model's."),
    ] = None
    template_var: Annotated[
        list[str],
        _option(
            "--template-var",
            metavar="KEY=JSON",
            help="Variable for the chat template, e.g. 'tools=[...]' or 'date_string=\"1 May\"' (repeatable).",
            callback=checked(parse_variable),
        ),
    ] = field(default_factory=list)
    reasoning: Annotated[
        str,
        _option(
            "--reasoning",
            metavar="on|off|auto",
            help="Whether the model thinks before it answers, where that can be chosen; auto = as the template has it.",
            callback=one_of("--reasoning", ("on", "off", "auto")),
        ),
    ] = ChatOptions.reasoning

    @property
    def variables(self) -> dict[str, Any]:
        """For another engine: what the template gets, with both names that templates have for a switch of thinking."""
        switch = dict.fromkeys(("enable_thinking", "thinking"), self.reasoning == "on")
        return ({} if self.reasoning == "auto" else switch) | dict(map(parse_variable, self.template_var))

    def options(self, raw: bool | None, budget: int = ChatOptions.budget) -> ChatOptions:
        """`raw`: there is no template; `budget`: of thinking. Raises UsageError, InputBytesError."""
        source = None if self.chat_template is None else read_file(self.chat_template)
        variables = dict(parse_variable(each) for each in self.template_var)
        given = {
            "--chat-template": source is not None,
            "--template-var": bool(variables),
            "--reasoning": self.reasoning != ChatOptions.reasoning,
            "--reasoning-budget": budget != ChatOptions.budget,
        }
        if raw and (flags := [name for name, there in given.items() if there]):
            raise UsageError(f"--raw and {flags[0]} cannot be used together", "--raw uses no chat template")
        return ChatOptions(source, variables, self.reasoning, budget)


@dataclass(frozen=True)
class ThinkingFlags:
    """How long the model may think."""

    reasoning_budget: Annotated[
        int,
        number(
            PROMPT,
            "--reasoning-budget",
            least=-1,
            help="Maximum number of tokens of thinking, which is then ended; -1 = no limit.",
        ),
    ] = ChatOptions.budget
