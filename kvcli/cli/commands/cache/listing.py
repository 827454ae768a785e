"""`kv cache ls`, `show` and `path`: what prompt caches say of themselves."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated, Any

import typer

from kvcli.cli import cachefiles, cachetree, render
from kvcli.cli.cachefiles import Described
from kvcli.cli.commands.cache import looking
from kvcli.cli.commands.cache.arguments import Name, described
from kvcli.cli.flags.promptcache import CACHE_TTL, CacheDir, parse_time, store_folder, time_option
from kvcli.cli.flags.shared import check_model
from kvcli.cli.invocation import Invocation, JsonFlag
from kvcli.errors import CacheFileError, UsageError
from kvcli.runtime.promptcache import worth
from kvcli.runtime.promptcache.file import PromptCacheFile
from kvcli.words import counted, human_bytes, human_seconds, human_time

HEADERS = ("id", "model", "tokens", "cache", "size", "used", "expires", "starts", "prompt")
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
    tree: Annotated[bool, typer.Option("--tree", help="Show which goes on from which.")] = False,
    json: JsonFlag = False,
) -> None:
    """List the stored prompts, the last used first; "1,024-2,048" continues another one.

    "starts" says where later prompts can go on with other text: anywhere, or, where windows slide, behind some tokens.
    One that "needs the first 1,024" is of use again when a prompt has computed these, which no file has.
    """
    ttl_s = parse_time(cache_ttl, "--cache-ttl")
    found = described(cache_dir, ctx.obj)
    above = cachetree.parents(found)
    if json:
        render.print_json(
            "cache ls",
            {
                "cache_dir": str(store_folder(cache_dir)),
                "size_bytes": sum(each.size for each in found),
                "models": {each.model_id: each.model_json() for each in found if each.model_id},
                "entries": [_entry(each, ttl_s, above) for each in found],
            },
        )
    elif found:
        listed = list(cachetree.rows(cachetree.trees(found))) if tree else [("", each) for each in found]
        rows = [_row(lines, each, ttl_s, cachetree.starting(each, above)) for lines, each in listed]
        one_model = len({each.model_id for each in found}) == 1
        spare = ["expires", *(["model", "starts", "used"] if one_model else ["starts", "used", "model"])]
        right = {HEADERS.index(name) for name in ("tokens", "size", "used", "expires")}
        render.print_table(HEADERS, rows, ctx.obj, right, [HEADERS.index(name) for name in spare])


def _entry(file: Described, ttl_s: float, above: dict[Path, Described]) -> dict[str, Any]:
    return file.as_json(ttl_s, above[file.path].path if file.path in above else None)


def _row(lines: str, file: Described, ttl_s: float, starting: str) -> list[str]:
    """`lines`: those of a tree that lead to the file."""
    left_s = min(ttl_s, max(0.0, file.used_at + ttl_s - time.time()))  # a clock may have been put back
    name = lines + cachefiles.id_of(file.path)
    cells = [name, file.title or "-", file.tokens, file.settings, human_bytes(file.size)]
    expires = "pinned" if file.pinned else f"in {human_time(left_s)}"
    return [*cells, f"{human_time(time.time() - file.used_at)} ago", expires, starting, file.prompt]


def show(
    ctx: typer.Context,
    name: Name,
    cache_dir: CacheDir = None,
    tokens: Annotated[bool, typer.Option("--tokens", help="Print only its token ids.")] = False,
    text: Annotated[bool, typer.Option("--text", help="Print only its text.")] = False,
    mass: Annotated[bool, typer.Option("--mass", help="Draw what its last tokens look at.")] = False,
    model: Annotated[
        str | None,
        typer.Option(
            "-m",
            "--model",
            metavar="MODEL",
            help="The model that --text and --mass need.",
            callback=check_model,
            show_default="the one that made it",
        ),
    ] = None,
    json: JsonFlag = False,
) -> None:
    """Show what a prompt cache holds, with the first words of its text."""
    if tokens + text + mass + json > 1:
        raise UsageError("--tokens, --text, --mass and --json cannot be used together", "give one of them")
    if model is not None and not (text or mass):
        raise UsageError("-m needs --text or --mass", "without them no model is opened")
    root = store_folder(cache_dir)
    file = cachefiles.locate(name, root)
    with PromptCacheFile(file) as opened:
        ids, identity, start = opened.contents.tokens, opened.contents.identity, opened.contents.start
    found = cachefiles.describe(file, worth.read(root))
    if tokens:
        render.write_out(" ".join(map(str, ids)) + "\n")
    elif text:
        render.write_out(_text(model or _maker(found), ids, identity["tokenizer"], ctx.obj))
    elif mass and start:
        told = f"it has only the tokens from {start:,} on, and what they look at is before them, too"
        raise UsageError(told, "kv cache ls --tree shows what it goes on from")
    elif mass:
        render.write_out(looking.drawn(model or _maker(found), ids, identity, ctx.obj))
    elif json:
        of_model, ttl_s = found.model_json(), parse_time(CACHE_TTL, "--cache-ttl")
        above = _parents(root)
        render.print_json("cache show", {**of_model, **_entry(found, ttl_s, above)})
    else:
        starting = cachetree.starting(found, _parents(root)) if start else found.starting
        lines = _lines(found, cachefiles.label(file, root), starting)
        render.write_out("".join(f"{line}\n" for line in lines))


def _parents(root: Path) -> dict[Path, Described]:
    return cachetree.parents([cachefiles.describe(each) for each in cachefiles.stored(root)])


def _lines(file: Described, label: str, starting: str) -> list[str]:
    """Names and values; the path whole, all else cut to the width of a terminal."""
    about, identity = file.about, file.identity
    rows: dict[str, Any] = {"id": label} if label != str(file.path) else {}
    rows |= {"path": file.path, "begins": about.get("begins", "-")}
    rows |= {"from": file.source} if file.source else {}
    rows |= {"tokens": file.tokens, "starts": starting, "size": human_bytes(file.size), "cache": file.settings}
    count, each = file.checkpoints or (0, 0)
    rows |= {"states": f"{counted(count, 'checkpoint')} of {human_bytes(each)}"} if each else {}
    rows |= _worth(file)
    rows |= {name: value for name, value in about.items() if name not in ("begins", "source", "chat", "owner")}
    rows |= {name: identity.get(name, "-") for name in _HASHES}
    width = max(map(len, rows))
    lines = {name: f"{name.replace('_', ' '):<{width}}  {render.one_line(str(value))}" for name, value in rows.items()}
    return [line if name == "path" else render.fitting(line) for name, line in lines.items()]


def _worth(file: Described) -> dict[str, str]:
    """What it was of use for, as far as that is recorded."""
    uses, cost = file.worth.uses, file.worth.cost_s
    found = {"pinned": "yes"} if file.pinned else {}
    if uses.hits:
        told = f"{counted(uses.hits, 'hit')}, {uses.tokens:,} tokens not computed again"
        found["worth"] = f"{told}, {human_seconds(uses.saved_s)} saved"
    found |= {} if cost is None else {"to compute": human_seconds(cost)}
    return found | ({} if file.read_s is None else {"to read": human_seconds(file.read_s)})


def _maker(file: Described) -> str:
    """The model that made a file, as -m takes it. Raises UsageError."""
    from kvcli.runtime.promptcache import fingerprint

    found = str(fingerprint.model_with(file.identity.get("weights", "")) or "") or file.model
    if not found:
        told = f"the model of this prompt cache is not known here: {file.title or 'it has no name'}"
        raise UsageError(told, "name it: -m MODEL")
    return found


def _text(model: str, ids: list[int], tokenizer_hash: str, invocation: Invocation) -> str:
    """Raises CacheFileError for a model with another tokenizer."""
    from kvcli.cli import locate
    from kvcli.runtime.headers.openmodel import open_model
    from kvcli.runtime.promptcache import fingerprint
    from kvcli.runtime.text.tokenizer import Tokenizer

    metadata = open_model(locate.locate_model(model, invocation)).metadata
    if fingerprint.tokenizer_hash(metadata) != tokenizer_hash:
        raise CacheFileError(
            f"the tokens are not those of {model}: it has a different tokenizer", "name the cache's model"
        )
    tokenizer = Tokenizer.from_gguf(metadata)
    return tokenizer.decode([token for token in ids if token < tokenizer.vocab_size]) + "\n"
