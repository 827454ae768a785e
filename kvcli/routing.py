"""`Routing`: how the router of a mixture-of-experts layer chooses. No torch."""

from __future__ import annotations

from dataclasses import dataclass

SOFTMAX, SIGMOID, CHOSEN = "softmax", "sigmoid", "chosen"
GATINGS = (SOFTMAX, SIGMOID, CHOSEN)


@dataclass(frozen=True)
class Routing:
    """`used` of `experts` are chosen for each token (arXiv 1701.06538): the highest scores, the first of equal ones.

    | field | |
    |---|---|
    | `gating` | scores are the SOFTMAX or SIGMOID of logits, and weights are scores; CHOSEN: scores are logits, and |
    | | weights the softmax of the chosen ones |
    | `normed` | weights are divided by their sum |
    | `scale` | multiplies weights |
    | `groups`, `groups_used`, | experts are chosen from the groups whose `best` ones, two (arXiv 2412.19437) or one |
    | `best` | (arXiv 2405.04434), have the highest sum of scores |
    """

    experts: int
    used: int
    gating: str = SOFTMAX
    normed: bool = False
    scale: float = 1.0
    groups: int = 1
    groups_used: int = 1
    best: int = 2
