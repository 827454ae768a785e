"""`kv launch`: a coding agent with a model of this machine."""

from __future__ import annotations

import logging
import os
import secrets
import shutil
import signal
import subprocess
import threading
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Annotated

import typer

from kvcli.cli.agents import AGENTS, Place
from kvcli.cli.commands.serve import Opener, ServerFlags, opened
from kvcli.cli.flags.eviction import EvictFlags
from kvcli.cli.flags.promptcache import StoreFlags
from kvcli.cli.flags.sampling import SampleFlags
from kvcli.cli.flags.shared import CacheFlags, ModelFlags, grouped
from kvcli.cli.flags.template import TemplateFlags, ThinkingFlags
from kvcli.cli.helptext import GENERATE
from kvcli.cli.interrupt import Interrupts
from kvcli.cli.invocation import Invocation
from kvcli.errors import UsageError

PARALLEL = 4  # answers at a time: an agent and its helpers

EXAMPLES = """
kv launch -m qwen3-coder-30b -c 64k claude
kv launch -m qwen3-coder-30b -c 64k -ct int8 codex exec "Why does the build fail?"
kv launch -m gpt-oss-20b opencode
"""


def register(app: typer.Typer) -> None:
    # What stands behind the program is the program's.
    settings = {"allow_interspersed_args": False, "ignore_unknown_options": False}
    app.command("launch", rich_help_panel=GENERATE, epilog=EXAMPLES, context_settings=settings)(launch)


@grouped
def launch(
    ctx: typer.Context,
    model: ModelFlags,
    cache: CacheFlags,
    evict: EvictFlags,
    store: StoreFlags,
    template: TemplateFlags,
    thought: ThinkingFlags,
    sample: SampleFlags,
    program: Annotated[str, typer.Argument(metavar="PROGRAM", help="claude, codex or opencode.")],
    words: Annotated[
        list[str] | None, typer.Argument(metavar="[ARGS]...", help="What the program is started with.")
    ] = None,
) -> None:
    """Start a coding agent that uses a model of this machine.

    A server runs for as long as the agent does, for this agent alone. Nothing is written into the agent's files: it is
    told by its environment and its command line. Options of kv stand before PROGRAM.
    """
    if program not in AGENTS:
        raise UsageError(f"kv does not know how to start {program}", f"it knows {', '.join(AGENTS)}")
    path = shutil.which(program)
    if path is None:
        raise UsageError(f"{program} is not installed, or not in PATH", "install it first")
    AGENTS[program](Place("", "", "", 0), os.environ)  # what is wrong there is told before a model is loaded
    from kvcli.serve import server

    invocation: Invocation = ctx.obj
    flags = ServerFlags(port=0, api_key=secrets.token_urlsafe(24), parallel=PARALLEL)
    kept = replace(store.options(invocation), memory=True)
    evicting = evict.options(cache.page_size)
    if evicting.keep == -1:
        raise UsageError("--keep -1 cannot be used with kv launch: prompts have different lengths", "give a number")
    options = replace(cache.options(evicting), sequences=PARALLEL)
    load = replace(model.options(invocation.offline), chat=template.options(None, thought.reasoning_budget))
    logging.basicConfig(format="kv: %(message)s", level=logging.ERROR)  # the terminal is the program's
    with Interrupts() as interrupts:
        opener = Opener(load, options, kept, flags, invocation, interrupts)
        sampling = replace(sample.options(attended=True), unattended=False)
        with opened(opener, sampling) as (app, listening, host):
            first = host.loaded[0]
            place = Place(server.address(listening), str(flags.api_key), first.name, first.worker.engine.ctx_size)
            told, over = AGENTS[program](place, os.environ), threading.Event()
            serving = threading.Thread(target=server.run, args=(app, listening, over.is_set))
            serving.start()
            try:
                code = _run([path, *told.words, *(words or [])], {**os.environ, **told.variables})
            finally:
                over.set()
                serving.join()
    raise typer.Exit(code)


def _run(words: Sequence[str], environment: Mapping[str, str]) -> int:
    """The exit code of a program that has the terminal. Signals typed there are for it alone; others are handed on."""
    process: subprocess.Popen[bytes] | None = None

    def hand_on(number: int, frame: object) -> None:
        if process is not None and number in (signal.SIGTERM, signal.SIGHUP):
            process.send_signal(number)

    numbers = (signal.SIGINT, signal.SIGQUIT, signal.SIGTERM, signal.SIGHUP)
    before = {number: signal.signal(number, hand_on) for number in numbers}  # a program starts with none of them
    try:
        process = subprocess.Popen(words, env=environment)
        code = process.wait()
    except OSError as error:
        raise UsageError(f"{words[0]} does not start: {error.strerror or error}") from None
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    return code if code >= 0 else 128 - code
