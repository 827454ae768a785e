"""`Worker`: the thread that has an engine, and the answers that it is writing. It knows nothing of HTTP."""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from kvcli.errors import KVError, UsageError
from kvcli.options import SampleOptions
from kvcli.runtime.engine import samplesettings
from kvcli.runtime.engine.events import End, Event
from kvcli.runtime.engine.prompt import Prompt
from kvcli.runtime.host.memory import CUDA
from kvcli.serve.metrics import Counts
from kvcli.serve.warming import Warming

if TYPE_CHECKING:
    from kvcli.notices import Tell
    from kvcli.runtime.engine.engine import Engine
    from kvcli.runtime.engine.request import Request
    from kvcli.runtime.promptcache.lookup import PromptCaches

LOG = logging.getLogger("kvcli")
STEP_S = 3.0  # that a step, or what is compiled for it, may go on for at the end
KEEP_S = 30.0  # and where prompts are then kept, as what is still to be written of others may


class Busy(KVError):
    """More questions wait than may."""


class Stopped(KVError):
    """The server is stopping, or has failed."""


Deliver = Callable[[int, "Event | KVError"], None]


@dataclass(eq=False)
class Work:
    """A prompt with the answers that are asked for, told apart by their number. `deliver(number, event)` is called in
    the worker's thread; an `End` or an error is the last of an answer. Set `cancelled` to end it."""

    prompt: Prompt
    options: list[SampleOptions]  # settled
    deliver: Deliver
    cancelled: bool = False
    number: int = field(default_factory=itertools.count(1).__next__)
    requests: list[Request] = field(default_factory=list)
    since: float = field(default_factory=time.monotonic)
    left: set[int] = field(init=False)  # answers that have not come to their ends

    def __post_init__(self) -> None:
        self.left = set(range(len(self.options)))

    def fail(self, error: KVError) -> None:
        """Tell it of every answer that has not come to its end."""
        for number in sorted(self.left):
            self.deliver(number, error)
        self.left.clear()


