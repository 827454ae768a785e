"""The flags that say which program computes, and over how many GPUs. Never imports torch."""

from __future__ import annotations

import functools
from dataclasses import dataclass, fields
from typing import Annotated, Any

import typer

from kvcli.cli import foreign, render
from kvcli.cli.flags.checks import checked, number, one_of
from kvcli.cli.helptext import MODEL
from kvcli.errors import UsageError
from kvcli.peers import mapping
from kvcli.peers.mapping import VLLM
from kvcli.runtime.host.memory import parse_size

_option = functools.partial(typer.Option, rich_help_panel=MODEL)
KV = "kv"
DEFAULT, TYPED = "DEFAULT", "COMMANDLINE"  # what Typer calls where a value is from
_OF_PROCESS = ("help", "verbose", "quiet", "color", "progress", "offline", "version")


def _offload(text: str) -> None:
    parse_size(text, "--cpu-offload")


def _other(name: str) -> str:
    """What there is of a program that kv does not start."""
    program = foreign.program(name)
    there = f"kv estimate MODEL --print-args {program} prints its command line"
    return f"{there}; kv does not start it" if program not in ("", VLLM) else ""


@dataclass(frozen=True)
class EngineFlags:
    """Which program computes."""

    engine: Annotated[
        str,
        _option(
            "--engine",
            metavar="kv|vllm",
            help="Program that computes: kv itself, or an installed vLLM, for models over several GPUs.",
            callback=one_of("--engine", (KV, VLLM), _other),
        ),
    ] = KV
    tp: Annotated[
        int, number(MODEL, "--tp", least=1, most=1024, help="With --engine vllm: number of GPUs that share each layer.")
    ] = 1
    pp: Annotated[
        int,
        number(
            MODEL,
            "--pp",
            least=1,
            most=1024,
            help="With --engine vllm: number of stages that the layers are divided into.",
        ),
    ] = 1
    nodes: Annotated[
        int,
        number(
            MODEL,
            "--nodes",
            least=1,
            most=1024,
            help="With --engine vllm: number of machines, of a Ray cluster that is there.",
        ),
    ] = 1
    cpu_offload: Annotated[
        str | None,
        _option(
            "--cpu-offload",
            metavar="SIZE",
            help="With --engine vllm: weights of each GPU that stay in main memory, e.g. 4GiB.",
            callback=checked(_offload),
        ),
    ] = None

    def __post_init__(self) -> None:
        """Raises UsageError for what needs another engine."""
        others = [each for each in fields(self) if each.name != "engine" and getattr(self, each.name) != each.default]
        if self.engine == KV and others:
            name = others[0].name.replace("_", "-")
            raise UsageError(f"--{name} needs --engine vllm", "kv itself uses one GPU")
        if (self.tp * self.pp) % self.nodes:
            raise UsageError(
                f"--nodes {self.nodes} does not divide the {self.tp * self.pp} GPUs of --tp and --pp",
                "every machine has as many",
            )


def given(ctx: Any) -> dict[str, Any]:
    """The options of a command that somebody gave, by their first long names. What is only set and the engine cannot
    mean is told, and left out."""
    found = {}
    for param in ctx.command.params:
        source = ctx.get_parameter_source(param.name)
        if param.name in _OF_PROCESS or param.param_type_name == "argument" or source is None or source.name == DEFAULT:
            continue
        name, value = next(each for each in param.opts if each.startswith("--")), ctx.params[param.name]
        if source.name != TYPED and (why := mapping.refusal(name, value, VLLM)):
            render.announce(f"a setting changes nothing: {why}", ctx.obj)
        else:
            found[name] = value
    return found
