"""Where `kv` and `python -m kvcli` begin and end: Ctrl-C is silent while anything is imported, and Python is not taken
apart behind the last command."""

import _signal  # the part of `signal` that is there already: importing the other takes milliseconds
import atexit
import os
import sys

from kvcli.keepalive import thisprocess


def main() -> None:
    """Let a process that keeps the model do what the words of this one ask, or do it here."""
    from kvcli.keepalive import client

    thisprocess.started_with.update(os.environ)
    client.attempt(sys.argv[1:])
    command()


def command() -> None:
    """`kvcli.cli.main.main`, which takes the signals over. After one there is nothing left for Python to tidy up."""
    from kvcli.cli import interrupt
    from kvcli.cli import main as cli

    codes = [1]
    atexit.register(_end, codes)  # the first to be registered is run last, behind every thread
    try:
        cli.main()
    except SystemExit as end:
        if end.code in interrupt.CODES:
            interrupt.leave(end.code)
        codes[0] = end.code if isinstance(end.code, int) else int(end.code is not None)
        raise


def _end(codes: list[int]) -> None:
    """End here with this code. Python would free all modules and objects one by one, for a third of a second."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError, AttributeError):  # it is closed, or None
            continue
    if thisprocess.forked is not None:
        from kvcli.keepalive import forkedcommand

        forkedcommand.tell_end(thisprocess.forked, codes[0])
    os._exit(codes[0])


if _signal.getsignal(_signal.SIGINT) is _signal.default_int_handler:  # else we were started to ignore it
    _signal.signal(_signal.SIGINT, thisprocess.leave)
if __name__ == "__main__":
    main()
