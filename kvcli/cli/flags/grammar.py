"""The flags that say which form an answer has. Never imports torch."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Annotated

import typer

from kvcli.cli.flags.checks import file_name
from kvcli.cli.helptext import GENERATION
from kvcli.cli.inputs import read_file
from kvcli.errors import UsageError

_option = functools.partial(typer.Option, rich_help_panel=GENERATION)


@dataclass(frozen=True)
class GrammarFlags:
    """What the answer follows."""

    json_schema: Annotated[
        str | None,
        file_name(
            GENERATION,
            "--json-schema",
            help="File with a JSON schema, or the schema itself: the answer is JSON of that form.",
        ),
    ] = None
    grammar: Annotated[
        str | None,
        file_name(
            GENERATION, "--grammar", help="File with a grammar in Lark's notation; the answer is a `start` of it."
        ),
    ] = None

    def schema(self) -> tuple[str, str] | None:
        """The text of the schema, and what to call it; None = there is none. Raises UsageError, InputBytesError."""
        if self.json_schema is None:
            return None
        if self.json_schema.lstrip().startswith("{"):
            return self.json_schema, "--json-schema"
        return read_file(self.json_schema), self.json_schema

    def source(self) -> str:
        """As `SampleOptions.grammar` has it. Raises UsageError, InputBytesError."""
        if self.json_schema is not None and self.grammar is not None:
            raise UsageError("--json-schema and --grammar cannot be used together", "leave one of them out")
        if self.json_schema is None and self.grammar is None:
            return ""
        from kvcli.runtime.text import grammar

        if (schema := self.schema()) is not None:
            return grammar.json_schema(*schema)
        assert self.grammar is not None
        return grammar.lark(read_file(self.grammar), self.grammar)
