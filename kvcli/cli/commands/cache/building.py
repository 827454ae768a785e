"""`kv cache build`: a prompt cache without an answer."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from functools import partial
from typing import Annotated

import typer

from kvcli.cli import engines, render, report
from kvcli.cli.answer import Job, answer, settle
from kvcli.cli.flags.eviction import EvictFlags
from kvcli.cli.flags.prompt import PromptFlags
from kvcli.cli.flags.promptcache import CacheMarks, writable
from kvcli.cli.flags.shared import CacheFlags, ModelFlags, SystemFlags, grouped
from kvcli.cli.flags.template import TemplateFlags
from kvcli.cli.interrupt import UNWIND, Interrupts, last_words
from kvcli.cli.invocation import Invocation, JsonFlag
from kvcli.cli.sinks import NoSink
from kvcli.errors import CacheFileError, OutputError, UsageError
from kvcli.options import PromptCacheOptions, SampleOptions
from kvcli.runtime.promptcache.file import PromptCacheFile
from kvcli.words import counted

KEEPS_ALL = "rows are selected when an answer begins, and the file has those of the prompt"


@grouped
def build(
    ctx: typer.Context,
    model: ModelFlags,
    cache: CacheFlags,
    evict: EvictFlags,
    prompt: PromptFlags,
    system: SystemFlags,
    template: TemplateFlags,
    out: Annotated[str, typer.Option("-o", "--output", metavar="FILE", help="The file to create.")],
    mark: CacheMarks = None,
    force: Annotated[bool, typer.Option("--force", help="Replace a prompt cache that holds another prompt.")] = False,
    instruction: Annotated[str | None, typer.Argument(metavar="PROMPT", help="Text after the files.")] = None,
    json: JsonFlag = False,
) -> None:
    """Prefill a prompt and store its cache in a file for kv run --prompt-cache; nothing is generated."""
    invocation: Invocation = ctx.obj
    with Interrupts(partial(last_words, as_json=json)) as interrupts:
        evicting = evict.options(cache.page_size, scored=KEEPS_ALL)
        question = prompt.question(instruction, system, invocation)
        cache_options, file = cache.options(evicting), writable(out)
        load = replace(prompt.loading(model.options(invocation.offline)), chat=template.options(prompt.raw))
        loaded = engines.load_model(load, cache_options, invocation, interrupts)
        question = question.of(loaded.text, invocation)
        ids = question.ids(loaded.text)
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
            file=file, strict=True, replace=force, awaited=True, source=prompt.source,
            lead=question.text(loaded.text, ids)[0],
        )  # fmt: skip
        with closing(engine.prompt_caches(kept, render.telling(invocation))) as caches:
            interrupts.stage = UNWIND
            job = Job(model.model, options, NoSink(invocation), interrupts, caches, marks=marks, told=invocation.told)
            result = answer(engine, engine.new_sequence(), ids, job)
    if not file.is_file():
        raise OutputError(f"{file} was not made", _why(result.end.unwritten, json))
    with PromptCacheFile(file) as made:
        if made.contents.tokens[: len(ids)] != ids:
            raise CacheFileError(
                f"{file} holds another prompt and is left as it is", "--force replaces it; or name another file"
            )
    if result.end.unwritten:
        raise CacheFileError(f"{file} is left as it is", _why(result.end.unwritten, json))
    if json:
        size = file.stat().st_size
        render.print_json("cache build", {**report.result_object(result), "path": str(file), "size_bytes": size})
    else:
        render.announce(f"{report.prompt_stats(result.end)} in {result.end.timings.prefill_s:.2f} s", invocation)
        render.write_out(f"{out}\n")
    raise typer.Exit(interrupts.code)


def _why(unwritten: Sequence[str], as_json: bool) -> str:
    """Where it is told why there is no file: on stderr, and in JSON here, as that has no lines."""
    return "; ".join(unwritten) if as_json else "the line above says why"
