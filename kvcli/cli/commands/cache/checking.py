"""`kv cache explain` and `verify`: how far a prompt cache fits a prompt, and whether it is whole and right."""

from __future__ import annotations

from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvcli.cli import cachefiles, engines, render
from kvcli.cli.commands.cache import modelchecks
from kvcli.cli.commands.cache.arguments import Name, stored_files
from kvcli.cli.flags.checks import in_range
from kvcli.cli.flags.prompt import PromptFlags
from kvcli.cli.flags.promptcache import CacheDir, store_folder
from kvcli.cli.flags.shared import ModelFlags, SystemFlags, grouped
from kvcli.cli.flags.template import TemplateFlags
from kvcli.cli.interrupt import Interrupts, last_words
from kvcli.cli.invocation import Invocation, JsonFlag
from kvcli.errors import CacheFileError, CheckFailed, UsageError
from kvcli.runtime.promptcache.file import PromptCacheFile
from kvcli.runtime.promptcache.sameness import selected_by
from kvcli.words import counted

if TYPE_CHECKING:
    from kvcli.options import LoadOptions
    from kvcli.runtime.engine.engine import Engine


@grouped
def explain(
    ctx: typer.Context,
    name: Name,
    model: ModelFlags,
    prompt: PromptFlags,
    system: SystemFlags,
    template: TemplateFlags,
    cache_dir: CacheDir = None,
    instruction: Annotated[str | None, typer.Argument(metavar="PROMPT", help="Text after the files.")] = None,
    json: JsonFlag = False,
) -> None:
    """Show how far a prompt cache agrees with a prompt, and at which token they differ."""
    invocation: Invocation = ctx.obj
    question = prompt.question(instruction, system, invocation)
    root = store_folder(cache_dir)
    with PromptCacheFile(cachefiles.locate(name, root)) as file:
        contents = file.contents
    with Interrupts(partial(last_words, as_json=json)) as interrupts:
        load = replace(prompt.loading(model.options(invocation.offline)), chat=template.options(prompt.raw))
        engine = _engine_for(contents.identity, load, invocation, interrupts)
        ids = question.of(engine.loaded.text, invocation).ids(engine.loaded.text)
        found = modelchecks.agreement(contents, ids, engine)
    if json:
        render.print_json("cache explain", {**_named(file.path, root), **found.as_json()})
    else:
        render.write_out(str(found))


def _engine_for(identity: dict[str, str], load: LoadOptions, invocation: Invocation, interrupts: Interrupts) -> Engine:
    """The model with the cache options of a file."""
    return engines.open_engine(load, modelchecks.options_of(identity), invocation, interrupts)


def _named(file: Path, root: Path) -> dict[str, str | None]:
    label = cachefiles.label(file, root)
    return {"id": label if label != str(file) else None, "path": str(file)}


@grouped
def verify(
    ctx: typer.Context,
    model: ModelFlags,
    names: Annotated[
        list[str] | None, typer.Argument(metavar="[FILE|ID]...", help="By default all stored prompts.")
    ] = None,
    cache_dir: CacheDir = None,
    recompute: Annotated[
        int,
        typer.Option(
            "--recompute",
            metavar="N",
            help="Also recompute all rows with -m and compare N pages.",
            callback=in_range("--recompute", 0, hint="it is a number of pages; 0 computes nothing"),
        ),
    ] = 0,
    tol: Annotated[
        float,
        typer.Option(
            "--tol",
            metavar="X",
            help="Largest error of an element that --recompute accepts.",
            callback=in_range("--tol", 0),
        ),
    ] = 0.0,
    json: JsonFlag = False,
) -> None:
    """Check prompt caches against their checksums (exit code 6) or against recomputed rows (exit code 8)."""
    invocation: Invocation = ctx.obj
    root, code = store_folder(cache_dir), 0
    entries: list[dict[str, Any]] = []
    for file in [cachefiles.locate(name, root) for name in names] if names else stored_files(cache_dir, invocation):
        label = cachefiles.label(file, root)
        entry: dict[str, Any] = {"pages": None, "recomputed": None, "problem": None}
        try:
            entry["pages"] = pages = cachefiles.check_pages(file)
            told = f"{label}: ok, {counted(pages, 'page')}"
            if recompute > 0:
                entry["recomputed"], more = _recomputed(file, model, recompute, tol, invocation, named=bool(names))
                told += f"; {more}"
        except (CacheFileError, CheckFailed) as error:
            code = max(code, error.exit_code)
            entry["problem"] = told = error.message.replace(str(file), label)
            if not json:
                stored = isinstance(error, CacheFileError) and not error.foreign and label != str(file)
                hint = f"kv cache rm {label} removes it" if stored else error.hint
                render.print_error(told, hint, invocation.color)
        else:
            if not json:
                render.write_out(f"{told}\n")
        entries.append({**_named(file, root), "ok": entry["problem"] is None, **entry})
    if json:
        render.print_json("cache verify", {"entries": entries})
    raise typer.Exit(code)


def _recomputed(
    file: Path, model: ModelFlags, pages: int, tol: float, invocation: Invocation, named: bool
) -> tuple[dict[str, Any] | None, str]:
    """What came of computing again, as JSON and in words; a file that was not `named` need not be fit for it."""
    with Interrupts(partial(last_words, as_json=invocation.json)) as interrupts, PromptCacheFile(file) as opened:
        try:
            if opened.contents.start:
                raise UsageError(
                    f"it begins at token {opened.contents.start:,}", "only what begins at token 0 can be computed again"
                )
            if selected_by(opened.contents.identity):
                raise UsageError("its rows were selected by score", "what is not there cannot be compared")
            engine = _engine_for(opened.contents.identity, model.options(invocation.offline), invocation, interrupts)
            found = modelchecks.recompute(engine, opened, pages, tol)
        except UsageError as error:
            if named:
                error.message = f"{file} cannot be computed again: {error.message}"
                raise
            return None, f"not computed again: {error.message}"
        except CacheFileError as error:
            if named or not error.foreign:
                raise
            return None, "not computed again: it is of another model or setting"
        return asdict(found), str(found)
