"""What this process is: one that was started, or one that was forked from a process that keeps a model.

Everything else of keep-alive that a command has to know stands here, so that it imports nothing for it.
"""

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
    """

    def __init__(self, key: str, kept: "Any", request: "Any", conn: "Any", control: int, parent: int) -> None:
        self.key, self.kept, self.request, self.conn, self.control = key, kept, request, conn, control
        self.parent = parent

    def tell(self, line: str) -> None:
        """A line to the process that keeps the model, if it still lives."""
        try:
            os.write(self.control, f"{line}\n".encode())
        except OSError:
            return


forked: "Forked | None" = None


def parent() -> int:
    """The process that started this command."""
    return os.getppid() if forked is None else forked.parent
