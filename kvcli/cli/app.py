"""The commands of `kv` as Typer builds them, but for the reading of options and the help pages, which are ours."""

from __future__ import annotations

import copy
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup

from kvcli.cli import commandline, helptext, plainvalues, remarks, render, settings
from kvcli.cli.invocation import Invocation
from kvcli.cli.settings import Setting
from kvcli.errors import UsageError

OTHER_NAMES = {"info": "inspect", "ppl": "perplexity"}  # of commands

# Commands that say what is wrong with settings, and so go on with wrong ones.
_LENIENT = ("config", "completion", "doctor")


class _Lasting:
    """Of a command or a group: what comes of its options alone, and not of what is typed, is made once."""

    _parser: Any = None
    _help: Any = None

    def get_help_option(self, ctx: Any) -> Any:
        self._help = self._help or super().get_help_option(ctx)  # type: ignore[misc]
        return self._help

    def make_parser(self, ctx: Any) -> Any:
        if self._parser is None:
            self._parser = super().make_parser(ctx)  # type: ignore[misc]
        parser = copy.copy(self._parser)
        parser.ctx = ctx
        return parser


class Command(_Lasting, TyperCommand):
    """A command."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        with _prepared(ctx, args) as read:
            return super().parse_args(ctx, read)

    def get_help(self, ctx: Any) -> str:
        return _page(ctx)


class Group(_Lasting, TyperGroup):
    """A command with commands below it."""

    alone = False  # it does something without them, too, and takes options like one of them

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        with _prepared(ctx, args) as read:
            return super().parse_args(ctx, read)

    def get_help(self, ctx: Any) -> str:
        return _page(ctx)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        if ctx.parent is None:
            args = [OTHER_NAMES.get(args[0], args[0]), *args[1:]]
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


@contextmanager
def _prepared(ctx: Any, args: list[str]) -> Iterator[list[str]]:
    """The words for a command as Typer may read them; inside, options that are not typed have what is set.

    Raises UsageError. What is wrong with settings is raised behind it, by the last command: --help and --version, which
    exit, need none.
    """
    if ctx.resilient_parsing:  # a shell completes them
        yield args
        return
    invocation: Invocation = ctx.obj
    plainvalues.read_plainly(ctx.command.get_params(ctx))
    reader = commandline.Reader(
        ctx.command.get_params(ctx),
        ctx.command_path,
        lambda name: having(invocation.tree() if invocation.tree else ctx.find_root().command, name),
    )
    read = reader.read(args, ctx.allow_interspersed_args)
    invocation.called |= reader.called
    last = getattr(ctx.command, "alone", True) and not reader.stopped
    found = settings.without(_set(ctx, last), [option.name for option in reader.given])
    ctx.default_map = {name: setting.value for name, setting in found.items()}
    for option in ctx.command.params:
        if option.name in found:
            invocation.called |= dict.fromkeys((*option.opts, *option.secondary_opts), found[option.name].called)
    yield read
    if not last:
        return
    if invocation.wrong_settings and _words(ctx)[0] not in _LENIENT:
        raise invocation.wrong_settings
    remarks.tell(ctx.command.params, found, invocation)
    if _words(ctx) in (["run"], ["chat"]):  # they have all options that variables set
        remarks.tell_unread(ctx.command.params, invocation)


def _words(ctx: Any) -> list[str]:
    """Those that name the command, behind `kv`."""
    return ctx.command_path.split()[1:]


def _set(ctx: Any, last: bool) -> dict[str, Setting]:
    """What is set of the options of a command; nothing where something is wrong with it, which is kept."""
    invocation: Invocation = ctx.obj
    if invocation.settings is None:
        return {}
    try:
        below = getattr(ctx.command, "commands", ())
        return invocation.settings.of(_words(ctx), ctx.command.params, below, last)
    except UsageError as error:
        invocation.wrong_settings = invocation.wrong_settings or error
        return {}


def walk(command: Any, words: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """A command with all below it, and the words that name each."""
    yield words, command
    for name, below in getattr(command, "commands", {}).items():
        yield from walk(below, (*words, name))


def having(tree: Any, name: str) -> list[str]:
    """The commands that have an option of that name, as they are called."""
    return [
        " ".join(("kv", *words))
        for words, command in walk(tree)
        if any(name in (*option.opts, *option.secondary_opts) for option in command.params)
    ]


def shared_options(tree: Any) -> dict[str, Any]:
    """The options that variables and the top of the config file set, by `name`: the first of each in all commands."""
    found: dict[str, Any] = {}
    for words, command in walk(tree):
        for option in settings.shared(words, command.params):
            found.setdefault(option.name, option)
    return found


def _page(ctx: Any) -> str:
    return helptext.page(ctx, render.use_color(sys.stdout, ctx.obj.color)).rstrip("\n")
