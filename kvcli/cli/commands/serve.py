"""`kv serve`: a model behind HTTP, for other programs and for a browser."""

from __future__ import annotations

import functools
import logging
import os
import re
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kvcli.cli import engines, render
from kvcli.cli.flags.attending import AttendFlags
from kvcli.cli.flags.checks import checked, not_empty, number
from kvcli.cli.flags.engine import EngineFlags
from kvcli.cli.flags.eviction import EvictFlags
from kvcli.cli.flags.promptcache import StoreFlags
from kvcli.cli.flags.sampling import SampleFlags
from kvcli.cli.flags.shared import CacheFlags, DraftFlags, ModelFlags, grouped
from kvcli.cli.flags.template import TemplateFlags, ThinkingFlags
from kvcli.cli.helptext import GENERATE, SERVER
from kvcli.cli.interrupt import FINISH, LEAVE, Interrupts
from kvcli.cli.invocation import Invocation
from kvcli.cli.streams import say
from kvcli.errors import UsageError
from kvcli.options import CacheOptions, LoadOptions, PromptCacheOptions, SampleOptions
from kvcli.peers.mapping import VLLM
from kvcli.runtime.host.memory import parse_size

if TYPE_CHECKING:
    import socket

    from starlette.applications import Starlette

    from kvcli.runtime.hub.inventory import Entry
    from kvcli.serve.app import Guard
    from kvcli.serve.host import Host, Known, Served

_option = functools.partial(typer.Option, rich_help_panel=SERVER)


def _site(text: str) -> None:
    if text != "*" and not re.fullmatch(r"https?://[^/\s]+", text):
        raise UsageError(f"--cors must be a site such as https://a.org, or *, not '{text}'", "give it without a path")


def _body(text: str) -> None:
    if parse_size(text, "--max-body") < 1024:
        raise UsageError(f"--max-body must be 1 KiB or more, not '{text}'", "write 32MiB")


def _name(text: str) -> None:
    if not text.strip():
        raise UsageError("--alias is empty", "give a name")


LOCAL = ("127.0.0.1", "localhost", "::1")


@dataclass(frozen=True)
class ServerFlags:
    """Where the server listens, and what it takes."""

    host: Annotated[
        str,
        _option(
            "--host",
            metavar="ADDRESS",
            help="Address to listen on: a name, 0.0.0.0 = every one of this machine, or unix:PATH.",
            callback=not_empty("--host", "give an address, or unix:PATH"),
        ),
    ] = "127.0.0.1"
    port: Annotated[int, number(SERVER, "--port", least=0, most=65535, help="Port; 0 = any free one.")] = 8080
    api_key: Annotated[
        str | None,
        _option(
            "--api-key",
            metavar="KEY",
            help="Answer only calls with this key (Authorization: Bearer KEY, or X-Api-Key).",
            callback=not_empty("--api-key", "give a key, or leave it out"),
        ),
    ] = None
    cors: Annotated[
        list[str],
        _option(
            "--cors",
            metavar="ORIGIN",
            help="Site whose pages may call, e.g. https://a.org; * = any.",
            callback=checked(_site),
        ),
    ] = field(default_factory=list)
    alias: Annotated[
        list[str],
        _option(
            "--alias",
            metavar="NAME",
            help="Another name by which calls may ask for the model (repeatable).",
            callback=checked(_name),
        ),
    ] = field(default_factory=list)
    parallel: Annotated[
        int,
        number(
            SERVER,
            "--parallel",
            least=1,
            most=256,
            help="Maximum number of answers written at a time. They share the memory; -c is of each.",
        ),
    ] = 8
    queue: Annotated[
        int,
        number(
            SERVER,
            "--queue",
            least=0,
            most=4096,
            help="Number of calls that may wait beside them; further ones get status 429.",
        ),
    ] = 64
    models_max: Annotated[
        int,
        number(
            SERVER,
            "--models-max",
            least=1,
            most=64,
            help="Maximum number of models that are loaded at a time; the one unused for the longest makes room.",
        ),
    ] = 1
    max_body: Annotated[
        str,
        _option(
            "--max-body",
            metavar="SIZE",
            help="Longest body of a call.",
            callback=checked(_body),
        ),
    ] = "32MiB"

    @property
    def guard(self) -> Guard:
        from kvcli.serve.app import Guard

        return Guard(self.api_key, tuple(self.cors), self.hosts, parse_size(self.max_body, "--max-body"))

    @property
    def hosts(self) -> frozenset[str] | None:
        """Names that calls may have for this server; None = any, where it is reached from other machines."""
        return frozenset(LOCAL) if self.host in LOCAL else None


@dataclass(frozen=True)
class Opener:
    """How models are opened, and under which names."""

    load: LoadOptions
    cache: CacheOptions
    kept: PromptCacheOptions
    flags: ServerFlags
    invocation: Invocation
    interrupts: Interrupts

    def open(self, name: str, aliases: tuple[str, ...] = ()) -> Served:
        """Raises KVError. `aliases`: other names of it."""
        from kvcli.serve.host import Served
        from kvcli.serve.worker import Worker

        engine = engines.open_engine(replace(self.load, model=name), self.cache, self.invocation, self.interrupts)
        tell = render.telling(self.invocation)
        caches = engine.prompt_caches(self.kept, tell)
        worker = Worker(engine, caches, self.flags.parallel, self.flags.queue, tell)
        worker.start()
        return Served(_called(name), worker, tuple(dict.fromkeys((*aliases, name, engine.loaded.title))))

    def later(self, name: str) -> Served:
        """Open a model that a call asks for; no signal ends the process meanwhile. Raises KVError."""
        later = replace(self, interrupts=Interrupts(), load=replace(self.load, offline=True))
        if name == _called(self.load.model):  # the first one, which made room
            return later.open(self.load.model, tuple(self.flags.alias))
        return replace(later, load=replace(later.load, draft="", mtp=False)).open(name)  # it drafts for the first one


