"""The next token chosen on the device, the same one as `kvcli.runtime.sampler.Sampler` chooses on the host.

Two kernels. `_maxima` takes the largest logit of every block. Greedy: `_greedy` looks into the first best block.
Otherwise `_draw`, one program: a threshold on the blocks, the candidates above it, the k best of them in ascending
order of ids (of equals at the edge those with the lowest ids), then top-p, min-p, temperature and the draw in
float64 as the sampler does them.

Floats are compared as integers of the same order ("keys"): NaN is the largest, -0.0 equals 0.0.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

MAX_TOP_K = 1024
NOT_A_NUMBER, NOTHING_LEFT = -1, -2  # written in place of a token: NaN or inf among the logits; all are -inf
_MOST_BLOCKS = 4096  # keys that one program holds in registers
_PROGRAM = 1024  # logits that a program of `_maxima` reads
_CHUNK = 1024  # candidates that `_draw` looks at together

_NAN = tl.constexpr(0x7FFFFFFF)
_INF = tl.constexpr(0x7F800000)
_MINUS_INF = tl.constexpr(-0x7F800001)
_LEAST = tl.constexpr(-0x80000000)  # below the key of every number


class DeviceSampler:
    """Sampling with fixed options over a vocabulary of `vocab` tokens. Its buffers are allocated once, here.

    `effective`: `Sampler.effective`, for which `supports` says "" (ValueError otherwise).
    """

    def __init__(self, effective: Mapping[str, Any], vocab: int, device: torch.device | str) -> None:
        reason = self.supports(effective)
        if reason:
            raise ValueError(reason)
        self.vocab, self.greedy = vocab, effective["temperature"] == 0
        self.k = min(effective["top_k"], vocab)
        self.top_p, self.min_p = effective["top_p"] < 1, effective["min_p"] > 0
        self.block = max(8, triton.next_power_of_2(triton.cdiv(vocab, _MOST_BLOCKS)))
        self.n_blocks = triton.cdiv(vocab, self.block)
        self.bias = _dense_bias(effective.get("logit_bias", {}), vocab, device)
        rows = triton.cdiv(vocab, _PROGRAM) * (_PROGRAM // self.block)
        self.maxima = torch.empty(rows, dtype=torch.int32, device=device)
        if self.greedy:
            return
        numbers = [effective["temperature"], effective["top_p"], effective["min_p"]]
        self.numbers = torch.tensor(numbers, dtype=torch.float64, device=device)
        self.width = max(16, triton.next_power_of_2(self.k))
        self.blocks = torch.empty(self.n_blocks, dtype=torch.int32, device=device)
        self.candidates = torch.empty(2, vocab, dtype=torch.int32, device=device)  # keys, ids
        self.best = torch.empty(2, self.width, dtype=torch.int32, device=device)
        self.order = torch.empty(self.width, dtype=torch.int64, device=device)
        self.shares = torch.empty(self.width, dtype=torch.float64, device=device)

    @staticmethod
    def supports(effective: Mapping[str, Any]) -> str:
        """Why the host must sample with these options; "" = the device can."""
        neutral = effective["repeat_penalty"] == 1 and not effective["presence_penalty"]
        if effective["repeat_last_n"] != 0 and not (neutral and not effective["frequency_penalty"]):
            return "penalties need the tokens so far"
        if effective["temperature"] > 0 and not 1 <= effective["top_k"] <= MAX_TOP_K:
            return f"top-k is {effective['top_k']}, on the device it is 1 to {MAX_TOP_K}"
        return ""

    @staticmethod
    def error(code: int) -> str:
        """What a negative code in place of a token says."""
        if code == NOTHING_LEFT:
            return "no token is left to choose from: every logit is -inf"
        return "the model's output is not a number"

    def launch(self, logits: Tensor, uniform: Tensor, out: Tensor) -> None:
        """Write the token after float32 `logits` [vocab] to int64 `out` [1]; `uniform`: float32 [1], unused if greedy.

        All on the device; nothing waits, nothing is allocated: it can be captured in a graph. A negative `out`
        (NOT_A_NUMBER, NOTHING_LEFT) stands for the `error` that `Sampler.sample` raises on these logits.
        """
        biased = self.bias is not None
        bias = logits if self.bias is None else self.bias
        _maxima[(triton.cdiv(self.vocab, _PROGRAM),)](
            logits, bias, self.maxima, self.vocab, BLOCK=self.block, ROWS=_PROGRAM // self.block, BIASED=biased
        )
        held = triton.next_power_of_2(self.n_blocks)
        shape = {"BLOCK": self.block, "HELD": held, "BIASED": biased, "num_warps": 8}
        if self.greedy:
            _greedy[(1,)](logits, bias, self.maxima, out, self.vocab, self.n_blocks, **shape)
            return
        _draw[(1,)](
            logits, bias, self.maxima, self.numbers, uniform, out, self.blocks, *self.candidates, *self.best,
            self.order, self.shares, self.vocab, self.n_blocks, self.k,
            WIDTH=self.width, CHUNK=max(_CHUNK, self.width), TOP_P=self.top_p, MIN_P=self.min_p, **shape,
        )  # fmt: skip


def _dense_bias(bias: Mapping[int, float], vocab: int, device: torch.device | str) -> Tensor | None:
    """float32 [vocab], or None where no token has a bias."""
    if not bias:
        return None
    dense = torch.zeros(vocab)
    dense[list(bias)] = torch.tensor(list(bias.values()))
    return dense.to(device)


@triton.jit
def _key(x):
    """float32 -> int32 of the same order."""
    bits = tl.where(x == 0, 0.0, x).to(tl.int32, bitcast=True)
    return tl.where(x != x, _NAN, bits ^ ((bits >> 31) & _NAN))


@triton.jit
def _value(key):
    """The number of a key, as float64."""
    return (key ^ ((key >> 31) & _NAN)).to(tl.float32, bitcast=True).to(tl.float64)


@triton.jit
def _keys(logits, bias, ids, valid, BIASED: tl.constexpr):
    """Keys of logits after bias; _LEAST where not valid."""
    x = tl.load(logits + ids, mask=valid, other=0.0)
    if BIASED:
        x += tl.load(bias + ids, mask=valid, other=0.0)
    return tl.where(valid, _key(x), _LEAST)


@triton.jit
def _checked(token, top):
    """The token, or the code of what is wrong with logits whose largest key is `top`."""
    token = tl.where(top >= _INF, -1, token)
    return tl.where(top <= _MINUS_INF, -2, token)


@triton.jit
def _maxima(logits, bias, maxima, vocab, BLOCK: tl.constexpr, ROWS: tl.constexpr, BIASED: tl.constexpr):
    """The largest key of each block: ROWS of them a program."""
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    ids = rows[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    tl.store(maxima + rows, tl.max(_keys(logits, bias, ids, ids < vocab, BIASED), axis=1))


@triton.jit
def _greedy(logits, bias, maxima, out, vocab, n_blocks, BLOCK: tl.constexpr, HELD: tl.constexpr, BIASED: tl.constexpr):
    """The lowest id of the largest logit."""
    rows = tl.arange(0, HELD)
    keys = tl.load(maxima + rows, mask=rows < n_blocks, other=_LEAST)
    top = tl.max(keys, axis=0)
    ids = tl.min(tl.where(keys == top, rows, HELD), axis=0) * BLOCK + tl.arange(0, BLOCK)
    found = _keys(logits, bias, ids, ids < vocab, BIASED) == top
    token = tl.min(tl.where(found, ids, vocab), axis=0)
    tl.store(out, _checked(token, top).to(tl.int64))


@triton.jit
def _count(keys, n, least, CHUNK: tl.constexpr):
    """How many of n keys in memory are `least` or more."""
    total = 0
    start = 0
    while start < n:
        at = start + tl.arange(0, CHUNK)
        found = tl.load(keys + at, mask=at < n, other=_LEAST) >= least
        total += tl.sum((found & (at < n)).to(tl.int32), axis=0)
        start += CHUNK
    return total


@triton.jit
def _candidates(logits, bias, blocks, n_blocks, keys, ids, least, vocab, BLOCK: tl.constexpr, CHUNK: tl.constexpr,
                BIASED: tl.constexpr):  # fmt: skip
    """Write key and id of every logit in the listed blocks whose key is `least` or more, ascending; their number."""
    found = 0
    start = 0
    while start < n_blocks * BLOCK:
        at = start + tl.arange(0, CHUNK)
        valid = at < n_blocks * BLOCK
        token = tl.load(blocks + at // BLOCK, mask=valid, other=0) * BLOCK + at % BLOCK
        valid = valid & (token < vocab)
        key = _keys(logits, bias, token, valid, BIASED)
        valid = valid & (key >= least)
        place = found + tl.cumsum(valid.to(tl.int32), axis=0) - 1
        tl.store(keys + place, key, mask=valid)
        tl.store(ids + place, token, mask=valid)
        found += tl.sum(valid.to(tl.int32), axis=0)
        start += CHUNK
    return found


@triton.jit
def _select(keys, ids, n, edge, k, best_keys, best_ids, CHUNK: tl.constexpr):
    """Write the k of n candidates with the largest keys: all above `edge`, of those at it the first."""
    spare = k - _count(keys, n, edge + 1, CHUNK)
    found = 0
    start = 0
    while start < n:
        at = start + tl.arange(0, CHUNK)
        key = tl.load(keys + at, mask=at < n, other=_LEAST)
        equal = ((key == edge) & (at < n)).to(tl.int32)
        taken = ((key > edge) & (at < n)) | ((equal != 0) & (tl.cumsum(equal, axis=0) <= spare))
        place = found + tl.cumsum(taken.to(tl.int32), axis=0) - 1
        tl.store(best_keys + place, key, mask=taken)
        tl.store(best_ids + place, tl.load(ids + at, mask=taken, other=0), mask=taken)
        spare -= tl.sum(equal, axis=0)
        found += tl.sum(taken.to(tl.int32), axis=0)
        start += CHUNK


@triton.jit
def _nucleus(key, weight, top, top_p, order, shares, k, WIDTH: tl.constexpr):
    """Which of the k best belong to the fewest whose shares sum to `top_p`; equals in order of their ids.

    The sum is taken one by one, as the sampler does: equal logits meet a round `top_p` exactly.
    """
    at = tl.arange(0, WIDTH)
    ranked = (key.to(tl.int64) << 32) | (WIDTH - 1 - at).to(tl.int64)
    best_first = tl.sort(ranked, descending=True)
    tl.store(order + at, best_first)
    share = tl.exp(_value((best_first >> 32).to(tl.int32)) - _value(top)) / tl.sum(weight, axis=0)
    tl.store(shares + at, share)
    tl.debug_barrier()
    n = 0
    mass = tl.load(shares) * 0.0
    while (n < k) & (mass < top_p):
        mass += tl.load(shares + n)
        n += 1
    return ranked >= tl.load(order + tl.maximum(n - 1, 0))  # n is 0 where logits are not numbers


@triton.jit(do_not_specialize=["k"])
def _draw(
    logits, bias, maxima, numbers, uniform, out, blocks, keys, ids, best_keys, best_ids, order, shares,
    vocab, n_blocks, k,
    BLOCK: tl.constexpr, HELD: tl.constexpr, WIDTH: tl.constexpr, CHUNK: tl.constexpr,
    TOP_P: tl.constexpr, MIN_P: tl.constexpr, BIASED: tl.constexpr,
):  # fmt: skip
    """Temperature, top-k and the other filters, the draw. `numbers`: temperature, top-p, min-p as float64."""
    rows = tl.arange(0, HELD)
    largest = tl.load(maxima + rows, mask=rows < n_blocks, other=_LEAST)
    top = tl.max(largest, axis=0)
    # The upper half of the bits of the k-th largest maximum: k logits or more are at least that.
    coarse = tl.where(tl.sum((largest >= 0).to(tl.int32), axis=0) >= k, 0, _LEAST)
    for step in range(15):
        trial = coarse + (0x40000000 >> step)
        coarse = tl.where(tl.sum((largest >= trial).to(tl.int32), axis=0) >= k, trial, coarse)
    taken = (largest >= coarse) & (rows < n_blocks)
    tl.store(blocks + tl.cumsum(taken.to(tl.int32), axis=0) - 1, rows, mask=taken)
    tl.debug_barrier()
    n_taken = tl.sum(taken.to(tl.int32), axis=0)
    n = _candidates(logits, bias, blocks, n_taken, keys, ids, coarse, vocab, BLOCK, CHUNK, BIASED)
    tl.debug_barrier()
    low, high = coarse.to(tl.int64), top.to(tl.int64)  # the k-th largest key is between
    while low < high:
        middle = low + (high - low + 1) // 2
        enough = _count(keys, n, middle.to(tl.int32), CHUNK) >= k
        low = tl.where(enough, middle, low)
        high = tl.where(enough, high, middle - 1)
    _select(keys, ids, n, low.to(tl.int32), k, best_keys, best_ids, CHUNK)
    tl.debug_barrier()

    at = tl.arange(0, WIDTH)
    key = tl.load(best_keys + at, mask=at < k, other=_MINUS_INF)
    value = _value(key) - _value(top)
    weight = tl.exp(value)
    kept = at < k
    if TOP_P:
        kept = kept & _nucleus(key, weight, top, tl.load(numbers + 1), order, shares, k, WIDTH)
    if MIN_P:
        kept = kept & (weight >= tl.load(numbers + 2))
    weight = tl.where(kept, tl.exp(value / tl.load(numbers)), 0.0)
    cumulative = tl.cumsum(weight, axis=0)
    target = tl.sum(tl.where(at == WIDTH - 1, cumulative, 0.0), axis=0) * tl.load(uniform).to(tl.float64)
    possible = kept & (weight > 0)
    last = tl.max(tl.where(possible, at, 0), axis=0)
    chosen = tl.min(tl.where(possible & (cumulative > target), at, last), axis=0)
    tl.store(out, _checked(tl.load(best_ids + chosen), top).to(tl.int64))
