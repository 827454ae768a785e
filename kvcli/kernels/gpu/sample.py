"""The next token chosen on the device, the same one as `kvcli.runtime.engine.sampler.Sampler` chooses on the host.

Two kernels. `_maxima` takes the largest logit of every block. Greedy: `_greedy` looks into the first best block.
Otherwise `_draw`, one program: a threshold on the blocks, the candidates above it, the k best of them in ascending
order of ids (of equals at the edge those with the lowest ids), then top-p, min-p, temperature and the draw in
float64 as the sampler does them. Logits are penalised and biased wherever they are read; for penalties the device
counts the tokens that it has chosen itself. The rows of several sequences are chosen for side by side, each with
options of its own.

Floats are compared as integers of the same order ("keys"): NaN is the largest, -0.0 equals 0.0.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvcli.kernels.gpu.launching import launch
from kvcli.kernels.gpu.penalties import Seen, dense_bias, penalises

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
    """Sampling with fixed options of each of n rows over a vocabulary of `vocab` tokens. Its buffers are allocated
    once, here.

    `each`: `Sampler.effective` of the rows, for which `supports` says "" (ValueError otherwise). `histories`: the
    tokens so far; those that `launch` chooses follow them.
    """

    def __init__(
        self,
        each: Sequence[Mapping[str, Any]],
        vocab: int,
        device: torch.device | str,
        histories: Sequence[Sequence[int]] = (),
    ) -> None:
        if reason := next(filter(None, map(self.supports, each)), ""):
            raise ValueError(reason)
        n, self.vocab, self.greedy = len(each), vocab, all(x["temperature"] == 0 for x in each)
        self.rows = n
        self.block = max(8, triton.next_power_of_2(triton.cdiv(vocab, _MOST_BLOCKS)))
        self.n_blocks = triton.cdiv(vocab, self.block)
        self.bias = dense_bias([x["logit_bias"] for x in each], vocab, device)
        self.seen = Seen(each, vocab, device, histories or [()] * n) if any(map(penalises, each)) else None
        blocks = triton.cdiv(vocab, _PROGRAM) * (_PROGRAM // self.block)
        self.maxima = torch.empty(n, blocks, dtype=torch.int32, device=device)
        if self.greedy:
            return
        # The largest logit is the best one of one, whatever the temperature.
        numbers = [(x["temperature"], x["top_p"], x["min_p"]) if x["temperature"] else (1.0, 1.0, 0.0) for x in each]
        most = [min(x["top_k"], vocab) if x["temperature"] else 1 for x in each]
        self.top_p, self.min_p = any(x[1] < 1 for x in numbers), any(x[2] > 0 for x in numbers)
        self.numbers = torch.tensor(numbers, dtype=torch.float64, device=device)
        self.k = torch.tensor(most, dtype=torch.int32, device=device)
        self.width = max(16, triton.next_power_of_2(max(most)))
        self.blocks = torch.empty(n, self.n_blocks, dtype=torch.int32, device=device)
        self.candidates = torch.empty(2, n, vocab, dtype=torch.int32, device=device)  # keys, ids
        self.best = torch.empty(2, n, self.width, dtype=torch.int32, device=device)
        self.order = torch.empty(n, self.width, dtype=torch.int64, device=device)
        self.shares = torch.empty(n, self.width, dtype=torch.float64, device=device)

    @staticmethod
    def supports(effective: Mapping[str, Any]) -> str:
        """Why the host must sample with these options; "" = the device can."""
        if effective["dry_multiplier"] > 0 and effective["dry_penalty_last_n"] != 0:
            return "DRY compares all of the text"
        if effective.get("grammar"):
            return "a grammar says what may come next"
        if effective.get("logprobs") is not None:
            return "log probabilities are asked for"
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
        """Write the tokens after float32 `logits` [n, vocab], contiguous, to int64 `out` [n]; `uniform`: float32 [n],
        unused if all are greedy.

        All on the device; nothing waits, nothing is allocated: it can be captured in a graph. A negative `out`
        (NOT_A_NUMBER, NOTHING_LEFT) stands for the `error` that `Sampler.sample` raises on these logits.
        """
        n, room = self.rows, self.maxima.shape[1]
        changes = {"BIASED": self.bias is not None, "PENALISED": self.seen is not None}
        bias = logits if self.bias is None else self.bias
        counts, penalties = (logits, logits) if self.seen is None else (self.seen.counts, self.seen.penalties)
        raw = logits, bias, counts, penalties
        launch(_maxima, (triton.cdiv(self.vocab, _PROGRAM), n))(
            *raw, self.maxima, self.vocab, room, BLOCK=self.block, ROWS=_PROGRAM // self.block, **changes
        )
        held = triton.next_power_of_2(self.n_blocks)
        shape = {"BLOCK": self.block, "HELD": held, "num_warps": 8, **changes}
        window: tuple[Tensor | int, ...] = logits, logits, logits, 1
        if self.seen is not None:
            window = self.seen.ring, self.seen.slot, self.seen.last_n, self.seen.ring.shape[1]
        counted = *window, self.vocab, self.n_blocks, room
        if self.greedy:
            launch(_greedy, (n,))(*raw, self.maxima, out, *counted, **shape)
            return
        launch(_draw, (n,))(
            *raw, self.maxima, self.numbers, uniform, out, self.k, self.blocks, *self.candidates, *self.best,
            self.order, self.shares, *counted,
            WIDTH=self.width, CHUNK=max(_CHUNK, self.width), TOP_P=self.top_p, MIN_P=self.min_p, **shape,
        )  # fmt: skip


@triton.jit
def _uniforms(seeds, sequences, position, out, n, N: tl.constexpr):
    row = tl.arange(0, N)
    there = row < n
    at = tl.load(position + row, mask=there, other=0)
    low, high = (at & 0xFFFFFFFF).to(tl.uint32), (at >> 32).to(tl.uint32)
    sequence = tl.load(sequences + row, mask=there, other=0).to(tl.uint32)
    word, _, _, _ = tl.philox(tl.load(seeds + row, mask=there, other=0), low, high, sequence, low * 0)
    tl.store(out + row, tl.uint_to_uniform_float(word), mask=there)


def uniforms(seeds: Tensor, sequences: Tensor, position: Tensor, out: Tensor) -> None:
    """`kvcli.runtime.engine.sampler.uniform` of each row: int64 [n] each -> float32 `out` [n]."""
    n = len(out)
    launch(_uniforms, (1,))(seeds, sequences, position, out, n, triton.next_power_of_2(n), num_warps=1)


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
def _keys(logits, bias, counts, penalties, ids, valid, BIASED: tl.constexpr, PENALISED: tl.constexpr):
    """Keys of logits after penalties (repeat, frequency, presence) and bias; _LEAST where not valid."""
    x = tl.load(logits + ids, mask=valid, other=0.0)
    if PENALISED:
        count = tl.load(counts + ids, mask=valid, other=0)
        if tl.max(count) > 0:  # rare: the arithmetic in float64, which rounds as the host does, is slow on many GPUs
            repeat = tl.load(penalties)
            wide = tl.where(x > 0, x.to(tl.float64) / repeat, x.to(tl.float64) * repeat).to(tl.float32)
            lost = count.to(tl.float64) * tl.load(penalties + 1) + tl.load(penalties + 2)
            x = tl.where(count > 0, wide - lost.to(tl.float32), x)
    if BIASED:
        x += tl.load(bias + ids, mask=valid, other=0.0)
    return tl.where(valid, _key(x), _LEAST)


@triton.jit
def _checked(token, top):
    """The token, or the code of what is wrong with logits whose largest key is `top`."""
    token = tl.where(top >= _INF, -1, token)
    return tl.where(top <= _MINUS_INF, -2, token)


@triton.jit
def _note(token, row, counts, ring, slot, last_n, room):
    """Count a token that was chosen, in place of the oldest of the last_n ones (0: besides all others)."""
    chosen = token >= 0
    ring += row * room
    slot += row
    last_n = tl.load(last_n + row)
    if last_n > 0:
        at = tl.load(slot)
        oldest = tl.load(ring + at)
        tl.atomic_add(counts + oldest, -1, mask=chosen & (oldest >= 0))
        tl.debug_barrier()
        tl.store(ring + at, token, mask=chosen)
        tl.store(slot, (at + 1) % last_n)
    tl.atomic_add(counts + token, 1, mask=chosen)


@triton.jit
def _of_row(row, logits, bias, counts, penalties, vocab, BIASED: tl.constexpr, PENALISED: tl.constexpr):
    """What stands for one of the rows in these."""
    logits += row * vocab
    if BIASED:
        bias += row * vocab
    if PENALISED:
        counts += row * vocab
        penalties += row * 3
    return logits, bias, counts, penalties


@triton.jit
def _maxima(logits, bias, counts, penalties, maxima, vocab, room, BLOCK: tl.constexpr, ROWS: tl.constexpr,
            BIASED: tl.constexpr, PENALISED: tl.constexpr):  # fmt: skip
    """The largest key of each block: ROWS of them a program; `room` for those of a row."""
    row = tl.program_id(1).to(tl.int64)
    logits, bias, counts, penalties = _of_row(row, logits, bias, counts, penalties, vocab, BIASED, PENALISED)
    maxima += row * room
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    ids = rows[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    keys = _keys(logits, bias, counts, penalties, ids, ids < vocab, BIASED, PENALISED)
    tl.store(maxima + rows, tl.max(keys, axis=1))


@triton.jit(do_not_specialize=["ring_room"])
def _greedy(logits, bias, counts, penalties, maxima, out, ring, slot, last_n, ring_room, vocab, n_blocks, room,
            BLOCK: tl.constexpr, HELD: tl.constexpr, BIASED: tl.constexpr, PENALISED: tl.constexpr):  # fmt: skip
    """The lowest id of the largest logit."""
    row = tl.program_id(0).to(tl.int64)
    logits, bias, counts, penalties = _of_row(row, logits, bias, counts, penalties, vocab, BIASED, PENALISED)
    maxima += row * room
    rows = tl.arange(0, HELD)
    keys = tl.load(maxima + rows, mask=rows < n_blocks, other=_LEAST)
    top = tl.max(keys, axis=0)
    ids = tl.min(tl.where(keys == top, rows, HELD), axis=0) * BLOCK + tl.arange(0, BLOCK)
    found = _keys(logits, bias, counts, penalties, ids, ids < vocab, BIASED, PENALISED) == top
    token = _checked(tl.min(tl.where(found, ids, vocab), axis=0), top).to(tl.int64)
    tl.store(out + row, token)
    if PENALISED:
        _note(token, row, counts, ring, slot, last_n, ring_room)


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
def _candidates(logits, bias, counts, penalties, blocks, n_blocks, keys, ids, least, vocab, BLOCK: tl.constexpr,
                CHUNK: tl.constexpr, BIASED: tl.constexpr, PENALISED: tl.constexpr):  # fmt: skip
    """Write key and id of every logit in the listed blocks whose key is `least` or more, ascending; their number."""
    found = 0
    start = 0
    while start < n_blocks * BLOCK:
        at = start + tl.arange(0, CHUNK)
        valid = at < n_blocks * BLOCK
        token = tl.load(blocks + at // BLOCK, mask=valid, other=0) * BLOCK + at % BLOCK
        valid = valid & (token < vocab)
        key = _keys(logits, bias, counts, penalties, token, valid, BIASED, PENALISED)
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


@triton.jit(do_not_specialize=["ring_room"])
def _draw(
    logits, bias, counts, penalties, maxima, numbers, uniform, out, most, blocks, keys, ids, best_keys, best_ids, order,
    shares, ring, slot, last_n, ring_room, vocab, n_blocks, room,
    BLOCK: tl.constexpr, HELD: tl.constexpr, WIDTH: tl.constexpr, CHUNK: tl.constexpr,
    TOP_P: tl.constexpr, MIN_P: tl.constexpr, BIASED: tl.constexpr, PENALISED: tl.constexpr,
):  # fmt: skip
    """Temperature, top-k and the other filters, the draw, a program a row. `numbers`: temperature, top-p, min-p as
    float64; `most`: top-k."""
    row = tl.program_id(0).to(tl.int64)
    logits, bias, counts, penalties = _of_row(row, logits, bias, counts, penalties, vocab, BIASED, PENALISED)
    maxima += row * room
    numbers += row * 3
    blocks += row * n_blocks
    keys += row * vocab
    ids += row * vocab
    best_keys += row * WIDTH
    best_ids += row * WIDTH
    order += row * WIDTH
    shares += row * WIDTH
    k = tl.load(most + row)
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
    n = _candidates(
        logits, bias, counts, penalties, blocks, n_taken, keys, ids, coarse, vocab, BLOCK, CHUNK, BIASED, PENALISED
    )
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
        top_p = tl.load(numbers + 1)
        kept = tl.where(top_p < 1, kept & _nucleus(key, weight, top, top_p, order, shares, k, WIDTH), kept)
    if MIN_P:
        kept = kept & (weight >= tl.load(numbers + 2))
    weight = tl.where(kept, tl.exp(value / tl.load(numbers)), 0.0)
    cumulative = tl.cumsum(weight, axis=0)
    target = tl.sum(tl.where(at == WIDTH - 1, cumulative, 0.0), axis=0) * tl.load(uniform + row).to(tl.float64)
    possible = kept & (weight > 0)
    last = tl.max(tl.where(possible, at, 0), axis=0)
    chosen = tl.min(tl.where(possible & (cumulative > target), at, last), axis=0)
    token = _checked(tl.load(best_ids + chosen), top).to(tl.int64)
    tl.store(out + row, token)
    if PENALISED:
        _note(token, row, counts, ring, slot, last_n, ring_room)