class Worker:
    """Answers prompts over one engine, several at a time; none of its methods waits for that."""

    def __init__(
        self, engine: Engine, caches: PromptCaches, parallel: int, queue: int, tell: Tell | None = None
    ) -> None:
        """`parallel`: answers that are written at a time; `queue`: prompts that may wait beside them; `tell`: who is
        told when a GPU is ready for them (see `Warming`)."""
        from kvcli.runtime.engine.scheduler import Scheduler

        self.engine, self.caches, self.parallel, self.queue = engine, caches, parallel, queue
        self.counts = Counts()
        self.used = time.monotonic()  # when something was asked last
        self._scheduler = Scheduler(engine, parallel)
        self._warming = Warming(engine, parallel, tell)
        self._preempted = 0  # by schedulers that had a fault
        self._waiting: deque[Work] = deque()
        self._running: list[Work] = []
        self._change = threading.Condition()
        self._stopping = False
        self._computing = False
        self._thread = threading.Thread(target=self._run, name="kv-worker", daemon=True)

    def start(self) -> None:
        self._thread.start()

    # --- for other threads

    def settled(self, options: SampleOptions, count: int = 1) -> list[SampleOptions]:
        """The options of `count` answers to one prompt, with nothing left open. Raises UsageError."""
        if not 1 <= count <= self.parallel:
            raise UsageError(f"`n` must be 1 to {self.parallel}, not {count}", "kv serve --parallel N sets the most")
        defaults, vocabulary = self.engine.loaded.sampling_defaults, self.engine.config.vocab_size
        whole = samplesettings.settled(options, defaults, vocabulary)
        return [replace(whole, sequence=number) for number in range(count)]

    def submit(self, work: Work) -> None:
        """Have it answered. Raises ContextOverflow, UsageError, Busy and Stopped."""
        self.engine.terms.check_prompt(work.prompt.ids, answer=work.options[0].max_tokens)
        with self._change:
            if self._stopping:
                raise Stopped("the server is stopping, or has failed")
            if len(self._waiting) >= self.queue + max(0, self.parallel - self._answers):
                self.counts.refused += 1
                raise Busy(f"{len(self._waiting)} prompts wait already", "ask again later; kv serve --queue N sets it")
            self._waiting.append(work)
            self.used = time.monotonic()
            self._change.notify()

    def cancel(self, work: Work) -> None:
        """End it as soon as may be, if it has not ended."""
        with self._change:
            work.cancelled = True
            self._change.notify()

    def retire(self) -> bool:
        """Take nothing more, if nothing runs or waits; whether that is so."""
        with self._change:
            self._stopping = self._stopping or self.idle
            return self._stopping

    def stop(self, seconds: float) -> None:
        """Take nothing more; what runs has so long to end by itself. Waits until the caches are written, KEEP_S at
        most; for a step behind which there is nothing to write, STEP_S."""
        with self._change:
            self._stopping = True
            self._change.notify()
        self._thread.join(seconds)
        with self._change:
            for work in (*self._waiting, *self._running):
                work.cancelled = True
        self._thread.join(STEP_S)
        if keeps := self._thread.is_alive() and self._keeps:
            LOG.warning("waiting %.0f s at most for prompts to be kept", KEEP_S)
            self._thread.join(KEEP_S)
        if self._thread.is_alive():
            lost = ": prompts may have to be computed again" if keeps else ""
            what = "a step takes long" if self._computing else "writing prompt caches takes long"
            LOG.warning("%s, and is not waited for%s", what, lost)

    @property
    def _keeps(self) -> bool:
        """Whether rows are written, or will be as soon as the step at hand is done."""
        requests = [request for work in list(self._running) for request in list(work.requests)]
        prompts = [request.n_prompt for request in requests if not request.answering and not request.finished]
        return self.caches.writes or any(map(self.caches.keeps, prompts))

    @property
    def idle(self) -> bool:
        return not self._waiting and not self._running

    @property
    def _answers(self) -> int:
        return sum(len(work.options) for work in self._running)

    def facts(self) -> dict[str, float]:
        """What /metrics shows of now."""
        pool = self.engine.pool
        return {
            "requests_running": self._answers,
            "requests_waiting": len(self._waiting),
            "preemptions_total": self._preempted + self._scheduler.preemptions,
            "cache_pages_used": sum(pool.used(arena) for arena in range(len(self.engine.layout.arenas))),
            "cache_used_bytes": pool.used_bytes,
            "cache_budget_bytes": pool.budget_bytes or 0,
        }

    def slots(self) -> list[dict[str, Any]]:
        """The answers that are being written."""
        return [
            {
                "id": work.number,
                "answer": number,
                "prompt_tokens": request.n_prompt,
                "cache_read_tokens": request.reuse.tokens,
                "completion_tokens": len(request.history) - request.n_prompt,
                "state": "decode" if request.answering else "prefill",
                "seconds": round(time.monotonic() - work.since, 3),
            }
            for work in list(self._running)
            for number, request in enumerate(list(work.requests))
            if not request.finished
        ]

    # --- the thread

    def _run(self) -> None:
        if self.engine.device.kind == CUDA:
            import torch

            torch.cuda.set_device(self.engine.pool.device)
        with closing(self.caches):
            try:
                while self._next():
                    self._computing = True
                    try:
                        self._step()
                    except Exception as error:  # a fault of ours: whoever waits is told, and others go on
                        LOG.exception("an answer failed")
                        self._drop(_fault(error))
                    self._computing = False
            finally:
                with self._change:
                    self._stopping = True
                    for work in (*self._waiting, *self._running):  # none, but where this thread fails
                        work.fail(Stopped("the server has failed"))

    def _next(self) -> bool:
        """Wait for something to do and begin it; False = there will be nothing more."""
        with self._change:
            while self._scheduler.idle and not self._waiting:
                if self._stopping:
                    return False
                if self._warming.due_s == 0:
                    break
                self._change.wait(self._warming.due_s)
            began = []
            for work in [each for each in self._waiting if each.cancelled]:
                self._waiting.remove(work)
                work.fail(Stopped("it was cancelled before it began"))
            while self._waiting and self._answers + len(self._waiting[0].options) <= self.parallel:
                began.append(self._waiting.popleft())
                self._running.append(began[-1])
        for work in began:
            try:
                self._begin(work)
            except Exception as error:
                if not isinstance(error, KVError):
                    LOG.exception("an answer could not begin")
                    error = _fault(error)
                with self._change:
                    self._running.remove(work)
                work.fail(error)
        return True

    def _begin(self, work: Work) -> None:
        """Have the scheduler run it; the first answer reads the prompt for the others. Raises what `Engine.request`
        does."""
        engine, prompt = self.engine, work.prompt
        requests: list[Request] = []
        for number in reversed(range(len(work.options))):
            twins = () if number else requests
            request = engine.request(
                engine.new_sequence(), prompt.ids, work.options[number], lambda: work.cancelled, False, twins,
                self.caches, prompt.thinking, prompt.marks, prompt.tools,
            )  # fmt: skip
            requests = [request, *requests]
        work.requests = requests
        self.counts.requests += 1
        for request in requests:
            self._scheduler.submit(request)

    def _step(self) -> None:
        """One step of the engine; what came of it is delivered. Where nobody asks, it is made ready for more."""
        if self._scheduler.idle and not self._warming.over:
            self._warming.step()
            return
        self._warming.put_off()
        owners = {id(request): (work, number) for work in self._running for number, request in enumerate(work.requests)}
        for request, events in self._scheduler.step():
            work, number = owners[id(request)]
            if request.finished:
                request.seq.close()
            for event in events:
                if isinstance(event, End):
                    self.counts.add(event)
                    work.left.discard(number)
                work.deliver(number, event)
            if request.error is not None:
                self.counts.failed += 1
                work.left.discard(number)
                work.deliver(number, request.error)
        with self._change:
            self._running = [work for work in self._running if not all(each.finished for each in work.requests)]

    def _drop(self, error: KVError) -> None:
        """Give up everything that runs."""
        from kvcli.runtime.engine.scheduler import Scheduler

        with self._change:
            dropped, self._running = self._running, []
        self._preempted += self._scheduler.preemptions
        self._scheduler = Scheduler(self.engine, self.parallel)
        for work in dropped:
            left = [work.requests[number] for number in work.left]
            work.fail(error)
            for request in left:
                request.close()
                request.guesses.close()
                request.seq.close()


def _fault(error: Exception) -> Stopped:
    return Stopped(f"an internal error: {error}")
