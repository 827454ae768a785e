"""`kv bench --no-kv-cache`: generation with the cache of keys and values, and without."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from kvcli.cli import render
from kvcli.cli.commands.bench.flags import NO_CACHE, BenchFlags
from kvcli.cli.commands.bench.setting import Series, Setting, arm_object, print_rows, steps
from kvcli.cli.flags.cache import Types
from kvcli.cli.flags.typelists import TypeFlags, type_name
from kvcli.errors import UsageError
from kvcli.options import EvictOptions

if TYPE_CHECKING:
    from kvcli.runtime.engine.engine import Engine
    from kvcli.runtime.evaluate.uncached import Both

PROMPT, GENERATED, REPETITIONS = "128", "32", 3  # where nothing is asked for: seconds on a small model
HEADERS = ("type", "prompt", "tokens", "s with cache", "tok/s", "s without", "tok/s", "times", "same")


def measure(series: Series, what: BenchFlags, types: TypeFlags, evict: EvictOptions, as_json: bool) -> list[str]:
    """Measure and print; why pairs of types are missing. Raises UsageError."""
    from kvcli.runtime.evaluate import uncached

    if evict.policy != "none":
        raise UsageError(f"--evict cannot be used with {NO_CACHE}", "without a cache nothing is evicted")
    prompts = what.positive(what.prompts(PROMPT), "--n-prompt")
    wanted = [(n, m) for n in prompts for m in what.positive(what.generations(GENERATED), "--n-gen")]
    repetitions, invocation = what.repetitions or REPETITIONS, series.invocation
    tell = steps(len(series.pairs), len(wanted), invocation)
    setting: list[Setting] = []

    def one(engine: Engine, pair: Types) -> list[tuple[Types, Both]]:
        setting.append(Setting.of(engine, series.load, types, evict))
        found = uncached.run(engine, wanted, repetitions, not what.no_warmup, partial(tell, pair))
        return [(pair, both) for both in found]

    longest = max(n + m for n, m in wanted)
    measured, failures = series.in_context(longest).measure(one)
    results = [each for of_type in measured for each in of_type]
    if as_json:
        found = [_result(*each) for each in results]
        render.print_json("bench --no-kv-cache", arm_object(setting[0], repetitions, found, failures, invocation))
        return failures
    setting[0].print_head()
    print_rows(HEADERS, [_row(*each) for each in results], invocation, left=1)
    return failures


def _row(pair: Types, both: Both) -> list[str]:
    with_it, without = both.cached, both.uncached
    rates = f"{both.generated / with_it:,.2f}", f"{both.generated / without:,.2f}"
    figures = [f"{with_it:,.2f}", rates[0], f"{without:,.2f}", rates[1], f"{both.times:,.1f}"]
    return [type_name(pair), f"{both.prompt:,}", f"{both.generated:,}", *figures, f"{both.same:,}"]


def _result(pair: Types, both: Both) -> dict[str, Any]:
    arms = zip(("cached", "uncached"), both.computed, (both.cached, both.uncached), strict=True)
    samples = {"cached": both.cached_s, "uncached": both.uncached_s}
    return {
        "type_k": pair[0],
        "type_v": pair[1],
        "prompt_tokens": both.prompt,
        "completion_tokens": both.generated,
        "same_tokens": both.same,
        "times_as_fast": both.times,
        **{
            name: {
                "computed_tokens": computed,
                "answer_s": seconds,
                "tps": both.generated / seconds,
                "answer_samples": list(samples[name]),
            }
            for name, computed, seconds in arms
        },
    }
