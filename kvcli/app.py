"""The commands of `kv` as Typer builds them, with help pages of our own."""

from __future__ import annotations

import sys
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup

from kvcli import helptext, render


class _Helpful:
    """Help pages in the layout of `helptext`."""

    def get_help(self, ctx: Any) -> str:
        return helptext.page(ctx, render.use_color(sys.stdout, ctx.obj.color)).rstrip("\n")


class Command(_Helpful, TyperCommand):
    """A command."""


class Group(_Helpful, TyperGroup):
    """A command with commands below it."""


class App(typer.Typer):
    """A Typer whose commands and groups are ours."""

    def __init__(self, **options: Any) -> None:
        names = {"help_option_names": ["-h", "--help"]}
        super().__init__(cls=Group, add_completion=False, rich_markup_mode=None, context_settings=names, **options)

    def command(self, name: str | None = None, **options: Any) -> Any:
        return super().command(name, **{"cls": Command, **options})
