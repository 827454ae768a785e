"""From the logits of a prompt to token after token: on the host, or on the device without waiting for each token."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from typing import TYPE_CHECKING

import torch

from kvcli.errors import DoesNotFit, KVError
from kvcli.runtime.cache.layout import KVLayout
from kvcli.runtime.cache.sequence import Sequence
from kvcli.runtime.engine.sampler import Sampler, uniform

if TYPE_CHECKING:
    from kvcli.kernels.gpu.sample import DeviceSampler
    from kvcli.runtime.engine.graph.nexttoken import NextToken


MOST_AHEAD = 2  # see `steps_ahead`


def steps_ahead(layout: KVLayout) -> int:
    """How many steps a device computes behind the one whose tokens are read: so many that it has something to do while
    the host makes lists, where pages end. One where rows too many would take with them what windows, states, evicted or
    noted rows had. Where one too many was the last of a page that is sealed, that page is computed again."""
    plain = not (layout.states or layout.selection or any(g.window or g.retention for g in layout.groups))
    return MOST_AHEAD if plain else 1


def host_tokens(
    logits: torch.Tensor, history: list[int], sampler: Sampler, forward: Callable[[int], torch.Tensor]
) -> Iterator[int]:
    """Token after token, each chosen on the host; the caller appends each to `history` (prompt and answer).

    `forward` runs a token as the next row -> logits [vocab].
    """
    while True:
        yield sampler.sample(logits, history, len(history))
        logits = forward(history[-1])


def graph_tokens(
    graph: NextToken, vocab_size: int, seq: Sequence, history: list[int], sampler: Sampler, logits: torch.Tensor
) -> Generator[int, None, None]:
    """Ids that follow `history`, whose rows `seq` holds and whose last one gave `logits` [vocab].

    The caller appends each id to `history`, and closes the iterator when it wants no more: then `seq` holds no row of a
    token that it did not get.
    """
    from kvcli.kernels.gpu.sample import DeviceSampler

    graph.unbind()  # what the prompt changed is not known to it
    if sampler.constrained or DeviceSampler.supports(sampler.effective):
        yield from host_tokens(logits, history, sampler, lambda t: graph.run(seq, t))
        return
    chooser = DeviceSampler([sampler.effective], vocab_size, graph.device, [history])
    tokens = DeviceTokens(graph, seq, sampler, chooser)
    try:
        yield from tokens.iterate(logits)
    finally:
        tokens.close()


class DeviceRows:
    """Tokens of some rows of one text, chosen on the device where their logits are: each as `sampler` chooses it at its
    position, whatever stands before it."""

    def __init__(self, sampler: Sampler, vocab_size: int, device: torch.device) -> None:
        """`sampler`: one of which `possible` says so."""
        self.sampler, self.vocab_size, self.device = sampler, vocab_size, device
        self._choosers: dict[int, DeviceSampler] = {}

    @staticmethod
    def possible(sampler: Sampler) -> bool:
        """Whether tokens depend on their own logits alone, and a device can choose them."""
        from kvcli.kernels.gpu.penalties import penalises
        from kvcli.kernels.gpu.sample import DeviceSampler

        return not (sampler.constrained or DeviceSampler.supports(sampler.effective) or penalises(sampler.effective))

    def chosen(self, logits: torch.Tensor, first: int) -> Iterator[int]:
        """By logits [n, vocab], of which the first row's token is to stand at position `first`. Raises KVError for a
        row that gives none."""
        out = torch.empty(len(logits), dtype=torch.int64, device=self.device)
        self._of(len(logits)).launch(logits.contiguous(), self._uniforms(first, len(logits)), out)
        yield from map(self._checked, out.tolist())

    def choose(self, logits: torch.Tensor, uniform: torch.Tensor, out: torch.Tensor) -> None:
        """Of one row [vocab], into `out` [1]; nothing waits."""
        self._of(1).launch(logits, uniform, out)

    def _uniforms(self, first: int, n: int) -> torch.Tensor:
        """Random numbers of so many positions, float32 [n]."""
        if not self.sampler.effective["temperature"]:
            return torch.empty(n, device=self.device)
        numbers = [uniform(self.sampler.seed, self.sampler.sequence, first + i) for i in range(n)]
        return torch.tensor(numbers, dtype=torch.float32).to(self.device)

    def _checked(self, token: int) -> int:
        if token < 0:
            raise KVError(self._of(1).error(token), f"check `logit_bias`; {self.sampler.remedy}")
        return token

    def drawn(self, graph: NextToken, seq: Sequence, logits: torch.Tensor, count: int) -> list[int]:
        """So many tokens behind the rows of `seq`, whose last one gave `logits` [vocab]: each but the last is computed
        as the next row, and none is read before all are chosen. Raises DoesNotFit, KVError."""
        first, ids = seq.length, torch.empty(count, dtype=torch.int64, device=self.device)
        uniforms = self._uniforms(first, count)
        graph.unbind()
        for i in range(count):
            self.choose(logits, uniforms[i : i + 1], ids[i : i + 1])
            if i + 1 < count:
                graph.token.copy_(ids[i : i + 1])
                logits = graph.run(seq)
        found = [self._checked(token) for token in ids.tolist()]
        seq.tokens[first:] = found[: seq.length - first]
        return found

    def _of(self, rows: int) -> DeviceSampler:
        from kvcli.kernels.gpu.sample import DeviceSampler

        if rows not in self._choosers:
            each = [self.sampler.effective] * rows
            self._choosers[rows] = DeviceSampler(each, self.vocab_size, self.device)
        return self._choosers[rows]


class DeviceTokens:
    """Tokens that are chosen on the device, while the row of the one before is on its way.

    Iterate for ids. Some rows more than were asked for may be computed (see `steps_ahead`); `close` takes them back.
    """

    def __init__(self, graph: NextToken, seq: Sequence, sampler: Sampler, device_sampler: DeviceSampler) -> None:
        self.graph, self.seq, self.sampler, self.device_sampler = graph, seq, sampler, device_sampler
        self._uniform = torch.zeros(1, device=graph.device)
        self._token = torch.zeros(1, dtype=torch.int64, device=graph.device)  # the newest one
        self._waits = graph.device.type == "cuda"  # else it is Triton's interpreter, which is never behind
        self._ids = torch.zeros(1 + steps_ahead(graph.layout), dtype=torch.int64, pin_memory=self._waits)
        self._events = [torch.cuda.Event() for _ in range(len(self._ids) if self._waits else 0)]
        self._chosen = 0  # tokens chosen so far, read or not
        self._known = seq.length  # rows whose ids were read

    @torch.inference_mode()
    def iterate(self, logits: torch.Tensor) -> Iterator[int]:
        """Ids, the first by the logits [vocab] of the prompt's last row, until the context is full: without end where
        old rows are evicted."""
        position, read, token = self.seq.length, 0, -1
        self._choose(logits, position)
        full: DoesNotFit | None = None  # told when the tokens that were chosen before are out
        while read < self._chosen:
            token = self._read(read)
            if position < self.seq.length:
                self.seq.tokens[position] = token
            read, position = read + 1, position + 1
            self._known = min(position, self.seq.length)
            yield token  # the first one before anything else is launched: it is waited for
            while full is None and self._chosen - read < len(self._ids) and self._has_room:
                try:
                    self._choose(self._next_logits(token if read == self._chosen else None), self.seq.length)
                except DoesNotFit as error:
                    full = error
        if full is not None:
            raise full

    @property
    def _has_room(self) -> bool:
        """Whether another row may be computed: not the last one before rows are selected by score."""
        selector = self.seq.selector
        if selector is not None and self.seq.length + 1 >= selector.due:
            return False
        return bool(self.seq.retention) or self.seq.kept < self.graph.ctx_size

    def _next_logits(self, known: int | None) -> torch.Tensor:
        """Of the row of the newest token; `known`: its id, where it was read."""
        if known is None:
            self.graph.token.copy_(self._token)
        return self.graph.run(self.seq, known)

    def _choose(self, logits: torch.Tensor, position: int) -> None:
        """Choose the token that is to stand at `position`, and send it to the host."""
        if not self.device_sampler.greedy:
            self._uniform.fill_(uniform(self.sampler.seed, self.sampler.sequence, position))
        self.device_sampler.launch(logits, self._uniform, self._token)
        slot = self._chosen % len(self._ids)
        self._ids[slot : slot + 1].copy_(self._token, non_blocking=True)
        if self._waits:
            self._events[slot].record()
        self._chosen += 1

    def _read(self, number: int) -> int:
        if self._waits:
            self._events[number % len(self._ids)].synchronize()
        token = int(self._ids[number % len(self._ids)])
        if token < 0:
            raise KVError(self.device_sampler.error(token), f"check `logit_bias`; {self.sampler.remedy}")
        return token

    def close(self) -> None:
        """Give up rows whose tokens nobody has seen."""
        if self._waits:
            torch.cuda.synchronize(self.graph.device)
        self.seq.rewind_to(self._known)