def _called(model: str) -> str:
    """The name of a model by which calls ask for it: that of a file or folder is its own, without where it lies."""
    return Path(model).name.removesuffix(".gguf") if os.path.exists(model) else model


def _known() -> list[Known]:
    """Models that are on this disk and run."""
    from kvcli.runtime.hub import inventory

    here = (each for each in inventory.entries() if each.path and not each.damaged and each.runs == "yes")
    return [_as_known(each) for each in here]


def _as_known(entry: Entry) -> Known:
    from kvcli.runtime.hub import hubnames
    from kvcli.serve.host import Known

    quant = hubnames.quant_of(entry.path.name) if entry.path else ""
    return Known(entry.name, entry.size, entry.arch, entry.sha256, entry.parameters, quant, entry.path)


EXAMPLES = """
kv serve -m qwen3-8b -c 32k -ct int8
kv serve --port 0 --api-key secret
curl http://127.0.0.1:8080/v1/chat/completions -d '{"messages": [{"role": "user", "content": "Hi"}]}'
"""


def register(app: typer.Typer) -> None:
    app.command("serve", rich_help_panel=GENERATE, epilog=EXAMPLES)(serve)


@grouped
def serve(
    ctx: typer.Context,
    flags: ServerFlags,
    by: EngineFlags,
    model: ModelFlags,
    draft: DraftFlags,
    cache: CacheFlags,
    evict: EvictFlags,
    attend: AttendFlags,
    store: StoreFlags,
    template: TemplateFlags,
    thought: ThinkingFlags,
    sample: SampleFlags,
) -> None:
    """Serve a model over HTTP: the interfaces of OpenAI, Anthropic and Ollama, and a page for a browser at /.

    Options of generation hold for calls that do not say otherwise.
    """
    invocation: Invocation = ctx.obj
    logging.basicConfig(format="kv: %(message)s", level=logging.WARNING)
    if by.engine == VLLM:
        _relay(ctx, flags, model.model, replace(sample.options(attended=True), unattended=False), template)
        return
    kept = replace(store.options(invocation), memory=True)
    evicting = evict.options(cache.page_size)
    if evicting.keep == -1:
        raise UsageError("--keep -1 cannot be used with kv serve: prompts have different lengths", "give a number")
    cache_options = replace(cache.options(evicting, attend.options(evicting)), sequences=flags.parallel)
    sampling = replace(sample.options(attended=True), unattended=False)
    load = draft.add_to(model.options(invocation.offline), sample.spec)
    load = replace(load, chat=template.options(None, thought.reasoning_budget))
    with Interrupts() as interrupts:
        opener = Opener(load, cache_options, kept, flags, invocation, interrupts)
        with opened(opener, sampling) as (app, listening, host):
            _run(app, listening, host.loaded[0].name, flags, invocation, interrupts.cancelled)
    say("stopped")


def _run(
    app: Starlette, listening: socket.socket, name: str, flags: ServerFlags, invocation: Invocation,
    stopping: Callable[[], bool],
) -> None:  # fmt: skip
    from kvcli.serve import server

    say(f"serving {name} at {server.address(listening)}")
    if flags.host not in LOCAL and not flags.host.startswith("unix:") and flags.api_key is None:
        render.warn("other machines may use this server: --api-key KEY keeps strangers out", invocation)
    server.run(app, listening, stopping)


def _relay(
    ctx: typer.Context, flags: ServerFlags, model: str, sampling: SampleOptions, template: TemplateFlags
) -> None:
    """vLLM writes the answers. Raises UsageError, ModelError."""
    from kvcli.cli import vllm
    from kvcli.serve import relay, server
    from kvcli.serve.app import application
    from kvcli.serve.serving import Serving

    most, variables, names = flags.parallel + flags.queue, template.variables, tuple(flags.alias)
    with (
        Interrupts() as interrupts,
        server.bound(flags.host, flags.port) as listening,
        vllm.opened(ctx, model, most, interrupts, variables, names) as found,
    ):
        interrupts.stage = FINISH
        app = application(Serving(found.upstream, sampling), flags.guard, relay.INTERFACES)

        def stopping() -> bool:
            return interrupts.cancelled() or found.program.ended

        _run(app, listening, found.upstream.name, flags, ctx.obj, stopping)
    say("stopped")


@contextmanager
def opened(opener: Opener, sampling: SampleOptions) -> Iterator[tuple[Starlette, socket.socket, Host]]:
    """What answers, where it listens, and the models, the first one loaded; inside, no signal ends the process."""
    from kvcli.runtime.text import grammar
    from kvcli.runtime.text.schemacompiler import Compiler
    from kvcli.serve import server
    from kvcli.serve.app import application
    from kvcli.serve.host import Host
    from kvcli.serve.serving import Serving

    flags, model = opener.flags, opener.load.model
    with server.bound(flags.host, flags.port) as listening, closing(Compiler()) as compiler:
        grammar.COMPILER = compiler  # of others: what takes too long is ended
        host = Host(opener.open(model, tuple(flags.alias)), opener.later, _known, flags.models_max)
        opener.interrupts.stage = FINISH
        try:
            yield application(Serving(host, sampling), flags.guard), listening, host
        finally:
            host.stop(0.0)
            opener.interrupts.stage = LEAVE
