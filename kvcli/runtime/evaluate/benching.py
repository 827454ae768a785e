"""Speeds of an engine, measured as its users meet them: every token goes through `Engine.generate`.

A prompt test (`pp`) times a prompt of random ids until its first token is there; a generation test (`tg`) times the
tokens after the first one, greedy, with the end of text ruled out. Both can stand behind a *depth*: rows that are in
the cache already, prefilled once and gone back to between repetitions.
"""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvcli.options import SampleOptions
from kvcli.runtime.engine.events import End, Token
from kvcli.runtime.evaluate.contextline import ContextLine, fit
from kvcli.runtime.evaluate.rates import WARMUP_TOKENS, Rates
from kvcli.runtime.host.device import Device
from kvcli.runtime.host.machine import ProbeFailed
from kvcli.runtime.host.measuring import measure
from kvcli.runtime.host.memory import CPU, gpus, peak_on_card
from kvcli.runtime.host.processmemory import peak_bytes, reset_peak
from kvcli.runtime.plan import overheads

if TYPE_CHECKING:
    from kvcli.runtime.cache.sequence import Sequence
    from kvcli.runtime.engine.engine import Engine
    from kvcli.runtime.promptcache.lookup import PromptCaches

PROMPT, GENERATION = "pp", "tg"


@dataclass(frozen=True)
class Case:
    """What is measured: `tokens` of a prompt (PROMPT), or generated (GENERATION), behind `depth` rows."""

    kind: str
    tokens: int
    depth: int = 0

    def __str__(self) -> str:
        return f"{self.kind}{self.tokens}" + (f" @ d{self.depth}" if self.depth else "")

    @property
    def rows(self) -> int:
        """Tokens of prompt and answer together, as a context must hold them."""
        return self.depth + self.tokens + (1 if self.kind == PROMPT else 2)

    @property
    def middle(self) -> int:
        """Rows that a generated token sees half-way through the test."""
        return self.depth + 1 + self.tokens // 2


@dataclass(frozen=True)
class Speed(Rates):
    """`rates`: tokens a second of each repetition. `gaps`: seconds between tokens, of all repetitions together.

    `read_bytes`: what one generated token reads, half-way through the test; 0 for a prompt.
    """

    case: Case
    rates: tuple[float, ...]
    gaps: tuple[float, ...]
    read_bytes: int

    def gap(self, share: float) -> float | None:
        """The time between two tokens, in seconds, that this share of them does not exceed; None for a prompt."""
        if not self.gaps:
            return None
        ordered = sorted(self.gaps)
        return ordered[min(len(ordered) - 1, int(share * len(ordered)))]

    def limit(self, bandwidth: float | None) -> float | None:
        """Tokens a second if nothing but reading at `bandwidth` (10^9 bytes/s) took time; None = not known."""
        return bandwidth * 1e9 / self.read_bytes if bandwidth and self.read_bytes else None


def cases(prompts: list[int], generations: list[int], depths: list[int]) -> list[Case]:
    """Every length at every depth; a length of 0 is no test."""
    lengths = [(PROMPT, n) for n in prompts] + [(GENERATION, n) for n in generations]
    return [Case(kind, n, depth) for depth in depths for kind, n in lengths if n]


def lines(speeds: Iterable[Speed]) -> dict[int, ContextLine]:
    """For each length of an answer that was measured at enough depths, the time of a token over the context."""
    points: dict[int, list[tuple[int, float]]] = {}
    for speed in speeds:
        if speed.case.kind == GENERATION:
            points.setdefault(speed.case.tokens, []).append((speed.case.middle, 1 / speed.median))
    return {tokens: line for tokens, each in points.items() if (line := fit(each)) is not None}


