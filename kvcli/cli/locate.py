"""From a model's name to its file, for commands: with bars, and with a word on what is downloaded."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from kvcli.cli import render
from kvcli.cli.invocation import Invocation
from kvcli.errors import DownloadError, ModelError

if TYPE_CHECKING:
    from kvcli.runtime.hub.ranges import RemoteFile


def locate_model(name: str, invocation: Invocation, to_run: bool = False) -> Path:
    """The .gguf file meant by `name`, downloaded first if need be. Raises ModelError, DownloadError.

    `to_run`: a model that kv cannot run is refused before it is downloaded.
    """
    from kvcli.runtime.hub import modelfiles

    with showing_download(invocation) as (progress, notice):
        return modelfiles.find_model(name, invocation.offline, progress, notice, _refuse_unrunnable if to_run else None)


def _refuse_unrunnable(files: Sequence[RemoteFile]) -> None:
    from kvcli.runtime.headers.modelheaders import gguf_model
    from kvcli.runtime.hub.runnable import judge

    try:
        header = gguf_model(files)
    except DownloadError:  # a server without ranges, say; then the download itself tells what can be had
        return
    _, problem = judge(header.metadata, header.tensors)
    if problem:
        raise ModelError(f"kv cannot run {files[0].label}: {problem}", "kv pull downloads it all the same")


@contextmanager
def showing_download(invocation: Invocation) -> Iterator[tuple[render.Progress, Callable[[str], None]]]:
    """The progress bars and the notices of one download, on stderr."""
    with render.Progress(invocation) as progress:

        def notice(text: str) -> None:
            progress.close()  # a line must not be written into a bar
            render.announce(text, invocation)

        yield progress, notice
