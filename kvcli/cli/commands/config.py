"""`kv config`: what options are set to without being typed, and where that is from; and changing the config file."""

from __future__ import annotations

import fcntl
import os
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvcli import paths
from kvcli.cli import configfile, foreign, helptext, render, settings
from kvcli.cli.app import App, shared_options, walk
from kvcli.cli.globaloptions import require_command
from kvcli.cli.helptext import SETUP
from kvcli.cli.invocation import Invocation, JsonFlag
from kvcli.cli.settings import DEFAULT, FILE, TYPED, Setting, Settings
from kvcli.errors import OutputError, UsageError
from kvcli.words import meant, near

if TYPE_CHECKING:
    from collections.abc import Mapping

EXAMPLES = """
kv config show
kv config show bench
kv config show ctx-size
kv config set model gemma-3-270m
kv config set ctx-size 32k
kv config set chat.stats false
kv config unset ctx-size
kv config path
"""
Key = Annotated[
    str,
    typer.Argument(
        metavar="NAME", help="Long name of an option, such as ctx-size; for one command only, chat.ctx-size."
    ),
]


def register(app: typer.Typer) -> None:
    group = App(epilog=EXAMPLES)
    group.callback(invoke_without_command=True)(config)
    for name, command in (("show", show), ("path", path), ("set", set_), ("unset", unset)):
        group.command(name)(command)
    app.add_typer(group, name="config", rich_help_panel=SETUP)


def config(ctx: typer.Context) -> None:
    """Show and change settings: the default values of options.

    An option takes the first of: the command line; its variable, such as KV_CTX_SIZE for --ctx-size; the config file,
    where the table of a command, such as [bench], comes before the top; a variable of another program that means the
    same; its default. Variables and the top of the file set options of kv run and kv chat, and those of other commands
    that are the same.
    """
    require_command(ctx)


def path(json: JsonFlag = False) -> None:
    """Print the path of the config file, whether or not it is there."""
    render.print_path("config path", {"path": str(_file())}, json)


def show(
    ctx: typer.Context,
    command: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[COMMAND]...",
            help="Show all options of one command, e.g. cache build, or one setting, e.g. ctx-size.",
        ),
    ] = None,
    json: JsonFlag = False,
) -> None:
    """List settings, their values and where these are from."""
    invocation: Invocation = ctx.obj
    tree = invocation.tree()  # type: ignore[misc]
    found = dict(_of_command(ctx, tree, command) if command else in_force(ctx))
    if json:
        file = settings.file_path()
        entries = [
            {"name": name, "value": each.value, "origin": each.origin, "source": each.called or None}
            for name, each in found.items()
        ]
        place = str(file) if file else None
        render.print_json("config show", {"path": place, "settings": entries, "unread": unread(invocation)})
        return
    rows = [[name, shown(each.value), source(each)] for name, each in found.items()]
    render.print_table(["setting", "value", "from"], rows, invocation)
    for line in unread(invocation):
        render.warn(line, invocation)


def unread(invocation: Invocation) -> list[str]:
    """A line for each variable that looks as if it were read, and is not."""
    tree = invocation.tree()  # type: ignore[misc]
    known = {name for _, each in walk(tree) for option in each.params for name, _ in settings.names(option)}
    return list(_settings(invocation).unread(known))


def in_force(ctx: typer.Context) -> Iterator[tuple[str, Setting]]:
    """What variables and the top of the file set, then what tables set. Raises UsageError if anything is wrong."""
    tree = ctx.obj.tree()
    options = sorted(shared_options(tree).values(), key=lambda option: helptext.rank(helptext.section(option)))
    found = _settings(ctx.obj).common(options)
    for option in options:
        yield settings.name(option), _typed(ctx, option) or found.get(option.name) or _default(option)
    for words, command in walk(tree):
        below = getattr(command, "commands", ())
        for name, setting in _settings(ctx.obj).of(words, command.params, below).items():
            option = next(option for option in command.params if option.name == name)
            if setting.origin == FILE and setting.called.startswith(".".join([*words, ""])) and words:
                yield ".".join([*words, settings.name(option)]), setting


