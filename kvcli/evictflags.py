"""The flags that say what happens where a context is full: what an answer may forget, and what of a prompt may be cut.
Never imports torch."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Annotated

import typer

from kvcli.errors import UsageError
from kvcli.flags import parse_tokens
from kvcli.options import EvictOptions
from kvcli.overflow import ERROR, POLICIES
from kvcli.runtime import eviction

_option = functools.partial(typer.Option, rich_help_panel="When the context is full")


@dataclass(frozen=True)
class EvictFlags:
    """What is forgotten."""

    evict: Annotated[
        str,
        _option(
            "--evict", metavar="none|window|sink", help="Forget old tokens: all but a window, or but the first, too."
        ),
    ] = EvictOptions.policy
    window: Annotated[
        str | None,
        _option("--window", metavar="N", help="Recent tokens that stay.", show_default="what the context holds"),
    ] = None
    keep: Annotated[
        int | None,
        _option("--keep", metavar="N", help="sink: first tokens that stay; -1 = the prompt.", show_default="4"),
    ] = None

    def options(self, page_size: int, prompt: bool = True) -> EvictOptions:
        """`prompt`: whether there is one, for --keep -1. Raises UsageError for what cannot be in any context."""
        window = 0
        if self.window is not None:
            window = parse_tokens(self.window, "--window")
            if window == 0:
                raise UsageError("--window is 0", "give a number of tokens, or leave it out for as many as fit")
        asked = EvictOptions(self.evict, window, self.keep)
        eviction.check(asked, page_size)
        if asked.keep == eviction.WHOLE_PROMPT and not prompt:
            raise UsageError("--keep -1 is the whole prompt, and here is none", "give a number of tokens")
        return asked


@dataclass(frozen=True)
class OverflowFlags:
    """What becomes of a prompt that is longer than the context."""

    on_overflow: Annotated[
        str,
        _option(
            "--on-overflow", metavar="|".join(POLICIES), help="A prompt that is too long: refuse it, or cut its text."
        ),
    ] = ERROR

    def policy(self) -> str:
        """Raises UsageError."""
        if self.on_overflow not in POLICIES:
            raise UsageError(f"--on-overflow is '{self.on_overflow}'", f"it is one of {', '.join(POLICIES)}")
        return self.on_overflow
