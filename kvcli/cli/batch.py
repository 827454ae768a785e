"""`kv run --batch FILE`: a prompt a line in, an answer a line out, several at a time, in the order of the file."""

from __future__ import annotations

import codecs
import hashlib
import json
import os
import re
import sys
import time
from contextlib import closing, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from kvcli import paths
from kvcli.cli import engines, inputs, jsonobjects, keeping, render
from kvcli.cli.answer import cache_facts, settle
from kvcli.cli.batchlines import SHAPE, Form, Line, value_id
from kvcli.cli.interrupt import FINISH, Interrupts
from kvcli.cli.invocation import Invocation
from kvcli.cli.outcome import Outcome
from kvcli.cli.report import cache_objects, end_objects, sampling_object
from kvcli.cli.streams import say, writing_to
from kvcli.cli.wording import as_flags
from kvcli.errors import KVError, OutputError, UsageError
from kvcli.options import CacheOptions, LoadOptions, PromptCacheOptions
from kvcli.runtime.engine.events import End, Event, Token
from kvcli.runtime.formats.boundedjson import load_object
from kvcli.words import counted

if TYPE_CHECKING:
    from kvcli.cli.flags.keeping import KeepFlags
    from kvcli.runtime.engine.engine import Engine
    from kvcli.runtime.engine.request import Request
    from kvcli.runtime.promptcache.lookup import PromptCaches

PARALLEL = 8  # lines at a time where no number is asked for
FAILED = 1  # exit code where a line has no answer
MEND_S = 5.0  # in which what came of lines that are tried again is not in the file yet


@dataclass(frozen=True)
class Batch:
    """The file of prompts, where answers go (None and "-" = stdout), and what holds for all lines."""

    source: str
    target: str | None
    form: Form
    staying: KeepFlags  # whether the model stays behind it


class Answers:
    """The lines that come out: in the order of those that they answer, each as soon as those before it are there.

    A file that exists is continued: it must hold the answers to the first lines, as these are now. A last line that is
    not whole is made again. Lines that have errors there are tried again: what comes of that takes the place of the
    error when all is written (`close`).
    """

    def __init__(self, target: str | None, source: str, lines: dict[int, bytes]) -> None:
        """Raises UsageError for a file that has something else, OutputError."""
        self.name = "stdout" if target in (None, "-") else str(target)
        self.numbers, self.done, self.failed = list(lines), 0, 0
        self._lines = lines
        self._waiting: dict[int, dict[str, Any]] = {}
        self._errors: dict[int, int] = {}  # of an earlier run: where they stand in the file, by their line
        self._better: dict[int, dict[str, Any]] = {}  # what came of these lines now, and is not in the file yet
        self._mended = time.monotonic()
        if target in (None, "-"):
            if sys.stdout is None:
                raise OutputError("stdout is closed")
            self._file: BinaryIO = sys.stdout.buffer
            return
        with writing_to(self.name):
            if os.path.isfile(self.name):
                self._go_on(source)
            self._file = open(self.name, "ab")  # noqa: SIM115  # closed by the end of the process

    def _go_on(self, source: str) -> None:
        with open(self.name, "rb") as file:
            whole = [line for line in file.read().splitlines(keepends=True) if line.endswith(b"\n")]
        if whole and not _is_object(whole[-1]):
            whole.pop()
        for number, line in zip(self.numbers, whole, strict=False):
            value = load_object(line, self.name, UsageError) if _is_object(line) else {}
            if (value.get("line"), value.get("input")) != (number, self._input(number)):
                break
            if "error" in value:
                self._errors[number] = self.done
            self.done, self.failed = self.done + 1, self.failed + ("error" in value)
        if self.done < len(whole):
            raise UsageError(
                f"{self.name} exists, and its line {self.done + 1:,} answers no line that {source} has there now",
                "name another file with -o, or delete that line and all behind it",
            )
        os.truncate(self.name, sum(map(len, whole)))

    def put(self, number: int, value: dict[str, Any]) -> None:
        """The answer or the error of a line. Raises OutputError."""
        value = {"line": number, "input": self._input(number), **value}
        if number in self._errors:
            self._better[number] = value
            self.failed -= "error" not in value
            if time.monotonic() - self._mended > MEND_S:
                self._mend()
            return
        self._waiting[number] = value
        while self.done < len(self.numbers) and (found := self._waiting.pop(self.numbers[self.done], None)):
            with writing_to(self.name):
                self._file.write(jsonobjects.line("run --batch", found).encode())
                self._file.flush()
            self.done, self.failed = self.done + 1, self.failed + ("error" in found)

    @property
    def missing(self) -> list[int]:
        """Lines to be answered: those that had errors in an earlier run, and all behind it."""
        return [*self._errors, *self.numbers[self.done :]]

    def close(self) -> None:
        """Nothing more comes. Raises OutputError."""
        if self._better:
            self._mend()

    def _mend(self) -> None:
        """Put what came of lines that had errors in the place of these."""
        with writing_to(self.name):
            self._file.close()
            path = Path(os.path.realpath(self.name))
            whole = path.read_bytes().splitlines(keepends=True)
            for number, value in self._better.items():
                whole[self._errors[number]] = jsonobjects.line("run --batch", value).encode()
            mode = path.stat().st_mode
            paths.replace_file(path, b"".join(whole))
            path.chmod(mode)
            self._file = open(path, "ab")  # noqa: SIM115  # closed by the end of the process
        self._better.clear()
        self._mended = time.monotonic()

    def _input(self, number: int) -> str:
        """What tells a line from others."""
        return hashlib.sha256(self._lines[number].strip()).hexdigest()[:16]


