"""What a process that keeps a model has of it: on a CPU the model, on a GPU what the process says that holds it."""

from __future__ import annotations

import sys
from collections.abc import Collection
from dataclasses import replace
from typing import TYPE_CHECKING

from kvcli import startup
from kvcli.errors import KVError
from kvcli.keepalive.holder import Holder
from kvcli.keepalive.spawn import Wanted
from kvcli.options import CacheOptions, LoadOptions
from kvcli.runtime.host.memory import CPU

if TYPE_CHECKING:
    from kvcli.runtime.engine.held import HeldModel
    from kvcli.runtime.engine.loaded import LoadedModel


def load(wanted: Wanted, others: Collection[int]) -> tuple[LoadedModel | HeldModel, Holder | None]:
    """The model, and the process that has its weights where it is on a GPU, which must not have the descriptors
    `others`. With one thread: others would not be there in a forked process. Ends this one where it fails."""
    options = replace(wanted.load, threads=1, offline=True)
    try:
        with startup.uncollected():
            model, holder = _held(wanted, options, others) if is_held(wanted) else (_loaded(wanted, options), None)
            model.text.prepare()
            return model, holder
    except KVError as error:
        sys.exit(f"kv: {error.message}")


def is_held(wanted: Wanted) -> bool:
    """Whether another process has the weights."""
    return wanted.device != CPU


def _loaded(wanted: Wanted, options: LoadOptions) -> LoadedModel:
    from kvcli.runtime.engine.opened import Opened

    opened = Opened(wanted.path, options)
    from kvcli.runtime.engine.loaded import LoadedModel

    loaded = LoadedModel(opened, options, CacheOptions())
    loaded.finish()
    return loaded


def _held(wanted: Wanted, options: LoadOptions, others: Collection[int]) -> tuple[HeldModel, Holder]:
    from kvcli.runtime.engine import loaded  # noqa: F401  # torch first, of which no thread may load anything in a fork
    from kvcli.runtime.engine.opened import Opened

    opened = Opened(wanted.path, options, sends=False)
    try:
        holder = Holder(options, opened, others)
    except OSError as error:
        sys.exit(f"kv: {wanted.load.model} is not kept: no process can hold it: {error.strerror}")
    model = holder.model(opened)
    return (model, holder) if model else sys.exit(1)
