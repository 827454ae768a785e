"""`kv perplexity`: what each cache type costs in quality and bytes, on texts of the user's own."""

from __future__ import annotations

import dataclasses
import math
import re
import sys
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvcli import inputs, measuring, render
from kvcli.cacheflags import Types
from kvcli.errors import CheckFailed, UsageError
from kvcli.evictflags import EvictFlags
from kvcli.flags import ModelFlags, grouped, parse_tokens
from kvcli.helptext import PLANNING
from kvcli.interrupt import Interrupts, last_words
from kvcli.invocation import Invocation, JsonFlag
from kvcli.measuring import TypeFlags, type_name

if TYPE_CHECKING:
    from kvcli.runtime.engine import Engine
    from kvcli.runtime.quality import Cost, Protocol, Scores, Summary

DEFAULT_TYPES = "f16,fp8,int8,int8/int4,int4"
HEADERS = ("type", "PPL", "±", "ΔPPL %", "KLD", "±", "99 %", "max", "top-1 %", "B/token", "bits", "sealed")


def register(app: typer.Typer) -> None:
    app.command("perplexity", rich_help_panel=PLANNING)(perplexity)


@dataclass(frozen=True)
class TextFlags:
    """The texts, how they are cut and what is scored."""

    file: Annotated[
        list[str], typer.Option("-f", "--file", metavar="FILE", help="A text; - = stdin (repeat). Default: stdin.")
    ] = field(default_factory=list)
    ctx_size: Annotated[str, typer.Option("-c", "--ctx-size", metavar="N", help="Tokens of a chunk.")] = "512"
    chunks: Annotated[
        int, typer.Option("--chunks", metavar="N", min=0, help="Most chunks of each text; 0 = all whole ones.")
    ] = 0
    score_from: Annotated[
        int | None,
        typer.Option("--score-from", metavar="N", min=0, help="First scored position.", show_default="the second half"),
    ] = None

    def protocol(self) -> Protocol:
        """Raises UsageError."""
        from kvcli.runtime.quality import Protocol

        found = Protocol(parse_tokens(self.ctx_size, "--ctx-size"), self.chunks, self.score_from)
        found.check()
        return found

    def read(self, invocation: Invocation) -> list[tuple[str, str]]:
        """(name, text) of each. Raises UsageError, InputBytesError."""
        if not self.file and sys.stdin.isatty():
            raise UsageError("no text", "give -f FILE, or pipe something in")
        names = self.file or ["-"]
        if names.count("-") > 1:
            raise UsageError("-f - stands twice; stdin can be read once")
        tell = render.telling(invocation)
        return [("stdin", inputs.read_stdin(tell)) if name == "-" else (name, inputs.read_file(name)) for name in names]


@dataclass(frozen=True)
class GateFlags:
    """Limits that make the command fail."""

    max_kld: Annotated[
        float | None, typer.Option("--max-kld", metavar="X", help="Exit 8 if a type's mean KLD is above X.")
    ] = None
    max_ppl_delta: Annotated[
        str | None,
        typer.Option("--max-ppl-delta", metavar="X%", help="Exit 8 if a type's PPL is more than X % above f16's."),
    ] = None

    def check(self, types: list[Types]) -> None:
        """Raises UsageError where a limit makes no sense, or there is nothing to hold it against."""
        limited = self.ppl_limit() is not None or self.max_kld is not None
        if limited and set(types) == {("f16", "f16")}:
            raise UsageError(
                "a limit for f16 alone checks nothing: f16 is what it is compared with",
                "name other types, e.g. -ct int8",
            )

    def ppl_limit(self) -> float | None:
        """In per cent. Raises UsageError, for --max-kld too."""
        if self.max_kld is not None and not self.max_kld >= 0:
            raise UsageError(f"--max-kld is {self.max_kld}", "it is 0 or more, in nats")
        if self.max_ppl_delta is None:
            return None
        match = re.fullmatch(r"(\d+\.?\d*|\.\d+)\s*%?", self.max_ppl_delta.strip(), re.ASCII)
        if match is None:
            raise UsageError(f"--max-ppl-delta is '{self.max_ppl_delta}'", "write a number of per cent, e.g. 0.5%")
        return float(match[1])

    def failures(self, rows: dict[Types, Summary]) -> list[str]:
        """What is above its limit; a figure that is not a number is."""
        limit, found = self.ppl_limit(), []
        for types, row in rows.items():
            if self.max_kld is not None and not row.kld <= self.max_kld:
                found.append(f"{type_name(types)}: KLD {row.kld:.6f} is above {self.max_kld:g}")
            if limit is not None and not row.ppl_delta <= limit:
                found.append(f"{type_name(types)}: PPL is {row.ppl_delta:+.3f} % of f16's, above {limit:g} %")
        return found


