"""`Scheduler`: which of many requests run together, and which one waits when the pool has no pages left."""

from __future__ import annotations

from kvcli.errors import DoesNotFit
from kvcli.runtime.engine.engine import Engine
from kvcli.runtime.engine.events import Event
from kvcli.runtime.engine.request import Request

ANSWER_ROWS = 64  # of an answer that a request finds room for when it starts


class Scheduler:
    """Requests start in the order in which they came, at most `parallel` at a time.

    One starts when the pool has room for its prompt and the beginning of its answer beside what is held. If pages run
    out all the same, the youngest one gives up its pages and waits: what is left of them in the prefix tree by then is
    taken up again, the rest is computed again, and its answer is the same as if nothing had happened.
    """

    def __init__(self, engine: Engine, parallel: int) -> None:
        self.engine, self.parallel = engine, parallel
        self.preemptions = 0
        self._unfinished: list[Request] = []  # the oldest first
        self._running: list[Request] = []

    @property
    def idle(self) -> bool:
        """Whether all that was submitted is finished."""
        return not self._unfinished

    @property
    def room(self) -> bool:
        """Whether one request more could run if the pool has pages."""
        return len(self._unfinished) < self.parallel

    def submit(self, request: Request) -> None:
        """Have this request run, after those that came before it. Its sequence belongs to the caller, who closes it
        when the request is finished."""
        self._unfinished.append(request)

    def step(self) -> list[tuple[Request, list[Event]]]:
        """Compute one step of those that run -> what came of it."""
        self._admit()
        while True:
            running = list(self._running)
            try:
                found = list(zip(running, self.engine.step(running), strict=True))
                break
            except DoesNotFit as error:
                self._make_room(error)
        found += [(request, request.take_events()) for request in self._unfinished if request not in running]
        self._unfinished = [request for request in self._unfinished if not request.finished]
        self._running = [request for request in self._running if not request.finished]
        return [(request, events) for request, events in found if events or request.finished]

    def _admit(self) -> None:
        """Start what there is room for, in order: nobody is overtaken."""
        for request in self._unfinished:
            if request in self._running:
                continue
            if len(self._running) >= self.parallel or (self._running and not self._fits(request)):
                return
            self._running.append(request)

    def _fits(self, request: Request) -> bool:
        """Whether the pool has room for what those that run lack of their prompts, and for what this one lacks of its
        own and of the beginning of its answer."""
        lacking = [self._missing(each, 0) for each in self._running] + [self._missing(request, ANSWER_ROWS)]
        spare = (request.caches.spare(arena) for arena in range(len(self.engine.layout.arenas)))
        pages = (sum(each) for each in zip(*lacking, strict=True))
        return self.engine.pool.has_room([n - there for n, there in zip(pages, spare, strict=True)])

    def _missing(self, request: Request, more: int) -> list[int]:
        """Pages of each arena that a request has yet to take for its tokens and `more` rows behind them."""
        engine, layout = self.engine, self.engine.layout
        rows = min(len(request.history) + more, engine.terms.setting.most(layout, engine.ctx_size))
        wanted = layout.arena_pages(rows, engine.ubatch)
        return [max(0, n - request.seq.pages(arena)) for arena, n in enumerate(wanted)]

    def _make_room(self, error: DoesNotFit) -> None:
        """Take pages from the youngest request that has any to give, if it is not the only one; else that one fails."""
        holders = [request for request in self._unfinished if request.seq.length or request in self._running]
        if len(holders) == 1:
            holders[0].fail(error)
            self._running.remove(holders[0])
            return
        youngest = holders[-1]
        youngest.park()
        self.preemptions += 1
        if youngest in self._running:
            self._running.remove(youngest)
