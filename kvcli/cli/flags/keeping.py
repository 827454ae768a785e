"""How long a model stays behind a command that used it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import typer

from kvcli.cli.flags.checks import checked
from kvcli.cli.helptext import MODEL
from kvcli.keepalive.spawn import parse_time
from kvcli.runtime.host.memory import parse_size

_ANY_CARD = 1 << 40  # bytes, for shares


def _check_least(text: str) -> None:
    parse_size(text, "--yield-vram", _ANY_CARD)


@dataclass(frozen=True)
class KeepFlags:
    """Whether a process stays with the model."""

    keep_alive: Annotated[
        str | None,
        typer.Option(
            "--keep-alive",
            metavar="TIME",
            help=(
                "Let the model stay in memory for so long after this command, so that the next one answers at once:"
                " 30s, 5m, 1h, 1d; -1 = until kv stop; 0 = not at all, and run without one that stayed."
            ),
            show_default="as a running one was told; else 0",
            callback=checked(parse_time),
            rich_help_panel=MODEL,
        ),
    ] = None

    yield_vram: Annotated[
        str | None,
        typer.Option(
            "--yield-vram",
            metavar="SIZE",
            help=(
                "With --keep-alive on a GPU: while nobody uses the model, unload it as soon as less than this is free"
                " there: 4G, or a share such as 0.2."
            ),
            show_default="as a running one was told; else 0.05",
            callback=checked(_check_least),
            rich_help_panel=MODEL,
        ),
    ] = None

    @property
    def seconds(self) -> float | None:
        """None = nothing was asked."""
        return None if self.keep_alive is None else parse_time(self.keep_alive)
