"""`kv bench --spec`: answers whose tokens are guessed ahead, and the same ones without."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from kvcli.cli import render
from kvcli.cli.commands.bench.flags import BenchFlags
from kvcli.cli.commands.bench.setting import Series, Setting, arm_object, print_rows, steps
from kvcli.cli.flags.cache import Types
from kvcli.cli.flags.typelists import TypeFlags, type_name
from kvcli.options import EvictOptions

if TYPE_CHECKING:
    from kvcli.runtime.engine.engine import Engine
    from kvcli.runtime.evaluate.guessing import Guessed

TEXT, GENERATED, REPETITIONS = "512", "128", 3
HEADERS = ("type", "answer", "prompt", "tok/s", "without", "times", "drafted", "accepted", "tok a step", "same")


def measure(series: Series, what: BenchFlags, types: TypeFlags, evict: EvictOptions, as_json: bool) -> list[str]:
    """Measure and print; why pairs of types are missing."""
    from kvcli.runtime.evaluate import guessing

    lengths = what.positive(what.prompts(TEXT), "--n-prompt")
    counts = what.positive(what.generations(GENERATED), "--n-gen")
    repetitions, invocation, method = what.repetitions or REPETITIONS, series.invocation, what.spec or ""
    tell = steps(len(series.pairs), len(guessing.ARMS) * len(lengths) * len(counts), invocation)
    setting: list[Setting] = []

    def one(engine: Engine, pair: Types) -> list[tuple[Types, Guessed]]:
        setting.append(Setting.of(engine, series.load, types, evict))
        how = method, lengths, counts, repetitions, not what.no_warmup
        return [(pair, found) for found in guessing.run(engine, *how, partial(tell, pair))]

    measured, failures = series.in_context(guessing.rows(max(lengths), max(counts))).measure(one)
    results = [each for of_type in measured for each in of_type]
    if as_json:
        value = arm_object(setting[0], repetitions, [_result(*each) for each in results], failures, invocation)
        render.print_json("bench --spec", value | {"spec": method})
        return failures
    setting[0].print_head(f"guesses: {method}")
    print_rows(HEADERS, [_row(*each) for each in results], invocation, left=2)
    return failures


def _row(pair: Types, one: Guessed) -> list[str]:
    return [
        type_name(pair),
        one.arm,
        f"{one.prompt:,}",
        f"{one.median:,.2f}",
        f"{one.plain:,.2f}",
        f"{one.times:,.2f}",
        f"{one.drafted:,}",
        f"{one.accepted:,}",
        f"{one.tokens_per_step:,.2f}",
        f"{one.same:,} of {one.tokens:,}",
    ]


def _result(pair: Types, one: Guessed) -> dict[str, Any]:
    return {
        "type_k": pair[0],
        "type_v": pair[1],
        "arm": one.arm,
        "prompt_tokens": one.prompt,
        "completion_tokens": one.tokens,
        "tps": one.median,
        "tps_samples": list(one.rates),
        "times_as_fast": one.times,
        "plain_tps": one.plain,
        "plain_tps_samples": list(one.plain_rates),
        "drafted_tokens": one.drafted,
        "accepted_tokens": one.accepted,
        "tokens_per_step": one.tokens_per_step,
        "same_tokens": one.same,
    }
