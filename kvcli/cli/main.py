"""The entry point: the list of commands, and how every failure becomes one line and an exit code.

Only what costs nothing is imported with this module, so that signals are caught from the first moment and
`kv --version` answers at once. Typer comes in `run_command`, torch inside the commands that compute.
"""

from __future__ import annotations

import errno
import os
import sys

from kvcli.errors import (
    EXIT_BROKEN_PIPE,
    EXIT_INTERRUPTED,
    DoesNotFit,
    KVError,
    StdoutError,
    UsageError,
)

TYPE_CHECKING = False  # typing itself takes milliseconds in which Ctrl-C would show a traceback
if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Any, NoReturn

    from kvcli.cli.interrupt import Interrupts
    from kvcli.cli.invocation import Invocation

# Modules of kvcli.cli.commands, in the order of the help page.
COMMANDS = (
    "run",
    "chat",
    "serve",
    "launch",
    "estimate",
    "doctor",
    "bench",
    "perplexity",
    "eval",
    "pull",
    "convert",
    "models",
    "ps",
    "stop",
    "inspect",
    "tokenize",
    "prompt",
    "cache",
    "storage",
    "config",
    "completion",
)

HELP = """Run language models on your own machine, with a quantized and paged KV cache.

kv COMMAND --help shows the options of a command. Defaults can be set in a config file (kv config) or by variables such
as KV_MODEL and KV_CTX_SIZE.
"""
EXAMPLES = """
kv run "Why is the sky blue?"
cat notes.txt | kv run "Summarize this."
kv chat
kv help run
"""

prepared: dict[str, Any] = {}  # commands that are made already: a process that was forked has them

_VERSION, _VERBOSE, _JSON = {"--version", "-V"}, {"-v", "-vv", "--verbose"}, {"--json"}

# A write to stdout that fails with one of these is the output's fault, not a bug.
_OUTPUT_ERRNOS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EBADF)


def main() -> NoReturn:
    """Run `kv` with the arguments of the process and exit."""
    from kvcli.cli.interrupt import LEAVE, Interrupts, last_words, say_nothing

    args = sys.argv[1:]
    told = (lambda code: last_words(code, as_json=True)) if _asks_for_json(args) else say_nothing
    interrupts = Interrupts(told)
    interrupts.install()  # for good: a signal while Python shuts down is silent, too
    _prepare_process()
    code = run_command(args, interrupts)
    interrupts.stage, interrupts.on_leave = LEAVE, say_nothing
    if code == EXIT_BROKEN_PIPE:
        _die_of_broken_pipe()
    sys.exit(code)


def run_command(args: list[str], interrupts: Interrupts | None = None) -> int:
    """The exit code of `kv` with these arguments, after everything that went wrong has been told.

    `interrupts` of the process leave at once until the command begins, which may have to tidy up.
    """
    invocation: Invocation | None = None
    try:
        if sys.stdout is None:
            raise StdoutError("standard output is closed", "redirect it to /dev/null to discard the output")
        args = _meant(args)
        if _VERSION.intersection(args) and (_VERSION | _VERBOSE | _JSON).issuperset(
            args
        ):  # at once: Typer takes a while
            return _flushed(_print_version(not _VERBOSE.isdisjoint(args), not _JSON.isdisjoint(args)))
        if args == ["--json-schema", "--help"]:
            return _flushed(_print_schema())
        from kvcli.cli.invocation import Invocation
        from kvcli.cli.settings import Settings

        invocation = Invocation(settings=Settings(COMMANDS, _shared_names), tree=_tree)
        if "_KV_COMPLETE" in os.environ:
            return _flushed(_complete(invocation))
        return _flushed(_call(args, invocation, interrupts))
    except BaseException as error:
        return _report(error, args, invocation)


def _meant(args: list[str]) -> list[str]:
    """The words with `kv help COMMAND` and `kv version` as the options that they are; so `kv help --json-schema`."""
    if args[:1] == ["help"]:
        return [*args[1:], "--help"]
    if args[:1] == ["version"]:
        return ["--version", *args[1:]]
    return args


def _print_version(verbose: bool, as_json: bool) -> int:
    from kvcli import versions

    if as_json:
        from kvcli.cli import jsonobjects

        sys.stdout.write(jsonobjects.line("version", versions.as_object()))
    else:
        sys.stdout.write("\n".join(versions.lines() if verbose else [versions.short()]) + "\n")
    return 0


def _print_schema() -> int:
    from kvcli.cli import jsonobjects

    sys.stdout.write(jsonobjects.schema())
    return 0


def _call(args: list[str], invocation: Invocation, interrupts: Interrupts | None) -> int:
    """Parse and run; the exit code where nothing was raised."""
    import typer

    from kvcli import startup
    from kvcli.cli.interrupt import UNWIND

    with startup.uncollected():
        command = _command(args)
    try:
        if interrupts:
            interrupts.stage = UNWIND
        # Not `command(...)`: Typer's own main turns a broken pipe into exit code 1 before we see it.
        with command.make_context("kv", args, obj=invocation) as context:
            command.invoke(context)
    except typer.Exit as done:
        return done.exit_code
    return 0


def _command(args: list[str]) -> Any:
    """The click command made of the Typer app; it takes the global options behind a command's name too.

    Where the first word of `args` names a command, only that one's module is imported.
    """
    from kvcli.cli.app import OTHER_NAMES

    first = OTHER_NAMES.get(args[0], args[0]) if args else ""
    return prepared.get(first) or command_of(first if first in COMMANDS else "")


