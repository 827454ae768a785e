"""`kv tokenize`: text to token ids, pieces and a count."""

from __future__ import annotations

import json as jsonlib
import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvcli.cli import inputs, render
from kvcli.cli.flags.shared import DEFAULT_MODEL, ModelName
from kvcli.cli.helptext import STORES
from kvcli.cli.invocation import JsonFlag
from kvcli.cli.locate import locate_model
from kvcli.errors import UsageError
from kvcli.notices import Tell
from kvcli.words import counted

if TYPE_CHECKING:
    from kvcli.runtime.text.tokenizer import Tokenizer


EXAMPLES = """
kv tokenize "Hello, world"
kv tokenize -f notes.txt --ids
kv tokenize --json < notes.txt | jq .count
"""


def register(app: typer.Typer) -> None:
    app.command("tokenize", rich_help_panel=STORES, epilog=EXAMPLES)(tokenize)


def tokenize(
    ctx: typer.Context,
    text: Annotated[str | None, typer.Argument(help="The text; by default it is read from stdin.")] = None,
    model: ModelName = DEFAULT_MODEL,
    file: Annotated[
        str | None, typer.Option("-f", "--file", metavar="FILE", help="File with the text; - = stdin.")
    ] = None,
    json: JsonFlag = False,
    ids: Annotated[bool, typer.Option("--ids", help="Print only the ids, on one line.")] = False,
    no_bos: Annotated[bool, typer.Option("--no-bos", help="Do not prepend the BOS token.")] = False,
    special: Annotated[
        bool, typer.Option("--special", help="Parse special tokens such as <|im_end|> in the text.")
    ] = False,
    null: Annotated[
        bool, typer.Option("-0", "--null", help="Read NUL-terminated texts and print a JSON line for each.")
    ] = False,
    force_pretokenizer: Annotated[
        bool,
        typer.Option(
            "--force-pretokenizer", help="Go on if the model's pre-tokenizer is unknown; tokens may be wrong."
        ),
    ] = False,
) -> None:
    """Show how a model splits text into tokens.

    Files and stdin are read exactly as they are, including a byte-order mark and a newline at the end. A token that is
    not made of whole characters is shown by its bytes, <0xF0> for each, as in the pieces of --json.
    """
    from kvcli.runtime.headers.openmodel import open_model
    from kvcli.runtime.text.tokenizer import Tokenizer

    if json and ids:
        raise UsageError("--json and --ids cannot be used together", "--json has the ids too")
    texts = _texts(text, file, null, render.telling(ctx.obj))
    with open_model(locate_model(model, ctx.obj)) as opened:
        tokenizer = Tokenizer.from_gguf(opened.metadata, force_pretokenizer)
    for each in texts:
        found = tokenizer.encode(each, add_bos=not no_bos, parse_special=special)
        if ids:
            render.write_out(" ".join(map(str, found)) + "\n")
        elif json or null:
            render.print_json("tokenize", tokens_object(tokenizer, model, found))
        else:
            render.write_out(_as_lines(tokenizer, found))


def _texts(text: str | None, file: str | None, null: bool, tell: Tell) -> list[str]:
    """What to tokenize: one text, or with `null` those that NULs end (the last one may lack its NUL)."""
    if text is not None:
        if file is not None or null:
            raise UsageError(f"TEXT and {'-0' if null else '--file'} cannot be used together", "leave one out")
        return [inputs.argument(text, "the text", "-f", tell)]
    if file is None and sys.stdin.isatty():
        raise UsageError("no text", 'give one (kv tokenize "Hello"), -f FILE, or pipe something in')
    if file is None or file == "-":
        content = inputs.decode(inputs.stdin_bytes(tell), "stdin", null)
    else:
        content = inputs.decode(inputs.file_bytes(file), file, null)
    if not null:
        return [content]
    texts = content.split("\0")
    return texts if texts[-1] else texts[:-1]


def tokens_object(tokenizer: Tokenizer, model: str, ids: list[int]) -> dict[str, Any]:
    """Tokens for JSON."""
    pieces = [tokenizer.piece(token) for token in ids]
    return {"model": model, "tokens": len(ids), "ids": ids, "pieces": pieces}


def _as_lines(tokenizer: Tokenizer, ids: list[int]) -> str:
    """A line for each token, then the count."""
    width = max(map(len, map(str, ids)), default=0)
    lines = [f"{token:>{width}}  {_shown(tokenizer, token)}\n" for token in ids]
    return "".join(lines) + counted(len(ids), "token") + "\n"


def _shown(tokenizer: Tokenizer, token: int) -> str:
    """Its piece: text in quotes; a control token's name, and bytes that are no whole characters, without."""
    text = tokenizer.piece(token)
    if tokenizer.token_bytes(token) != text.encode():
        return render.one_line(text)
    safe = (c if c.isprintable() and c not in '"\\' else jsonlib.dumps(c)[1:-1] for c in text)
    return '"' + "".join(safe) + '"'
