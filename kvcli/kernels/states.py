"""`Carried`: the state of one sequence and layer along some rows of a step.

Layers that keep a state compute each row from the one before it, and leave the one behind it.
"""

from __future__ import annotations

from typing import NamedTuple

import torch


class Carried(NamedTuple):
    """Rows [lo, hi) of a step, which follow the state `source` (None = zeros, at the start of a sequence) and leave
    `target`: float32, flat. Both may be the same memory. Later rows of the same sequence come later in lists of these,
    and may begin with what these leave."""

    lo: int
    hi: int
    source: torch.Tensor | None
    target: torch.Tensor
