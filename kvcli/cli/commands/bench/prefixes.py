"""`kv bench --prefix-reuse`: the time to the first token of prompts that begin alike."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from kvcli.cli import render
from kvcli.cli.commands.bench.flags import BenchFlags
from kvcli.cli.commands.bench.setting import Series, Setting, arm_object, print_rows, steps
from kvcli.cli.flags.cache import Types
from kvcli.cli.flags.typelists import TypeFlags, type_name
from kvcli.options import EvictOptions
from kvcli.words import human_bytes

if TYPE_CHECKING:
    from kvcli.runtime.engine.engine import Engine
    from kvcli.runtime.evaluate.prefixreuse import Arm, Reuse

PREFIX, SUFFIX, REPETITIONS = "2048", 64, 5
HEADERS = ("type", "prefix", "rows from", "hits", "reused", "TTFT s p50", "p95", "times", "stored")


def measure(series: Series, what: BenchFlags, types: TypeFlags, evict: EvictOptions, as_json: bool) -> list[str]:
    """Measure and print; why pairs of types are missing."""
    from kvcli.runtime.evaluate import prefixreuse

    lengths = what.positive(what.prompts(PREFIX), "--n-prompt")
    suffix, repetitions = what.suffix or SUFFIX, what.repetitions or REPETITIONS
    invocation = series.invocation
    tell = steps(len(series.pairs), len(lengths), invocation)
    setting: list[Setting] = []

    def one(engine: Engine, pair: Types) -> list[tuple[Types, Reuse]]:
        setting.append(Setting.of(engine, series.load, types, evict))
        found = prefixreuse.run(engine, lengths, suffix, repetitions, not what.no_warmup, partial(tell, pair))
        return [(pair, reuse) for reuse in found]

    longest = prefixreuse.rows(max(lengths), suffix)
    measured, failures = series.in_context(longest).measure(one)
    results = [each for of_type in measured for each in of_type]
    for reason in {reuse.cold for _, reuse in results if reuse.cold}:
        render.warn(f"files may have been read from memory, not from the disk: {reason}", invocation)
    if as_json:
        found = [_result(*each) for each in results]
        render.print_json("bench --prefix-reuse", arm_object(setting[0], repetitions, found, failures, invocation))
        return failures
    setting[0].print_head(f"{suffix:,} new tokens behind each prefix")
    rows = [row for pair, reuse in results for row in _rows(pair, reuse)]
    print_rows(HEADERS, rows, invocation, left=1)
    return failures


def _rows(pair: Types, reuse: Reuse) -> list[list[str]]:
    computed = reuse.arms[0].share(0.5)
    total = reuse.prefix + reuse.suffix

    def row(arm: Arm) -> list[str]:
        p50, p95 = arm.share(0.5), arm.share(0.95)
        reused = f"{100 * sum(arm.reused) / (total * len(arm.reused)):.1f} %"
        times = [f"{p50:,.3f}", f"{p95:,.3f}", f"{computed / p50:,.1f}"]
        stored = human_bytes(reuse.stored_bytes) if arm.name == "disk" else "-"
        hits = f"{arm.hits} of {len(arm.reused)}"
        return [type_name(pair), f"{reuse.prefix:,}", arm.name, hits, reused, *times, stored]

    return [row(arm) for arm in reuse.arms]


def _result(pair: Types, reuse: Reuse) -> dict[str, Any]:
    total = reuse.prefix + reuse.suffix
    return {
        "type_k": pair[0],
        "type_v": pair[1],
        "prefix_tokens": reuse.prefix,
        "suffix_tokens": reuse.suffix,
        "stored_bytes": reuse.stored_bytes,
        "page_cache_dropped": not reuse.cold,
        "arms": [
            {
                "rows_from": arm.name,
                "lookups": len(arm.reused),
                "hits": arm.hits,
                "hit_rate": arm.hits / len(arm.reused),
                "reused_share": sum(arm.reused) / (total * len(arm.reused)),
                "ttft_p50_s": arm.share(0.5),
                "ttft_p95_s": arm.share(0.95),
                "ttft_samples": list(arm.ttft_s),
            }
            for arm in reuse.arms
        ],
    }
