"""From a model's name to a file that kv can run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from kvcli.errors import DownloadError, ModelError

if TYPE_CHECKING:
    from kvcli.runtime.hub.ranges import RemoteFile
    from kvcli.runtime.hub.store import Progress


def find_runnable(
    name: str, offline: bool, progress: Progress | None = None, notice: Callable[[str], None] | None = None
) -> Path:
    """The .gguf file meant by `name`, downloaded first if need be: `find_model`, but a model that kv cannot run is
    refused before it is downloaded. Raises ModelError, DownloadError."""
    from kvcli.runtime.hub.modelfiles import find_model

    return find_model(name, offline, progress, notice, _refuse_unrunnable)


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
