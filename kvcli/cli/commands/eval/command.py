"""`kv eval`: questions about long contexts, and continuations of a text, with one cache and another."""

from __future__ import annotations

import itertools
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Annotated

import typer

from kvcli.cli import engines, inputs, render
from kvcli.cli.commands.eval import plot, throughput
from kvcli.cli.commands.eval.results import Cell, print_cells, print_object
from kvcli.cli.commands.eval.throughput import SEQUENCES, THROUGHPUT, Measuring
from kvcli.cli.flags.checks import checked, number
from kvcli.cli.flags.comparedsettings import Compared, WithFlags
from kvcli.cli.flags.eviction import EvictFlags, repeated_rows
from kvcli.cli.flags.shared import ModelFlags, grouped, parse_tokens
from kvcli.cli.flags.typelists import PARALLEL, TypeFlags, counts, warn_of_layout
from kvcli.cli.helptext import MEASURE, PLANNING
from kvcli.cli.interrupt import Interrupts, last_words
from kvcli.cli.invocation import Invocation, JsonFlag
from kvcli.cli.wording import length_is
from kvcli.errors import ContextOverflow, UsageError

if TYPE_CHECKING:
    from kvcli.runtime.engine.engine import Engine
    from kvcli.runtime.evaluate.tasks import Example

DEFAULT_TYPES = "f16,int8,int4"
MADE = {  # what each task is, for the help page
    "recall": "one key in filler, at each of --depths",
    "needles": "one of several keys",
    "variables": "variables that are set to each other",
    "words": "the commonest word of a list",
    "facts": "one of many facts in no order",
    "text": "to go on with a text of -f",
    THROUGHPUT: "tokens a second of several sequences at a time, by itself",
}

EXAMPLES = """
kv eval -m model.gguf
kv eval needles facts --tokens 1k,4k -ct f16,int8,int4
kv eval --with "--evict sink --window 512" --with "-ct int4 --evict sink --window 512" -f text.txt
kv eval recall --depths 0,50,100 --trials 10 -ct f16,int4
kv eval needles --ask-later --with "--evict kvzip --budget 50%" --with "--evict snapkv --budget 50%"
kv eval --plot eval.svg
kv eval throughput --tokens 1k,4k --parallel 1,4,16 -ct f16,int4 --plot rates.svg
"""


def register(app: typer.Typer) -> None:
    app.command("eval", rich_help_panel=PLANNING, epilog=EXAMPLES)(evaluate)


_option = partial(typer.Option, rich_help_panel=MEASURE)


def _sizes(text: str) -> list[int]:
    """'1k,2k' -> tokens, each once. Raises UsageError."""
    return list(dict.fromkeys(parse_tokens(entry, "--tokens") for entry in text.split(",")))


def _depths(text: str) -> list[float]:
    """'0,50' -> percentages, each once. Raises UsageError."""
    try:
        found = [float(entry) for entry in text.split(",")]
    except ValueError:
        found = [-1.0]
    if not all(0 <= depth <= 100 for depth in found):
        raise UsageError(f"--depths must be percentages, not '{text}'", "write them with commas, e.g. 0,50,100")
    return list(dict.fromkeys(found))


def _check_task(name: str) -> None:
    if name not in MADE:
        raise UsageError(f"there is no task '{name}'", f"tasks are {', '.join(MADE)}")


@dataclass(frozen=True)
class TaskFlags:
    """What is asked."""

    tasks: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[TASK]...",
            help=f"{'; '.join(f'{name}: {what}' for name, what in MADE.items())}."
            " By default all but recall and throughput.",
            callback=checked(_check_task),
        ),
    ] = None
    file: Annotated[
        list[str],
        _option("-f", "--file", metavar="FILE", help="Text to go on with, for the task text (repeatable)."),
    ] = field(default_factory=list)
    tokens: Annotated[
        str, _option("--tokens", "--ctx", metavar="LIST", help="Lengths, answer included.", callback=checked(_sizes))
    ] = "1k"
    trials: Annotated[
        int,
        number(
            MEASURE,
            "--trials",
            least=1,
            help="Number of questions of each task and length, and for recall of each depth; for throughput how often"
            " each rate is measured.",
        ),
    ] = 4
    depths: Annotated[
        str,
        _option(
            "--depths",
            metavar="LIST",
            help="For recall: positions of the key, in percent of the filler.",
            callback=checked(_depths),
        ),
    ] = "0,25,50,75,100"
    parallel: Annotated[
        str | None,
        _option(
            PARALLEL,
            metavar="LIST",
            help="For throughput: numbers of sequences at a time.",
            callback=checked(counts),
            show_default=SEQUENCES,
        ),
    ] = None
    seed: Annotated[int, _option("-s", "--seed", metavar="N", help="Random seed of the questions.")] = 0
    later: Annotated[
        bool,
        _option(
            "--ask-later",
            help="Let the text be read, and rows be forgotten, before the question comes, as in a second turn.",
        ),
    ] = False
    plot: Annotated[
        str | None,
        _option("--plot", metavar="FILE", help="Also draw the results (.svg, .png).", callback=checked(plot.check)),
    ] = None

    def chosen(self) -> list[str]:
        """The tasks. Raises UsageError."""
        if self.tasks and "text" in self.tasks and not self.file:
            raise UsageError("the task text needs a text", "give -f FILE")
        if self.tasks and "text" not in self.tasks and self.file:
            raise UsageError(f"-f is for the task text, not for {', '.join(self.tasks)}", "name text, too")
        if (self.tasks or []) == [THROUGHPUT]:
            if self.later:
                raise UsageError(f"--ask-later cannot be used with {THROUGHPUT}", "there are no questions")
            return [THROUGHPUT]
        if THROUGHPUT in (self.tasks or []):
            raise UsageError(f"{THROUGHPUT} cannot be measured with other tasks", "run them one after the other")
        if self.parallel is not None:
            raise UsageError(f"{PARALLEL} is for {THROUGHPUT}", f"kv eval {THROUGHPUT} {PARALLEL} {self.parallel}")
        default = [name for name in MADE if name not in ("recall", THROUGHPUT) and (name != "text" or self.file)]
        return list(dict.fromkeys(self.tasks or default))

    def measuring(self) -> Measuring:
        """What is measured of throughput."""
        return Measuring(sorted(_sizes(self.tokens)), counts(self.parallel or SEQUENCES), self.trials)

    def texts(self) -> list[str]:
        """Raises UsageError, InputBytesError."""
        return [inputs.read_file(name) for name in self.file]

    def examples(self, engine: Engine, tasks: list[str], texts: list[str]) -> list[Example]:
        """The questions of these tasks. Raises UsageError where a length has no room for one, or a text is too
        short."""
        from kvcli.runtime.evaluate.tasks import RECALL, TEXT, example, passages

        found, tokenizer = [], engine.tokenizer
        for tokens, task in itertools.product(_sizes(self.tokens), tasks):
            if task == TEXT:
                found += [each for text in texts for each in passages(tokenizer, text, tokens, self.trials)]
                continue
            depths = _depths(self.depths) if task == RECALL else [None]
            for depth, trial in itertools.product(depths, range(self.trials)):
                found.append(example(tokenizer, task, tokens, self.seed + trial, depth))
        return found


