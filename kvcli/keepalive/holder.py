"""The process that has the weights of a model that stays on a GPU.

What uses CUDA cannot be forked, so the process that forks for commands leaves that to this one, which does nothing
else: it loads the model, says how others can have it, and stays for as long as any process is there that may have it.
"""

from __future__ import annotations

import _thread
import os
import pickle
import select
import signal
import sys
import traceback
from collections.abc import Collection
from contextlib import suppress
from dataclasses import dataclass
from fcntl import F_DUPFD_CLOEXEC, fcntl
from typing import TYPE_CHECKING, NoReturn

from kvcli.errors import KVError
from kvcli.keepalive import pressure
from kvcli.keepalive.forkedcommand import HIGH
from kvcli.options import CacheOptions, LoadOptions
from kvcli.runtime.engine.held import HeldModel
from kvcli.runtime.host.cudadriver import Driver, Failed
from kvcli.runtime.host.memory import CPU, gpus
from kvcli.runtime.host.processmemory import held_bytes

if TYPE_CHECKING:
    from kvcli.runtime.engine.loaded import LoadedModel
    from kvcli.runtime.engine.opened import Opened

ENDS_S = 5.0  # until it has ended, where nobody has the weights any more
# Memory that other processes can open is not mapped piece by piece, and large rests are not cut for what is small.
_ALLOCATOR = "expandable_segments:False,max_split_size_mb:32"


@dataclass(frozen=True)
class Told:
    """What it says when the model is loaded: what its parent does not know of the `HeldModel`, and what it takes of
    which GPU."""

    device: str
    described: bytes
    weight_bytes: int
    gpu_bytes: int
    gpu_uuid: str


class Holder:
    """That process, as its parent has it. `process`: a descriptor of it; `told`: what it said."""

    told: Told

    def __init__(self, load: LoadOptions, opened: Opened, others: Collection[int]) -> None:
        """Fork it, to load the model on the device of `load`. `others`: descriptors that it must not have.

        Commands have the end of the pipe that it waits at, since they are forked from this process. Raises OSError.
        """
        life, end = os.pipe2(os.O_CLOEXEC)
        self._pipe, says = os.pipe2(os.O_CLOEXEC)
        self.pid = os.fork()
        if self.pid == 0:
            for fd in (end, self._pipe, *others):
                os.close(fd)
            _hold(load, opened, life, says)
        for fd in (life, says):
            os.close(fd)
        self._life = fcntl(end, F_DUPFD_CLOEXEC, HIGH)
        os.close(end)
        self.process = os.pidfd_open(self.pid)

    def model(self, opened: Opened) -> HeldModel | None:
        """The model, as soon as it is loaded; None where it was not, of which the log has the reason."""
        with open(self._pipe, "rb") as pipe:
            said = pipe.read()
        if not said:
            return None
        self.told = told = pickle.loads(said)
        return HeldModel(opened, self.pid, told.device, told.described, told.weight_bytes)

    def __str__(self) -> str:
        return f"the process {self.pid} that had the weights on {self.told.device}"

    def prepare(self) -> None:
        """Have done in its parent what each command would have to do before it uses the GPU."""
        if self.told.gpu_uuid:
            from kvcli.kernels.gpu.compiled import hash_all

            hash_all()

    def is_pressed(self, least: str) -> bool:
        """Whether others need memory of the GPU that the model is on (see `pressure.is_short`)."""
        uuid = self.told.gpu_uuid
        return bool(uuid) and any(pressure.is_short(card, least) for card in gpus() if card.uuid == uuid)

    def as_object(self, beside: int) -> dict[str, object]:
        """What `kv ps` shows of memory. `beside`: bytes of its parent."""
        told, held = self.told, held_bytes(self.pid)
        return {"memory_bytes": beside + held, "gpu_bytes": told.gpu_bytes, "gpu_uuid": told.gpu_uuid}

    def end(self) -> None:
        """Let it go, and wait until it has given the memory back."""
        os.close(self._life)
        if not select.select([self.process], [], [], ENDS_S)[0]:
            with suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)
        os.close(self.process)


def _hold(load: LoadOptions, opened: Opened, life: int, says: int) -> NoReturn:
    try:
        _thread.start_new_thread(_leave_last, (life,))
        loaded = _loaded(load, opened)
        with open(says, "wb") as pipe:
            pickle.dump(_told(loaded), pipe)
        while loaded:
            signal.pause()
    except (KVError, Failed) as error:
        print(f"kv: {load.model} is not kept: {error}", file=sys.stderr, flush=True)
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(1)


def _leave_last(life: int) -> None:
    """End this process when nobody has the other end of that pipe."""
    os.read(life, 1)
    os._exit(0)


def _loaded(load: LoadOptions, opened: Opened) -> LoadedModel:
    import torch

    from kvcli.runtime.engine.loaded import LoadedModel

    if load.device != CPU:
        torch._C._accelerator_setAllocatorSettings(_ALLOCATOR)
    return LoadedModel(opened, load, CacheOptions())


def _told(loaded: LoadedModel) -> Told:
    """Raises Failed where other processes cannot have the weights."""
    import torch

    from kvcli.runtime.model.handover import describe

    device, index = str(loaded.device), loaded.device.index
    if loaded.device.kind == CPU:
        return Told(device, describe(loaded.decoder, None), 0, 0, "")
    driver = Driver()
    driver.open(index)
    before = loaded.cards_before[index]
    taken = max(torch.cuda.memory_reserved(index), before.free - gpus()[index].free)
    weights = torch.cuda.memory_allocated(index)
    return Told(device, describe(loaded.decoder, driver), weights, taken, before.uuid)