def _same_file(one: str, other: str) -> bool:
    with suppress(OSError):
        return os.path.samefile(one, other) and os.path.isfile(one)
    return False


def _is_object(line: bytes) -> bool:
    with suppress(ValueError):
        return isinstance(json.loads(line), dict)
    return False


@dataclass
class _Asked:
    """A line whose answer is on its way."""

    number: int
    line: Line
    request: Request
    parts: list[str] = field(default_factory=list)
    thoughts: list[str] = field(default_factory=list)
    end: End | None = None

    def take(self, event: Event) -> None:
        if isinstance(event, Token):
            self.parts.append(event.text)
            self.thoughts.append(event.reasoning)
        elif isinstance(event, End):
            self.end = event

    def outcome(self, engine: Engine) -> Outcome | None:
        """The answer, once it has ended; None = there is none."""
        if self.end is None:
            return None
        text, cache = "".join(self.parts) + self.end.text, cache_facts(engine, self.request.seq)
        return Outcome(text, self.end, cache, self.request.options, [])

    def told(self, outcome: Outcome | None) -> dict[str, Any]:
        """What comes out."""
        if outcome is None:
            assert self.request.error is not None
            return _error(self.line.id, self.request.error)
        return {
            "id": self.line.id,
            "text": outcome.text,
            "reasoning": "".join(self.thoughts) + outcome.end.reasoning or None,
            "finish_reason": outcome.end.finish_reason,
            "stop": outcome.end.stop,
            **end_objects(outcome.end),
            **cache_objects(outcome),
            "sampling": sampling_object(outcome.params),
            "warnings": outcome.warnings,
        }


def _error(id: str | int | None, error: KVError) -> dict[str, Any]:
    """Keys of lines have the names of fields, but the context, which no line sets, has that of its option."""
    found = error.as_object().items()
    told = {key: _plain(text) if isinstance(text, str) else text for key, text in found}
    return {"id": id, "error": told}


def _plain(text: str) -> str:
    return re.sub(r"`ctx(=\d+)?`", lambda ctx: as_flags(ctx[0]), text).replace("`", "")


def _id_of(raw: bytes) -> str | int | None:
    """The id of a line that may be wrong otherwise."""
    with suppress(KVError):
        return value_id(load_object(raw, "", UsageError))
    return None


