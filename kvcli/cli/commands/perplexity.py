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

from kvcli.cli import inputs, render
from kvcli.cli.flags import typelists
from kvcli.cli.flags.cache import Types
from kvcli.cli.flags.checks import checked, number
from kvcli.cli.flags.eviction import EvictFlags
from kvcli.cli.flags.shared import ModelFlags, grouped, parse_tokens
from kvcli.cli.flags.typelists import TypeFlags, type_name
from kvcli.cli.helptext import MEASURE, PLANNING
from kvcli.cli.interrupt import Interrupts, last_words
from kvcli.cli.invocation import Invocation, JsonFlag
from kvcli.errors import CheckFailed, UsageError
from kvcli.words import counted

if TYPE_CHECKING:
    from kvcli.runtime.engine.engine import Engine
    from kvcli.runtime.evaluate.quality import Cost, Scores, Scoring, Summary

DEFAULT_TYPES = "f16,fp8,int8,int8/int4,int4"
QUALITY_HEADERS = ("type", "PPL", "±", "ΔPPL %", "KLD", "±", "99 %", "max", "top-1 %")
SIZE_HEADERS = ("type", "B/token", "bits", "sealed bits")
TERMS = (
    "ΔPPL and KLD (divergence of the predictions, in nats: mean, 99th percentile, maximum) are against f16; top-1: how"
    " often the most likely token is the same; bits of a value in all pages, and in sealed ones, which are quantized"
)


EXAMPLES = """
kv perplexity -f text.txt
kv perplexity -m model.gguf -f text.txt -c 2k --chunks 8 -ct f16,int8,int4
kv perplexity -f text.txt -ct int8 --max-kld 0.001
"""


def register(app: typer.Typer) -> None:
    app.command("perplexity", rich_help_panel=PLANNING, epilog=EXAMPLES)(perplexity)


_option = partial(typer.Option, rich_help_panel=MEASURE)


def _chunk(text: str) -> int:
    return parse_tokens(text, "--ctx-size")


def _check_kld(value: float) -> None:
    if not value >= 0:
        raise UsageError(f"--max-kld must be 0 or more (in nats), not {value}")


def _percentage(text: str) -> float:
    match = re.fullmatch(r"(\d+\.?\d*|\.\d+)\s*%?", text.strip(), re.ASCII)
    if match is None:
        raise UsageError(f"--max-ppl-delta must be a percentage, not '{text}'", "write 0.5%")
    return float(match[1])


@dataclass(frozen=True)
class TextFlags:
    """The texts, how they are cut and what is scored."""

    file: Annotated[
        list[str],
        _option("-f", "--file", metavar="FILE", help="Text file; - = stdin (repeatable).", show_default="stdin"),
    ] = field(default_factory=list)
    ctx_size: Annotated[
        str, _option("-c", "--ctx-size", metavar="N", help="Tokens per chunk.", callback=checked(_chunk))
    ] = "512"
    chunks: Annotated[
        int, number(MEASURE, "--chunks", least=0, help="Maximum number of chunks per text; 0 = all complete ones.")
    ] = 0
    score_from: Annotated[
        int | None,
        number(
            *(MEASURE, "--score-from"),
            least=0,
            help="First position of a chunk that is scored.",
            show_default="the second half",
        ),
    ] = None

    def protocol(self) -> Scoring:
        """Raises UsageError."""
        from kvcli.runtime.evaluate.quality import Scoring

        found = Scoring(_chunk(self.ctx_size), self.chunks, self.score_from)
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
        texts = []
        for name in names:
            text = inputs.read_stdin(tell) if name == "-" else inputs.read_file(name)
            shown = "stdin" if name == "-" else name
            if not text.strip():
                raise UsageError(f"there is no text in {shown}", "give -f FILE, or pipe a text in")
            texts.append((shown, text))
        return texts


