"""From options to an open engine: find the model, download it where it is missing, load it."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from kvcli import startup
from kvcli.cli import keeping, locate, render
from kvcli.cli.flags.cache import Types
from kvcli.cli.interrupt import LEAVE, UNWIND, Interrupts
from kvcli.cli.invocation import Invocation
from kvcli.codecs import alias_note
from kvcli.errors import DoesNotFit, NotTaken
from kvcli.options import CacheOptions, LoadOptions, SampleOptions

if TYPE_CHECKING:
    from kvcli.runtime.engine.engine import Engine
    from kvcli.runtime.engine.loaded import LoadedModel
    from kvcli.runtime.text.template import ChatTemplate


def tell_aliases(pairs: Iterable[Types], invocation: Invocation) -> None:
    """Say what names that other programs use for formats of their own mean here, each once."""
    for name in dict.fromkeys(name for pair in pairs for name in pair):
        if note := alias_note(name):
            render.announce(note, invocation)


def load_model(load: LoadOptions, cache: CacheOptions, invocation: Invocation, interrupts: Interrupts) -> LoadedModel:
    """Load the model, downloading it first where it is a known name. ModelError, DownloadError, UsageError,
    DoesNotFit.

    An interrupt unwinds while files are written and leaves at once while weights are read. Where memory is short,
    models that stay there behind other commands and that nobody uses make room, unless that would not be enough.
    """
    tell_aliases([(cache.type_k, cache.type_v)], invocation)
    interrupts.stage = UNWIND
    path = locate.locate_model(load.model, invocation, to_run=True)
    draft = locate.locate_draft(load.draft, path, invocation) if load.draft else None
    interrupts.stage = LEAVE
    try:
        loaded = _loaded(path, draft, load, cache, invocation)
    except (DoesNotFit, NotTaken) as error:
        if not keeping.let_go(error, invocation):
            raise
        loaded = _loaded(path, draft, load, cache, invocation)
    _tell(loaded.notices, loaded.doubts, invocation)
    return loaded


def _loaded(
    path: Path, draft: Path | None, load: LoadOptions, cache: CacheOptions, invocation: Invocation
) -> LoadedModel:
    kept = keeping.kept_model(path, load)
    with startup.uncollected():
        from kvcli.runtime.engine.opened import Opened

        # Before torch is imported, whose libraries are loaded meanwhile.
        opened = Opened(path, load, kept.opened if kept else None)
        guesses = Opened.draft(draft, load) if draft else None
        from kvcli.runtime.engine.loaded import LoadedModel

        if kept is None:  # else this process was forked, and code is that of the one before
            startup.release_code()
        tell = partial(render.warn, invocation=invocation)
        return LoadedModel(opened, load, cache, tell, kept, guesses, room=keeping.make_room)


def engine_of(loaded: LoadedModel, invocation: Invocation, prompt_tokens: int = 0) -> Engine:
    """Run a model in the context that it was loaded for; `prompt_tokens`: what --keep -1 means. UsageError where that
    leaves no window, DoesNotFit."""
    from kvcli.runtime.engine.engine import Engine

    engine = Engine(loaded, loaded.terms.keeping(prompt_tokens))
    _tell([text for text in engine.notices if text not in loaded.notices], engine.doubts, invocation)
    return engine


def open_engine(load: LoadOptions, cache: CacheOptions, invocation: Invocation, interrupts: Interrupts) -> Engine:
    """`load_model` and `engine_of`, where no prompt decides anything."""
    return engine_of(load_model(load, cache, invocation, interrupts), invocation)


def tell_of_guesses(engine: Engine, sampling: SampleOptions, invocation: Invocation) -> None:
    """Say that guesses which were asked for are not made with another option."""
    if name := engine.unguessed(sampling):
        render.warn(f"`spec={sampling.spec}` changes nothing: nothing can be guessed with {name}", invocation)


def tell_of_template(template: ChatTemplate | None, styles: bool, invocation: Invocation) -> None:
    """Say which options of templates and of thinking change nothing for a model; `styles`: it marks thinking in a way
    that kv knows."""
    for name in template.unread if template else ():
        render.warn(f"--template-var {name} changes nothing: the chat template never reads it", invocation)
    if template is None or template.switch:
        return
    if template.options.reasoning == "on":
        render.warn("--reasoning on changes nothing: the chat template has no switch for thinking", invocation)
    elif template.budget >= 0 and not styles:
        render.notice("the model marks no thinking that kv knows: there is none to end", invocation)


def _tell(notices: list[str], doubts: list[str], invocation: Invocation) -> None:
    for text in notices:
        tell = render.announce if text in doubts else render.notice
        tell(text, invocation)