@grouped
def evaluate(
    ctx: typer.Context,
    model: ModelFlags,
    types: TypeFlags,
    others: WithFlags,
    evict: EvictFlags,
    what: TaskFlags,
    json: JsonFlag = False,
) -> None:
    """Test what a model can still do with other cache types and with less of the cache, beside a full one in f16.

    Questions are made from the seed. For each task: how often greedy decoding gives exactly the answer, and the
    answer's mean negative log likelihood per token (lower is better), which also says something about models that are
    too small to answer exactly. KLD is the divergence of the answers' predictions from those over the full cache, in
    nats; text is scored by its perplexity. Prompt and answer go through the cache as in kv run.
    """
    invocation: Invocation = ctx.obj
    with Interrupts(partial(last_words, as_json=json)) as interrupts:
        tasks, texts, longest = what.chosen(), what.texts(), max(_sizes(what.tokens))
        asked = others.compared(types, evict, DEFAULT_TYPES, invocation)
        own = any(each.cache.ctx_size for each in asked)
        with nullcontext() if own else length_is("--tokens"):
            if tasks == [THROUGHPUT]:
                _throughput(model, asked, what, json, invocation, interrupts)
                return
            compared = [_within(each, longest) for each in asked]
            first = engines.open_engine(model.options(invocation.offline), compared[0].cache, invocation, interrupts)
            examples = what.examples(first, tasks, texts)
            opened = [first, *(_beside(first, each, examples) for each in compared[1:])]
            for each, engine in zip(compared, opened, strict=True):
                warn_of_layout(engine.loaded, engine.layout, each.name, longest, invocation)
            cells = _measure(opened, compared, examples, what.later, invocation)
    if what.plot:
        plot.draw(what.plot, cells)
    if json:
        print_object(model.model, what.seed, list(zip(compared, opened, strict=True)), cells, invocation)
    else:
        print_cells(cells, invocation)


def _throughput(
    model: ModelFlags, asked: list[Compared], what: TaskFlags, as_json: bool, invocation: Invocation,
    interrupts: Interrupts,
) -> None:  # fmt: skip
    found = throughput.measure(model.options(invocation.offline), asked, what.measuring(), invocation, interrupts)
    rates, settings, failures = found
    if what.plot:
        plot.draw_rates(what.plot, *throughput.lines(rates))
    if as_json:
        throughput.print_object(model.model, settings, rates, failures, invocation)
    else:
        throughput.print_rates(rates, invocation)


def _within(compared: Compared, tokens: int) -> Compared:
    """The setting with a context of so many tokens, and of as many more as its policy repeats of a prompt at a time,
    unless it has a length of its own."""
    if compared.cache.ctx_size:
        return compared
    ctx_size = tokens + repeated_rows(compared.cache.evict)
    return replace(compared, cache=replace(compared.cache, ctx_size=ctx_size))


def _beside(first: Engine, compared: Compared, examples: list[Example]) -> Engine:
    """An engine for a setting. The error of one that is not possible, or too short for an example, names it."""
    try:
        engine = first.beside(compared.cache)
        for example in examples:
            engine.terms.check_prompt(example.context + example.answer[:-1], history=True)
    except (UsageError, ContextOverflow) as error:
        raise type(error)(f"{compared.name}: {error.message}", error.hint) from None
    return engine


def _measure(
    opened: list[Engine], compared: list[Compared], examples: list[Example], later: bool, invocation: Invocation
) -> list[Cell]:
    """A cell for each setting, length and task, in this order."""
    from kvcli.runtime.evaluate import givenanswers

    cells: dict[tuple[str, int, str], Cell] = {}
    with render.Progress(invocation, unit="tokens") as progress:
        for example, found in givenanswers.compare(opened, examples, progress, later):
            for each, answer in zip(compared, found, strict=True):
                key = each.name, example.tokens, example.name
                cells.setdefault(key, Cell(each, example.task, example.tokens, example.depth)).add(example, answer)
    order = {each.name: i for i, each in enumerate(compared)}
    return sorted(cells.values(), key=lambda cell: order[cell.compared.name])
