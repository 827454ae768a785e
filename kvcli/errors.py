"""The errors a user can cause. Each is one line (what, why), a hint (what next) and an exit code.

Texts name options by their fields, in backticks and perhaps with a value: `ctx`, `evict=sink`. These are the names that
`kvcli.load` and `kvcli.options` have; the command line puts its own flags in their place (cli/wording.py)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


class KVError(Exception):
    """A failure with a message for the user; the command line prints it and exits with `exit_code`."""

    exit_code = 1

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    @property
    def __notes__(self) -> list[str]:
        """The hint, below the message in a traceback."""
        return [self.hint] if self.hint else []

    def as_object(self) -> dict[str, int | str | None]:
        """What --json says of it, as "error"."""
        return {"code": self.exit_code, "message": self.message, "hint": self.hint or None}


@contextmanager
def of_draft_model() -> Iterator[None]:
    """Whatever is refused is said to be the draft model's fault."""
    try:
        yield
    except KVError as error:
        error.message = f"the draft model: {error.message}"
        error.args = (error.message,)
        raise


class UsageError(KVError):
    """A flag or argument that makes no sense (exit 2)."""

    exit_code = 2


class ModelError(KVError):
    """A model that is missing, unreadable or unsupported (exit 3)."""

    exit_code = 3


class DeviceError(KVError):
    """A device that is asked for and missing or cannot be used (exit 3)."""

    exit_code = 3


class DoesNotFit(KVError):
    """The plan or a running sequence needs more memory than there is (exit 4).

    `missing`: bytes that other programs would have to free; 0 = that would be of no use.
    """

    exit_code = 4

    def __init__(self, message: str, hint: str = "", missing: int = 0) -> None:
        super().__init__(message, hint)
        self.missing = missing


class NotTaken(DeviceError):
    """The driver does not let this process have the weights that another one holds on a GPU; they can be loaded."""


class ContextOverflow(KVError):
    """A prompt longer than the context (exit 5)."""

    exit_code = 5


class CacheFileError(KVError):
    """A prompt-cache file that is invalid or belongs to another model (exit 6).

    `foreign`: it is whole, but of another model or setting. `passing`: it cannot be read now, which is not its fault.
    `path`: which file, where that was found out late.
    """

    exit_code = 6
    foreign = False
    path = ""
    passing = False


class DownloadError(KVError):
    """Network, authorization, checksum, or offline (exit 7)."""

    exit_code = 7


class CheckFailed(KVError):
    """A check that the user asked for did not pass (exit 8)."""

    exit_code = 8


class InputBytesError(KVError):
    """Input that is not valid UTF-8 (exit 65)."""

    exit_code = 65


class OutputError(KVError):
    """Output that could not be written (exit 74)."""

    exit_code = 74


class StdoutError(OutputError):
    """Standard output that takes no more, not even an error as JSON."""


EXIT_CONTEXT_FULL = 9  # `kv run` only: the context filled while answering
EXIT_INTERRUPTED = 130
EXIT_BROKEN_PIPE = 141