def _of_command(ctx: typer.Context, tree: Any, words: Sequence[str]) -> Iterator[tuple[str, Setting]]:
    """All options of one command, or a setting by its name. Raises UsageError for what is neither."""
    command = dict(walk(tree)).get(tuple(words))
    if command is None and len(words) == 1:
        yield _of_name(ctx, tree, words[0])
        return
    if command is None or not getattr(command, "alone", True):
        raise UsageError(f"there is no command '{' '.join(words)}' with options", "see kv --help")
    found = _settings(ctx.obj).of(words, command.params, getattr(command, "commands", ()))
    for option in settings.settable(command.params):
        if helptext.section(option) != helptext.GLOBAL:
            yield settings.name(option), found.get(option.name) or _default(option)


def _of_name(ctx: typer.Context, tree: Any, name: str) -> tuple[str, Setting]:
    """One setting. Raises UsageError for a name that is none."""
    table, option, _ = _option(ctx, name)
    called = settings.name(option)
    if not table:
        return called, dict(in_force(ctx))[called]
    command = dict(walk(tree))[tuple(table)]
    found = _settings(ctx.obj).of(table, command.params, getattr(command, "commands", ()))
    return ".".join([*table, called]), found.get(option.name) or _default(option)


def _settings(invocation: Invocation) -> Settings:
    assert invocation.settings is not None
    return invocation.settings


def _typed(ctx: typer.Context, option: Any) -> Setting | None:
    """A global option that was given with this very call."""
    for context in (ctx, ctx.find_root()):
        source = context.get_parameter_source(option.name)
        if source is not None and source.name == "COMMANDLINE":
            value = getattr(ctx.obj, option.name, True)
            return Setting(getattr(value, "value", value), TYPED, "")
    return None


def _default(option: Any) -> Setting:
    value = option.default
    return Setting(getattr(value, "value", value) if value is not None else helptext.default_text(option), DEFAULT, "")


def shown(value: Any) -> str:
    return value if isinstance(value, str) else "" if value is None else configfile.toml(value)


def source(setting: Setting) -> str:
    named = setting.called if setting.origin in (settings.VARIABLE, settings.OTHER) else ""
    return named or setting.origin.replace("_", " ")


def set_(
    ctx: typer.Context,
    name: Key,
    values: Annotated[
        list[str], typer.Argument(metavar="VALUE...", help="Several values for an option that is repeatable.")
    ],
) -> None:
    """Keep a value for an option in the config file."""
    table, option, no = _option(ctx, name)
    if len(values) > 1 and not option.multiple:
        raise UsageError(f"{name} takes one value, not {len(values)}", "put it in quotes")
    value: Any = values if option.multiple else _value(option, no, values[0], name)
    ctx.obj.called |= dict.fromkeys(option.opts, name)
    option.process_value(
        ctx, value if option.is_flag or option.multiple else values[0]
    )  # raises for one of another type
    _change(ctx.obj, table, _names(option), value)


def unset(ctx: typer.Context, name: Key) -> None:
    """Remove a value from the config file, or a table that is of no command."""
    file = _file()
    held = settings.parse(settings.read_text(file), file)
    try:
        table, option, _ = _option(ctx, name)
        names = _names(option)
    except UsageError:
        *table, last = words = _words(name)
        if tuple(words) not in dict(walk(ctx.obj.tree())) and _without(held, words) != held:
            edit, expected = partial(configfile.without_table, words=words), partial(_without, words=words)
            _rewrite(ctx.obj, edit, expected)
            return
        names = [last]
        if _expected(held, table, names, None) == held:
            raise
    if _expected(held, table, names, None) == held:
        render.announce(f"{name} is not set in {file}", ctx.obj)
    else:
        _change(ctx.obj, table, names, None)


def _words(name: str) -> list[str]:
    return name.removeprefix("--").replace("_", "-").split(".")


def _names(option: Any) -> list[str]:
    """What an option is called in the file, as kv writes it first."""
    return [name for name, _ in settings.names(option)]


