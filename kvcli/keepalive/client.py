"""The caller's side: a command is done by the process that keeps its model, with this process's own files, terminal,
folder and environment, and this one ends as that did. Imports next to nothing: it is all that such a command starts.
"""

import _signal
import os
import sys
from itertools import pairwise

TYPE_CHECKING = False  # typing itself takes milliseconds, and `kv` starts here
if TYPE_CHECKING:
    import _socket
    from typing import Any, NoReturn

PATIENCE_S = 5.0  # until a process has begun; else this one does the work
_NAMES = ("SIGHUP", "SIGINT", "SIGTERM", "SIGQUIT", "SIGUSR1", "SIGUSR2", "SIGALRM", "SIGVTALRM", "SIGWINCH", "SIGCONT")
_HARMLESS = ("SIGWINCH", "SIGCONT")


def attempt(args: "list[str]") -> None:
    """Exit with what a process that keeps a model did; return where this process has to do it, having done nothing."""
    if not may_be_asked(args, os.environ.get("KV_KEEP_ALIVE", "")):
        return
    from kvcli.keepalive import socketfolder

    for name in socketfolder.sockets() and socketfolder.sockets(socketfolder.kind()):
        from kvcli.keepalive import wire

        try:
            conn = wire.connect(name)
        except OSError:  # it ended in a hurry
            continue
        _Caller(conn).call()
        conn.close()
        return


def may_be_asked(args: "list[str]", variable: str) -> bool:
    """Whether a command could be done by another process: those that answer, unless somebody at a terminal talks.

    `variable`: the value of KV_KEEP_ALIVE. 0 there or as `--keep-alive 0` says that the command runs by itself.
    """
    if sys.platform != "linux" or not (args[:1] == ["run"] or (args[:1] == ["chat"] and "--script" in args)):
        return False
    words = args[: args.index("--")] if "--" in args else args
    given = [word[len("--keep-alive=") :] for word in words if word.startswith("--keep-alive=")]
    given += [after for word, after in pairwise(words) if word == "--keep-alive"]
    return (given[-1] if given else variable) != "0"


class _Caller:
    def __init__(self, conn: "_socket.socket") -> None:
        self.conn, self.pid = conn, 0
        self.handlers: dict[int, Any] = {}

    def call(self) -> None:
        """Ask for the command of this process, and end as it does; return where it was not begun."""
        from kvcli.keepalive import wire

        code = None
        try:
            self._catch_signals()
            self.conn.settimeout(PATIENCE_S)
            if not self._ask():
                return
            while True:
                kind, body, _ = wire.receive(self.conn)
                if kind == wire.PID:
                    self.conn.settimeout(None)
                    wire.send(self.conn, wire.GO)
                    self.pid = int(body)
                elif kind == wire.COLD:
                    return
                elif kind == wire.DONE:
                    code = int(body)
                elif kind == wire.ENDED:
                    _end_as(int(body))
        except (wire.Closed, OSError):
            if self.pid == 0:
                return
            # The process that keeps the model is gone, too: else it would have told how the other one ended.
            if code is None:
                os.write(2, b"kv: the process that wrote this answer was ended\n")
            os._exit(1 if code is None else code)
        finally:
            self.conn.settimeout(None)
            for number, handler in self.handlers.items():
                _signal.signal(number, handler)

    def _ask(self) -> bool:
        """False where there is too much to be handed over."""
        from marshal import dumps

        from kvcli.keepalive import wire

        numbers = _inherited(self.conn.fileno())
        if len(numbers) >= wire.MOST_FDS:
            return False
        here = os.open(".", os.O_PATH | os.O_CLOEXEC)
        argv = [os.fsencode(word) for word in sys.argv]
        body = dumps((argv, dict(os.environb), numbers))
        wire.send(self.conn, wire.RUN, body, [here, *numbers])
        os.close(here)
        return True

    def _catch_signals(self) -> None:
        for name in _NAMES:
            number = getattr(_signal, name)
            if _signal.getsignal(number) is not _signal.SIG_IGN:
                self.handlers[number] = _signal.signal(number, self._pass_on)
        if _signal.getsignal(_signal.SIGTSTP) is _signal.SIG_DFL:
            self.handlers[_signal.SIGTSTP] = _signal.signal(_signal.SIGTSTP, self._stop)

    def _pass_on(self, number: int, frame: object) -> None:
        if self.pid:
            self._kill(number)
        elif number not in [getattr(_signal, name) for name in _HARMLESS]:
            _die_of(number)  # nothing has begun

    def _stop(self, number: int, frame: object) -> None:
        """Ctrl-Z stops the command and this process, and what continues this process continues both."""
        self._kill(_signal.SIGSTOP)
        _signal.signal(number, _signal.SIG_DFL)
        _signal.raise_signal(number)
        _signal.signal(number, self._stop)
        self._kill(_signal.SIGCONT)

    def _kill(self, number: int) -> None:
        try:
            if self.pid:
                os.killpg(self.pid, number)
        except OSError:  # it has just ended
            return


def _inherited(own: int) -> "list[int]":
    """Descriptors that this process was started with."""
    found = []
    for name in os.listdir("/proc/self/fd"):
        try:
            if int(name) != own and os.get_inheritable(int(name)):
                found.append(int(name))
        except OSError:  # of this listing
            continue
    return sorted(found)


def _end_as(status: int) -> "NoReturn":
    if os.WIFSIGNALED(status):
        _die_of(os.WTERMSIG(status))
    os._exit(os.WEXITSTATUS(status))


def _die_of(number: int) -> "NoReturn":
    if number != 9:
        _signal.signal(number, _signal.SIG_DFL)
    os.kill(os.getpid(), number)
    os._exit(128 + number)  # it is blocked
