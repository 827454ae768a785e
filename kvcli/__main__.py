"""Where `kv` and `python -m kvcli` begin and end: Ctrl-C is silent while anything is imported and while Python would
shut down."""

import _signal  # the part of `signal` that is there already: importing the other takes milliseconds
import os


def main() -> None:
    """`kvcli.cli.main.main`, which takes the signals over. After one there is nothing left for Python to tidy up."""
    from kvcli.cli import interrupt
    from kvcli.cli import main as cli

    try:
        cli.main()
    except SystemExit as end:
        if end.code in interrupt.CODES:
            interrupt.leave(end.code)
        raise


def _leave(number: int, frame: object) -> None:
    _signal.signal(number, _signal.SIG_DFL)  # a shell's loop ends, too
    _signal.raise_signal(number)
    os._exit(128 + number)  # it is blocked


if _signal.getsignal(_signal.SIGINT) is _signal.default_int_handler:  # else we were started to ignore it
    _signal.signal(_signal.SIGINT, _leave)
if __name__ == "__main__":
    main()
