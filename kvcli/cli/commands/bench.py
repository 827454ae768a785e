"""`kv bench`: tokens a second of prompts and of generation, by cache type and depth, beside what memory allows."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvcli.cli import engines, render
from kvcli.cli.flags import comparing
from kvcli.cli.flags.cache import Types, check_size_of_step
from kvcli.cli.flags.checks import check_bandwidth, checked, in_range
from kvcli.cli.flags.comparing import TypeFlags, type_name
from kvcli.cli.flags.eviction import EvictFlags
from kvcli.cli.flags.shared import ModelFlags, grouped, parse_tokens
from kvcli.cli.helptext import MEASURE, PLANNING
from kvcli.cli.interrupt import Interrupts, last_words
from kvcli.cli.invocation import Invocation, JsonFlag
from kvcli.cli.wording import as_flags
from kvcli.cli.wrapping import columns, fill
from kvcli.errors import DoesNotFit, UsageError
from kvcli.options import CacheOptions, EvictOptions
from kvcli.words import human_bytes

if TYPE_CHECKING:
    from kvcli.options import LoadOptions
    from kvcli.runtime.engine.engine import Engine
    from kvcli.runtime.evaluate.benching import Case, Meter, Speed
    from kvcli.runtime.host.device import Device

MIB = 1 << 20
_NONE, _DEPTH = "; 0 = none", "; -d is not --device"  # for hints
SPEED_HEADERS = ("type", "test", "tok/s", "±", "ms p50", "ms p95", "% of limit")
MEMORY_HEADERS = ("type", "tokens", "KV MiB", "MiB predicted", "MiB measured")


EXAMPLES = """
kv bench
kv bench -m model.gguf -d 0,4k,16k -ct f16,int8,int4
kv bench --json > bench.json
"""


def register(app: typer.Typer) -> None:
    app.command("bench", rich_help_panel=PLANNING, epilog=EXAMPLES)(bench)


_option = partial(typer.Option, rich_help_panel=MEASURE)


def _list(*names: str, help: str, more: str) -> typer.models.OptionInfo:
    """An option whose value is what `_lengths` takes."""
    return _option(*names, metavar="LIST", help=help, callback=checked(partial(_lengths, flag=names[-1], more=more)))


def _lengths(text: str, flag: str, more: str) -> list[int]:
    """'0,4k' -> tokens, each once. Raises UsageError."""
    return list(dict.fromkeys(parse_tokens(word, flag, more) for word in text.split(",")))


@dataclass(frozen=True)
class BenchFlags:
    """Lengths, depths and repetitions."""

    n_prompt: Annotated[str, _list("-p", "--n-prompt", help="Prompt lengths to measure; 0 = none.", more=_NONE)] = "512"
    n_gen: Annotated[str, _list("-n", "--n-gen", help="Numbers of tokens to generate; 0 = none.", more=_NONE)] = "128"
    n_depth: Annotated[
        str,
        _list(
            *("-d", "--n-depth"),
            help="Numbers of tokens that are in the cache already, e.g. 0,4k.",
            more=_DEPTH,
        ),
    ] = "0"
    repetitions: Annotated[
        int,
        _option(
            *("-r", "--repetitions"),
            metavar="N",
            help="Repetitions of each test; the median counts.",
            callback=in_range("--repetitions", 1),
        ),
    ] = 5
    no_warmup: Annotated[
        bool, typer.Option("--no-warmup", rich_help_panel=MEASURE, help="Skip the warm-up run of each test.")
    ] = False
    bandwidth: Annotated[
        float | None,
        _option(
            "--bandwidth",
            metavar="GB/s",
            help="Memory bandwidth, from which the limit is computed.",
            callback=check_bandwidth,
        ),
    ] = None
    ubatch_size: Annotated[
        int,
        _option(
            *("-ub", "--ubatch-size", "-b", "--batch-size"),
            metavar="N",
            help="Tokens per prefill step; 0 = automatic.",
            callback=check_size_of_step,
        ),
    ] = CacheOptions.ubatch

    def cases(self) -> list[Case]:
        """Every test. Raises UsageError where there is none."""
        from kvcli.runtime.evaluate import benching

        prompts, generations = _lengths(self.n_prompt, "--n-prompt", _NONE), _lengths(self.n_gen, "--n-gen", _NONE)
        found = benching.cases(prompts, generations, _lengths(self.n_depth, "--n-depth", _DEPTH))
        if not found:
            raise UsageError("there is nothing to measure: -p and -n are both 0")
        return found

    def cache(self, pair: Types, types: TypeFlags, cases: list[Case], evict: EvictOptions) -> CacheOptions:
        """A context that holds every test. Types are measured even where the weights speak against them."""
        pages = types.page_size, self.ubatch_size, types.kv_tail, types.kv_sink
        return CacheOptions(max(case.rows for case in cases), *pair, *pages, force_types=True, evict=evict)


@dataclass(frozen=True)
class _Table:
    """What was measured of one pair of types. `tokens`: rows of the longest test."""

    types: Types
    speeds: list[Speed]
    tokens: int
    kv_bytes: int  # committed by the pool
    predicted: int  # by the plan, all memory of the process
    measured: int


@dataclass(frozen=True)
class _Setting:
    """What all tests had in common, but that later types may have shorter steps for want of memory. `bandwidth` in
    10^9 bytes/s, None = not known."""

    model: str
    title: str
    file_bytes: int
    backend: str
    device: Device
    threads: int
    ubatch_size: int
    bandwidth: float | None
    source: str
    evict: dict[str, Any]  # the policy and its numbers


@grouped
def bench(
    ctx: typer.Context,
    model: ModelFlags,
    what: BenchFlags,
    types: TypeFlags,
    evict: EvictFlags,
    json: JsonFlag = False,
) -> None:
    """Measure the speed of prompts (pp) and generation (tg) by cache type and depth, as in kv run.

    Rates are medians over the repetitions, with their standard deviation. The limit is what generation would reach if
    reading weights and cache took all the time.
    """
    invocation: Invocation = ctx.obj
    with Interrupts(partial(last_words, as_json=json)) as interrupts:
        load, pairs, cases = model.options(invocation.offline), types.types("f16", invocation), what.cases()
        evicting = evict.options(types.page_size, prompt=False)
        from kvcli.runtime.evaluate import benching

        meter, setting = benching.Meter(), None
        tables: list[_Table] = []
        failures: list[str] = []
        engine: Engine | None = None
        for number, pair in enumerate(pairs):
            meter.restart()
            steps = (f"{number * len(cases) + i} of {len(pairs) * len(cases)}" for i in itertools.count(1))
            try:
                cache = what.cache(pair, types, cases, evicting)
                engine = engines.open_engine(load, cache, invocation, interrupts)
                setting = setting or _setting(engine, load, what.bandwidth, evicting, invocation)
                tables.append(_measure(engine, pair, cases, what, meter, steps, invocation))
            except DoesNotFit as error:
                if not tables and pair == pairs[-1]:  # nothing was measured
                    raise
                render.warn(f"{type_name(pair)} is left out: {error.message}", invocation)
                failures.append(as_flags(error.message))  # not the error, whose frames would keep the engine
            engine = None
            benching.release()
    assert setting is not None
    if json:
        render.print_json("bench", _object(tables, setting, what, types, failures) | {"warnings": invocation.told})
    else:
        _show(tables, setting, invocation)
    raise typer.Exit(DoesNotFit.exit_code if failures else 0)


def _setting(
    engine: Engine, load: LoadOptions, bandwidth: float | None, evict: EvictOptions, invocation: Invocation
) -> _Setting:
    from kvcli.runtime.evaluate import benching
    from kvcli.runtime.host.cores import physical_cores

    source = "--bandwidth"
    if bandwidth is None:
        bandwidth, source = benching.bandwidth(engine.device, partial(render.notice, invocation=invocation))
    size, threads = engine.loaded.path.stat().st_size, load.threads or physical_cores()
    forgotten = comparing.evict_object(engine, evict)
    computes = engine.loaded.backend, engine.device, threads, engine.ubatch
    return _Setting(load.model, engine.loaded.title, size, *computes, bandwidth, source, forgotten)


def _measure(
    engine: Engine,
    pair: Types,
    cases: list[Case],
    what: BenchFlags,
    meter: Meter,
    steps: Iterator[str],
    invocation: Invocation,
) -> _Table:
    """`steps`: what to call each test in turn."""
    from kvcli.runtime.evaluate import benching

    def tell(text: str) -> None:
        render.step(f"{next(steps)}: {type_name(pair)} {text}", invocation)

    speeds = list(benching.run(engine, cases, what.repetitions, not what.no_warmup, tell))
    tokens = max(case.rows for case in cases)
    measured = meter.used(engine)
    return _Table(pair, speeds, tokens, engine.pool.committed_bytes, engine.predict(tokens).total, measured)


def _show(tables: list[_Table], setting: _Setting, invocation: Invocation) -> None:
    rate = "speed of memory not known" if setting.bandwidth is None else f"memory {setting.bandwidth:,.1f} GB/s"
    computes = setting.backend if setting.device.kind != "cpu" else f"{setting.backend}, {setting.threads} threads"
    facts = (setting.title, human_bytes(setting.file_bytes), setting.device.name, computes, rate)
    head = " · ".join(map(render.one_line, facts))
    render.write_out((fill(head, columns(sys.stdout)) if render.is_terminal(sys.stdout) else head) + "\n\n")
    rows = [_speed_row(table.types, speed, setting.bandwidth) for table in tables for speed in table.speeds]
    _print(SPEED_HEADERS, rows, invocation, left=2)
    render.write_out("\n")
    _print(MEMORY_HEADERS, [_memory_row(table) for table in tables], invocation, left=1)


def _print(headers: Sequence[str], rows: list[list[str]], invocation: Invocation, left: int) -> None:
    """Aligned on a terminal, Markdown elsewhere; the first `left` columns hold words, the others numbers."""
    if render.is_terminal(sys.stdout):
        render.print_table(headers, rows, invocation, right=range(left, len(headers)))
        return
    rule = ["---" if i < left else "---:" for i in range(len(headers))]
    render.write_out("".join(f"| {' | '.join(row)} |\n" for row in (headers, rule, *rows)))


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


def _memory_row(table: _Table) -> list[str]:
    sizes = (table.kv_bytes, table.predicted, table.measured)
    return [type_name(table.types), f"{table.tokens:,}", *(f"{size / MIB:,.1f}" for size in sizes)]


def _object(
    tables: list[_Table], setting: _Setting, what: BenchFlags, types: TypeFlags, failures: list[str]
) -> dict[str, Any]:
    """Everything measured; sizes in bytes, times in seconds."""
    return {
        "model": setting.model,
        "file_bytes": setting.file_bytes,
        "backend": setting.backend,
        "device": str(setting.device),
        "device_name": setting.device.name,
        "threads": setting.threads,
        "ubatch_size": setting.ubatch_size,
        "page_size": types.page_size,
        "kv_tail": types.kv_tail,
        "kv_sink": types.kv_sink,
        "repetitions": what.repetitions,
        "evict": setting.evict,
        "bandwidth_gb_s": setting.bandwidth,
        "bandwidth_source": setting.source,
        "results": [_result(table.types, speed, setting.bandwidth) for table in tables for speed in table.speeds],
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
