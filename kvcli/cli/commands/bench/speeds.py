"""Tokens a second of prompts and of generation, by cache type and depth, beside what memory allows."""

from __future__ import annotations

from contextlib import closing, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from kvcli.cli import render
from kvcli.cli.commands.bench.flags import BenchFlags
from kvcli.cli.commands.bench.setting import Series, Setting, print_rows, steps
from kvcli.cli.flags.cache import Types
from kvcli.cli.flags.typelists import TypeFlags, type_name
from kvcli.cli.invocation import Invocation
from kvcli.options import EvictOptions

if TYPE_CHECKING:
    from kvcli.runtime.engine.engine import Engine
    from kvcli.runtime.evaluate.benching import Speed
    from kvcli.runtime.evaluate.contextline import ContextLine

MIB = 1 << 20
REPETITIONS = 5
SPEED_HEADERS = ("type", "test", "tok/s", "±", "ms p50", "ms p95", "% of limit")
LINE_HEADERS = ("type", "test", "ms empty", "ns a token before", "off by %")
MEMORY_HEADERS = ("type", "tokens", "KV MiB", "MiB predicted", "MiB measured")


@dataclass(frozen=True)
class Table:
    """What was measured of one pair of types. `tokens`: rows of the longest test."""

    types: Types
    speeds: list[Speed]
    tokens: int
    kv_bytes: int  # committed by the pool
    predicted: int  # by the plan, all memory of the process
    measured: int
    evicts: bool

    @property
    def lines(self) -> dict[int, ContextLine]:
        """See `benching.lines`; none where old rows are evicted, which ends the growth of the context."""
        from kvcli.runtime.evaluate import benching

        return {} if self.evicts else benching.lines(self.speeds)


@dataclass(frozen=True)
class Bandwidth:
    """In 10^9 bytes/s, None = not known, and from where that is known."""

    value: float | None
    source: str


def measure(series: Series, what: BenchFlags, types: TypeFlags, evict: EvictOptions, as_json: bool) -> list[str]:
    """Measure and print; why pairs of types are missing."""
    from kvcli.runtime.evaluate import benching
    from kvcli.runtime.promptcache import enginecaches
    from kvcli.runtime.promptcache.userfile import check_model

    cases, kept, invocation = what.cases(), what.caches(), series.invocation
    longest, repetitions = max(case.rows for case in cases), what.repetitions or REPETITIONS
    tell = steps(len(series.pairs), len(cases), invocation)
    meter = benching.Meter()
    setting: list[tuple[Setting, Bandwidth]] = []

    def one(engine: Engine, pair: Types) -> Table:
        if not setting:
            setting.append((Setting.of(engine, series.load, types, evict), bandwidth_of(engine, what, invocation)))
        if kept is not None and kept.file is not None:
            check_model(kept.file, enginecaches.view(engine).identity())
        caches = engine.prompt_caches(kept, render.telling(invocation)) if kept else None
        with closing(caches) if caches else nullcontext():
            run = benching.run(engine, cases, repetitions, not what.no_warmup, partial(tell, pair), caches)
            speeds = list(run)
        kv_bytes, predicted = engine.pool.committed_bytes, engine.predict(longest).total
        return Table(pair, speeds, longest, kv_bytes, predicted, meter.used(engine), engine.retention is not None)

    tables, failures = series.in_context(longest).measure(one, meter.restart)
    (common, bandwidth), *_ = setting
    if told := _too_low(tables, bandwidth):
        render.warn(told, invocation)
    if as_json:
        value = as_object(tables, common, bandwidth, repetitions, failures)
        render.print_json("bench", value | {"warnings": invocation.told})
    else:
        show(tables, common, bandwidth, invocation)
    return failures


def bandwidth_of(engine: Engine, what: BenchFlags, invocation: Invocation) -> Bandwidth:
    """As it is asked for, known, or measured now."""
    from kvcli.runtime.evaluate import benching

    if what.bandwidth is not None:
        return Bandwidth(what.bandwidth, "--bandwidth")
    return Bandwidth(*benching.bandwidth(engine.device, partial(render.notice, invocation=invocation)))


