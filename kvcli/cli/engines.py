"""From options to an open engine: find the model, download it where it is missing, load it."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import TYPE_CHECKING

from kvcli.cli import locate, render
from kvcli.cli.flags.cache import Types
from kvcli.cli.interrupt import LEAVE, UNWIND, Interrupts
from kvcli.cli.invocation import Invocation
from kvcli.codecs import alias_note
from kvcli.options import CacheOptions, LoadOptions

if TYPE_CHECKING:
    from kvcli.runtime.engine.engine import Engine


def tell_aliases(pairs: Iterable[Types], invocation: Invocation) -> None:
    """Say what names that other programs use for formats of their own mean here, each once."""
    for name in dict.fromkeys(name for pair in pairs for name in pair):
        if note := alias_note(name):
            render.announce(note, invocation)


def open_engine(load: LoadOptions, cache: CacheOptions, invocation: Invocation, interrupts: Interrupts) -> Engine:
    """Load the model, downloading it first where it is a known name. ModelError, DownloadError, UsageError,
    DoesNotFit.

    An interrupt unwinds while files are written and leaves at once while weights are read.
    """
    tell_aliases([(cache.type_k, cache.type_v)], invocation)
    interrupts.stage = UNWIND
    path = locate.locate_model(load.model, invocation, to_run=True)
    interrupts.stage = LEAVE
    from kvcli.runtime.engine.engine import Engine

    engine = Engine.open(path, load, cache)  # maps the file: too quick for a bar
    _tell(engine, 0, invocation)
    engine.tell = partial(render.warn, invocation=invocation)
    return engine


def keep_prompt(engine: Engine, n_tokens: int, invocation: Invocation) -> None:
    """`Engine.keep_prompt`, and what it says of it."""
    known = len(engine.notices)
    engine.keep_prompt(n_tokens)
    _tell(engine, known, invocation)


def _tell(engine: Engine, known: int, invocation: Invocation) -> None:
    """What the engine has noted since there were `known` notices."""
    for text in engine.notices[known:]:
        tell = render.announce if text in engine.doubts else render.notice
        tell(text, invocation)
