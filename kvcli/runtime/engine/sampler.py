"""Logits and history -> the next token's id.

Order: penalties (repetition as in CTRL, arXiv 1909.05858; presence; frequency; DRY), logit bias, top-k, top-p
(arXiv 1904.09751), min-p (arXiv 2407.01082), temperature, draw. Filters look at probabilities before
temperature; ties go to the lowest id, so the set that is kept depends on nothing but the logits.

The draw walks the kept ids in ascending order with one uniform number, a pure function of (seed, sequence,
position): Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011), folded to a
float as `tl.rand` of triton does, so that a kernel can draw the same token.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from kvcli.errors import KVError
from kvcli.options import SampleOptions
from kvcli.runtime.engine import samplesettings
from kvcli.runtime.engine.dry import Dry

if TYPE_CHECKING:
    from kvcli.runtime.text.grammar import Constraint

_BLOCK = 64  # logits in a block of the two-level search
_NUCLEUS_GUESS = 1024  # top-p over a whole vocabulary sorts this many first


def philox4x32(counter: tuple[int, int, int, int], key: tuple[int, int]) -> tuple[int, int, int, int]:
    """Ten rounds of Philox4x32 over 32-bit words."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        product0, product2 = 0xD2511F53 * c0, 0xCD9E8D57 * c2
        c0, c1 = (product2 >> 32) ^ c1 ^ k0, product2 & 0xFFFFFFFF
        c2, c3 = (product0 >> 32) ^ c3 ^ k1, product0 & 0xFFFFFFFF
        k0, k1 = (k0 + 0x9E3779B9) & 0xFFFFFFFF, (k1 + 0xBB67AE85) & 0xFFFFFFFF
    return c0, c1, c2, c3


def uniform(seed: int, sequence: int, position: int) -> float:
    """The float32 in [0, 1) of this seed (64 bits), sequence (32 bits) and position (64 bits).

    For sequence 0 it is triton's `tl.rand(seed, position)`: 31 bits of the first word, folded at the sign.
    """
    key = (seed & 0xFFFFFFFF, seed >> 32 & 0xFFFFFFFF)
    counter = (position & 0xFFFFFFFF, position >> 32 & 0xFFFFFFFF, sequence & 0xFFFFFFFF, 0)
    word = philox4x32(counter, key)[0]
    folded = word if word < 1 << 31 else 0xFFFFFFFF - word
    return float(np.float32(folded) * np.float32(4.6566127342e-10))


