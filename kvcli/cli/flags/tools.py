"""The flags that say which tools an answer may call. Never imports torch."""

from __future__ import annotations

import functools
import json
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvcli.cli.flags.checks import file_name, not_empty
from kvcli.cli.flags.prompt import PromptFlags
from kvcli.cli.helptext import GENERATION
from kvcli.cli.inputs import read_file, read_stdin
from kvcli.errors import UsageError
from kvcli.notices import Tell
from kvcli.options import ChatOptions

if TYPE_CHECKING:
    from kvcli.runtime.text.modeltext import ModelText
    from kvcli.runtime.text.tools.use import Tool, ToolChoice, ToolUse

_option = functools.partial(typer.Option, rich_help_panel=GENERATION)
AUTO, REQUIRED = "auto", "required"


@dataclass(frozen=True)
class ToolFlags:
    """Which tools the answer may call."""

    tools: Annotated[
        str | None,
        file_name(
            *(GENERATION, "--tools"),
            help="JSON file with a list of tools, as OpenAI has them, that the answer may call; - = stdin, or the list"
            ' itself. Each call is one line of JSON on stdout: {"name": ..., "arguments": {...}}.',
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

    def listed(self, prompt: PromptFlags, tell: Tell) -> ToolsAsked | None:
        """None = there are no tools. `prompt`: what else may want stdin. Raises UsageError, InputBytesError."""
        if self.tools is None:
            if self.tool_choice is not None:
                raise UsageError("--tool-choice needs --tools FILE", "it says how they are called")
            return None
        from kvcli.runtime.text.tools.use import tools_of

        called, text = self._text(prompt, tell)
        try:
            given = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise UsageError(f"{called} is not JSON: {error}") from None
        if not (found := tools_of(given)):
            raise UsageError(f"{called} lists no tools")
        return ToolsAsked(found, self.tool_choice or AUTO)

    def _text(self, prompt: PromptFlags, tell: Tell) -> tuple[str, str]:
        """What to call the list, and its text. Raises UsageError, InputBytesError."""
        assert self.tools is not None
        if self.tools.lstrip().startswith(("[", "{")):
            return "--tools", self.tools
        if self.tools != "-":
            return self.tools, read_file(self.tools)
        if "-" in prompt.file:
            raise UsageError("--tools - and -f - cannot be used together", "stdin can be read once")
        return "stdin", read_stdin(tell)


@dataclass(frozen=True)
class ToolsAsked:
    tools: tuple[Tool, ...]
    choice: str

    @property
    def asked(self) -> ToolChoice:
        from kvcli.runtime.text.tools.use import ToolChoice

        return ToolChoice(self.choice != AUTO, () if self.choice in (AUTO, REQUIRED) else (self.choice,))

    def told(self, chat: ChatOptions) -> ChatOptions:
        """With the tools for the chat template."""
        told: list[dict[str, Any]] = [tool.told for tool in self.tools]
        return replace(chat, variables={**chat.variables, "tools": told})

    def use(self, model: ModelText, raw: bool | None) -> ToolUse:
        """What an answer of this model may call. Raises UsageError."""
        from kvcli.runtime.text.tools.use import ToolUse

        if raw or model.template is None:
            raise UsageError("--tools needs a chat template", "it tells the model of them")
        return ToolUse.of(model.template, model.tokenizer, self.tools, self.asked)
