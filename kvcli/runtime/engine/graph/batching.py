"""`Batch`: single tokens of several requests at a time on a GPU, chosen there by the options of each, and read late."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from kvcli.errors import DoesNotFit, KVError
from kvcli.kernels.gpu.sample import DeviceSampler, uniforms
from kvcli.kernels.gpu.shares import NoRoom
from kvcli.runtime.cache.layout import KVLayout
from kvcli.runtime.engine.graph.batchgraph import BatchGraph
from kvcli.runtime.engine.graph.pages import sent
from kvcli.runtime.engine.rowsahead import on_host
from kvcli.runtime.engine.tokenstream import steps_ahead
from kvcli.runtime.model.decoder import Decoder
from kvcli.runtime.plan.graphs import BATCH_ROWS

if TYPE_CHECKING:
    from kvcli.runtime.engine.request import Request

MOST = BATCH_ROWS[-1]


def unsupported(layout: KVLayout) -> str:
    """Why sequences cannot be computed together; "" = they can."""
    if layout.attend.pages:
        return "tokens choose the pages that they read"
    if layout.selection is not None:
        return "rows are selected by score"
    return "answers from cached rows are to be the same" if layout.grain > 1 else ""


class Batches:
    """Batches of an engine: `step` all that its requests want together. `reason`: why they cannot be computed together;
    "" = they can."""

    def __init__(self, model: Decoder, layout: KVLayout, ctx_size: int) -> None:
        self._sizes = model, layout, ctx_size
        self.reason = unsupported(layout)
        self._batches: list[Batch] = []

    def step(self, work: list[tuple[Request, list[int]]]) -> list[tuple[Request, list[int]]]:
        """Compute the single rows of answers, where there are several -> what is left of the rows that requests want.
        Raises DoesNotFit; see `Batch.step`."""
        if self.reason:
            return work
        done: set[int] = set()
        single = [r for r, ids in work if r.answering and len(ids) == 1 and not on_host(r.seq, r.guesses)]
        for batch, requests in self._dealt(single):
            done.update(map(id, requests))
            try:
                batch.step(requests)
            except NoRoom as error:
                self.reason = str(error)
                for each in self._batches:  # those of the others, too, go on one by one
                    each.close()
                break
        return [(request, ids) for request, ids in work if id(request) not in done]

    def _dealt(self, requests: list[Request]) -> list[tuple[Batch, list[Request]]]:
        """Which batch has which requests: that in which they sit, else the first one with a free seat. None has one
        alone that does not sit yet."""
        found, new = [], [request for request in requests if request.ahead.seat is None]
        for batch in self._batches:
            mine = [request for request in requests if batch.seat_of(request)]
            more = new[: batch.free]
            if mine or len(more) > 1:
                new = new[batch.free :]
                found.append((batch, mine + more))
        while len(new) > 1:
            self._batches.append(Batch(*self._sizes))
            found.append((self._batches[-1], new[:MOST]))
            new = new[MOST:]
        return found


class Seat:
    """The place of a request in a batch, until it is closed."""

    def __init__(self, batch: Batch, request: Request, row: int) -> None:
        self.batch, self.request, self.row = batch, request, row

    def close(self) -> None:
        """Leave the batch: the sequence keeps no row of a token that is not in the history."""
        self.batch.leave(self)
        seq = self.request.seq
        seq.rewind_to(min(seq.length, len(self.request.history)))


@dataclass(frozen=True)
class Flight:
    """A step that was launched, and whose tokens have not been read. `hosted`: rows whose tokens the host chooses."""

    seats: list[Seat]
    slot: int
    hosted: set[int]


class Batch:
    """Up to MOST requests that answer. `step` them together; whoever is new to it, or no longer there, changes the
    tables on the device, and nothing else."""

    def __init__(self, model: Decoder, layout: KVLayout, ctx_size: int) -> None:
        self.model, self.layout, self.ctx_size = model, layout, ctx_size
        self.device: torch.device = model.ops.device
        self._waits = self.device.type == "cuda"  # else it is Triton's interpreter, which is never behind
        self._memory = torch.cuda.graph_pool_handle() if self._waits else None
        self._graphs: dict[int, BatchGraph] = {}
        self._graph: BatchGraph | None = None
        self._seats: list[Seat | None] = []
        self._chooser: Chooser | None = None
        self._flights = deque[Flight]()  # the oldest first
        self._ahead, self._launched = steps_ahead(layout), 0
        self._ids = torch.zeros(1 + self._ahead, MOST, dtype=torch.int64, pin_memory=self._waits)
        self._events = [torch.cuda.Event() for _ in range(len(self._ids) if self._waits else 0)]

    @property
    def free(self) -> int:
        """How many requests more it takes."""
        return MOST - sum(seat is not None for seat in self._seats)

    def close(self) -> None:
        """Have all leave it: the rows that they want next are those of their newest tokens."""
        for request in [seat.request for seat in self._taken]:
            request.close()
            request.seq.rewind_to(min(request.seq.length, len(request.history) - 1))

    def leave(self, seat: Seat) -> None:
        """Whoever had it is not computed any more, once what is on its way has come."""
        if self._waits:
            torch.cuda.synchronize(self.device)
        self._seats[seat.row] = None
        if self._graph is not None:
            self._graph.seat(seat.row, None)
        self._chooser = None

    def step(self, requests: list[Request]) -> None:
        """Give requests the tokens of the oldest step that is on its way, and have further ones computed: of all of
        them, where they are more than one. Raises DoesNotFit, with the tokens given that were there, and NoRoom."""
        flights, new = self._flights, [request for request in requests if self.seat_of(request) is None]
        for request in new:
            request.close()
            request.seq.rewind_to(min(request.seq.length, len(request.history) - 1))
        while flights and not any(seat.request.ahead.seat is seat for seat in flights[0].seats):
            flights.popleft()
        while 0 < len(flights) <= self._ahead and not new and self._goes_on(requests):
            try:
                flights.append(self._launch(None))
            except (DoesNotFit, NoRoom):  # told when nothing is on its way
                break
        if flights:
            self._deliver(flights.popleft())  # one of each request: it may be its last one
        if not flights:
            self._begin([request for request in new if self._answers(request)])

    def _begin(self, new: list[Request]) -> None:
        """Have rows computed whose tokens are known: of those that have seats, and of new ones."""
        for seat in self._taken:
            if not self._answers(seat.request):
                seat.request.close()
        if len(self._taken) + len(new) < 2:
            self.close()
            return
        self._sit(new)
        self._flights.append(self._launch({seat.row: seat.request.history[-1] for seat in self._taken}))

    def _answers(self, request: Request) -> bool:
        """Whether its next row is that of its newest token, behind which others may come, and there is room for it."""
        there = not request.finished and _left(request) > 0 and request.seq.length == len(request.history) - 1
        return there and (request.seq.retention is not None or request.seq.kept < self.ctx_size)

    def seat_of(self, request: Request) -> Seat | None:
        seat = request.ahead.seat
        return seat if isinstance(seat, Seat) and seat.batch is self else None

    @property
    def _taken(self) -> list[Seat]:
        return [seat for seat in self._seats if seat is not None]

    def _goes_on(self, requests: list[Request]) -> bool:
        """Whether what follows is computed before the tokens are read that are on their way: nobody comes or goes, they
        are not the last ones of all, the device chooses for all, and there is room."""
        flight = self._flights[-1]
        if len(requests) < 2 or flight.seats != self._taken or flight.hosted or self._chooser is None:
            return False
        if all(_left(seat.request) <= len(self._flights) for seat in flight.seats):
            return False
        seqs = [seat.request.seq for seat in flight.seats]
        return all(seq.retention is not None or seq.kept < self.ctx_size for seq in seqs)

    def _sit(self, new: list[Request]) -> None:
        """Give seats to requests, in a graph with enough rows for all."""
        wanted = len(self._taken) + len(new)
        rows = next(n for n in BATCH_ROWS if n >= wanted)
        if self._graph is None or rows > self._graph.rows or 2 * rows < self._graph.rows:
            self._move(rows)
        assert self._graph is not None
        free = (row for row, seat in enumerate(self._seats) if seat is None)
        for request in new:
            seat = request.ahead.seat = Seat(self, request, next(free))
            self._seats[seat.row] = seat
            self._graph.seat(seat.row, request.seq)
            self._chooser = None

    def _move(self, rows: int) -> None:
        """Have a graph of so many rows."""
        taken = self._taken
        if self._graph is not None:
            for seat in taken:
                self._graph.seat(seat.row, None)
        if rows not in self._graphs:
            self._graphs[rows] = BatchGraph(self.model, self.layout, self.ctx_size, rows, self._memory)
        self._graph, self._chooser = self._graphs[rows], None
        self._seats = [*taken, *[None] * (rows - len(taken))]
        for row, seat in enumerate(taken):
            seat.row = row
            self._graph.seat(row, seat.request.seq)

    def _launch(self, ids: dict[int, int] | None) -> Flight:
        """Compute the next rows, and choose the tokens that follow. `ids`: see `BatchGraph.run`. Raises DoesNotFit and
        NoRoom."""
        graph, seats = self._graph, self._taken
        assert graph is not None
        if self._chooser is None:
            self._chooser = Chooser(graph, self._seats)
        logits, slot = graph.run(ids), self._launched % len(self._ids)
        self._launched += 1
        self._chooser.launch(logits, graph)
        self._ids[slot, : graph.rows].copy_(graph.tokens, non_blocking=True)
        if self._waits:
            self._events[slot].record()
        return Flight(seats, slot, self._chooser.hosted)

    def _deliver(self, flight: Flight) -> None:
        """Read the tokens of a step, and give each to its request, if that is still there."""
        if self._waits:
            self._events[flight.slot].synchronize()
        tokens, graph = self._ids[flight.slot].tolist(), self._graph
        assert graph is not None
        hosted = {row: graph.logits[row].cpu() for row in flight.hosted}
        for seat in flight.seats:
            request, token = seat.request, tokens[seat.row]
            if request.ahead.seat is not seat:
                continue
            if seat.row in hosted:
                request.choose(hosted[seat.row])
            elif token < 0:
                error = KVError(DeviceSampler.error(token), f"check `logit_bias`; {request.sampler.remedy}")
                request.fail(error)
            else:
                at = len(request.history)
                if at < request.seq.length:
                    request.seq.tokens[at] = token
                request.take(token)


def _left(request: Request) -> float:
    """How many tokens more the request may have."""
    most = request.options.max_tokens
    return most - (len(request.history) - request.n_prompt) if most >= 0 else float("inf")


class Chooser:
    """The next tokens of a batch. `hosted`: rows whose tokens the host chooses."""

    def __init__(self, graph: BatchGraph, seats: list[Seat | None]) -> None:
        there = {row: seat.request for row, seat in enumerate(seats) if seat is not None}
        samplers = {row: request.sampler for row, request in there.items()}
        self.hosted = {row for row, s in samplers.items() if s.constrained or DeviceSampler.supports(s.effective)}
        chosen = {row: r for row, r in there.items() if row not in self.hosted}
        each = [chosen[row].sampler.effective if row in chosen else GREEDY for row in range(graph.rows)]
        histories = [chosen[row].history if row in chosen else [] for row in range(graph.rows)]
        self._sampler = DeviceSampler(each, graph.logits.shape[1], graph.device, histories)
        self._uniform = torch.zeros(graph.rows, device=graph.device)
        seeds, sequences = np.zeros((2, graph.rows), np.uint64)
        for row, request in chosen.items():
            seeds[row], sequences[row] = request.sampler.seed, request.sampler.sequence
        numbers = torch.from_numpy(np.stack((seeds, sequences)).view(np.int64))
        self._seeds, self._sequences = sent(numbers, graph.device)

    def launch(self, logits: torch.Tensor, graph: BatchGraph) -> None:
        """Choose the tokens that stand where `graph.position` says, into `graph.tokens`."""
        if not self._sampler.greedy:
            uniforms(self._seeds, self._sequences, graph.position, self._uniform)
        self._sampler.launch(logits, self._uniform, graph.tokens)


GREEDY: dict[str, Any] = {
    "temperature": 0.0, "top_k": 1, "top_p": 1.0, "min_p": 0.0, "repeat_penalty": 1.0, "frequency_penalty": 0.0,
    "presence_penalty": 0.0, "repeat_last_n": 0, "dry_multiplier": 0.0, "logit_bias": {},
}  # fmt: skip
