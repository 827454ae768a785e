"""Rows that are selected by score: which ones, against each paper's rule in float64 over queries and keys as attention
had them; and that attention then is attention over these rows, whatever the cache type, chunks, caches and forks."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from engines import GREEDY, open_tiny
from kernelcases import same_bits
from reusecases import Told

from kvcli.errors import UsageError
from kvcli.kernels import Moments
from kvcli.options import CacheOptions, EvictOptions, PromptCacheOptions
from kvcli.runtime.cache import eviction
from kvcli.runtime.cache.eviction import expected as expected_attention
from kvcli.runtime.cache.scoring import Scored
from kvcli.runtime.cache.selection import Budget
from kvcli.runtime.cache.sequence import Sequence
from kvcli.runtime.engine.engine import Engine

SIZE = 16
TEXT = torch.randint(3, 370, (205,), generator=torch.manual_seed(9)).tolist()
SCORERS = ("expected", "h2o", "keydiff", "random", "snapkv", "tova")
BELOW = len(TEXT) // SIZE * SIZE  # rows of the page that is being filled stay
KEPT = 100
CHOSEN = KEPT - (len(TEXT) - BELOW)  # of those before it


def selecting(variant: str, policy: str, budget: str, types: tuple[str, str], backend: str = "native") -> Engine:
    evict = EvictOptions(policy, budget=budget)
    return open_tiny(variant, backend, CacheOptions(400, *types, page_size=SIZE, ubatch=48, evict=evict))


class Seen:
    """What attention was given, of each layer of the reference: queries after RoPE [T, heads, dim], and the output."""

    def __init__(self, engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
        self.queries: dict[int, list[torch.Tensor]] = {}
        self.keys: dict[int, list[torch.Tensor]] = {}
        self.values: dict[int, list[torch.Tensor]] = {}
        self.outputs: dict[int, list[torch.Tensor]] = {}
        ops, layers = engine.model.ops, engine.config.n_layers
        attention, store = ops.attention, ops.store
        calls = iter(range(1 << 30))

        def attended(q: torch.Tensor, *how: Any) -> torch.Tensor:
            layer, out = next(calls) % layers, attention(q, *how)
            self.queries.setdefault(layer, []).append(q.clone())
            self.outputs.setdefault(layer, []).append(out.clone())
            return out

        stores = iter(range(1 << 30))

        def stored(k: torch.Tensor, v: torch.Tensor, *where: Any) -> None:
            layer = next(stores) % layers
            self.keys.setdefault(layer, []).append(k.clone())
            self.values.setdefault(layer, []).append(v.clone())
            store(k, v, *where)

        monkeypatch.setattr(ops, "attention", attended, raising=False)
        monkeypatch.setattr(ops, "store", stored, raising=False)

    def of(self, layer: int) -> tuple[torch.Tensor, ...]:
        """Queries, keys and values float64 [heads, T, dim] of that layer."""
        found = (self.queries, self.keys, self.values)
        q, k, v = (torch.cat(each[layer]).double().transpose(0, 1) for each in found)
        return q, k, v


def prefilled(engine: Engine, ubatch: int = 0) -> Sequence:
    """The text's rows, of which some were selected."""
    seq = engine.new_sequence()
    assert seq.selector is not None
    seq.selector.expect(len(TEXT))
    step = ubatch or engine.ubatch
    for start in range(0, len(TEXT), step):
        engine.forward(seq, TEXT[start : start + step])
    engine.select(seq)
    return seq


def selected_layers(engine: Engine, seq: Sequence) -> Iterator[tuple[int, torch.Tensor]]:
    """Model layers in which rows were selected, and the positions that stay, int [kv_heads, rows], ascending."""
    for held in seq._lists:
        if held.selected is not None:
            for layer, positions in zip(held.layout.layers, held.selected.positions, strict=True):
                yield layer, positions.long().sort(1).values


# --- the rules


def probabilities(q: torch.Tensor, k: torch.Tensor, scale: float) -> torch.Tensor:
    """float64 [heads, T, T], causal."""
    scores = (q @ k.transpose(1, 2)) * scale
    return scores.masked_fill(~torch.ones(scores.shape[1:], dtype=torch.bool).tril(), -torch.inf).softmax(-1)


def best(scores: torch.Tensor, first: int, last: int) -> torch.Tensor:
    """The rows [kv_heads, CHOSEN] that stay by these scores [kv_heads, T], and the first and last ones in any case."""
    scores = scores.clone()
    scores[:, :first] = scores[:, len(TEXT) - last :] = torch.inf
    return scores[:, :BELOW].topk(CHOSEN).indices.sort(1).values


