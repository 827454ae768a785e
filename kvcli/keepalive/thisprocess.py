"""What this process is: one that was started, or one that was forked from a process that keeps a model.

Everything else of keep-alive that a command has to know stands here, so that it imports nothing for it.
"""

import _signal
import os

TYPE_CHECKING = False  # typing itself takes milliseconds, and `kv` starts here
if TYPE_CHECKING:
    from typing import Any

NOBODY = -1
DONE = "done"  # told to the process that keeps the model by one that ends now
started_with: dict[str, str] = {}  # the environment before anything of ours was set in it


class Forked:
    """This process was forked for a command that another one, the caller, was started with.

    `key`: of the model that is kept (see `places.key`). `kept`: its `LoadedModel`, or `HeldModel`. `request`:
    what came from the caller, to be handed on; None = there is no caller. `conn`: the socket to the caller.
    `control`: a pipe to the process that keeps the model, or NOBODY. `parent`: the process that started the caller.
    `on_cpu`: nothing of what is kept is on a GPU.
    """

    def __init__(self, key: str, kept: "Any", request: "Any", conn: "Any", control: int, parent: int) -> None:
        self.key, self.kept, self.request, self.conn, self.control = key, kept, request, conn, control
        self.parent = parent
        self.on_cpu = False

    def tell(self, line: str) -> None:
        """A line to the process that keeps the model, if it still lives."""
        try:
            os.write(self.control, f"{line}\n".encode())
        except OSError:
            return


forked: "Forked | None" = None


def leave(number: int, frame: object) -> None:
    """End by this signal, and say nothing: what SIGINT does until a command handles it."""
    _signal.signal(number, _signal.SIG_DFL)  # a shell's loop ends, too
    _signal.raise_signal(number)
    os._exit(128 + number)  # it is blocked


def parent() -> int:
    """The process that started this command."""
    return os.getppid() if forked is None else forked.parent
