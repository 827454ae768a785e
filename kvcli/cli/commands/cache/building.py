"""`kv cache build`: a prompt cache without an answer."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvcli.cli import engines, render, report
from kvcli.cli.answer import Job, answer, settle
from kvcli.cli.flags.eviction import EvictFlags
from kvcli.cli.flags.prompt import PromptFlags, Question
from kvcli.cli.flags.promptcache import CacheDir, CacheMarks, CacheScope, store_folder, writable
from kvcli.cli.flags.shared import CacheFlags, ModelFlags, SystemFlags, grouped
from kvcli.cli.flags.template import TemplateFlags
from kvcli.cli.interrupt import UNWIND, Interrupts, last_words
from kvcli.cli.invocation import Invocation, JsonFlag
from kvcli.cli.sinks import NoSink
from kvcli.errors import CacheFileError, OutputError, UsageError
from kvcli.options import PromptCacheOptions, SampleOptions
from kvcli.runtime.cache import eviction
from kvcli.runtime.promptcache.file import PromptCacheFile
from kvcli.words import counted

REPLACES = "--force replaces it; or name another file"
NOT_KEPT = "it goes by what all queries before have looked at, which a file does not have"

if TYPE_CHECKING:
    from kvcli.runtime.engine.engine import Engine


@grouped
def build(
    ctx: typer.Context,
    model: ModelFlags,
    cache: CacheFlags,
    evict: EvictFlags,
    prompt: PromptFlags,
    system: SystemFlags,
    template: TemplateFlags,
    out: Annotated[str | None, typer.Option("-o", "--output", metavar="FILE", help="The file to create.")] = None,
    mark: CacheMarks = None,
    force: Annotated[bool, typer.Option("--force", help="Replace one of another prompt or setting.")] = False,
    chunks: Annotated[
        bool,
        typer.Option("--chunks", help="Store each file of -f by itself, for kv run --chunks; no -o, no other text."),
    ] = False,
    cache_dir: CacheDir = None,
    cache_scope: CacheScope = "",
    instruction: Annotated[str | None, typer.Argument(metavar="PROMPT", help="Text after the files.")] = None,
    json: JsonFlag = False,
) -> None:
    """Prefill a prompt and store its cache in a file for kv run --prompt-cache; nothing is generated.

    With --budget the file has the rows that were selected; other prompts go on from them with the same options.
    """
    if chunks:
        _check_chunks(prompt, instruction, out, mark)
    elif out is None:
        raise UsageError("--output is missing", "name the file to create: -o FILE")
    elif cache_scope:
        raise UsageError("--cache-scope needs --chunks", "a file of -o is used where it is named, and nowhere else")
    invocation: Invocation = ctx.obj
    with Interrupts(partial(last_words, as_json=json)) as interrupts:
        scorer = eviction.policy(evict.evict).scorer
        evicting = evict.options(cache.page_size, scored=NOT_KEPT if scorer and scorer().remembers else "")
        question = (replace(prompt, no_stdin=True) if chunks else prompt).question(instruction, system, invocation)
        cache_options, file = cache.options(evicting), writable(out) if out else Path()
        load = replace(prompt.loading(model.options(invocation.offline)), chat=template.options(prompt.raw))
        loaded = engines.load_model(load, cache_options, invocation, interrupts)
        question = question.of(loaded.text, invocation)
        if chunks:
            interrupts.stage = UNWIND
            kept = PromptCacheOptions(store=store_folder(cache_dir), scope=cache_scope)
            _build_chunks(engines.engine_of(loaded, invocation), question, kept, invocation, json)
            raise typer.Exit(interrupts.code)
        loaded.terms.check_text(len(question.prompt), loaded.text.tokenizer.longest)
        ids = question.ids(loaded.text)
        if scorer and instruction is None and prompt.prompt is None:  # rows are of use behind all of the file's ids
            ids = question.shared(loaded.text, ids)
        if len(ids) < cache_options.page_size:
            raise UsageError(
                f"the prompt has {counted(len(ids), 'token')}: less than a page of {cache_options.page_size} is"
                " never read from a prompt cache",
                "give a longer prompt, or a smaller --page-size",
            )
        loaded.terms.check_prompt(ids)
        marks = question.marks(loaded.text, ids, mark or [], "--mark")
        engine, options = engines.engine_of(loaded, invocation, len(ids)), settle(loaded, SampleOptions(max_tokens=0))
        kept = PromptCacheOptions(
            file=file, strict=True, replace=force, awaited=True, selected=True, source=prompt.source,
            lead=question.text(loaded.text, ids)[0],
        )  # fmt: skip
        with closing(engine.prompt_caches(kept, render.telling(invocation))) as caches:
            interrupts.stage = UNWIND
            job = Job(model.model, options, NoSink(invocation), interrupts, caches, marks=marks, told=invocation.told)
            try:
                result = answer(engine, engine.new_sequence(), ids, job)
            except CacheFileError as error:
                if error.foreign:
                    error.hint = REPLACES
                raise
    if not file.is_file():
        raise OutputError(f"{file} was not made", _why(result.end.unwritten, json))
    with PromptCacheFile(file) as made:
        if made.contents.tokens[: len(ids)] != ids:
            raise CacheFileError(f"{file} holds another prompt and is left as it is", REPLACES)
    if result.end.unwritten:
        raise CacheFileError(f"{file} is left as it is", _why(result.end.unwritten, json))
    for loss in result.losses:
        render.warn(loss, invocation)
    if json:
        size = file.stat().st_size
        render.print_json("cache build", {**report.result_object(result), "path": str(file), "size_bytes": size})
    else:
        render.announce(f"{report.prompt_stats(result.end)} in {result.end.timings.prefill_s:.2f} s", invocation)
        render.write_out(f"{out}\n")
    raise typer.Exit(interrupts.code)


def _check_chunks(prompt: PromptFlags, instruction: str | None, out: str | None, mark: list[str] | None) -> None:
    """Raises UsageError for what --chunks cannot be used with."""
    others = {"-o": out, "a prompt": instruction if instruction is not None else prompt.prompt, "--mark": mark}
    if given := [name for name, value in others.items() if value]:
        raise UsageError(f"--chunks and {given[0]} cannot be used together", "each file of -f is stored by itself")
    if not prompt.file:
        raise UsageError("--chunks needs documents", "give them as files, e.g. -f a.txt -f b.txt")


def _build_chunks(
    engine: Engine, question: Question, options: PromptCacheOptions, invocation: Invocation, json: bool
) -> None:
    """Have the rows of each file by itself in the store."""
    from kvcli.runtime.engine.chunkcaches import LEAST, ChunkCaches, Document

    documents = [Document(*each) for each in question.documents(engine.loaded.text)]
    for each in documents:
        if len(each.ids) < LEAST:
            raise UsageError(f"{each.name} has {len(each.ids)} tokens", f"less than {LEAST} are not worth storing")
    told = list[dict[str, Any]]()
    with closing(ChunkCaches(engine, documents, options, render.telling(invocation))) as caches:
        for each in documents:
            seq = caches.alone.new_sequence()
            told.append({"name": each.name, "tokens": len(each.ids), "cache_disk_tokens": caches.read(seq, each)})
            seq.close()
    if json:
        render.print_json("cache build --chunks", {"chunks": told, "warnings": invocation.told})
        return
    for found in told:
        before = f"{found['cache_disk_tokens']:,} of them stored before"
        render.write_out(f"{found['name']}: {counted(found['tokens'], 'token')}, {before}\n")


def _why(unwritten: Sequence[str], as_json: bool) -> str:
    """Where it is told why there is no file: on stderr, and in JSON here, as that has no lines."""
    return "; ".join(unwritten) if as_json else "the line above says why"
