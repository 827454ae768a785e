"""`Warming`: what a GPU needs for answers side by side is there before somebody asks for them."""

from __future__ import annotations

import logging
import math
import time
from collections import deque
from contextlib import suppress
from typing import TYPE_CHECKING

from kvcli.errors import KVError
from kvcli.options import SampleOptions
from kvcli.runtime.engine.spec import OFF
from kvcli.runtime.host.memory import CUDA
from kvcli.runtime.plan import graphs
from kvcli.runtime.plan.graphs import BATCH_ROWS

if TYPE_CHECKING:
    from kvcli.notices import Tell
    from kvcli.runtime.engine.engine import Engine
    from kvcli.runtime.engine.graph.stepgraph import StepGraph
    from kvcli.runtime.engine.request import Request

LOG = logging.getLogger("kvcli")
MOST_S = 120.0  # behind which no further round is begun
QUIET_S = 1.0  # behind an answer before the next step: who asks again at once does not wait for it
LEAST_ROWS = 2  # of prompts that are there for their answers
TOKENS = 4  # of each answer: the prompt's, one alone, two side by side


class Warming:
    """Answers to nobody, a round of some after the other: prompts of so many rows, and so many answers at a time. What
    they need is compiled and captured as it is for others. `step` where nobody asks and `due_s` is 0."""

    def __init__(self, engine: Engine, parallel: int, tell: Tell | None = None) -> None:
        """`parallel`: answers that there are at a time. On a CPU there is nothing to do."""
        self.engine, self._tell = engine, tell
        self._rounds = deque(_rounds(engine, parallel) if engine.device.kind == CUDA and engine.batches else ())
        self._requests: list[Request] = []
        self._took_s, self._widest = 0.0, 1
        self._asked = -math.inf  # when somebody last did

    @property
    def over(self) -> bool:
        return not self._rounds

    @property
    def due_s(self) -> float | None:
        """Seconds until the next step is wanted; None = there is none."""
        return None if self.over else max(0.0, self._asked + QUIET_S - time.monotonic())

    def step(self) -> None:
        """One step of the engine, or of what it takes to begin a round."""
        began = time.monotonic()
        try:
            if not self._requests:
                self._begin(*self._rounds[0])
            self.engine.step(self._requests)
        except Exception as error:  # no room, or a fault, which whoever asks will see
            LOG.debug("kv is not made ready for %s", self._rounds[0], exc_info=error)
            self.put_off()
            self._rounds.clear()
        self._took_s += time.monotonic() - began
        self._requests = [request for request in self._requests if not self._ended(request)]
        if not self._requests and self._rounds:
            self._widest = max(self._widest, self._rounds.popleft()[1])
            if self._took_s > MOST_S:
                self._rounds.clear()
        if not self._rounds:
            self._say()

    def put_off(self) -> None:
        """Give back the pages: somebody asks. The round is begun again."""
        self._asked = time.monotonic()
        if self._requests and self._rounds:
            self._join(*self._rounds[0], False)  # there may be no graph yet
        for request in self._requests:
            with suppress(KVError):
                request.close()
            request.guesses.close()
            request.seq.close()
        self._requests = []

    def _begin(self, rows: int, answers: int) -> None:
        """Greedy and drawn ones, which nobody's cache or statistics see."""
        self._join(rows, answers, True)
        most = TOKENS if answers == 1 or rows == LEAST_ROWS else 1
        for number in range(answers):
            options = SampleOptions(temperature=None if number % 2 else 0.0, max_tokens=most, spec=OFF, seed=number)
            seq = self.engine.new_sequence()
            self._requests.append(self.engine.request(seq, [number % self.engine.config.vocab_size] * rows, options))

    def _join(self, rows: int, prompts: int, there: bool) -> None:
        """Whether so many prompts of so many rows are read in one pass from now on."""
        steps = _graphs(self.engine)
        if prompts > 1 and rows > LEAST_ROWS and steps is not None:
            (steps.joined.add if there else steps.joined.discard)((rows, prompts))

    def _ended(self, request: Request) -> bool:
        if request.finished:
            request.seq.close()
        return request.finished

    def _say(self) -> None:
        if self._tell is not None and self._widest > 1:
            took = f"{self._took_s:.1f} s"
            self._tell.notice(f"ready for {self._widest} answers at a time: what the GPU computes is captured ({took})")


def _graphs(engine: Engine) -> StepGraph | None:
    """Those of prompts."""
    from kvcli.runtime.engine.steplist import StepList

    return None if isinstance(engine.steps, StepList) else engine.steps


def _rounds(engine: Engine, parallel: int) -> list[tuple[int, int]]:
    """Rows of each prompt, and how many there are: one alone first, then as many answers as graphs have rows, then
    prompts that are read in one pass. Most rows come first: graphs of fewer fit into their memory."""
    longest = min(engine.ctx_size - TOKENS - 1, engine.ubatch)
    steps = _graphs(engine)
    prompts = [(rows, 1) for rows in (steps.sizes[::-1] if steps else ()) if rows <= longest]
    if engine.one_by_one:
        return prompts
    counts = [min(parallel, rows) for i, rows in enumerate(BATCH_ROWS) if i == 0 or BATCH_ROWS[i - 1] < parallel]
    several = [(LEAST_ROWS, count) for count in counts if count > 1]
    joined = [(rows, n) for rows, n in graphs.steps(engine.layout, parallel) if n > 1 and rows * n <= engine.ubatch]
    return prompts + several + sorted((x for x in joined if (x[0], 1) in prompts), key=lambda x: -x[0] * x[1])
