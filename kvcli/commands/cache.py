"""`kv cache`: prompt caches on disk. What is there, whether it is whole, why it fits a prompt; making and removing."""

from __future__ import annotations

import sys
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kvcli import cachefiles, opening, render, report
from kvcli.answering import Job, answer, settle
from kvcli.app import App
from kvcli.commands.run import PromptFlags
from kvcli.errors import CacheFileError, CheckFailed, OutputError, UsageError
from kvcli.evictflags import EvictFlags
from kvcli.flags import CacheFlags, ModelFlags, SystemFlags, grouped
from kvcli.globaloptions import require_command
from kvcli.helptext import STORES
from kvcli.interrupt import Interrupts, last_words
from kvcli.invocation import Invocation, JsonFlag
from kvcli.options import PromptCacheOptions, SampleOptions
from kvcli.promptcacheflags import CACHE_SIZE, CACHE_TTL, CacheDir, parse_time, store_folder, writable
from kvcli.runtime.host.memory import parse_size
from kvcli.runtime.promptcaches.promptcache import PromptCacheFile
from kvcli.sinks import NoSink

if TYPE_CHECKING:
    from kvcli.runtime.engine import Engine

Name = Annotated[str, typer.Argument(metavar="FILE|ID", help="A path, or an id of kv cache ls.")]
Yes = Annotated[bool, typer.Option("-y", "--yes", help="Do not ask.")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Only say what would be removed.")]
Ttl = Annotated[str, typer.Option("--cache-ttl", metavar="TIME", help="As given to kv run.")]


def register(app: typer.Typer) -> None:
    group = App()
    group.callback(invoke_without_command=True)(cache)
    for command in (ls, show, build, explain, verify, rm, prune, path):
        group.command(command.__name__)(command)
    app.add_typer(group, name="cache", rich_help_panel=STORES)


def cache(ctx: typer.Context) -> None:
    """List, explain, check, make and remove prompt caches."""
    require_command(ctx)


def path(cache_dir: CacheDir = None) -> None:
    """Print the folder in which the rows of long prompts are kept."""
    render.write_out(f"{store_folder(cache_dir)}\n")


def ls(ctx: typer.Context, cache_dir: CacheDir = None, cache_ttl: Ttl = CACHE_TTL, json: JsonFlag = False) -> None:
    """The prompts that are kept, the one used last first; "1,024-2,048" goes on from another one."""
    ttl = parse_time(cache_ttl, "--cache-ttl")
    found = [cachefiles.describe(file) for file in cachefiles.stored(store_folder(cache_dir))]
    if json:
        render.print_json([each.as_json(ttl) for each in found])
        return
    render.print_table(cachefiles.HEADERS, [each.row(ttl) for each in found], ctx.obj, right={2, 5, 7})


def show(
    ctx: typer.Context,
    name: Name,
    cache_dir: CacheDir = None,
    tokens: Annotated[bool, typer.Option("--tokens", help="Print its token ids, and nothing else.")] = False,
    text: Annotated[str | None, typer.Option("--text", metavar="MODEL", help="Print its text, by this model.")] = None,
    json: JsonFlag = False,
) -> None:
    """What a prompt cache says of itself."""
    if tokens + (text is not None) + json > 1:
        raise UsageError("--tokens, --text and --json exclude each other", "give one of them")
    with PromptCacheFile(cachefiles.locate(name, store_folder(cache_dir))) as file:
        ids, found = file.contents.tokens, cachefiles.describe(file.path)
        identity = file.contents.identity
    if tokens:
        render.write_out(" ".join(map(str, ids)) + "\n")
    elif text is not None:
        render.write_out(_text(text, ids, identity["tokenizer"], ctx.obj))
    elif json:
        render.print_json(found.as_json(parse_time(CACHE_TTL, "--cache-ttl")))
    else:
        rows = {"path": str(found.path), "size": render.human_bytes(found.size), "tokens": f"{found.tokens:,}"}
        rows |= {"from token": f"{found.start:,}"} if found.start else {}
        rows |= {"types": found.types, **(found.about or {}), **(found.identity or {})}
        width = max(map(len, rows))
        lines = {key: f"{key.replace('_', ' '):<{width}}  {render.one_line(value)}" for key, value in rows.items()}
        shown = (line if key == "path" else render.fitting(line) for key, line in lines.items())
        render.write_out("\n".join(shown) + "\n")


def _text(model: str, ids: list[int], tokenizer_hash: str, invocation: Invocation) -> str:
    """Raises CacheFileError for a model with another tokenizer."""
    from kvcli import locate
    from kvcli.runtime.formats.gguf import GGUFFile
    from kvcli.runtime.promptcaches import fingerprint
    from kvcli.runtime.text.tokenizer import Tokenizer

    metadata = GGUFFile.open(locate.locate_model(model, invocation)).metadata
    if fingerprint.tokenizer_hash(metadata) != tokenizer_hash:
        raise CacheFileError(f"the tokens are not those of {model}: its tokenizer is another", "name the cache's model")
    tokenizer = Tokenizer.from_gguf(metadata)
    return tokenizer.decode([token for token in ids if token < tokenizer.vocab_size]) + "\n"


@grouped
def build(
    ctx: typer.Context,
    model: ModelFlags,
    cache: CacheFlags,
    evict: EvictFlags,
    prompt: PromptFlags,
    system: SystemFlags,
    out: Annotated[str, typer.Option("-o", "--output", metavar="FILE", help="The file to make.")],
    instruction: Annotated[str | None, typer.Argument(metavar="PROMPT", help="Text behind the files.")] = None,
) -> None:
    """Prefill a prompt and keep its rows in a file, for kv run --prompt-cache; nothing is generated."""
    invocation: Invocation = ctx.obj
    with Interrupts(last_words) as interrupts:
        question = prompt.question(instruction, system, invocation)
        cache_options, file = cache.options(evict.options(cache.page_size)), writable(out)
        engine = opening.open_engine(model.options(invocation.offline), cache_options, invocation, interrupts)
        question = question.of(engine, invocation)
        ids = question.ids(engine)
        if engine.keeps_prompt and len(ids) <= engine.ctx_size:
            opening.keep_prompt(engine, len(ids), invocation)
        options = settle(engine, SampleOptions(max_tokens=0))
        job = Job(model.model, options, NoSink(invocation), interrupts)
        with closing(engine.use_caches(PromptCacheOptions(file=file, strict=True), render.telling(invocation))):
            result = answer(engine, engine.new_sequence(), ids, job)
    if not file.is_file():
        raise OutputError(f"{file} was not made", "the line above says why")
    with PromptCacheFile(file) as made:
        if made.contents.tokens[: len(ids)] != ids:
            raise CacheFileError(f"{file} holds another prompt and is left as it is", "delete it, or name another file")
    render.announce(f"{report.prompt_stats(result.end)} in {result.end.timings.prefill_s:.2f} s", invocation)
    render.write_out(f"{out}\n")
    raise typer.Exit(interrupts.code)


@grouped
def explain(
    ctx: typer.Context,
    name: Name,
    model: ModelFlags,
    prompt: PromptFlags,
    system: SystemFlags,
    cache_dir: CacheDir = None,
    instruction: Annotated[str | None, typer.Argument(metavar="PROMPT", help="Text behind the files.")] = None,
) -> None:
    """How far a prompt cache agrees with a prompt, and the token at which they part."""
    from kvcli import cachechecks

    invocation: Invocation = ctx.obj
    question = prompt.question(instruction, system, invocation)
    with PromptCacheFile(cachefiles.locate(name, store_folder(cache_dir))) as file:
        contents = file.contents
    with Interrupts(last_words) as interrupts:
        engine = _engine_for(contents.identity, model, invocation, interrupts)
        render.write_out(cachechecks.explain(contents, question.of(engine, invocation).ids(engine), engine))


def _engine_for(identity: dict[str, str], model: ModelFlags, invocation: Invocation, interrupts: Interrupts) -> Engine:
    """The model with the cache options of a file."""
    from kvcli import cachechecks

    return opening.open_engine(
        model.options(invocation.offline), cachechecks.options_of(identity), invocation, interrupts
    )


@grouped
def verify(
    ctx: typer.Context,
    model: ModelFlags,
    names: Annotated[list[str] | None, typer.Argument(metavar="[FILE|ID]...", help="Without one: all kept.")] = None,
    cache_dir: CacheDir = None,
    recompute: Annotated[
        int, typer.Option("--recompute", metavar="N", help="Also compute all rows again with -m, and compare N pages.")
    ] = 0,
    tol: Annotated[
        float, typer.Option("--tol", metavar="X", help="Largest error of an element with --recompute.")
    ] = 0.0,
) -> None:
    """Check prompt caches against their checksums (exit 6), or against rows computed again (exit 8)."""
    invocation: Invocation = ctx.obj
    if recompute < 0:
        raise UsageError(f"--recompute is {recompute}", "it is a number of pages; 0 computes nothing")
    root, code = store_folder(cache_dir), 0
    for file in [cachefiles.locate(name, root) for name in names] if names else cachefiles.stored(root):
        try:
            pages = cachefiles.check_pages(file)
            told = f"{file}: ok, {pages} pages"
            if recompute > 0:
                told += _recomputed(file, model, recompute, tol, invocation, named=bool(names))
            render.write_out(told + "\n")
        except (CacheFileError, CheckFailed) as error:
            render.print_error(error.message, error.hint, invocation.color)
            code = max(code, error.exit_code)
    raise typer.Exit(code)


def _recomputed(file: Path, model: ModelFlags, pages: int, tol: float, invocation: Invocation, named: bool) -> str:
    """What comes behind "ok": of a file that was not named and goes on from another one, that it was not compared."""
    from kvcli import cachechecks

    with Interrupts(last_words) as interrupts, PromptCacheFile(file) as opened:
        if opened.contents.start and not named:
            return f"; not computed again: it begins at token {opened.contents.start:,}"
        engine = _engine_for(opened.contents.identity, model, invocation, interrupts)
        return cachechecks.recompute(engine, opened, pages, tol)


def rm(
    ctx: typer.Context,
    names: Annotated[list[str] | None, typer.Argument(metavar="ID...", help="Ids of kv cache ls.")] = None,
    all: Annotated[bool, typer.Option("--all", help="Everything that is kept.")] = False,
    yes: Yes = False,
    dry_run: DryRun = False,
    cache_dir: CacheDir = None,
) -> None:
    """Remove kept prompts."""
    root = store_folder(cache_dir)
    if bool(names) == all:
        raise UsageError("give ids, or --all", "kv cache ls lists ids")
    files = cachefiles.stored(root) if all else [cachefiles.locate(name, root) for name in names or []]
    if outside := [file for file in files if root not in file.absolute().parents]:
        raise UsageError(f"{outside[0]} is not in {root}", "kv removes files of the store only")
    _remove(files, yes, dry_run, ctx.obj)


def _ask(yes: bool, question: str) -> None:
    if not yes:
        if not render.is_terminal(sys.stdin):
            raise UsageError("not removing anything unasked", "there is no terminal to ask on: add -y")
        typer.confirm(question, abort=True, err=True)


def _remove(files: list[Path], yes: bool, dry_run: bool, invocation: Invocation) -> None:
    sizes = [file.lstat().st_size for file in files]
    what = f"{len(files)} files, {render.human_bytes(sum(sizes))}"
    if not dry_run and files:
        _ask(yes, f"Remove {what}?")
        try:
            for file in files:
                file.unlink(missing_ok=True)
        except OSError as error:
            raise OutputError(f"cannot remove {file}: {error.strerror or error}") from None
    for file in files:
        render.write_out(f"{cachefiles.id_of(file)}\n")
    render.announce(f"{'would remove' if dry_run else 'removed'} {what}", invocation)


def prune(
    ctx: typer.Context,
    max_size: Annotated[str, typer.Option("--max-size", metavar="SIZE", help="Most bytes that stay.")] = CACHE_SIZE,
    older_than: Annotated[
        str, typer.Option("--older-than", metavar="TIME", help="Also what was unused so long.")
    ] = CACHE_TTL,
    yes: Yes = False,
    dry_run: DryRun = False,
    cache_dir: CacheDir = None,
) -> None:
    """Remove what was used longest ago, and what killed processes left."""
    from kvcli.runtime.promptcaches import promptstore

    root = store_folder(cache_dir)
    limits = promptstore.Limits(parse_size(max_size, "--max-size"), parse_time(older_than, "--older-than"))
    gone = [entry.path for entry in promptstore.prune(root, limits, dry_run=True)]
    _remove(gone, yes, dry_run, ctx.obj)
    if not dry_run:
        try:
            promptstore.prune(root, limits)
        except OSError as error:
            raise OutputError(f"cannot clear {root}: {error.strerror or error}") from None
