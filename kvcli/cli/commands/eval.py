"""`kv eval`: what a model can still do with a cache type. `kv eval recall`: find a pass key in a long context."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvcli.cli import render
from kvcli.cli.app import App
from kvcli.cli.flags import comparing
from kvcli.cli.flags.cache import Types
from kvcli.cli.flags.checks import checked, in_range
from kvcli.cli.flags.comparing import TypeFlags, type_name
from kvcli.cli.flags.eviction import EvictFlags
from kvcli.cli.flags.shared import ModelFlags, grouped, parse_tokens
from kvcli.cli.globaloptions import require_command
from kvcli.cli.helptext import MEASURE, PLANNING
from kvcli.cli.interrupt import Interrupts, last_words
from kvcli.cli.invocation import Invocation, JsonFlag
from kvcli.errors import UsageError

if TYPE_CHECKING:
    from kvcli.runtime.engine.engine import Engine
    from kvcli.runtime.evaluate.recall import Answer, PassKey

DEFAULT_TYPES = "f16,int8,int4"


EXAMPLES = """
kv eval recall -m model.gguf
kv eval recall --ctx 4k,8k --depths 0,50,100 --trials 10 -ct f16,int4
"""


def register(app: typer.Typer) -> None:
    group = App(epilog=EXAMPLES)
    group.callback(invoke_without_command=True)(evaluate)
    group.command("recall", epilog=EXAMPLES)(recall)
    app.add_typer(group, name="eval", rich_help_panel=PLANNING)


def evaluate(ctx: typer.Context) -> None:
    """Test what a model can still do with each cache type."""
    require_command(ctx)


_option = partial(typer.Option, rich_help_panel=MEASURE)


def _sizes(text: str) -> list[int]:
    """'1k,2k' -> tokens, each once. Raises UsageError."""
    return list(dict.fromkeys(parse_tokens(entry, "--ctx") for entry in text.split(",")))


def _depths(text: str) -> list[float]:
    """'0,50' -> percentages, each once. Raises UsageError."""
    try:
        found = [float(entry) for entry in text.split(",")]
    except ValueError:
        found = [-1.0]
    if not all(0 <= depth <= 100 for depth in found):
        raise UsageError(f"--depths must be percentages, not '{text}'", "write them with commas, e.g. 0,50,100")
    return list(dict.fromkeys(found))


@dataclass(frozen=True)
class QuestionFlags:
    """Which questions are asked."""

    depths: Annotated[
        str,
        _option(
            "--depths",
            metavar="LIST",
            help="Positions of the key, in percent of the filler.",
            callback=checked(_depths),
        ),
    ] = "0,25,50,75,100"
    lengths: Annotated[
        str, _option("--ctx", metavar="LIST", help="Context lengths, in tokens.", callback=checked(_sizes))
    ] = "1k,2k,4k"
    trials: Annotated[
        int,
        _option("--trials", metavar="N", help="Number of questions per depth.", callback=in_range("--trials", 1)),
    ] = 1
    seed: Annotated[int, _option("-s", "--seed", metavar="N", help="Random seed of keys and filler.")] = 0


@dataclass(frozen=True)
class _Cell:
    """The answers of one cache type to the questions of one length and depth."""

    types: Types
    ctx: int
    depth: float
    answers: list[Answer]
    keys: list[str]

    @property
    def exact(self) -> int:
        return sum(answer.exact for answer in self.answers)

    @property
    def nll(self) -> float:
        return sum(answer.nll for answer in self.answers) / len(self.answers)


@grouped
def recall(
    ctx: typer.Context,
    model: ModelFlags,
    types: TypeFlags,
    evict: EvictFlags,
    questions: QuestionFlags,
    json: JsonFlag = False,
) -> None:
    """Hide a pass key in filler text at several depths and test whether the model finds it.

    For each depth: how often greedy decoding gives the exact key, and the key's mean negative log likelihood per token
    (lower is better), which also says something about models that are too small to answer exactly.
    """
    invocation: Invocation = ctx.obj
    with Interrupts(partial(last_words, as_json=json)) as interrupts:
        chosen = types.types(DEFAULT_TYPES, invocation)
        lengths, depths = _sizes(questions.lengths), _depths(questions.depths)
        evicting = evict.options(types.page_size, prompt=False)
        engine = comparing.open_for(model, types, evicting, max(lengths), invocation, interrupts)
        comparing.warn_of_types(engine, chosen, max(lengths), invocation)
        asked = _questions(engine, questions, lengths, depths)
        with render.Progress(invocation, unit="tokens") as progress:
            cells = _ask(engine, asked, chosen, progress)
    if json:
        entries = [_entry(cell) for cell in cells]
        head = {"model": model.model, "seed": questions.seed, "evict": comparing.evict_object(engine, evicting)}
        render.print_json("eval recall", {**head, "results": entries, "warnings": invocation.told})
        return
    _print(cells, depths, invocation)


def _questions(
    engine: Engine, flags: QuestionFlags, lengths: list[int], depths: list[float]
) -> dict[tuple[int, float], list[PassKey]]:
    from kvcli.runtime.evaluate import recall

    return {
        (n, depth): [recall.question(engine.tokenizer, n, depth, flags.seed + i) for i in range(flags.trials)]
        for n in lengths
        for depth in depths
    }


def _ask(
    engine: Engine, asked: dict[tuple[int, float], list[PassKey]], types: list[Types], progress: render.Progress
) -> list[_Cell]:
    from kvcli.runtime.cache.pool import PagePool
    from kvcli.runtime.evaluate import quality, recall

    total = sum(len(q.context) for each in asked.values() for q in each) * len(types)
    done, cells = 0, []
    for pair in types:
        pool = PagePool(quality.layout_of(engine, pair), device=engine.pool.device)
        for (length, depth), each in asked.items():
            answers = []
            for question in each:
                answers.append(recall.ask(engine, pool, question))
                done += len(question.context)
                progress("recall", done, total)
            cells.append(_Cell(pair, length, depth, answers, [q.key for q in each]))
    return cells


def _print(cells: list[_Cell], depths: list[float], invocation: Invocation) -> None:
    """A row for each type and length; a column for each depth."""
    rows: dict[tuple[str, int], list[_Cell]] = {}
    for cell in cells:
        rows.setdefault((type_name(cell.types), cell.ctx), []).append(cell)
    headers = ["type", "ctx", *(f"{depth:g} %" for depth in depths), "exact", "NLL"]
    table = []
    for (name, length), found in rows.items():
        trials = sum(len(cell.answers) for cell in found)
        shown = [f"{cell.exact}/{len(cell.answers)} {cell.nll:.3f}" for cell in found]
        mean = sum(cell.nll for cell in found) / len(found)
        table.append([name, str(length), *shown, f"{sum(cell.exact for cell in found)}/{trials}", f"{mean:.4f}"])
    render.print_table(headers, table, invocation, right=range(1, len(headers)))


def _entry(cell: _Cell) -> dict[str, Any]:
    return {
        "type_k": cell.types[0],
        "type_v": cell.types[1],
        "ctx_size": cell.ctx,
        "depth_percent": cell.depth,
        "trials": len(cell.answers),
        "exact_trials": cell.exact,
        "nll": cell.nll,
        "answers": [
            {"key": key, "exact": answer.exact, "nll": answer.nll}
            for key, answer in zip(cell.keys, cell.answers, strict=True)
        ],
    }
