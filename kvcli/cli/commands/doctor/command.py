"""`kv doctor`: what this machine is and how fast, measured and kept for `kv estimate`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import typer

from kvcli.cli import render, settings
from kvcli.cli.commands import config
from kvcli.cli.flags.promptcache import CacheDir, store_folder
from kvcli.cli.helptext import PLANNING
from kvcli.cli.invocation import Invocation, JsonFlag
from kvcli.cli.settings import DEFAULT
from kvcli.errors import UsageError

if TYPE_CHECKING:
    from kvcli.cli.commands.doctor.probes import Finding

_WIDTH, _INDENT = 80, 10


EXAMPLES = """
kv doctor
kv doctor --json > report.json
"""


def register(app: typer.Typer) -> None:
    app.command("doctor", rich_help_panel=PLANNING, epilog=EXAMPLES)(doctor)


def doctor(ctx: typer.Context, cache_dir: CacheDir = None, json: JsonFlag = False) -> None:
    """Show versions, devices, memory, speeds, folders and settings; measure what kv estimate would assume."""
    from kvcli.cli.commands.doctor.probes import as_json, examine

    invocation: Invocation = ctx.obj

    def begin(what: str) -> None:
        render.step(f"measuring: {what}", invocation)

    found = examine(_settings(ctx), store_folder(cache_dir), begin)
    if json:
        render.print_json("doctor", as_json(found))
        return
    for finding in found:
        render.write_out(_lines(finding.name, finding.facts))


def _settings(ctx: typer.Context) -> Finding:
    """What is set, or what is wrong with it."""
    from kvcli.cli.commands.doctor.probes import Finding

    file = settings.file_path()
    there = str(file) if file and file.exists() else None
    try:
        found = {name: each for name, each in config.in_force(ctx) if each.origin != DEFAULT}
        unread = config.unread(ctx.obj)
    except UsageError as error:
        return Finding("settings", (error.message,), {"path": there, "problem": error.message})
    facts = [f"{name} = {config.shown(each.value)} ({config.source(each)})" for name, each in found.items()]
    values = {name: {"value": each.value, "origin": each.origin} for name, each in found.items()}
    facts = [there or "no config file", *facts, *unread]
    return Finding("settings", tuple(facts), {"path": there, "set": values, "unread": unread})


def _lines(name: str, facts: tuple[str, ...]) -> str:
    """The name, then the facts with dots between them, broken between facts before column 80."""
    lines = [render.one_line(facts[0])]
    for fact in map(render.one_line, facts[1:]):
        if _INDENT + len(lines[-1]) + 3 + len(fact) > _WIDTH:
            lines.append(fact)
        else:
            lines[-1] += f" · {fact}"
    text = ("\n" + " " * _INDENT).join(part for line in lines for part in _wrapped(line))
    return f"{name:<{_INDENT}}{text}\n"


def _wrapped(line: str) -> list[str]:
    import textwrap

    return textwrap.wrap(line, _WIDTH - _INDENT, break_long_words=False, break_on_hyphens=False) or [""]
