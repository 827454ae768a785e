"""`kv convert`: a folder of safetensors as one GGUF file."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from kvcli.cli import render
from kvcli.cli.flags.checks import checked
from kvcli.cli.helptext import STORES
from kvcli.cli.invocation import Invocation, JsonFlag
from kvcli.errors import OutputError, UsageError
from kvcli.runtime.formats.packing import named

EXAMPLES = """
kv convert ~/models/some-model -o some-model.gguf
kv convert ~/models/some-model -o some-model.gguf --quantize q4_k
"""


def register(app: typer.Typer) -> None:
    app.command("convert", rich_help_panel=STORES, epilog=EXAMPLES)(convert)


def convert(
    ctx: typer.Context,
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="A folder with config.json and safetensors.")],
    output: Annotated[Path, typer.Option("-o", "--output", metavar="FILE", help="The GGUF file to write.")],
    quantize: Annotated[
        str | None,
        typer.Option(
            "--quantize",
            metavar="TYPE",
            help="Pack the weights: q8_0, q6_k, q4_k, ...",
            show_default="as they are",
            callback=checked(named),
        ),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace a file that is there.")] = False,
    json: JsonFlag = False,
) -> None:
    """Write a model of a folder as one GGUF file, which kv and llama.cpp run, and print its path."""
    from kvcli.runtime.headers.ggufwriter import write_gguf
    from kvcli.runtime.headers.safetensorsmodel import SafetensorsModel
    from kvcli.runtime.hub.store import check_disk
    from kvcli.runtime.model.loading import check

    invocation: Invocation = ctx.obj
    if str(output) == "-" or (output.exists() and not output.is_file()):
        raise UsageError(f"{output} cannot be the GGUF file: a regular file is written", "name a new file with -o")
    if output.is_symlink():
        raise UsageError(
            f"{output} is a link to {os.readlink(output)}, which kv does not replace", "name a file with -o"
        )
    if os.path.lexists(output) and not force:
        raise UsageError(f"{output} is there already", "--force replaces it")
    if not folder.is_dir():
        raise UsageError(f"{folder} is no folder", "give a folder with config.json and model.safetensors")
    with SafetensorsModel(folder, named(quantize) if quantize else "") as model:
        check(model)
        for notice in model.notices:
            render.announce(notice, invocation)
        if model.metadata.get("tokenizer.ggml.pre", model.metadata["tokenizer.ggml.model"]) == "gpt2":
            render.warn("llama.cpp has no name for how this tokenizer cuts words: kv alone will obey it", invocation)
        check_disk(output.absolute().parent, sum(tensor.nbytes for tensor in model.tensors.values()))
        try:
            with render.Progress(invocation) as progress:
                write_gguf(model, output, progress)
        except OSError as error:
            raise OutputError(f"{output} cannot be written: {error.strerror or error}") from None
    if json:
        found = {"model": str(folder), "path": str(output), "file_bytes": output.stat().st_size}
        render.print_json("convert", {**found, "other_types": model.otherwise})
    else:
        render.write_out(f"{output}\n")
