"""The commands of `kv` as Typer builds them, but for the reading of options and the help pages, which are ours."""

from __future__ import annotations

import sys
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup

from kvcli import commandline, helptext, render


class Command(TyperCommand):
    """A command."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        return super().parse_args(ctx, _read(ctx, args))

    def get_help(self, ctx: Any) -> str:
        return _page(ctx)


class Group(TyperGroup):
    """A command with commands below it."""

    alone = False  # it does something without them, too, and takes options like one of them

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        return super().parse_args(ctx, _read(ctx, args))

    def get_help(self, ctx: Any) -> str:
        return _page(ctx)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        if not ctx.resilient_parsing and args[0] not in self.commands:
            names = [name for name, command in self.commands.items() if not command.hidden]
            raise commandline.no_command(args[0], ctx.command_path, names)
        return super().resolve_command(ctx, args)


class App(typer.Typer):
    """A Typer whose commands and groups are ours."""

    def __init__(self, **options: Any) -> None:
        names = {"help_option_names": ["-h", "--help"]}
        settings = {"cls": Group, "add_completion": False, "rich_markup_mode": None, "context_settings": names}
        super().__init__(**{**settings, **options})

    def command(self, name: str | None = None, **options: Any) -> Any:
        return super().command(name, **{"cls": Command, **options})


def _read(ctx: Any, args: list[str]) -> list[str]:
    """The words for a command as Typer may read them. Raises UsageError."""
    if ctx.resilient_parsing:  # a shell completes them
        return args
    reader = commandline.Reader(ctx.command.get_params(ctx), ctx.command_path)
    read = reader.read(args, ctx.allow_interspersed_args)
    ctx.obj.called |= reader.called
    return read


def _page(ctx: Any) -> str:
    return helptext.page(ctx, render.use_color(sys.stdout, ctx.obj.color)).rstrip("\n")