class Sampler:
    """Chooses tokens: the same arguments give the same token. A history that was given before has changed by appending
    only."""

    def __init__(
        self,
        options: SampleOptions,
        defaults: Mapping[str, float],
        vocab_size: int,
        token_bytes: Callable[[int], bytes] = lambda token: b"",
        remedy: str = "the model file may be damaged; pull it again",
        constraint: Constraint | None = None,
    ) -> None:
        """`defaults`: the model's own, see `sampling.settled`, which also says what is raised. `token_bytes`: what a
        token adds to the text, for DRY's sequence breakers. `remedy`: what to do where logits are not numbers.
        `constraint`: what tokens follow while `follows` is set; the caller tells it of each. Before, nothing ends."""
        found = samplesettings.settled(options, defaults, vocab_size)
        self.vocab_size, self.seed, self.sequence = vocab_size, found.seed, found.sequence
        self.effective: dict[str, Any] = {f.name: getattr(found, f.name) for f in fields(found)}
        """Every value in force, by option name, with the seed that is used."""
        self.logprobs: list[tuple[int, float]] | None = None
        """Of the token that was sampled last, then of the likeliest ones, where they are asked for: natural logarithms
        by the model's own distribution."""
        self._bias, self.remedy = found.logit_bias, remedy
        self.constraint, self.follows = constraint, constraint is not None
        dry = found.dry_multiplier > 0 and found.dry_penalty_last_n != 0
        self._dry = Dry(self.effective, token_bytes) if dry else None

    @property
    def constrained(self) -> bool:
        """Whether not every token may come next."""
        return self.constraint is not None and not self.constraint.waits

    def sample(self, logits: Tensor, history: Sequence[int], position: int) -> int:
        """The token after `history` (prompt and generated ids), to stand at absolute `position`.

        `logits`: [vocab_size], on any device; not changed. Raises KVError if they are not numbers, or if bias
        rules out every token.
        """
        token = self._drawn(_Blocks(self._adjusted(logits, history), self.remedy), position)
        if (most := self.effective["logprobs"]) is not None:
            self.logprobs = _logprobs(logits, token, most)
        return token

    def _drawn(self, found: _Blocks, position: int) -> int:
        if self.effective["temperature"] == 0:
            return found.argmax()
        ids, weights = self._weighted(found)
        cumulative = torch.from_numpy(weights).cumsum(0).numpy()  # six times quicker than numpy's where they are many
        target = cumulative[-1] * uniform(self.seed, self.sequence, position)
        return int(ids[cumulative.searchsorted(target, side="right")])

    def distribution(self, logits: Tensor, history: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
        """What `sample` draws from: ids int64 [n] in ascending order and their probabilities, float64 [n]."""
        found = _Blocks(self._adjusted(logits, history), self.remedy)
        if self.effective["temperature"] == 0:
            return np.array([found.argmax()]), np.ones(1)
        ids, weights = self._weighted(found)
        return ids, weights / weights.sum()

    def _adjusted(self, logits: Tensor, history: Sequence[int]) -> Tensor:
        """Penalties, bias and what a grammar forbids, on a copy if there are any. float32 [vocab_size]."""
        if self.constraint is not None and self.constrained:  # found while a GPU may still be at work
            allowed = self.constraint.allowed() if self.follows else self.constraint.unfinished
            logits = logits.masked_fill(torch.from_numpy(~allowed).to(logits.device), -math.inf)
        if logits.shape != (self.vocab_size,):
            raise ValueError(f"logits are {tuple(logits.shape)}, not [{self.vocab_size}]")
        penalised = self._penalised(logits.float(), history)
        if self._dry is not None:
            ids, amounts = map(torch.from_numpy, self._dry.penalties(history))
            penalised = penalised.index_add(0, ids.to(logits.device), amounts.to(logits.device), alpha=-1)
        if not self._bias:
            return penalised
        ids = torch.tensor(list(self._bias), device=logits.device)
        bias = torch.tensor(list(self._bias.values()), device=logits.device)
        return penalised.index_add(0, ids, bias)

    def _penalised(self, logits: Tensor, history: Sequence[int]) -> Tensor:
        """CTRL's repetition penalty on each token seen, then count * frequency + presence subtracted."""
        repeat, last_n = self.effective["repeat_penalty"], self.effective["repeat_last_n"]
        frequency, presence = self.effective["frequency_penalty"], self.effective["presence_penalty"]
        recent = history if last_n < 0 else history[max(0, len(history) - last_n) :]
        if not recent or (repeat == 1 and frequency == 0 and presence == 0):
            return logits
        seen = Counter(recent)
        ids = torch.tensor(list(seen), device=logits.device)
        counts = torch.tensor(list(seen.values()), dtype=torch.float64, device=logits.device)
        values = logits[ids].double()  # then the results are rounded once, on any device
        values = torch.where(values > 0, values / repeat, values * repeat).float()
        return logits.index_copy(0, ids, values - (counts * frequency + presence).float())

    def _weighted(self, logits: _Blocks) -> tuple[np.ndarray, np.ndarray]:
        """Ids that pass the filters, ascending, and their unnormalised float64 weights after temperature."""
        top_k, top_p, min_p = (self.effective[name] for name in ("top_k", "top_p", "min_p"))
        ids, values = np.arange(self.vocab_size), logits.values
        if 0 < top_k < self.vocab_size:
            ids = logits.largest(top_k)
            values = values[ids]
        values = values.astype(np.float64) - logits.top
        if top_p < 1:
            kept = _nucleus(values, top_p)
            ids, values = ids[kept], values[kept]
        if min_p > 0:
            kept = np.exp(values) >= min_p
            ids, values = ids[kept], values[kept]
        return ids, np.exp(values / self.effective["temperature"])


class _Blocks:
    """Logits [v] on the host with the maximum of each block of 64, `top` being the largest of all. Raises KVError if
    they are not numbers or all -inf.

    Steps over the few blocks that matter are numpy's: they take less time than calling torch.
    """

    def __init__(self, logits: Tensor, remedy: str = "") -> None:
        logits = logits.cpu()
        self.values: np.ndarray = logits.numpy()
        if padding := -len(logits) % _BLOCK:
            logits = torch.nn.functional.pad(logits, (0, padding), value=-math.inf)
        blocks = logits.view(-1, _BLOCK)
        self._blocks: np.ndarray = blocks.numpy()
        self._maxima: np.ndarray = blocks.amax(1).numpy()  # ten times quicker than numpy's
        self.top = float(self._maxima.max())  # NaN if any logit is
        if self.top == -math.inf:
            raise KVError("no token is left to choose from: every logit is -inf", "check `logit_bias`")
        if not math.isfinite(self.top):
            raise KVError(f"the model's output is not a number (largest logit {self.top})", remedy)

    def argmax(self) -> int:
        """The lowest id of the largest logit."""
        block = int(self._maxima.argmax())
        return block * _BLOCK + int(self._blocks[block].argmax())

    def largest(self, k: int) -> np.ndarray:
        """Ids of the k largest values, ascending; among equals at the edge the lowest ids. 0 < k <= v.

        The k-th largest value is found in the k blocks with the largest maxima: all larger values lie in them.
        """
        least = _kth_largest(self._maxima, min(k, len(self._maxima)))
        edge = _kth_largest(self._blocks[self._maxima >= least].ravel(), k)
        alive = (self._maxima >= edge).nonzero()[0]
        block, place = (self._blocks[alive] >= edge).nonzero()
        ids = alive[block] * _BLOCK + place
        if surplus := len(ids) - k:
            at_edge = (self._blocks.ravel()[ids] == edge).nonzero()[0]  # those of the padding, if any, come last
            ids = np.delete(ids, at_edge[-surplus:])
        return ids


def _logprobs(logits: Tensor, token: int, most: int) -> list[tuple[int, float]]:
    """Ids, and logarithms of the softmax of `logits` [v]: `token`, then the `most` likeliest ones, of equals the lowest
    id first."""
    found = _Blocks(logits.float())
    values = found.values.astype(np.float64)
    values -= found.top + math.log(np.exp(values - found.top).sum())
    ids = found.largest(min(most, len(values))) if most else np.zeros(0, np.int64)
    ids = ids[(-values[ids]).argsort(kind="stable")]
    return [(token, float(values[token])), *zip(ids.tolist(), values[ids].tolist(), strict=True)]


def _kth_largest(values: np.ndarray, k: int) -> Any:
    """The k-th largest of values [n], 0 < k <= n."""
    return np.partition(values, len(values) - k)[-k]


def _nucleus(values: np.ndarray, top_p: float) -> np.ndarray:
    """Ascending indices of the fewest largest values whose softmax sums to `top_p`; among equals at the edge the
    lowest. float64 [n], max 0."""
    weights = np.exp(values)
    total, n = weights.sum(), min(_NUCLEUS_GUESS, len(values))
    while True:
        edge = _kth_largest(values, n)
        indices = (values >= edge).nonzero()[0]
        indices = indices[(-values[indices]).argsort(kind="stable")]
        mass = (weights[indices] / total).cumsum()
        n_kept = int(mass.searchsorted(top_p)) + 1
        if n_kept <= n or len(indices) == len(values):
            return np.sort(indices[:n_kept])
        n = min(16 * n, len(values))
