"""`kv cache ls`, `show` and `path`: what prompt caches say of themselves."""

from __future__ import annotations

import time
from typing import Annotated, Any

import typer

from kvcli.cli import cachefiles, render
from kvcli.cli.cachefiles import Described
from kvcli.cli.commands.cache.arguments import Name, stored_files
from kvcli.cli.flags.promptcache import CACHE_TTL, CacheDir, parse_time, store_folder, time_option
from kvcli.cli.invocation import Invocation, JsonFlag
from kvcli.errors import CacheFileError, UsageError
from kvcli.runtime.promptcache.file import PromptCacheFile
from kvcli.words import human_bytes, human_time

HEADERS = ("id", "model", "tokens", "cache", "size", "used", "expires", "prompt")
_HASHES = ("weights", "tokenizer", "template")


def path(cache_dir: CacheDir = None, json: JsonFlag = False) -> None:
    """Print the folder in which long prompts are stored."""
    render.print_path("cache path", {"path": str(store_folder(cache_dir))}, json)


def ls(
    ctx: typer.Context,
    cache_dir: CacheDir = None,
    cache_ttl: Annotated[
        str, time_option("--cache-ttl", "As given to kv run: entries unused for longer are expired.")
    ] = CACHE_TTL,
    json: JsonFlag = False,
) -> None:
    """List the stored prompts, the last used first; "1,024-2,048" continues another one."""
    ttl_s = parse_time(cache_ttl, "--cache-ttl")
    found = [cachefiles.describe(file) for file in stored_files(cache_dir, ctx.obj)]
    if json:
        render.print_json(
            "cache ls",
            {
                "cache_dir": str(store_folder(cache_dir)),
                "size_bytes": sum(each.size for each in found),
                "models": {each.model_id: each.model_json() for each in found if each.model_id},
                "entries": [each.as_json(ttl_s) for each in found],
            },
        )
    elif found:
        rows = [_row(each, ttl_s) for each in found]
        one_model = len({each.model_id for each in found}) == 1
        spare = [HEADERS.index(name) for name in ("expires", *(("model", "used") if one_model else ("used", "model")))]
        right = {HEADERS.index(name) for name in ("tokens", "size", "used", "expires")}
        render.print_table(HEADERS, rows, ctx.obj, right, spare)


def _row(file: Described, ttl_s: float) -> list[str]:
    left_s = max(0.0, file.used_at + ttl_s - time.time())
    cells = [cachefiles.id_of(file.path), file.title or "-", file.tokens, file.settings, human_bytes(file.size)]
    return [*cells, f"{human_time(time.time() - file.used_at)} ago", f"in {human_time(left_s)}", file.prompt]


def show(
    ctx: typer.Context,
    name: Name,
    cache_dir: CacheDir = None,
    tokens: Annotated[bool, typer.Option("--tokens", help="Print only its token ids.")] = False,
    text: Annotated[
        str | None, typer.Option("--text", metavar="MODEL", help="Print only its text, decoded by this model.")
    ] = None,
    json: JsonFlag = False,
) -> None:
    """Show what a prompt cache holds, with the first words of its text."""
    if tokens + (text is not None) + json > 1:
        raise UsageError("--tokens, --text and --json cannot be used together", "give one of them")
    file = cachefiles.locate(name, store_folder(cache_dir))
    with PromptCacheFile(file) as opened:
        ids, identity = opened.contents.tokens, opened.contents.identity
    found = cachefiles.describe(file)
    if tokens:
        render.write_out(" ".join(map(str, ids)) + "\n")
    elif text is not None:
        render.write_out(_text(text, ids, identity["tokenizer"], ctx.obj))
    elif json:
        of_model = found.model_json()
        render.print_json("cache show", {**of_model, **found.as_json(parse_time(CACHE_TTL, "--cache-ttl"))})
    else:
        lines = _lines(found, cachefiles.label(file, store_folder(cache_dir)))
        render.write_out("".join(f"{line}\n" for line in lines))


def _lines(file: Described, label: str) -> list[str]:
    """Names and values; the path whole, all else cut to the width of a terminal."""
    about, identity = file.about, file.identity
    rows: dict[str, Any] = {"id": label} if label != str(file.path) else {}
    rows |= {"path": file.path, "begins": about.get("begins", "-")}
    rows |= {"from": file.source} if file.source else {}
    rows |= {"tokens": file.tokens, "size": human_bytes(file.size), "cache": file.settings}
    rows |= {name: value for name, value in about.items() if name not in ("begins", "source", "chat", "owner")}
    rows |= {name: identity.get(name, "-") for name in _HASHES}
    width = max(map(len, rows))
    lines = {name: f"{name.replace('_', ' '):<{width}}  {render.one_line(str(value))}" for name, value in rows.items()}
    return [line if name == "path" else render.fitting(line) for name, line in lines.items()]


def _text(model: str, ids: list[int], tokenizer_hash: str, invocation: Invocation) -> str:
    """Raises CacheFileError for a model with another tokenizer."""
    from kvcli.cli import locate
    from kvcli.runtime.headers.opening import open_model
    from kvcli.runtime.promptcache import fingerprint
    from kvcli.runtime.text.tokenizer import Tokenizer

    metadata = open_model(locate.locate_model(model, invocation)).metadata
    if fingerprint.tokenizer_hash(metadata) != tokenizer_hash:
        raise CacheFileError(
            f"the tokens are not those of {model}: it has a different tokenizer", "name the cache's model"
        )
    tokenizer = Tokenizer.from_gguf(metadata)
    return tokenizer.decode([token for token in ids if token < tokenizer.vocab_size]) + "\n"