def run(
    batch: Batch,
    load: LoadOptions,
    cache: CacheOptions,
    kept: PromptCacheOptions,
    invocation: Invocation,
    interrupts: Interrupts,
    stats: bool,
) -> int:
    """Answer all lines -> the exit code. Raises KVError for what has nothing to do with a single line."""
    if cache.evict.keep == -1:
        raise UsageError("--keep -1 cannot be used with --batch: prompts have different lengths", "give a number")
    if batch.target is not None and _same_file(batch.source, batch.target):
        raise UsageError(f"-o {batch.target} is the file of --batch itself", "name another file for the answers")
    tell = render.telling(invocation)
    data = (
        inputs.stdin_bytes(tell, most=inputs.LIST_BYTES)
        if batch.source == "-"
        else inputs.file_bytes(batch.source, inputs.LIST_BYTES)
    )
    data = data.removeprefix(codecs.BOM_UTF8)
    lines = {number: raw for number, raw in enumerate(data.splitlines(), 1) if raw.strip()}
    if not lines:
        raise UsageError(f"{batch.source} has no lines", SHAPE)
    answers, total = Answers(batch.target, batch.source, lines), len(lines)
    if answers.done:
        again = f"trying {counted(answers.failed, 'line')} with an error again" if answers.failed else ""
        further = "" if answers.done == total else f"going on with line {answers.numbers[answers.done]}"
        told = ", ".join(filter(None, (again, further)))
        there = f"{answers.name} has the answers to {answers.done - answers.failed:,} of {counted(total, 'line')}"
        say(f"{there}: {told}" if told else there)
    if answers.missing:
        load = replace(load, chat_anyway=batch.form.raw is False)
        engine = engines.open_engine(load, cache, invocation, interrupts)
        keeping.stay(engine.loaded, load, batch.staying, invocation)
        engines.tell_of_guesses(engine, batch.form.sampling, invocation)
        with closing(answers), closing(engine.prompt_caches(kept, tell)) as caches:
            _answer(engine, caches, batch.form, lines, answers, cache.sequences, invocation, interrupts, stats)
    if answers.failed:
        say(f"{counted(answers.failed, 'line')} of {total:,} could not be answered: see error in {answers.name}")
    if interrupts.code:
        say(f"stopped after {answers.done:,} of {counted(total, 'line')}")
    return interrupts.code or (FAILED if answers.failed else 0)


def _answer(
    engine: Engine,
    caches: PromptCaches,
    form: Form,
    lines: dict[int, bytes],
    answers: Answers,
    parallel: int,
    invocation: Invocation,
    interrupts: Interrupts,
    stats: bool,
) -> None:
    """Answer the lines that `answers` does not have yet, until a signal comes."""
    from kvcli.runtime.engine.scheduler import Scheduler

    scheduler, asked = Scheduler(engine, parallel), dict[int, _Asked]()  # by request
    left, began, made, tokens = iter(answers.missing), time.perf_counter(), 0, 0
    lossy = dict[int, str]()  # by line
    interrupts.stage = FINISH
    with render.Progress(invocation, unit="lines") as progress:
        while not interrupts.cancelled():
            while scheduler.room and (number := next(left, None)):
                try:
                    found = _ask(engine, caches, form, lines[number], number)
                    asked[id(found.request)] = found
                    scheduler.submit(found.request)
                except KVError as error:
                    answers.put(number, _error(_id_of(lines[number]), error))
                    made += 1
            if scheduler.idle:
                break
            for request, events in scheduler.step():
                one = asked[id(request)]
                for event in events:
                    one.take(event)
                if request.finished:
                    outcome = asked.pop(id(request)).outcome(engine)
                    answers.put(one.number, one.told(outcome))
                    if outcome and outcome.losses:
                        lossy[one.number] = outcome.losses[0]
                    made += 1
                    tokens += len(request.history) - request.n_prompt
                    request.seq.close()
            progress("lines", answers.done, len(answers.numbers))
    for one in asked.values():
        one.request.abandon()
        one.request.seq.close()
    if lossy:
        first = min(lossy)
        told = f"{len(lossy):,} of {counted(made, 'line')} lossy, the first one line {first:,} ({lossy[first]})"
        render.warn(f"{told}: see warnings in {answers.name}", invocation)
    if stats:
        took = time.perf_counter() - began
        render.aside(
            f"{counted(made, 'line')} in {took:.1f} s | gen {tokens:,} tok · {tokens / took:,.0f} tok/s", invocation
        )


def _ask(engine: Engine, caches: PromptCaches, form: Form, raw: bytes, number: int) -> _Asked:
    """The request of a line. Raises KVError."""
    line = Line.parse(raw, number, form)
    settled = settle(engine.loaded, line.sampling)
    prompt = line.asked(engine.loaded.text, form)
    request = engine.request(
        engine.new_sequence(), prompt.ids, settled, caches=caches, thinking=prompt.thinking, marks=prompt.marks
    )
    return _Asked(number, line, request)
