"""From a model's name to its file, for commands: with bars, and with a word on what is downloaded."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from kvcli.api import finding
from kvcli.cli import render
from kvcli.cli.invocation import Invocation


def locate_model(name: str, invocation: Invocation, to_run: bool = False) -> Path:
    """The .gguf file meant by `name`, downloaded first if need be. Raises ModelError, DownloadError.

    `to_run`: a model that kv cannot run is refused before it is downloaded.
    """
    from kvcli.runtime.hub import modelfiles

    find = finding.find_runnable if to_run else modelfiles.find_model
    with showing_download(invocation) as (progress, notice):
        return find(name, invocation.offline, progress, notice)


def locate_draft(name: str, model: Path, invocation: Invocation) -> Path:
    """As above, of a model that is to draft for the one in `model`."""
    with showing_download(invocation) as (progress, notice):
        return finding.find_draft(name, model, invocation.offline, progress, notice)


@contextmanager
def showing_download(invocation: Invocation) -> Iterator[tuple[render.Progress, Callable[[str], None]]]:
    """The progress bars and the notices of one download, on stderr."""
    with render.Progress(invocation) as progress:

        def notice(text: str) -> None:
            progress.close()  # a line must not be written into a bar
            render.announce(text, invocation)

        yield progress, notice
