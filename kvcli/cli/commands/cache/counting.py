"""`kv cache stats`: what the store was worth."""

from __future__ import annotations

import time
from collections import Counter
from datetime import datetime, timezone
from typing import Annotated, Any

import typer

from kvcli.cli import cachefiles, render
from kvcli.cli.cachefiles import Described
from kvcli.cli.commands.cache.arguments import nothing_in
from kvcli.cli.flags.promptcache import CacheDir, store_folder
from kvcli.cli.invocation import JsonFlag
from kvcli.errors import OutputError
from kvcli.runtime.promptcache import marks, worth
from kvcli.runtime.promptcache.worth import ModelWorth, Uses, Worth
from kvcli.words import counted, human_bytes, human_seconds, human_time

MODEL_HEADERS = ("model", "cache", "look-ups", "hits", "prompt tokens", "from disk", "from memory", "saved")
PROMPT_HEADERS = ("id", "hits", "tokens", "saved", "to compute", "size", "used", "prompt")
MOST = 10  # prompts that are listed
WORDS_OF_MARKS = {
    marks.USER: "behind --cache-mark",
    marks.SYSTEM: "the system message",
    marks.SHARED: "where others parted",
    marks.FILE: "the end of a file",
    marks.TURN: "a turn",
    marks.EVEN: "an even place",
}


def stats(
    ctx: typer.Context,
    reset: Annotated[bool, typer.Option("--reset", help="Begin to count anew, after printing.")] = False,
    cache_dir: CacheDir = None,
    json: JsonFlag = False,
) -> None:
    """Show what the stored prompts were worth: look-ups, hits, tokens and seconds saved, by model and by prompt.

    Saved are the seconds that computing the rows would have taken on this machine, by what other prompts took, less
    those of reading them.
    """
    root = store_folder(cache_dir)
    record = worth.read(root)
    files = [cachefiles.describe(path, record) for path in cachefiles.stored(root)]
    of_use = sorted((file for file in files if file.worth.uses.hits), key=lambda f: -f.worth.uses.saved_s)
    gone = _gone(record, files)
    models = sorted(record.models.values(), key=lambda model: (-model.disk.saved_s, -model.lookups))
    if json:
        value = {
            "cache_dir": str(root),
            "since": datetime.fromtimestamp(record.since, timezone.utc).isoformat(timespec="seconds"),
            "models": [_model_object(model) for model in models],
            "entries": [_entry_object(file) for file in of_use],
            "gone": _uses_object(gone),
        }
        render.print_json("cache stats", value)
    elif not any(model.lookups for model in models):
        told = nothing_in(root) if not files else f"no prompt was looked for in {root} since it is counted"
        render.announce(told, ctx.obj)
    else:
        _show(record, models, of_use, gone, files, ctx)
    if reset and root.is_dir():
        try:
            if not worth.change(root, worth.begin_anew):
                raise OutputError("another process writes the record", "try again")
        except OSError as error:
            raise OutputError(f"cannot write {root / worth.NAME}: {error.strerror or error}") from None


def _gone(record: Worth, files: list[Described]) -> Uses:
    """What was read from files that are not there any more."""
    found = Uses()
    found.add(record.gone)
    here = {worth.key_of(file.path) for file in files}
    for name, each in record.files.items():
        if name not in here:
            found.add(each.uses)
    return found


def _show(
    record: Worth,
    models: list[ModelWorth],
    of_use: list[Described],
    gone: Uses,
    files: list[Described],
    ctx: typer.Context,
) -> None:
    since = datetime.fromtimestamp(record.since).strftime("%Y-%m-%d %H:%M")
    total, lookups = Uses(), sum(model.lookups for model in models)
    for model in models:
        total.add(model.disk)
    size = human_bytes(sum(file.size for file in files))
    told = f"since {since}: {counted(lookups, 'look-up')}, {counted(total.hits, 'hit')} on disk,"
    told += f" {total.tokens:,} tokens not computed again, {human_seconds(total.saved_s)} saved;"
    render.write_out(f"{told} {counted(len(files), 'file')}, {size}\n\n")
    right = range(2, len(MODEL_HEADERS))
    render.print_table(MODEL_HEADERS, [_model_row(model) for model in models if model.lookups], ctx.obj, right)
    if begun := _marks(models):
        render.write_out(f"prompts went on from: {begun}\n")
    if of_use:
        render.write_out("\n")
        rows = [_prompt_row(file) for file in of_use[:MOST]]
        numbers, spare = range(1, len(PROMPT_HEADERS) - 1), [PROMPT_HEADERS.index(n) for n in ("to compute", "used")]
        render.print_table(PROMPT_HEADERS, rows, ctx.obj, numbers, spare)
    if len(of_use) > MOST:
        render.write_out(f"and {len(of_use) - MOST:,} more, which --json lists\n")
    if gone.hits:
        render.write_out(f"files that are gone: {counted(gone.hits, 'hit')}, {human_seconds(gone.saved_s)} saved\n")


def _marks(models: list[ModelWorth]) -> str:
    """From which kinds of marks prompts went on, and how often; "" = from none."""
    counts = Counter[str]()
    for model in models:
        counts.update(model.marks)
    return ", ".join(f"{WORDS_OF_MARKS.get(kind, kind)} ({count:,})" for kind, count in counts.most_common())


def _model_row(model: ModelWorth) -> list[str]:
    counts = model.lookups, model.disk.hits, model.prompt_tokens, model.disk.tokens, model.memory_tokens
    return [model.title, model.settings, *(f"{count:,}" for count in counts), human_seconds(model.disk.saved_s)]


def _prompt_row(file: Described) -> list[str]:
    uses, cost = file.worth.uses, file.worth.cost_s
    figures = [f"{uses.hits:,}", f"{uses.tokens:,}", human_seconds(uses.saved_s)]
    figures += ["-" if cost is None else human_seconds(cost), human_bytes(file.size)]
    return [cachefiles.id_of(file.path), *figures, f"{human_time(time.time() - file.used_at)} ago", file.prompt]


def _uses_object(uses: Uses) -> dict[str, Any]:
    return {"hits": uses.hits, "hit_tokens": uses.tokens, "saved_s": round(uses.saved_s, 3)}


def _model_object(model: ModelWorth) -> dict[str, Any]:
    return {
        "model_title": model.title,
        "cache": model.settings,
        "lookups": model.lookups,
        "prompt_tokens": model.prompt_tokens,
        "memory_tokens": model.memory_tokens,
        "marks": model.marks,
        **_uses_object(model.disk),
    }


def _entry_object(file: Described) -> dict[str, Any]:
    cost = file.worth.cost_s
    return {
        "id": cachefiles.id_of(file.path),
        "path": str(file.path),
        "size_bytes": file.size,
        "source": file.about.get("source"),
        "chat": file.about.get("chat"),
        "begins": file.about.get("begins"),
        "compute_s": None if cost is None else round(cost, 3),
        **_uses_object(file.worth.uses),
    }
