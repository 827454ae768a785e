"""The flags that say how much of the cache is read. Never imports torch."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Annotated

import typer

from kvcli.cli.flags.checks import checked
from kvcli.cli.flags.shared import parse_tokens
from kvcli.cli.helptext import KV_CACHE
from kvcli.errors import UsageError
from kvcli.options import AttendOptions, EvictOptions
from kvcli.runtime.cache import attending

_option = functools.partial(typer.Option, rich_help_panel=KV_CACHE)
FROM = "--prefill-sparse-from"


@dataclass(frozen=True)
class AttendFlags:
    """What of the cache is read."""

    attend: Annotated[
        str,
        _option(
            "--attend",
            metavar="all|pages:K",
            help=(
                "What each token of an answer reads: all, or the first and the recent pages and the K best of the"
                " others (lossy)."
            ),
            callback=checked(attending.pages_of),
        ),
    ] = attending.ALL
    prefill_sparse: Annotated[
        str,
        _option(
            "--prefill-sparse",
            metavar="off|auto|X",
            help=(
                "Read fewer pages while long prompts are computed (lossy): those with at least X of the largest weight,"
                " or a share of them, such as 25%."
            ),
            callback=checked(attending.sparseness),
        ),
    ] = attending.OFF
    prefill_sparse_from: Annotated[
        str | None,
        _option(
            FROM,
            metavar="N",
            help="With --prefill-sparse: the first token of a prompt that is computed so.",
            show_default=str(AttendOptions.sparse_from),
            callback=checked(functools.partial(parse_tokens, flag=FROM)),
        ),
    ] = None

    def options(self, evict: EvictOptions) -> AttendOptions:
        """Raises UsageError for what cannot be together."""
        if self.prefill_sparse_from is not None and self.prefill_sparse == attending.OFF:
            raise UsageError(f"{FROM} needs --prefill-sparse", "--prefill-sparse auto reads fewer pages from there on")
        asked_from = self.prefill_sparse_from
        start = AttendOptions.sparse_from if asked_from is None else parse_tokens(asked_from, FROM)
        asked = AttendOptions(attending.pages_of(self.attend), *attending.sparseness(self.prefill_sparse), start)
        attending.check(asked, evict)
        return asked
