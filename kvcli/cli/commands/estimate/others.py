"""`kv estimate --print-args vllm|sglang|llama-server`: the command line of another program. Never imports torch."""

from __future__ import annotations

import functools
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvcli.cli import render
from kvcli.cli.flags.checks import number
from kvcli.cli.flags.engine import given
from kvcli.cli.helptext import DEVICE
from kvcli.errors import ModelError, UsageError
from kvcli.peers import mapping, memory
from kvcli.runtime.host.memory import CUDA
from kvcli.runtime.hub.recipes import find_recipe

if TYPE_CHECKING:
    from kvcli.cli.commands.estimate.view import Report

# What says how much memory there is, and how the answer is shown.
_OURS = frozenset({
    "--gpu", "--vram", "--margin", "--bandwidth", "--device", "--units", "--print-args", "--nodes", "--gpus", "--tp",
    "--model", "--ctx-size",
})  # fmt: skip
_BF16 = 2  # bytes of a weight
PLACE = "MODEL"
_device = functools.partial(typer.Option, rich_help_panel=DEVICE)


@dataclass(frozen=True)
class ClusterFlags:
    """Several GPUs and machines, for other programs."""

    nodes: Annotated[
        int, number(DEVICE, "--nodes", least=1, most=1024, help="With --print-args PROGRAM: machines.")
    ] = 1
    gpus: Annotated[
        int, number(DEVICE, "--gpus", least=1, most=1024, help="With --print-args PROGRAM: GPUs of each.")
    ] = 1

    def check(self, program: str | None) -> None:
        """Raises UsageError."""
        if (self.nodes, self.gpus) != (1, 1) and program in (None, "kv"):
            raise UsageError(
                "--nodes and --gpus need --print-args PROGRAM", "kv itself uses one GPU; --tp plans a share"
            )


def print_command(ctx: Any, report: Report, name: str | None, program: str, flags: ClusterFlags) -> None:
    """Raises UsageError, ModelError, DoesNotFit."""
    model, query, target = report.model, report.query, report.target
    if len(query.contexts) > 1 or (len(query.pairs) > 1 and _names_types(ctx)):
        raise UsageError("--print-args is about one context and one cache type", "give -c and -ct one value each")
    if name is None or model.weights is None:
        raise UsageError(f"a shape by hand names no model for {program}", "name one")
    if target.memory.kind != CUDA:
        raise UsageError(f"{program} is planned for a GPU, and there is none here", "--gpu NAME names one")
    asked = given(ctx)
    tp = asked.get("--tp")
    on = memory.cluster(flags.nodes, flags.gpus, tp, target.memory.total, program)
    said = {flag: value for flag, value in asked.items() if flag not in _OURS}
    meant: dict[str, Any] = {"--model": _model(name, program, model.run_as), "--ctx-size": query.contexts[0]}
    if program == mapping.LLAMA:
        meant["--ctx-size"] *= query.sequences
    meant |= {"--tp": on.tp} if on.tp > 1 else {}
    meant |= {"--pp": on.pp} if on.pp > 1 else {}
    meant |= {"--nodes": on.nodes} if on.nodes > 1 else {}
    types = query.pairs[0] if _names_types(ctx) else ("f16", "f16")
    weights = model.weights.packed if program == mapping.LLAMA or os.path.isdir(name) else _BF16 * (model.params or 0)
    question = memory.Asked(
        model.config, weights, query.contexts[0], query.sequences, types, query.ubatch, {**meant, **said}
    )
    if meant["--model"] == PLACE:
        form = "a GGUF file: FILE" if program == mapping.LLAMA else "safetensors: a folder"
        render.announce(f"{PLACE} stands for {model.name} as {form}, or org/name of the hub", ctx.obj)
    render.write_out("\n".join(memory.lines(program, question, on, target.memory.name)) + "\n")


def _names_types(ctx: Any) -> bool:
    return any(ctx.params[f"cache_type{which}"] for which in ("", "_k", "_v"))


def _model(name: str, program: str, run_as: str) -> str:
    """What the program is to load. Raises ModelError."""
    recipe = find_recipe(name)
    if program == mapping.LLAMA:
        return name if recipe is None else (run_as if recipe.hf else "") or PLACE
    if recipe is not None:
        return PLACE
    if name.endswith(".gguf") or ":" in name:
        raise ModelError(f"{program} does not read GGUF files such as {name}", "name a folder, or org/name of the hub")
    return name