def run(
    engine: Engine,
    wanted: list[Case],
    repetitions: int,
    warmup: bool,
    tell: Callable[[str], None],
    caches: PromptCaches | None = None,
) -> Iterator[Speed]:
    """Measure one test after the other, on one sequence. `tell` hears what begins. `caches`: where the rows of depths
    are looked for and kept; no test has a part in it."""
    deepest = max(case.depth for case in wanted)
    ids = random.Random(0).choices(range(engine.config.vocab_size), k=deepest)
    seq = engine.new_sequence()
    try:
        for case in wanted:
            tell(str(case))
            if caches is not None and case.depth:
                _restore(engine, seq, ids[: case.depth], caches)
            if warmup:
                _once(engine, seq, ids, case, -1)
            found = [_once(engine, seq, ids, case, number) for number in range(repetitions)]
            gaps = tuple(gap for _, each in found for gap in each)
            yield Speed(case, tuple(rate for rate, _ in found), gaps, _read_bytes(engine, case))
    finally:
        seq.close()


def _once(engine: Engine, seq: Sequence, ids: list[int], case: Case, number: int) -> tuple[float, list[float]]:
    """Tokens a second and the gaps between tokens of one repetition; number -1 warms up."""
    _go_to(engine, seq, ids[: case.depth])
    chance = random.Random(f"{case} {number}")
    if case.kind == PROMPT:
        fresh, most = chance.choices(range(engine.config.vocab_size), k=case.tokens), 1
    else:
        fresh = chance.choices(range(engine.config.vocab_size), k=1)
        most = 1 + (case.tokens if number >= 0 else min(case.tokens, WARMUP_TOKENS))
    options = SampleOptions(temperature=0.0, max_tokens=most, ignore_eos=True, spec="off")
    times, end = [], None
    for event in engine.generate(seq, ids[: case.depth] + fresh, options):
        if isinstance(event, Token):
            times.append(time.perf_counter())
        elif isinstance(event, End):
            end = event
    assert end is not None
    if case.kind == PROMPT:
        return end.timings.prefill_tokens / end.timings.ttft_s, []
    return end.timings.decode_tps, [b - a for a, b in itertools.pairwise(times)]


def _restore(engine: Engine, seq: Sequence, ids: list[int], caches: PromptCaches) -> None:
    """As `_go_to`, with the help of `caches`, which get what they lack; they have written it when this is over, however
    it ends."""
    ledger = caches.restore(seq, [*ids, ids[-1]])  # the last one of a prompt is never looked for
    try:
        _go_to(engine, seq, ids)
    except BaseException:
        ledger.interrupted(seq)
        raise
    caches.save(seq)
    caches.keeper.wait()


def _go_to(engine: Engine, seq: Sequence, ids: list[int]) -> None:
    """Leave exactly the rows of `ids` in the cache. What a window or a sealed page no longer allows is run again."""
    common = min(len(ids), seq.length)
    kept = seq.rewind_to(common if seq.tokens[:common] == ids[:common] else 0)
    for start, end in engine.chunks(kept, len(ids)):
        engine.forward(seq, ids[start:end])


def _read_bytes(engine: Engine, case: Case) -> int:
    if case.kind == PROMPT:
        return 0
    return engine.bytes_per_token(case.middle)


def bandwidth(device: Device, tell: Callable[[str], None]) -> tuple[float | None, str]:
    """How fast the device's memory is read, in 10^9 bytes/s, and from where that is known; (None, reason)."""
    stored = overheads.load(CPU if device.kind == CPU else device.name)[0].bandwidth
    if stored is not None:
        return stored, "kv doctor"
    tell("measuring how fast memory is read; kv doctor would keep the result")
    try:
        words = ("memory",) if device.kind == CPU else ("cuda", str(device.index))
        return measure(*words)["bandwidth_gb_s"], "measured"
    except ProbeFailed as error:
        return None, str(error)


class Meter:
    """Memory that this process takes on a device. Made before the first engine is opened."""

    def __init__(self) -> None:
        self._free = [gpu.free for gpu in gpus()]

    def restart(self) -> None:
        """Forget the peak so far, where the system can."""
        import torch

        reset_peak()
        if torch.cuda.is_initialized():
            for index in range(len(self._free)):
                torch.cuda.reset_peak_memory_stats(index)

    def used(self, engine: Engine) -> int:
        """Bytes at the peak: of the process, or of the engine's GPU, where other programs count too."""
        if engine.device.kind == CPU:
            return peak_bytes()
        return peak_on_card(engine.device.index, self._free[engine.device.index])