@grouped
def perplexity(
    ctx: typer.Context,
    model: ModelFlags,
    types: TypeFlags,
    evict: EvictFlags,
    text: TextFlags,
    gates: GateFlags,
    json: JsonFlag = False,
) -> None:
    """Compare cache types on a text: perplexity, divergence from f16, bytes.

    Everything goes through the cache: keys and values are read back as decode reads them. Chunks do not overlap and
    start from an empty cache; the second half of each is scored. f16 is the base and always measured. With --evict all
    types evict alike, f16 too.
    """
    invocation: Invocation = ctx.obj
    with Interrupts(partial(last_words, as_json=json)) as interrupts:
        chosen = types.types(DEFAULT_TYPES, invocation)
        gates.check(chosen)
        texts = text.read(invocation)
        protocol = text.protocol()
        asked = evict.options(types.page_size, prompt=False)
        engine = measuring.open_for(model, types, asked, protocol.chunk, invocation, interrupts)
        measuring.warn_of_types(engine, chosen, protocol.chunk, invocation)
        scores, counts = _measure(engine, texts, chosen, protocol, invocation)
    from kvcli.runtime import quality

    base = scores[quality.BASE]
    rows = {t: quality.summarize(found, base) for t, found in scores.items()}
    costs = {t: quality.cost(quality.layout_of(engine, t), protocol.chunk) for t in rows}
    failures = gates.failures(rows)
    failed = CheckFailed("; ".join(failures)) if failures else None
    if json:
        names = [name for name, _ in texts]
        parts = {t: [quality.summarize([s], [b]) for s, b in zip(scores[t], base, strict=True)] for t in rows}
        entries = [_entry(t, rows[t], costs[t], dict(zip(names, parts[t], strict=True))) for t in rows]
        head = {"kv_schema": 1, "model": model.model, "protocol": _protocol_object(protocol)}
        head["evict"] = measuring.evict_object(engine, asked)
        held = [{"name": name, "tokens": n, "chunks": k} for name, (n, k) in zip(names, counts, strict=True)]
        told = {"failures": failures} | ({"error": failed.as_object()} if failed else {})
        render.print_json({**head, "texts": held, "types": entries, **told})
        raise typer.Exit(failed.exit_code if failed else 0)
    _print(rows, costs, invocation)
    if failed:
        raise failed


def _measure(
    engine: Engine, texts: list[tuple[str, str]], types: list[Types], protocol: Protocol, invocation: Invocation
) -> tuple[dict[Types, list[Scores]], list[tuple[int, int]]]:
    """Scores by type and text; tokens and chunks of each text."""
    from kvcli.runtime import quality

    tokenizer = engine.tokenizer
    bos = tokenizer.bos_id if tokenizer.add_bos else None
    chunks, counts = [], []
    for _, content in texts:
        ids = tokenizer.encode(content)
        chunks.append(protocol.cut(ids, bos))
        counts.append((len(ids), len(chunks[-1])))
    with render.Progress(invocation, unit="tokens") as progress:
        return quality.measure(engine, chunks, types, protocol, progress), counts


def _print(rows: dict[Types, Summary], costs: dict[Types, Cost], invocation: Invocation) -> None:
    cells = []
    for types, row in rows.items():
        cost = costs[types]
        cells.append(
            [
                type_name(types),
                f"{row.ppl:.4f}",
                f"{row.ppl_error:.4f}",
                f"{row.ppl_delta:+.3f}",
                f"{row.kld:.6f}",
                f"{row.kld_error:.6f}",
                f"{row.kld_p99:.4f}",
                f"{row.kld_max:.4f}",
                f"{row.top1:.2f}",
                f"{cost.bytes_per_token:,.0f}",
                f"{cost.bits:.2f}",
                f"{cost.sealed_bits:.2f}",
            ]
        )
    render.print_table(HEADERS, cells, invocation, right=range(1, len(HEADERS)))
    first, tokens = next(iter(rows.values())), next(iter(costs.values())).tokens
    render.notice(
        f"{first.tokens:,} tokens scored; bits are those of a whole cache of {tokens:,} tokens, 16-bit pages included,"
        " and of sealed rows alone",
        invocation,
    )


def _entry(types: Types, row: Summary, cost: Cost, by_text: dict[str, Summary]) -> dict[str, Any]:
    return {
        "type_k": types[0],
        "type_v": types[1],
        **_numbers(row),
        "bytes_per_token": cost.bytes_per_token,
        "bits": cost.bits,
        "sealed_bits": cost.sealed_bits,
        "by_text": [{"name": name, **_numbers(each)} for name, each in by_text.items()],
    }


def _numbers(row: Summary) -> dict[str, float | None]:
    """JSON has no NaN: such a figure is null."""
    return {name: x if math.isfinite(x) else None for name, x in dataclasses.asdict(row).items()}


def _protocol_object(protocol: Protocol) -> dict[str, int]:
    return {"chunk": protocol.chunk, "chunks": protocol.chunks, "first_scored": protocol.first}
