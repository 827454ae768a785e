"""`StateLayout`: the bytes of states, of layers that keep one instead of rows. Pure integers, no torch.

Rows can be cut anywhere; a state is that of all tokens so far and of no others. So a sequence has a *live* state, which
every step changes, and *checkpoints*: states as they were at the ends of pages, which later prompts go on from.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvcli.runtime.config import RECURRENT, LayerConfig

CHECKPOINT_BYTES = 512 << 20  # all checkpoints of an engine take about this
LEAST_CHECKPOINTS, MOST_CHECKPOINTS = 3, 64  # one of them is for the state before guesses
CHECKPOINT_ROWS = 2048  # a long prompt leaves one behind each of so many rows
GUESSED_ROWS = 16  # most rows of a sequence that may be taken back one by one: see `Journal`


@dataclass(frozen=True)
class StateLayout:
    """An arena of states: those of all such `layers` together are a page of `page_bytes`. `limit`: most pages that
    there may be, None = any number."""

    layers: tuple[int, ...]
    page_bytes: int
    page_size: int  # rows from one possible checkpoint to the next
    limit: int | None = None

    kind = RECURRENT
    by_layer = False
    windowed = False
    pages_per_chunk = 1
    kept_pages = 0
    summarized = False

    @property
    def held_bytes(self) -> int:
        """Bytes of memory that a page takes."""
        return self.page_bytes

    @property
    def layer_bytes(self) -> int:
        """Bytes of one layer's state. All have as many in models that can be run."""
        return self.page_bytes // len(self.layers)

    def committed_bytes(self, pages: int) -> int:
        """Bytes that the pool has committed once `pages` pages were in use at a time."""
        return pages * self.page_bytes

    def rows_in_use(self, number: int, tokens: int) -> int:
        """Rows of page `number` that are of use behind `tokens`: those that its state stands for."""
        return self.page_size

    def left_by(self, tokens: int) -> int:
        """How many checkpoints a prompt of so many tokens leaves: regular ones, and the newest two."""
        ends = {tokens // self.page_size * self.page_size, (tokens - 1) // self.page_size * self.page_size}
        ends.update(range(CHECKPOINT_ROWS, tokens + 1, CHECKPOINT_ROWS))
        return min(self.limit or 0, len(ends - {0}))

    def checkpoint(self, length: int) -> int | None:
        """The number of the checkpoint behind the first `length` rows; None where there can be none."""
        return length // self.page_size - 1 if length and length % self.page_size == 0 else None


def checkpoints_of(state_bytes: int) -> int:
    """How many checkpoints an engine has room for, each of so many bytes."""
    return max(LEAST_CHECKPOINTS, min(MOST_CHECKPOINTS, CHECKPOINT_BYTES // max(1, state_bytes)))


def state_arenas(layers: tuple[LayerConfig, ...], page_size: int) -> tuple[StateLayout, ...]:
    """The arenas of live states and of checkpoints; none where no layer has a state."""
    stateful = tuple(i for i, layer in enumerate(layers) if layer.state_bytes)
    if not stateful:
        return ()
    size = sum(layers[i].state_bytes for i in stateful)
    return StateLayout(stateful, size, page_size), StateLayout(stateful, size, page_size, checkpoints_of(size))
