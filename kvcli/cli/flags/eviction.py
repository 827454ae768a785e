"""The flags that say what happens where a context is full: what an answer may forget, and what of a prompt may be cut.
Never imports torch."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Annotated

import typer

from kvcli.cli.flags.checks import checked, number, one_of
from kvcli.cli.flags.shared import parse_tokens
from kvcli.cli.helptext import FULL
from kvcli.cli.overflow import ERROR, POLICIES
from kvcli.errors import UsageError
from kvcli.options import EvictOptions
from kvcli.runtime.cache import eviction
from kvcli.runtime.cache.selection import Budget

_option = functools.partial(typer.Option, rich_help_panel=FULL)


def _window(text: str) -> int:
    if found := parse_tokens(text, "--window"):
        return found
    raise UsageError("--window is 0", "give a number of tokens, or leave it out for as many as fit")


@dataclass(frozen=True)
class EvictFlags:
    """What is forgotten."""

    evict: Annotated[
        str,
        _option(
            "--evict",
            metavar="|".join(eviction.names()),
            help="Which tokens to forget where the context is full: "
            + "; ".join(f"{name}: {what}" for name, what in eviction.forgetting().items())
            + "; or, with --budget, where the prompt is read: "
            + "; ".join(f"{name}: {what}" for name, what in eviction.forgetting(scored=True).items())
            + ".",
            callback=checked(eviction.policy),
        ),
    ] = EvictOptions.policy
    window: Annotated[
        str | None,
        _option(
            "--window",
            metavar="N",
            help="Number of recent tokens to keep.",
            show_default="as many as fit",
            callback=checked(_window),
        ),
    ] = None
    keep: Annotated[
        int | None,
        number(
            FULL,
            "--keep",
            least=eviction.WHOLE_PROMPT,
            hint="-1 = the whole prompt",
            help="Number of first tokens to keep; -1 = the whole prompt.",
            show_default="4",
        ),
    ] = None

    budget: Annotated[
        str | None,
        _option(
            "--budget",
            metavar="N|P%",
            help=f"Rows to keep, or their share, with {', '.join(eviction.scoring())}.",
            show_default=False,
            callback=checked(Budget.of),
        ),
    ] = None

    def options(self, page_size: int, prompt: bool = True, scored: str = "") -> EvictOptions:
        """`prompt`: whether there is one, for --keep -1. `scored`: why rows are not selected by score here; "" = they
        can be. Raises UsageError for what cannot be in any context."""
        window = 0 if self.window is None else _window(self.window)
        asked = EvictOptions(self.evict, window, self.keep, self.budget or "")
        eviction.check(asked, page_size)
        if asked.budget and scored:
            raise UsageError(f"--evict {asked.policy} cannot be used here: {scored}", "kv eval measures what it costs")
        if asked.keep == eviction.WHOLE_PROMPT and not prompt:
            raise UsageError("--keep -1 means the whole prompt, and there is none here", "give a number of tokens")
        return asked


@dataclass(frozen=True)
class OverflowFlags:
    """What becomes of a prompt that is longer than the context."""

    on_overflow: Annotated[
        str,
        _option(
            "--on-overflow",
            metavar="|".join(POLICIES),
            help="What to do with a prompt longer than the context: refuse it, or cut its start or middle.",
            callback=one_of("--on-overflow", POLICIES),
        ),
    ] = ERROR


def repeated_rows(evict: EvictOptions) -> int:
    """How many rows a context needs beside prompt and answer, for what a policy repeats of a prompt at a time."""
    scorer = eviction.policy(evict.policy).scorer
    if scorer is None or not scorer.repeats:
        return 0
    from kvcli.runtime.engine.replaying import PIECE

    return PIECE
