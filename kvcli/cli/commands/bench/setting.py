"""What all tests of one `kv bench` have in common, and how types are measured one after the other."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeVar

from kvcli.cli import engines, render, report
from kvcli.cli.flags import typelists
from kvcli.cli.flags.cache import Types
from kvcli.cli.flags.eviction import repeated_rows
from kvcli.cli.flags.typelists import TypeFlags, type_name
from kvcli.cli.interrupt import UNWIND, Interrupts
from kvcli.cli.invocation import Invocation
from kvcli.cli.wording import as_flags
from kvcli.cli.wrapping import columns, fill
from kvcli.errors import DoesNotFit
from kvcli.options import FORGET_NOTHING, AttendOptions, CacheOptions, EvictOptions
from kvcli.runtime.host.memory import release
from kvcli.words import human_bytes

if TYPE_CHECKING:
    from kvcli.options import LoadOptions
    from kvcli.runtime.engine.engine import Engine
    from kvcli.runtime.host.device import Device

Measured = TypeVar("Measured")


@dataclass(frozen=True)
class Setting:
    """Later types may have shorter steps for want of memory."""

    model: str
    title: str
    file_bytes: int
    backend: str
    device: Device
    threads: int
    ubatch_size: int
    evict: dict[str, Any]  # the policy and its numbers
    asked: EvictOptions
    page_size: int
    kv_tail: int
    kv_sink: int
    attend: AttendOptions

    @classmethod
    def of(cls, engine: Engine, load: LoadOptions, types: TypeFlags, evict: EvictOptions) -> Setting:
        from kvcli.runtime.host.cores import physical_cores

        size, threads = engine.loaded.file.size, load.threads or physical_cores()
        computes = engine.loaded.backend, engine.device, threads, engine.ubatch
        pages = types.page_size, types.kv_tail, types.kv_sink
        return cls(
            load.model,
            engine.loaded.title,
            size,
            *computes,
            typelists.evict_object(engine, evict),
            evict,
            *pages,
            engine.layout.attend,
        )

    def as_object(self) -> dict[str, Any]:
        return {
            "model": self.model,
            "file_bytes": self.file_bytes,
            "backend": self.backend,
            "device": str(self.device),
            "device_name": self.device.name,
            "threads": self.threads,
            "ubatch_size": self.ubatch_size,
            "page_size": self.page_size,
            "kv_tail": self.kv_tail,
            "kv_sink": self.kv_sink,
            "evict": self.evict,
            **report.attend_object(self.attend),
        }

    def print_head(self, *more: str) -> None:
        """What was measured, in front of the tables."""
        computes = self.backend if self.device.kind != "cpu" else f"{self.backend}, {self.threads} threads"
        forgets = self.asked.named if self.asked != FORGET_NOTHING else ""
        options = [as_flags(each) for each in (forgets, self.attend.named) if each]
        facts = self.title, human_bytes(self.file_bytes), self.device.name, computes, *options, *more
        head = " · ".join(map(render.one_line, facts))
        render.write_out((fill(head, columns(sys.stdout)) if render.is_terminal(sys.stdout) else head) + "\n\n")


@dataclass(frozen=True)
class Series:
    """One engine for each pair of types, one after the other. `cache`: its options but for types and context."""

    load: LoadOptions
    pairs: list[Types]
    cache: CacheOptions
    invocation: Invocation
    interrupts: Interrupts

    def in_context(self, rows: int, sequences: int = 1) -> Series:
        """With a context for tests of so many rows, and for what a policy repeats of a prompt."""
        ctx_size = rows + repeated_rows(self.cache.evict)
        return replace(self, cache=replace(self.cache, ctx_size=ctx_size, sequences=sequences))

    def measure(
        self, one: Callable[[Engine, Types], Measured], begin: Callable[[], None] = lambda: None
    ) -> tuple[list[Measured], list[str]]:
        """What came of each pair, and why pairs are missing. Types are measured even where the weights speak against
        them. `begin` is called before an engine is opened. Raises DoesNotFit where nothing fits."""
        found: list[Measured] = []
        failures: list[str] = []
        engine: Engine | None = None
        for pair in self.pairs:
            begin()
            try:
                cache = replace(self.cache, type_k=pair[0], type_v=pair[1], force_types=True)
                engine = engines.open_engine(self.load, cache, self.invocation, self.interrupts)
                self.interrupts.stage = UNWIND  # what was computed for a file is kept, and folders are removed
                found.append(one(engine, pair))
            except DoesNotFit as error:
                if not found and pair == self.pairs[-1]:  # nothing was measured
                    raise
                render.warn(f"{type_name(pair)} is left out: {error.message}", self.invocation)
                failures.append(as_flags(error.message))  # not the error, whose frames would keep the engine
            engine = None
            release()
        return found, failures


def print_rows(headers: Sequence[str], rows: list[list[str]], invocation: Invocation, left: int) -> None:
    """Aligned on a terminal, Markdown elsewhere; the first `left` columns hold words, the others numbers."""
    if render.is_terminal(sys.stdout):
        render.print_table(headers, rows, invocation, right=range(left, len(headers)))
        return
    rule = ["---" if i < left else "---:" for i in range(len(headers))]
    render.write_out("".join(f"| {' | '.join(row)} |\n" for row in (headers, rule, *rows)))


def arm_object(
    setting: Setting, repetitions: int, results: list[dict[str, Any]], failures: list[str], invocation: Invocation
) -> dict[str, Any]:
    """What was measured of an arm, and `results` of it."""
    found = {"repetitions": repetitions, "results": results, "failures": failures, "warnings": invocation.told}
    return {**setting.as_object(), **found}


def steps(pairs: int, tests: int, invocation: Invocation) -> Callable[[Types, str], None]:
    """What tells which test begins: '3 of 8: int8 tg128'."""
    counter = iter(range(1, pairs * tests + 1))

    def tell(pair: Types, text: str) -> None:
        render.step(f"{next(counter)} of {pairs * tests}: {type_name(pair)} {text}", invocation)

    return tell
