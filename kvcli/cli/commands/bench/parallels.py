"""`kv bench --parallel`: several sequences that are written at a time."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from kvcli.cli import render
from kvcli.cli.commands.bench.flags import BenchFlags
from kvcli.cli.commands.bench.setting import Series, Setting, arm_object, print_rows, steps
from kvcli.cli.commands.bench.speeds import Bandwidth, bandwidth_of
from kvcli.cli.flags.cache import Types
from kvcli.cli.flags.typelists import TypeFlags, type_name
from kvcli.cli.wording import as_flags
from kvcli.errors import DoesNotFit
from kvcli.options import EvictOptions

if TYPE_CHECKING:
    from kvcli.runtime.engine.engine import Engine
    from kvcli.runtime.evaluate.parallels import Parallel

REPETITIONS = 3
HEADERS = ("type", "sequences", "test", "tok/s", "±", "ms a step", "times one", "% of limit")


def measure(series: Series, what: BenchFlags, types: TypeFlags, evict: EvictOptions, as_json: bool) -> list[str]:
    """Measure and print; why pairs of types, or numbers of sequences, are missing. Raises DoesNotFit."""
    from kvcli.runtime.evaluate import parallels

    counts, repetitions, invocation = what.sequences(), what.repetitions or REPETITIONS, series.invocation
    wanted = [(d, n) for d in what.depths() for n in what.positive(what.generations("128"), "--n-gen")]
    tell = steps(len(series.pairs), len(wanted) * len(counts), invocation)
    setting: list[tuple[Setting, Bandwidth]] = []
    left_out: list[str] = []

    def one(engine: Engine, pair: Types) -> list[tuple[Types, Parallel]]:
        if not setting:
            setting.append((Setting.of(engine, series.load, types, evict), bandwidth_of(engine, what, invocation)))
        found = []
        try:
            for each in parallels.run(engine, counts, wanted, repetitions, not what.no_warmup, partial(tell, pair)):
                found.append((pair, each))
        except DoesNotFit as error:
            if not found:
                raise
            render.warn(f"{type_name(pair)}: {error.message}", invocation)
            left_out.append(as_flags(error.message))
        return found

    longest = max(parallels.rows(*each) for each in wanted)
    measured, failures = series.in_context(longest, max(counts)).measure(one)
    results, failures = [each for of_type in measured for each in of_type], [*failures, *left_out]
    common, bandwidth = setting[0]
    if as_json:
        found = [_result(*each, results, bandwidth) for each in results]
        value = arm_object(common, repetitions, found, failures, invocation)
        facts = {"bandwidth_gb_s": bandwidth.value, "bandwidth_source": bandwidth.source}
        render.print_json("bench --parallel", value | facts)
        return failures
    common.print_head("speed of memory not known" if bandwidth.value is None else f"memory {bandwidth.value:,.1f} GB/s")
    print_rows(HEADERS, [_row(*each, results, bandwidth) for each in results], invocation, left=1)
    return failures


def _times(pair: Types, one: Parallel, results: list[tuple[Types, Parallel]]) -> float | None:
    """How many times as many tokens come as of one sequence, where that was measured."""
    alike = (x for types, x in results if (types, x.depth, x.tokens, x.sequences) == (pair, one.depth, one.tokens, 1))
    alone = next(alike, None)
    return None if alone is None else one.median / alone.median


def _row(pair: Types, one: Parallel, results: list[tuple[Types, Parallel]], bandwidth: Bandwidth) -> list[str]:
    times, limit = _times(pair, one, results), one.limit(bandwidth.value)
    return [
        type_name(pair),
        f"{one.sequences:,}",
        f"tg{one.tokens}" + (f" @ d{one.depth}" if one.depth else ""),
        f"{one.median:,.2f}",
        "-" if one.deviation is None else f"{one.deviation:,.2f}",
        f"{1e3 * one.step_s:,.2f}",
        "-" if times is None else f"{times:,.2f}",
        "-" if limit is None else f"{100 * one.median / limit:.0f}",
    ]


def _result(pair: Types, one: Parallel, results: list[tuple[Types, Parallel]], bandwidth: Bandwidth) -> dict[str, Any]:
    limit = one.limit(bandwidth.value)
    return {
        "type_k": pair[0],
        "type_v": pair[1],
        "sequences": one.sequences,
        "tokens": one.tokens,
        "depth_tokens": one.depth,
        "tps": one.median,
        "tps_deviation": one.deviation,
        "tps_samples": list(one.rates),
        "step_s": one.step_s,
        "times_as_fast": _times(pair, one, results),
        "read_bytes_per_step": one.read_bytes,
        "limit_tps": limit,
        "share_of_limit": None if limit is None else one.median / limit,
    }
