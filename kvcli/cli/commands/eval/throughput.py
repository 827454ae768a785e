"""`kv eval throughput`: tokens a second of several sequences at a time, by their number and the length of their
contexts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from kvcli.cli import engines, render
from kvcli.cli.commands.eval.plot import Points
from kvcli.cli.commands.eval.results import setting_object
from kvcli.cli.flags.comparedsettings import Compared
from kvcli.cli.flags.eviction import repeated_rows
from kvcli.cli.interrupt import Interrupts
from kvcli.cli.invocation import Invocation
from kvcli.cli.wording import as_flags
from kvcli.errors import DoesNotFit, UsageError
from kvcli.options import LoadOptions
from kvcli.runtime.host.memory import release

if TYPE_CHECKING:
    from kvcli.runtime.engine.engine import Engine
    from kvcli.runtime.evaluate.parallels import Parallel

THROUGHPUT, SEQUENCES = "throughput", "1,2,4,8"
ANSWER = 32  # tokens that each sequence writes at the end of its context


@dataclass(frozen=True)
class Rate:
    """What came with one setting. `tokens`: of a context, answer included."""

    compared: Compared
    tokens: int
    found: Parallel


@dataclass(frozen=True)
class Measuring:
    """What is measured: `lengths` of contexts, numbers of sequences, and how often."""

    lengths: list[int]
    counts: list[int]
    repetitions: int

    def check(self) -> None:
        """Raises UsageError for a context that has no room for an answer."""
        if (shortest := min(self.lengths)) < 2 * ANSWER:
            raise UsageError(f"--tokens must be {2 * ANSWER} or more for {THROUGHPUT}, not {shortest}")


def measure(
    load: LoadOptions, settings: list[Compared], what: Measuring, invocation: Invocation, interrupts: Interrupts
) -> tuple[list[Rate], list[dict[str, Any]], list[str]]:
    """Every setting, one after the other: what came, the settings as JSON has them, and why some rates are missing.
    Raises DoesNotFit where nothing fits."""
    what.check()
    if own := next((each.name for each in settings if each.cache.ctx_size), None):
        raise UsageError(f"--with '{own}': contexts of {THROUGHPUT} are as long as --tokens says", "leave -c out")
    rates, objects, failures = list[Rate](), list[dict[str, Any]](), list[str]()
    tests = len(settings) * len(what.lengths) * len(what.counts)
    counter = iter(range(1, tests + 1))

    def tell(name: str, text: str) -> None:
        render.step(f"{next(counter)} of {tests}: {name} {text}", invocation)

    for each in settings:
        ctx_size = max(what.lengths) + repeated_rows(each.cache.evict)
        cache = replace(each.cache, ctx_size=ctx_size, sequences=max(what.counts))
        try:
            engine = engines.open_engine(load, cache, invocation, interrupts)
        except DoesNotFit as error:
            if not rates and each is settings[-1]:  # nothing was measured
                raise
            render.warn(f"{each.name} is left out: {error.message}", invocation)
            failures.append(as_flags(error.message))
            continue
        objects.append(setting_object(each, engine))
        for tokens in what.lengths:
            try:
                for found in _rates(engine, tokens, what, partial(tell, each.name)):
                    rates.append(Rate(each, tokens, found))
            except DoesNotFit as error:
                render.warn(f"{each.name}: {error.message}", invocation)
                failures.append(as_flags(error.message))
        del engine
        release()
    if not rates:
        raise DoesNotFit(failures[0], "measure fewer sequences, or shorter contexts")
    return rates, objects, failures


def _rates(engine: Engine, tokens: int, what: Measuring, tell: Callable[[str], None]) -> list[Parallel]:
    from kvcli.runtime.evaluate import parallels

    depth = tokens - ANSWER - parallels.rows(0, 0)
    return list(parallels.run(engine, what.counts, [(depth, ANSWER)], what.repetitions, True, tell))


def print_rates(rates: list[Rate], invocation: Invocation) -> None:
    """A row for each setting and length; a column for each number of sequences."""
    counts = sorted({each.found.sequences for each in rates})
    rows: dict[tuple[str, int], dict[int, str]] = {}
    for each in rates:
        rows.setdefault((each.compared.name, each.tokens), {})[each.found.sequences] = f"{each.found.median:,.1f}"
    headers = ["setting", "tokens", *(f"{count} at a time" for count in counts)]
    table = [[name, f"{tokens:,}", *(row.get(n, "-") for n in counts)] for (name, tokens), row in rows.items()]
    render.print_table(headers, table, invocation, right=range(1, len(headers)))


def print_object(
    model: str, settings: list[dict[str, Any]], rates: list[Rate], failures: list[str], invocation: Invocation
) -> None:
    """One JSON object."""
    results = [_entry(each) for each in rates]
    value = {"model": model, "compared": settings, "results": results, "failures": failures}
    render.print_json("eval throughput", value | {"warnings": invocation.told})


def _entry(rate: Rate) -> dict[str, Any]:
    found = rate.found
    return {
        "name": rate.compared.name,
        "ctx_size": rate.tokens,
        "sequences": found.sequences,
        "tps": found.median,
        "tps_deviation": found.deviation,
        "tps_samples": list(found.rates),
        "step_s": found.step_s,
        "read_bytes_per_step": found.read_bytes,
    }


def lines(rates: list[Rate]) -> tuple[Points, Points]:
    """Points of a picture: tokens a second by the number of sequences, a line for each setting and length; and by the
    length, a line for each setting and number of sequences."""
    by_count: Points = {}
    by_length: Points = {}
    for each in rates:
        name, rate = each.compared.name, each.found.median
        by_count.setdefault(f"{name}, {each.tokens:,} tokens", []).append((each.found.sequences, rate))
        by_length.setdefault(f"{name}, {each.found.sequences} at a time", []).append((each.tokens, rate))
    return by_count, by_length
