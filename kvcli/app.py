"""The commands of `kv` as Typer builds them, less its reading of options and its help pages."""

from __future__ import annotations

import sys
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup

from kvcli import arguments, helptext, render


class _Ours:
    """What all commands have: options by `arguments`, help pages by `helptext`."""

    def parse_args(self: Any, ctx: Any, args: list[str]) -> list[str]:
        if not ctx.resilient_parsing:
            path, interspersed = ctx.command_path, ctx.allow_interspersed_args
            args = arguments.as_ours(args, self.get_params(ctx), path, interspersed)
        return super().parse_args(ctx, args)

    def get_help(self, ctx: Any) -> str:
        return helptext.page(ctx, render.use_color(sys.stdout, ctx.obj.color)).rstrip("\n")


class Command(_Ours, TyperCommand):
    """A command."""


class Group(_Ours, TyperGroup):
    """A command with commands below it."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        if not ctx.resilient_parsing and args[0] not in self.commands:
            names = [name for name, command in self.commands.items() if not command.hidden]
            raise arguments.no_command(args[0], ctx.command_path, names)
        return super().resolve_command(ctx, args)


class App(typer.Typer):
    """A Typer whose commands and groups are ours."""

    def __init__(self, **options: Any) -> None:
        names = {"help_option_names": ["-h", "--help"]}
        super().__init__(cls=Group, add_completion=False, rich_markup_mode=None, context_settings=names, **options)

    def command(self, name: str | None = None, **options: Any) -> Any:
        return super().command(name, **{"cls": Command, **options})
