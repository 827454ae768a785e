"""Commands for nobody, by which a process that keeps a model finds out what others will need."""

from __future__ import annotations

import marshal
import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from kvcli.keepalive import thisprocess

if TYPE_CHECKING:
    from kvcli.runtime.engine.held import HeldModel
    from kvcli.runtime.engine.loaded import LoadedModel


def rehearse(
    words: Sequence[str], key: str, loaded: LoadedModel | HeldModel, found: Callable[[], Any]
) -> tuple[int, Any]:
    """Do the command of these words in a forked process, with the model of that key; its exit code, and what `found`
    finds in that process then."""
    from kvcli.cli import main

    read, write = os.pipe2(os.O_CLOEXEC)
    if (pid := os.fork()) == 0:
        os.close(read)
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        thisprocess.forked = thisprocess.Forked(key, loaded, None, None, thisprocess.NOBODY, 1)
        code = main.run_command(list(words))
        with suppress(BrokenPipeError), open(write, "wb") as told:  # `kv stop` has ended the process that would read it
            told.write(marshal.dumps((code, found())))
        os._exit(0)
    os.close(write)
    with open(read, "rb") as told:
        answer = told.read()
    os.waitpid(pid, 0)
    return marshal.loads(answer) if answer else (1, None)
