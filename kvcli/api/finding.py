"""From a model's name to a file that kv can run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from kvcli.errors import DownloadError, KVError, ModelError

if TYPE_CHECKING:
    from kvcli.runtime.hub.ranges import RemoteFile
    from kvcli.runtime.hub.store import Progress


def find_runnable(
    name: str, offline: bool, progress: Progress | None = None, notice: Callable[[str], None] | None = None
) -> Path:
    """The .gguf file or the folder meant by `name`, downloaded first if need be: `find_model`, but a model that kv
    cannot run is refused before it is downloaded. Raises ModelError, DownloadError."""
    from kvcli.runtime.hub.modelfiles import find_model

    return find_model(name, offline, progress, notice, _refuse_unrunnable)


def find_draft(
    name: str, model: Path, offline: bool, progress: Progress | None = None,
    notice: Callable[[str], None] | None = None,
) -> Path:  # fmt: skip
    """As `find_runnable`, of one that is to draft for the model in `model`: one of another vocabulary is refused before
    it is downloaded, where a recipe or a header says so. Raises ModelError, DownloadError."""
    if not offline:
        try:
            return find_runnable(name, True, progress, notice)
        except DownloadError:  # it is not here
            _refuse_unlike(name, model)
    return find_runnable(name, offline, progress, notice)


def _refuse_unlike(name: str, model: Path) -> None:
    from kvcli.api.planning import check_vocabularies
    from kvcli.runtime.headers.plannedmodel import planned_model
    from kvcli.runtime.headers.shapes import Given
    from kvcli.runtime.host.memory import CPU

    try:
        pair = [planned_model(each, Given(), CPU, False) for each in (str(model), name)]
    except KVError:  # whatever it is, loading tells it
        return
    check_vocabularies(pair[0], pair[1])


def _refuse_unrunnable(files: Sequence[RemoteFile]) -> None:
    try:
        problem = _problem_of(files)
    except DownloadError:  # a server without ranges, say; then the download itself tells what can be had
        return
    if problem:
        raise ModelError(f"kv cannot run {files[0].label}: {problem}", "kv pull downloads it all the same")


def _problem_of(files: Sequence[RemoteFile]) -> str:
    """Why these files, of which only the first bytes are read, do not run: GGUF files, or those of a folder."""
    from kvcli.runtime.formats.boundedjson import load_object
    from kvcli.runtime.headers.anygguf import config_problem
    from kvcli.runtime.headers.modelheaders import MAX_CONFIG_BYTES, document, gguf_model
    from kvcli.runtime.hub.runnable import judge
    from kvcli.runtime.text.foldernames import CONFIG

    if files[0].label.endswith(".gguf"):
        header = gguf_model(files)
        return judge(header.metadata, header.tensors)[1]
    config = next(file for file in files if file.label.endswith(f"/{CONFIG}"))
    return config_problem(load_object(document(config, MAX_CONFIG_BYTES), config.label))