def _too_low(tables: list[Table], bandwidth: Bandwidth) -> str:
    """What to say of generation faster than its limit; "" where there is none."""
    limits = ((speed.median, speed.limit(bandwidth.value)) for table in tables for speed in table.speeds)
    if not any(limit is not None and rate > limit for rate, limit in limits):
        return ""
    known = f"the {'stored ' if bandwidth.source == 'kv doctor' else ''}memory bandwidth"
    named = bandwidth.source if bandwidth.source.startswith("--") else known
    too_low = f"{named} ({bandwidth.value:,.1f} GB/s) is too low, or caches hold the model"
    return f"generation is above 100 % of the limit: {too_low}; kv doctor measures it again"


def show(tables: list[Table], setting: Setting, bandwidth: Bandwidth, invocation: Invocation) -> None:
    known = bandwidth.value is not None
    setting.print_head(f"memory {bandwidth.value:,.1f} GB/s" if known else "speed of memory not known")
    rows = [_speed_row(table.types, speed, bandwidth.value) for table in tables for speed in table.speeds]
    print_rows(SPEED_HEADERS, rows, invocation, left=2)
    render.write_out("\n")
    if lines := [_line_row(table.types, *each) for table in tables for each in table.lines.items()]:
        print_rows(LINE_HEADERS, lines, invocation, left=2)
        render.write_out("\n")
    print_rows(MEMORY_HEADERS, [_memory_row(table) for table in tables], invocation, left=1)


def _speed_row(types: Types, speed: Speed, bandwidth: float | None) -> list[str]:
    limit, gaps = speed.limit(bandwidth), [speed.gap(share) for share in (0.5, 0.95)]
    return [
        type_name(types),
        str(speed.case),
        f"{speed.median:,.2f}",
        "-" if speed.deviation is None else f"{speed.deviation:,.2f}",
        *("-" if gap is None else f"{gap * 1e3:,.3f}" for gap in gaps),
        "-" if limit is None else f"{100 * speed.median / limit:.1f}",
    ]


def _line_row(types: Types, tokens: int, line: ContextLine) -> list[str]:
    numbers = (f"{line.empty_s * 1e3:,.3f}", f"{line.each_s * 1e9:,.2f}", f"{100 * line.residual:.1f}")
    return [type_name(types), f"tg{tokens}", *numbers]


def _memory_row(table: Table) -> list[str]:
    sizes = (table.kv_bytes, table.predicted, table.measured)
    return [type_name(table.types), f"{table.tokens:,}", *(f"{size / MIB:,.1f}" for size in sizes)]


def as_object(
    tables: list[Table], setting: Setting, bandwidth: Bandwidth, repetitions: int, failures: list[str]
) -> dict[str, Any]:
    """Everything measured; sizes in bytes, times in seconds."""
    return {
        **setting.as_object(),
        "repetitions": repetitions,
        "bandwidth_gb_s": bandwidth.value,
        "bandwidth_source": bandwidth.source,
        "results": [_result(table.types, speed, bandwidth.value) for table in tables for speed in table.speeds],
        "lines": [_line(table.types, *each) for table in tables for each in table.lines.items()],
        "memory": [
            {
                "type_k": table.types[0],
                "type_v": table.types[1],
                "tokens": table.tokens,
                "kv_bytes": table.kv_bytes,
                "predicted_bytes": table.predicted,
                "peak_bytes": table.measured,
            }
            for table in tables
        ],
        "failures": failures,
    }


def _line(types: Types, tokens: int, line: ContextLine) -> dict[str, Any]:
    return {
        "type_k": types[0],
        "type_v": types[1],
        "tokens": tokens,
        "empty_token_s": line.empty_s,
        "context_token_s": line.each_s,
        "residual_percent": 100 * line.residual,
    }


def _result(types: Types, speed: Speed, bandwidth: float | None) -> dict[str, Any]:
    limit = speed.limit(bandwidth)
    return {
        "type_k": types[0],
        "type_v": types[1],
        "test": speed.case.kind,
        "tokens": speed.case.tokens,
        "depth_tokens": speed.case.depth,
        "tps": speed.median,
        "tps_deviation": speed.deviation,
        "tps_samples": list(speed.rates),
        "token_p50_s": speed.gap(0.5),
        "token_p95_s": speed.gap(0.95),
        "read_bytes_per_token": speed.read_bytes or None,
        "limit_tps": limit,
        "share_of_limit": None if limit is None else speed.median / limit,
    }
