"""What changes logits before a token is chosen on the device: tokens that were seen, and biases."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor


def penalises(effective: Mapping[str, Any]) -> bool:
    """Whether tokens that were seen lose by it."""
    penalties = (effective["repeat_penalty"], effective["frequency_penalty"], effective["presence_penalty"])
    return effective["repeat_last_n"] != 0 and penalties != (1, 0, 0)


class Seen:
    """The tokens that penalties look back on: how often each is among them, and the last ones in a ring, of each row.

    `last_n` of them; 0 = all, and then no ring is needed.
    """

    def __init__(
        self,
        each: Sequence[Mapping[str, Any]],
        vocab: int,
        device: torch.device | str,
        histories: Sequence[Sequence[int]],
    ) -> None:
        last_n = [max(0, x["repeat_last_n"]) for x in each]
        recent = [list(history[-n:]) for history, n in zip(histories, last_n, strict=True)]  # all where that is 0
        self.counts = torch.zeros(len(each), vocab, dtype=torch.int32, device=device)
        for row, tokens in enumerate(recent):
            self.counts[row] = torch.bincount(torch.tensor(tokens, dtype=torch.int64), minlength=vocab)
        ring = torch.full((len(each), max(1, *last_n)), -1)  # without a window nobody reads it
        for row, tokens in enumerate(recent):
            if last_n[row]:
                ring[row, : len(tokens)] = torch.tensor(tokens, dtype=torch.int64)
        self.ring = ring.to(device)
        slots = [len(tokens) % n if n else 0 for tokens, n in zip(recent, last_n, strict=True)]
        self.slot = torch.tensor(slots, device=device)  # of the oldest token, or free
        self.last_n = torch.tensor(last_n, dtype=torch.int32, device=device)
        names = ("repeat_penalty", "frequency_penalty", "presence_penalty")
        penalties = [[x[name] for name in names] if penalises(x) else [1.0, 0.0, 0.0] for x in each]
        self.penalties = torch.tensor(penalties, dtype=torch.float64, device=device)


def dense_bias(each: Sequence[Mapping[int, float]], vocab: int, device: torch.device | str) -> Tensor | None:
    """float32 [n, vocab], or None where no token has a bias."""
    if not any(each):
        return None
    rows = [row for row, bias in enumerate(each) for _ in bias]
    tokens = [token for bias in each for token in bias]
    places = torch.tensor([rows, tokens], dtype=torch.int64).to(device)
    values = torch.tensor([value for bias in each for value in bias.values()], dtype=torch.float32).to(device)
    dense = torch.zeros(len(each), vocab, device=device)
    dense[places[0], places[1]] = values
    return dense
