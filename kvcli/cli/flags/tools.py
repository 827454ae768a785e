"""The flags that say which tools an answer may call. Never imports torch."""

from __future__ import annotations

import functools
import json
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvcli.cli.flags.checks import not_empty
from kvcli.cli.helptext import GENERATION
from kvcli.cli.inputs import read_file
from kvcli.errors import UsageError
from kvcli.options import ChatOptions

if TYPE_CHECKING:
    from kvcli.runtime.text.modeltext import ModelText
    from kvcli.runtime.text.tools.use import Tool, ToolUse

_option = functools.partial(typer.Option, rich_help_panel=GENERATION)
AUTO, REQUIRED = "auto", "required"


@dataclass(frozen=True)
class ToolFlags:
    """Which tools the answer may call."""

    tools: Annotated[
        str | None,
        _option(
            "--tools",
            metavar="FILE",
            help=(
                "JSON file with a list of tools, as OpenAI has them, that the answer may call. Each call is one line of"
                ' JSON on stdout: {"name": ..., "arguments": {...}}.'
            ),
            callback=not_empty("--tools", "give the name of a file"),
        ),
    ] = None
    tool_choice: Annotated[
        str | None,
        _option(
            "--tool-choice",
            metavar="auto|required|NAME",
            help="Whether the answer may call tools, is a call, or is a call of this tool.",
            show_default=AUTO,
            callback=not_empty("--tool-choice", "give auto, required or the name of a tool"),
        ),
    ] = None

    def listed(self) -> ToolsAsked | None:
        """None = there are no tools. Raises UsageError, InputBytesError."""
        if self.tools is None:
            if self.tool_choice is not None:
                raise UsageError("--tool-choice needs --tools FILE", "it says how they are called")
            return None
        from kvcli.runtime.text.tools.use import tools_of

        try:
            given = json.loads(read_file(self.tools))
        except (ValueError, RecursionError) as error:
            raise UsageError(f"{self.tools} is not JSON: {error}") from None
        if not (found := tools_of(given)):
            raise UsageError(f"{self.tools} lists no tools")
        return ToolsAsked(found, self.tool_choice or AUTO)


@dataclass(frozen=True)
class ToolsAsked:
    tools: tuple[Tool, ...]
    choice: str

    def told(self, chat: ChatOptions) -> ChatOptions:
        """With the tools for the chat template."""
        told: list[dict[str, Any]] = [tool.told for tool in self.tools]
        return replace(chat, variables={**chat.variables, "tools": told})

    def use(self, model: ModelText, raw: bool | None) -> ToolUse:
        """What an answer of this model may call. Raises UsageError."""
        from kvcli.runtime.text.tools.use import ToolChoice, ToolUse

        if raw or model.template is None:
            raise UsageError("--tools needs a chat template", "it tells the model of them")
        must = self.choice != AUTO
        names = () if self.choice in (AUTO, REQUIRED) else (self.choice,)
        return ToolUse.of(model.template, model.tokenizer, self.tools, ToolChoice(must, names))