def rule(policy: str, engine: Engine, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """What stays by the paper, of queries [heads, T, dim] and the rows of KV heads."""
    facts, group = engine.model.layer_facts[layer], len(q) // len(k)
    if policy == "keydiff":  # cosine similarity with the mean of unit keys
        unit = k / k.norm(dim=-1, keepdim=True)
        anchor = unit.mean(1, keepdim=True)
        return best(-torch.nn.functional.cosine_similarity(k, anchor, dim=-1), 0, 0)
    every = k.repeat_interleave(group, 0)
    if policy == "expected":
        angles = facts.angles
        assert angles is not None
        import numpy as np

        def turned(x: torch.Tensor, positions: np.ndarray, back: bool = False) -> torch.Tensor:
            cos, sin = (each.double() for each in angles(positions))
            sin, half = -sin if back else sin, cos.shape[-1]
            a, b = x[..., :half], x[..., half : 2 * half]
            return torch.cat([a * cos - b * sin, b * cos + a * sin, x[..., 2 * half :]], -1)

        plain = turned(q, np.arange(len(TEXT)), back=True)
        mean = plain.mean(1)
        spread = (plain - mean[:, None]).transpose(1, 2) @ (plain - mean[:, None]) / len(TEXT)
        later = len(TEXT) + np.arange(512.0)
        eye = torch.eye(q.shape[-1], dtype=torch.float64)
        matrix = torch.stack([turned(row.expand(len(later), -1), later).mean(0) for row in eye], 1)
        mean, spread = mean @ matrix.T, matrix @ spread @ matrix.T
        logits = facts.scale * torch.einsum("hd,hnd->hn", mean, every)
        logits = logits + facts.scale**2 / 2 * torch.einsum("hnd,hde,hne->hn", every, spread, every)
        shares = logits.softmax(-1).unflatten(0, (-1, group)).mean(1)
        return best(shares * v.norm(dim=-1), 4, 0)
    mass = probabilities(q, every, facts.scale).unflatten(0, (-1, group)).sum(1)  # [kv_heads, T, T]
    if policy == "h2o":
        return best(mass.sum(1), 0, KEPT // 2)
    if policy == "tova":
        return best(mass[:, -1].mean(0).expand(len(mass), -1), 0, 1)
    pooled = torch.nn.functional.avg_pool1d(mass[:, -64:].sum(1)[:, None], 5, 1, 2)[:, 0]
    return best(pooled, 0, 64)


@pytest.mark.slow
@pytest.mark.parametrize("policy", [p for p in SCORERS if p != "random"])
@pytest.mark.parametrize("variant", ["llama", "gemma3", "qwen2"])
def test_rows_stay_by_the_rule_of_the_paper(variant: str, policy: str, monkeypatch: pytest.MonkeyPatch):
    engine = selecting(variant, policy, str(KEPT), ("f32", "f32"), "reference")
    seen = Seen(engine, monkeypatch)
    seq = prefilled(engine)
    layers = dict(selected_layers(engine, seq))
    full = [i for i, layer in enumerate(engine.config.layers) if not layer.window]
    assert list(layers) == full and full
    for layer, positions in layers.items():
        expected = rule(policy, engine, layer, *seen.of(layer))
        different = sum(len(set(a.tolist()) ^ set(b.tolist())) for a, b in zip(positions, expected, strict=True))
        assert different <= 2 * len(positions), (layer, different)  # scores that agree to the last bits of float32
    seq.close()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("variant", "types", "limit"),
    [("llama", ("f32", "f32"), 1e-5), ("gemma3", ("f16", "f16"), 5e-3), ("llama", ("int8", "fp8"), 0.06)],
)
def test_attention_is_attention_over_the_rows_that_stay(
    variant: str, types: tuple[str, str], limit: float, monkeypatch: pytest.MonkeyPatch
):
    """Of a token behind the selection, from the rows as they were stored."""
    engine = selecting(variant, "snapkv", str(KEPT), types, "reference")
    seen = Seen(engine, monkeypatch)
    seq = prefilled(engine)
    engine.forward(seq, [7])
    for layer, positions in selected_layers(engine, seq):
        q, k, v = seen.of(layer)
        group, scale = len(q) // len(k), engine.model.layer_facts[layer].scale
        for head, rows in enumerate(positions):
            stay = torch.cat([rows, torch.arange(BELOW, len(TEXT) + 1)])
            scores = q[head * group : (head + 1) * group, -1] @ k[head, stay].T * scale
            expected = (scores.softmax(-1) @ v[head, stay]).flatten()
            width = v.shape[-1] * group
            found = seen.outputs[layer][-1][0, head * width : (head + 1) * width].double()
            assert (found - expected).norm() < limit * expected.norm(), (layer, head)
    seq.close()


# --- laws


def positions_of(engine: Engine, seq: Sequence) -> torch.Tensor:
    return torch.stack([positions for _, positions in selected_layers(engine, seq)])


@pytest.mark.parametrize("policy", SCORERS)
def test_chunks_do_not_change_what_stays(policy: str):
    engine = selecting("llama", policy, str(KEPT), ("int4", "int8"))
    whole, parts = prefilled(engine), prefilled(engine, 16)
    assert whole.kept == parts.kept == KEPT and whole.evicted == len(TEXT) - KEPT
    assert torch.equal(positions_of(engine, whole), positions_of(engine, parts))
    assert same_bits(engine.forward(whole, [7]), engine.forward(parts, [7]))
    engine.pool.check([*whole.holds(), *parts.holds()])


@pytest.mark.parametrize(
    "policy", [pytest.param(p, marks=pytest.mark.thorough if p in ("random", "tova") else ()) for p in SCORERS]
)
def test_answers_go_on_beyond_the_context_and_forks_agree(policy: str):
    engine = selecting("llama", policy, "120", ("f16", "int8"))
    seq, options = engine.new_sequence(), replace(GREEDY, max_tokens=330, ignore_eos=True)
    *_, end = engine.generate(seq, TEXT, options)
    assert end.finish_reason == "length" and seq.length > engine.ctx_size >= seq.kept
    assert end.losses[0].startswith(f"evicted: {seq.evicted:,} tokens, kept {seq.kept:,} of {seq.length:,} rows by")
    twin = seq.fork()
    assert same_bits(engine.forward(seq, [5]), engine.forward(twin, [5]))
    engine.pool.check([*seq.holds(), *twin.holds()])
    assert seq.rewindable(3) == 0 and seq.rewindable(seq.length - 1) == seq.length - 1
    again = engine.new_sequence()
    *_, same = engine.generate(again, TEXT, options)
    assert same.ids == end.ids
    for each in (seq, twin, again):
        each.close()
    engine.pool.check([])


def test_the_first_token_sees_everything():
    plain = open_tiny("llama", "native", CacheOptions(400, page_size=SIZE))
    options = replace(GREEDY, max_tokens=1)
    *_, full = plain.generate(plain.new_sequence(), TEXT, options)
    engine = selecting("llama", "tova", "40", ("f16", "f16"))
    *_, end = engine.generate(engine.new_sequence(), TEXT, options)
    assert end.ids == full.ids


@pytest.mark.parametrize("policy", SCORERS)
def test_cached_prompts_give_the_same_answers(policy: str):
    """Rows of prompts are those of any cache until some are selected, and serve one another."""
    engine = selecting("llama", policy, str(KEPT), ("int8", "int8"))
    options = replace(GREEDY, max_tokens=40, ignore_eos=True)
    caches = engine.prompt_caches(PromptCacheOptions(memory=True), Told())
    *_, first = engine.generate(engine.new_sequence(), TEXT, options, caches=caches)
    *_, second = engine.generate(engine.new_sequence(), TEXT, options, caches=caches)
    assert second.ids == first.ids
    assert (second.usage.cache_read_tokens > 0) == (policy not in ("h2o", "expected"))
    longer = TEXT + first.ids
    *_, other = engine.generate(engine.new_sequence(), longer, options, caches=caches)
    assert other.usage.cache_read_tokens <= len(TEXT)  # rows behind a selection are nobody else's
    caches.close()


def test_noted_mass_can_be_taken_back_by_anybody():
    """Its tensors are made in inference mode, which a caller that rewinds need not be in."""
    engine = selecting("llama", "h2o", "150", ("f16", "f16"))
    seq = prefilled(engine)
    engine.forward(seq, [7])
    assert seq.selector is not None and not torch.is_inference_mode_enabled()
    mass = next(iter(seq.selector._mass.values()))
    assert mass.is_inference() and mass[..., seq.length - 1].any()
    seq.rewind(seq.length - 1)
    assert not mass[..., seq.length].any()


def test_a_row_is_encoded_anew_once_at_most():
    """Rows that stay where they are keep their bytes through later selections."""
    engine = selecting("llama", "h2o", "150", ("int4", "int4"))
    seq = prefilled(engine)
    held = seq._lists[0]
    before, pages = held.selected, {n: held.closed.pool.page(0, p).clone() for n, p in held.closed.pages.items()}
    assert before is not None and seq.selector is not None
    while seq.selector.times < 2:
        engine.forward(seq, [seq.length % 300])
        engine.select(seq)
    after = held.selected
    assert after is not None and after.below > before.below
    rows = min(before.rows, after.rows)
    stayed = before.positions[:, :, :rows] == after.positions[:, :, :rows]
    assert 0.5 < stayed.float().mean() < 1
    record, compared = held.layout.record, 0
    for layer, head, place in stayed.nonzero().tolist():
        page, slot = divmod(place, SIZE)
        if page in pages:
            mine = held.closed.pool.page(0, held.closed.pages[page])[layer].view(record.kv_heads, -1)[head]
            theirs = pages[page][layer].view(record.kv_heads, -1)[head]
            at = slice(slot * record.k_row_bytes, (slot + 1) * record.k_row_bytes)
            assert torch.equal(mine[at], theirs[at])
            compared += 1
    assert compared > 20


def test_pages_stand_in_order_where_more_rows_stay_than_before():
    engine = selecting("llama", "random", "50%", ("f16", "f16"))
    seq = prefilled(engine)
    held = seq._lists[0]
    before = held.selected
    assert before is not None and seq.selector is not None
    seq.selector.expect(seq.length + 100)
    engine.forward(seq, TEXT[:100])
    engine.select(seq)
    after = held.selected
    assert after is not None and after.rows > -(-before.rows // SIZE) * SIZE
    for form in held.forms:
        assert form.numbers.tolist() == sorted(form.pages)


# --- budgets


def test_budgets_are_numbers_or_shares():
    assert Budget.of("2k").rows == 2048 and Budget.of("12.5%").share == 0.125
    selection = eviction.selection(EvictOptions("random", budget="25%"), 4096, 64)
    assert selection is not None
    assert selection.stays(2000) == 500 and selection.stays(10) == selection.least == 64 + 36 + 1
    assert selection.pause(500) == 128 and selection.pause(2048) == 256 and selection.pause(4090) == 6


@pytest.mark.parametrize(
    ("evict", "message"),
    [
        (EvictOptions("snapkv"), "`evict=snapkv` needs `budget`"),
        (EvictOptions("sink", budget="25%"), "`budget` needs `evict=expected` or"),
        (EvictOptions("none", budget="25%"), "`budget` needs"),
        (EvictOptions("h2o", budget="much"), "`budget` must be a number of tokens or a share of them, not 'much'"),
        (EvictOptions("h2o", budget="0%"), "must be more than 0 %"),
        (EvictOptions("h2o", budget="0"), "must be more than 0 tokens"),
        (EvictOptions("snapkv", budget="80"), "`budget` is 80, less than the 129 rows"),
        (EvictOptions("h2o", window=100, budget="25%"), "`evict=h2o` has no `window`"),
        (EvictOptions("h2o", keep=3, budget="25%"), "`keep` needs"),
        (EvictOptions("h2o", budget="9999"), "forgets nothing in a context of 4,096"),
    ],
)
def test_what_cannot_be_is_refused(evict: EvictOptions, message: str):
    with pytest.raises(UsageError, match=message.replace("(", r"\(")):
        eviction.selection(evict, 4096, 64)


def test_expected_attention_is_computed_in_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that it takes no copies of all rows in float64 for each query head; slices change nothing."""
    generator = torch.Generator().manual_seed(4)
    queries = Moments()
    queries.add(torch.randn(30, 6, 8, generator=generator))
    keys, values = (torch.randn(2, 1300, 8, generator=generator) for _ in range(2))
    positions = torch.arange(1300).expand(2, -1)
    rows = Scored(1300, positions, None, queries, lambda: keys, lambda: values, 0.3, None, 0)
    found, widths, matmul = [], list[int](), torch.Tensor.__matmul__

    def watched(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        widths.append(a.shape[-2])
        return matmul(a, b)

    for size in (expected_attention.SLICE, 2000):
        with monkeypatch.context() as patch:
            patch.setattr(expected_attention, "SLICE", size)
            patch.setattr(torch.Tensor, "__matmul__", watched)
            found.append(expected_attention.Expected().score(rows))
    assert torch.allclose(*found, rtol=1e-12, atol=0) and found[0].shape == (2, 1300)
    assert max(widths[: len(widths) - 2]) <= 512 < widths[-1]


def test_sums_of_queries_are_planned() -> None:
    engine = selecting("llama", "expected", "50%", ("f16", "f16"))
    plan, config = engine.predict(200), engine.config
    dim, heads = config.layers[0].dim_k, config.n_heads
    assert plan.row("selection of rows").bytes > 8 * config.n_layers * heads * dim * dim