def _option(ctx: typer.Context, name: str) -> tuple[list[str], Any, bool]:
    """The tables that a setting stands in, its option, and whether the name says no. Raises UsageError for none."""
    *table, last = _words(name)
    tree = ctx.obj.tree()
    command = dict(walk(tree)).get(tuple(table))
    found = [] if command is None else settings.settable(command.params) if table else shared_options(tree).values()
    for option in found:
        for each, no in settings.names(option):
            if each == last:
                return table, option, no
    same = foreign.ALIASES.get(f"--{last}", f"-{last}")  # a short name, or one of another program
    if meant_by := [settings.name(option) for option in found if same in option.opts]:
        raise UsageError(f"{name} is not a setting", meant(".".join([*table, each]) for each in meant_by))
    offered = near(last, (each for option in found for each, _ in settings.names(option)))
    hint = meant(".".join([*table, name]) for name in offered) or "kv config show lists what can be set"
    raise UsageError(f"{name} is not a setting", hint)


def _value(option: Any, no: bool, text: str, name: str) -> Any:
    """A word as TOML would have it: true, 5, 0.5 or a string. Raises UsageError."""
    if option.is_flag and not option.count:
        if text.lower() not in (*settings.TRUE, *settings.FALSE):
            raise UsageError(f"{name} must be true or false, not '{text}'")
        return (text.lower() in settings.TRUE) is not no
    for kind, form in ((int, r"-?\d{1,15}"), (float, r"-?\d{1,15}\.\d+")):
        if re.fullmatch(form, text) and str(kind(text)) == text:
            return kind(text)
    return text


def _change(invocation: Invocation, table: list[str], names: list[str], value: Any) -> None:
    """Write the file with another value for the key of these names. Raises what `_rewrite` does."""

    def edit(text: str) -> str:
        for name in names:
            text = configfile.changed(text, [*table, name], None)
        return configfile.changed(text, [*table, names[0]], value)

    _rewrite(invocation, edit, lambda held: _expected(held, table, names, value))


def _rewrite(
    invocation: Invocation, edit: Callable[[str], str], expected: Callable[[dict[str, Any]], dict[str, Any]]
) -> None:
    """Write the file as `edit` makes its text, where that holds what is `expected`. Raises UsageError, OutputError; the
    file is then as it was."""
    file = _file()
    with _held(file.parent):
        old = settings.read_text(file)
        new, wanted = edit(old), expected(settings.parse(old, file))
        with suppress(UsageError):
            if settings.parse(new, file) == wanted:
                _write(file, new, invocation)
                return
    raise UsageError(f"{file} is not written in a way that kv can change", "change it in an editor")


def _file() -> Path:
    """The config file. Raises UsageError."""
    file = settings.file_path()
    if file is None:
        raise UsageError("there is no config file: KV_CONFIG is 'none'")
    return file


@contextmanager
def _held(folder: Path) -> Iterator[None]:
    """The folder, which is made where it is missing, for one process at a time: none loses what another one writes.
    Raises OutputError."""
    try:
        paths.make_private(folder)
        descriptor = os.open(folder, os.O_RDONLY)
    except OSError as error:
        raise OutputError(f"cannot use {folder}: {error.strerror or error}") from None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _write(file: Path, text: str, invocation: Invocation) -> None:
    """Raises OutputError."""
    try:
        paths.replace_file(Path(os.path.realpath(file)), text.encode())
    except OSError as error:
        raise OutputError(f"cannot write {file}: {error.strerror or error}") from None
    render.notice(f"{file} is written", invocation)


def _expected(found: Mapping[str, Any], table: list[str], names: list[str], value: Any) -> dict[str, Any]:
    """What the file is to hold: what it held, with another value for one key."""
    if table:
        if not isinstance(inner := found.get(table[0], {}), dict):  # a value beside the table
            return dict(found)
        below = _expected(inner, table[1:], names, value)
        return {**found, table[0]: below} if below or table[0] in found else dict(found)
    kept = {key: each for key, each in found.items() if key.replace("_", "-") not in names or isinstance(each, dict)}
    return kept if value is None else {**kept, names[0]: value}


def _without(found: dict[str, Any], words: Sequence[str]) -> dict[str, Any]:
    """What the file is to hold without the table that these words name. One that has nothing else goes with it."""
    first, *rest = words
    key = next((key for key, each in found.items() if key.replace("_", "-") == first and isinstance(each, dict)), "")
    below = _without(found[key], rest) if key and rest else {}
    if not key or (rest and below == found[key]):
        return found
    return {name: below if name == key else each for name, each in found.items() if name != key or below}
