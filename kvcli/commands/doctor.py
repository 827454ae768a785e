"""`kv doctor`: what this machine is and how fast, measured and kept for `kv estimate`."""

from __future__ import annotations

import typer

from kvcli import render
from kvcli.helptext import PLANNING
from kvcli.invocation import Invocation, JsonFlag

_WIDTH, _INDENT = 80, 10


def register(app: typer.Typer) -> None:
    app.command("doctor", rich_help_panel=PLANNING)(doctor)


def doctor(ctx: typer.Context, json: JsonFlag = False) -> None:
    """Show devices, kernels, libraries, memory and speeds; measure what `kv estimate` would assume."""
    from kvcli.doctor import as_json, examine

    invocation: Invocation = ctx.obj
    render.notice("measuring: this takes about 20 seconds", invocation)
    if json:
        render.print_json(as_json(examine()))
        return
    for finding in examine():
        render.write_out(_lines(finding.name, finding.facts))


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
