"""Few rows on a CPU as lists of kernel calls: what a CUDA graph is on a GPU.

A token needs the calls of the token before it, but for its id, its position and the angles of that, as long as the
sequence has the same pages; so do some tokens, guessed ones with a known one, those of as many before them. The second
step in a page of so many rows is computed by the decoder as ever, with its calls noted, and those after it by one call
of C that makes them again over the same buffers: the results are the same to the bit.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from kvcli.kernels.cpu.backend import FEW_ROWS, NativeBackend
from kvcli.kernels.cpu.calls import Calls
from kvcli.runtime.cache.journal import Inputs
from kvcli.runtime.cache.sequence import Part, Step
from kvcli.runtime.model.decoder import Decoder
from kvcli.runtime.model.rope import RopeTable

KEPT = 8  # lists, each of one sequence and number of rows
_HARMLESS = {
    "alias", "aminmax", "as_strided", "detach", "empty", "expand", "item", "lift_fresh", "permute", "select", "slice",
    "split", "squeeze", "t", "transpose", "unbind", "unsqueeze", "view",
    "_local_scalar_dense", "_reshape_alias", "_unsafe_view",
}  # fmt: skip


class _Computed(TorchDispatchMode):
    """Operations by which torch itself computes meanwhile: no list has them."""

    def __init__(self) -> None:
        super().__init__()
        self.found: set[str] = set()

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Or torch would import its compiler with the first operation, to have that leave this class alone."""
        return False

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if (name := func.overloadpacket.__name__) not in _HARMLESS:
            self.found.add(name)
        return func(*args, **(kwargs or {}))


class _Noted:
    """The calls of a step of so many rows that writes into some page of a sequence, with the buffers that they read."""

    def __init__(self, part: Part) -> None:
        self.groups, self.watches, self.usable = part.groups, part.watches, True
        self.states = _carried(part)
        self.inputs: Inputs = {}  # see `StateStep`
        self.ids = torch.zeros(len(part.ids), dtype=torch.int64)
        self.calls: Calls | None = None
        self.hidden: torch.Tensor
        self.tapped: list[torch.Tensor] = []
        self.angles: list[tuple[RopeTable, np.ndarray, np.ndarray]] = []

    def of(self, part: Part) -> bool:
        """Whether they are of this part's pages, and note what it wants noted."""
        return (
            self.watches is part.watches
            and self.states == _carried(part)
            and len(self.groups) == len(part.groups)
            and all(map(lambda a, b: a is b, self.groups, part.groups))
        )

    def run(self, ids: torch.Tensor, position: int) -> torch.Tensor:
        assert self.calls is not None
        self.ids.copy_(ids)
        for part in self.calls.parts:
            part[3] = position
        positions = np.arange(position, position + len(ids), dtype=np.float64)[:, None]
        for rope, cos, sin in self.angles:
            angles = positions * rope.frequencies
            cos[:], sin[:] = np.cos(angles), np.sin(angles)
        self.calls.run()
        return self.hidden.clone()


def _carried(part: Part) -> tuple[object, ...]:
    """Which states its rows carry on, and how far."""
    return (part.states.key, [rows for rows, _, _ in part.states.legs]) if part.states else ()


class StepList:
    """The model's pass over up to FEW_ROWS rows of one sequence at a time. `computed`: what torch itself computes in
    it, for which there are no lists, of one row and of several, as far as that is known."""

    def __init__(self, model: Decoder, ops: NativeBackend) -> None:
        self._model, self._ops = model, ops
        self._vocabulary: int = model.weights.embedding[0].rows
        self._lists: OrderedDict[tuple[int, int], _Noted] = OrderedDict()
        self.computed: dict[bool, set[str]] = {}  # by whether there are several

    def run(self, part: Part) -> torch.Tensor | None:
        """The rows' hidden states, float32 [T, d_model]; None where they are for the decoder to compute."""
        rows = len(part.ids)
        if (
            self.computed.get(rows > 1)
            or rows > FEW_ROWS
            or not part.groups
            or any(shift is not None for shift in part.shifts)
        ):
            return None
        if any(watches[0].queries is not None for watches in part.watches if watches):
            return None
        size, (least, most) = part.groups[0][0].record.page_size, part.ids.aminmax()
        if part.start // size != part.end // size or least < 0 or most >= self._vocabulary:
            return None  # what a full page brings, pages are sealed and means are fixed; or a token is refused
        key = id(part.groups[0]), rows
        noted = self._lists.get(key)
        if noted is None or not noted.of(part):
            self._lists[key] = _Noted(part)
            if len(self._lists) > KEPT:
                self._lists.popitem(last=False)
            return None
        self._lists.move_to_end(key)
        if noted.calls is None and not noted.usable:
            return None
        if part.states:
            part.states.begun = True
            if part.states.inputs is not None:
                part.states.inputs = noted.inputs
        if noted.calls is None:
            return self._note(noted, part)
        self._model.tapped = noted.tapped
        return noted.run(part.ids, part.start)

    def _note(self, noted: _Noted, part: Part) -> torch.Tensor:
        """Compute rows and note the calls."""
        noted.ids.copy_(part.ids)
        states = part.states and replace(part.states, inputs=noted.inputs)
        part = replace(part, ids=noted.ids, states=states)
        if (several := len(part.ids) > 1) not in self.computed:
            with _Computed() as computed:
                calls, noted.hidden = self._hidden(part)
            self.computed[several] = computed.found
        else:
            calls, noted.hidden = self._hidden(part)
        noted.tapped = self._model.tapped
        span = ((part.start, len(part.ids)),)
        for rope in self._model.ropes:
            given, (cos, sin) = rope.handed_over()
            if given == span:
                calls.keep += cos, sin
                noted.angles.append((rope, cos.numpy(), sin.numpy()))
        noted.usable = not calls.others
        noted.calls = calls if noted.usable else None
        return noted.hidden.clone()

    def _hidden(self, part: Part) -> tuple[Calls, torch.Tensor]:
        with self._ops.noted() as calls:
            return calls, self._model.hidden(Step((part,)))