def command_of(name: str) -> Any:
    """The same with the command of that name alone; "" = with all."""
    import importlib

    import typer

    from kvcli.cli import globaloptions
    from kvcli.cli.app import App

    app = App(help=HELP, epilog=EXAMPLES)
    globaloptions.register(app)
    for each in [name] if name else COMMANDS:
        importlib.import_module(f"kvcli.cli.commands.{each}").register(app)
    command: Any = typer.main.get_command(app)
    command.commands = dict(sorted(command.commands.items(), key=lambda entry: (*COMMANDS, entry[0]).index(entry[0])))
    globaloptions.add_to_commands(command)
    return command


def prepare(names: Sequence[str]) -> None:
    """Make these commands, and read a line for each that says nothing more, so that those who are forked from here have
    what comes of that."""
    from kvcli.cli.invocation import Invocation

    for name in names:
        prepared[name] = command = command_of(name)
        with command.make_context("kv", [name], obj=Invocation()) as context:
            command.commands[name].make_context(name, [], context)
        _shared_in(command)


def _complete(invocation: Invocation) -> int:
    from kvcli.cli import completion

    return completion.answer(_command(completion.words_so_far()), invocation)


def _tree() -> Any:
    """All commands."""
    return _command([])


def _shared_names() -> set[str]:
    return _shared_in(_tree())


def _shared_in(tree: Any) -> set[str]:
    """Names of the options of these commands that variables and the top of the config file set."""
    from kvcli.cli.app import shared_options
    from kvcli.cli.settings import names

    return {name for option in shared_options(tree).values() for name, _ in names(option)}


def _prepare_process() -> None:
    """Missing standard streams, and what libraries find when they are imported."""
    from kvcli import environment, startup

    if sys.stdin is None:
        sys.stdin = open(os.devnull)  # noqa: SIM115  # for as long as the process lives
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115
    environment.prepare()
    startup.take_process()


def _flushed(code: int) -> int:
    """The code, once stdout took everything: a full disk shows up here, not at interpreter exit."""
    sys.stdout.flush()
    return code


def _report(error: BaseException, args: list[str], invocation: Invocation | None) -> int:
    """Tell what went wrong, on stderr or as JSON on stdout, and return the exit code."""
    from kvcli.cli import interrupt

    if isinstance(error, SystemExit | KeyboardInterrupt):
        code = EXIT_INTERRUPTED if isinstance(error, KeyboardInterrupt) else error.code
        as_json = invocation and not invocation.answered and (invocation.json or _asks_for_json(args))
        if code in interrupt.CODES and as_json:
            interrupt.last_words(code, as_json=True)
        return code if isinstance(code, int) else int(code is not None)
    if isinstance(error, BrokenPipeError):
        return EXIT_BROKEN_PIPE
    from kvcli.cli import commandline, jsonobjects, render, streams, wording

    known = _as_kverror(error)
    known.message, known.hint = wording.as_flags(known.message), wording.as_flags(known.hint)
    if invocation and isinstance(known, UsageError):
        known.message = commandline.as_typed(known.message, invocation.called)
    if invocation and invocation.verbose >= 2:
        import traceback

        streams.write_err("".join(traceback.format_exception(error)))
    if isinstance(known, StdoutError):
        _discard_stdout()
    elif _tells_json(known, args, invocation):
        try:
            render.write_out(jsonobjects.failure(known.as_object(), "".join(invocation.answer) if invocation else ""))
        except BrokenPipeError:
            return EXIT_BROKEN_PIPE
        except OSError as failure:
            unwritten = StdoutError(f"could not write the output: {failure.strerror or failure}")
            return _report(unwritten, args, invocation)
        return known.exit_code
    if invocation:
        render.print_error(known.message, known.hint, invocation.color)
    else:
        render.print_error(known.message, known.hint)
    return known.exit_code


def _as_kverror(error: BaseException) -> KVError:
    """The error as one of ours, with a message and a hint for people."""
    import typer

    from kvcli.cli import commandline

    if isinstance(error, KVError):
        return error
    if isinstance(error, typer.BadParameter.__mro__[1]):
        return commandline.refused(error)
    if isinstance(error, typer.Abort):
        return KVError("aborted")
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":  # torch's, for a GPU
        return DoesNotFit("out of memory", "use a smaller context (-c) or a smaller model")
    if type(error).__name__ == "OutOfResources":  # Triton's
        return KVError("this GPU is too small for the kernels of this model", "use --device cpu")
    if isinstance(error, OSError) and error.errno in _OUTPUT_ERRNOS and error.filename is None:
        return StdoutError(f"could not write the output: {error.strerror}")
    text = str(error).partition("\n")[0][:300] or "no message"
    return KVError(f"{type(error).__name__}: {text}", "this is a bug; run with -vv for the traceback")


def _tells_json(error: KVError, args: list[str], invocation: Invocation | None) -> bool:
    """Whether an error is told as JSON; one in the command line itself comes before any option was noted."""
    if invocation and invocation.json:
        return not invocation.answered
    return isinstance(error, UsageError) and _asks_for_json(args)


def _asks_for_json(args: list[str]) -> bool:
    """Whether the words, of which no option was noted yet, have one that asks for JSON."""
    words = args[: args.index("--")] if "--" in args else args
    if "launch" in words:  # what stands behind the program's name is the program's
        from kvcli.cli.agents import AGENTS

        words = words[: next((i for i, word in enumerate(words) if word in AGENTS), None)]
    return any(word in ("--json", "--jsonl", "--stream-json") for word in words)


def _discard_stdout() -> None:
    from kvcli.cli import streams

    if sys.stdout is not None:
        streams.discard(sys.stdout)


def _die_of_broken_pipe() -> NoReturn:
    """End as programs do whose reader went away: by SIGPIPE, which a shell reports as 141."""
    import signal

    _discard_stdout()
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    os.kill(os.getpid(), signal.SIGPIPE)
    os._exit(EXIT_BROKEN_PIPE)  # SIGPIPE is blocked