@dataclass(frozen=True)
class GateFlags:
    """Limits that make the command fail."""

    max_kld: Annotated[
        float | None,
        _option(
            "--max-kld",
            metavar="X",
            help="Exit with code 8 if a type's mean KL divergence is above X.",
            callback=checked(_check_kld),
        ),
    ] = None
    max_ppl_delta: Annotated[
        str | None,
        _option(
            "--max-ppl-delta",
            metavar="X%",
            help="Exit with code 8 if a type's perplexity is more than X % above that of f16.",
            callback=checked(_percentage),
        ),
    ] = None

    def check(self, types: list[Types]) -> None:
        """Raises UsageError where there is nothing to hold a limit against."""
        limited = self.max_ppl_delta is not None or self.max_kld is not None
        if limited and set(types) == {("f16", "f16")}:
            raise UsageError(
                "a limit for f16 alone checks nothing: f16 is what it is compared with",
                "name other types, e.g. -ct int8",
            )

    def ppl_limit(self) -> float | None:
        """In per cent."""
        return None if self.max_ppl_delta is None else _percentage(self.max_ppl_delta)

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
    """Compare cache types on a text: perplexity, KL divergence from f16, bytes.

    Keys and values are read back from the cache, as in generation. Chunks do not overlap and start with an empty cache;
    the second half of each is scored. f16 is the reference and always measured. With --evict all types evict, f16 too.
    """
    invocation: Invocation = ctx.obj
    with Interrupts(partial(last_words, as_json=json)) as interrupts:
        chosen = types.types(DEFAULT_TYPES, invocation)
        gates.check(chosen)
        texts = text.read(invocation)
        protocol = text.protocol()
        asked = evict.options(types.page_size, prompt=False, scored="no prompt ends before a text does")
        engine = typelists.open_for(model, types, asked, protocol.chunk, invocation, interrupts)
        typelists.warn_of_types(engine, chosen, protocol.chunk, invocation)
        scores, counts = _measure(engine, texts, chosen, protocol, invocation)
    from kvcli.runtime.evaluate import quality

    base = scores[quality.BASE]
    rows = {t: quality.summarize(found, base) for t, found in scores.items()}
    costs = {t: quality.cost(quality.layout_of(engine, t), protocol.chunk) for t in rows}
    failures = gates.failures(rows)
    failed = CheckFailed("; ".join(failures)) if failures else None
    if json:
        names = [name for name, _ in texts]
        parts = {t: [quality.summarize([s], [b]) for s, b in zip(scores[t], base, strict=True)] for t in rows}
        entries = [_entry(t, rows[t], costs[t], dict(zip(names, parts[t], strict=True))) for t in rows]
        head = {"model": model.model, "protocol": _protocol_object(protocol)}
        head["evict"] = typelists.evict_object(engine, asked)
        held = [{"name": name, "tokens": n, "chunks": k} for name, (n, k) in zip(names, counts, strict=True)]
        told = {"failures": failures} | ({"error": failed.as_object()} if failed else {})
        render.print_json("perplexity", {**head, "texts": held, "types": entries, "warnings": invocation.told, **told})
        raise typer.Exit(failed.exit_code if failed else 0)
    _print(rows, costs, invocation)
    if failed:
        raise failed


def _measure(
    engine: Engine, texts: list[tuple[str, str]], types: list[Types], protocol: Scoring, invocation: Invocation
) -> tuple[dict[Types, list[Scores]], list[tuple[int, int]]]:
    """Scores by type and text; tokens and chunks of each text."""
    from kvcli.runtime.evaluate import quality

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
    quality, sizes = [], []
    for types, row in rows.items():
        cost = costs[types]
        quality.append(
            [
                type_name(types),
                _figure(row.ppl),
                _figure(row.ppl_error),
                f"{row.ppl_delta:+.3f}",
                f"{row.kld:.6f}",
                f"{row.kld_error:.6f}",
                f"{row.kld_p99:.4f}",
                f"{row.kld_max:.4f}",
                f"{row.top1:.2f}",
            ]
        )
        sizes.append([type_name(types), f"{cost.bytes_per_token:,.0f}", f"{cost.bits:.2f}", f"{cost.sealed_bits:.2f}"])
    render.print_table(QUALITY_HEADERS, quality, invocation, right=range(1, len(QUALITY_HEADERS)))
    render.write_out("\n")
    render.print_table(SIZE_HEADERS, sizes, invocation, right=range(1, len(SIZE_HEADERS)))
    first, tokens = next(iter(rows.values())), next(iter(costs.values())).tokens
    render.notice(f"{counted(first.tokens, 'token')} scored in chunks of {tokens:,}; {TERMS}", invocation)


def _figure(value: float) -> str:
    """With as many decimals as mean something, in nine columns at most."""
    return f"{value:.4f}" if value < 100 else f"{value:.1f}"


def _entry(types: Types, row: Summary, cost: Cost, by_text: dict[str, Summary]) -> dict[str, Any]:
    return {
        "type_k": types[0],
        "type_v": types[1],
        **_numbers(row),
        "bytes_per_token": cost.bytes_per_token,
        "bits_per_element": cost.bits,
        "sealed_bits_per_element": cost.sealed_bits,
        "by_text": [{"name": name, **_numbers(each)} for name, each in by_text.items()],
    }


def _numbers(row: Summary) -> dict[str, float | None]:
    """JSON has no NaN: such a figure is null."""
    names = {"tokens": "scored_tokens", "ppl_delta": "ppl_delta_percent", "top1": "top1_percent"}
    figures = dataclasses.asdict(row).items()
    return {names.get(name, name): x if math.isfinite(x) else None for name, x in figures}


def _protocol_object(protocol: Scoring) -> dict[str, int]:
    return {"ctx_size": protocol.chunk, "chunks": protocol.chunks, "first_scored_token": protocol.first}
