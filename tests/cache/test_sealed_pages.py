"""Sequences over sealed caches: whatever is forked, rewound, dropped and given up, rows are those that a fresh sequence
would have, in the precision that their positions say; and a row is encoded once.
"""

from __future__ import annotations

from collections.abc import Iterator
from unittest import mock

import pytest
import torch
from cachecases import SmallPool
from engines import open_tiny, states
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, rule
from kernelcases import one_thread, same_bits
from sealedcases import SEALED, PoisonedPool

from kvcli.kernels import PagedKV
from kvcli.kernels.reference.backend import ReferenceBackend
from kvcli.options import CacheOptions
from kvcli.runtime.cache import layout as layouts
from kvcli.runtime.cache.layout import KVLayout
from kvcli.runtime.cache.pool import PagePool
from kvcli.runtime.cache.sequence import Part, Sequence
from kvcli.runtime.config import FULL, SLIDING, LayerConfig, ModelConfig
from kvcli.runtime.engine.engine import Engine
from kvcli.runtime.model.sealing import seal_step

OPS = ReferenceBackend()
SIZE, WINDOW, DIM = 16, 37, 4
KINDS = (SLIDING, FULL, SLIDING)  # groups are numbered as they appear: 0 slides, 1 is full; their open pages: 2, 3
TYPES = (("int8", "int8"), ("fp8", "int4"), ("f16", "int8"), ("int6", "f32"), ("int4", "fp8_e5m2"))


@pytest.fixture(autouse=True)
def _one_thread():
    with one_thread():
        yield


def tiny_layout(types: tuple[str, str], tail: int, sinks: int = 1) -> KVLayout:
    """Its sliding window counts as a large one, so that group is sealed too."""
    layers = tuple(LayerConfig(kind, 1, DIM, DIM, WINDOW if kind == SLIDING else 0) for kind in KINDS)
    config = ModelConfig("llama", "tiny", 10, 2, 2, 1, 4096, 1e-5, layers, 1.0)
    with mock.patch.object(layouts, "SMALL_WINDOW", 8):
        made = KVLayout.build(config, *types, SIZE, tail=tail, sinks=sinks)
    assert all(g.sealed for g in made.groups) and len(made.arenas) == 4
    return made


def chunks(start: int, end: int, ubatch: int) -> Iterator[tuple[int, int]]:
    """As the engine cuts a prompt."""
    pages = -(-ubatch // SIZE)
    while start < end:
        stop = min(end, start + ubatch, (start // SIZE + pages) * SIZE)
        yield start, stop
        start = stop


def rows(tokens: list[int], start: int, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values float32 [T, 1, DIM], both functions of token, position and layer."""
    token = torch.tensor(tokens, dtype=torch.float32)[:, None]
    at, d = torch.arange(start, start + len(tokens))[:, None] + 7.0 * layer, torch.arange(DIM) + 1.0
    return torch.sin(token * d * 0.37 + at * 0.11)[:, None], torch.cos(token * d * 0.73 - at * 0.05)[:, None]


def write(part: Part, tokens: list[int]) -> None:
    for layer in range(len(KINDS)):
        kv = part.kv(layer)
        k, v = rows(tokens, part.start, layer)
        for x, rotated in zip((k, v), kv.rotated, strict=True):
            if rotated:
                OPS.rotate_(x)
        OPS.store(k, v, kv, part.start)
        seal_step(OPS, None, kv, part.start, part.start + len(tokens))


def append(seq: Sequence, tokens: list[int], ubatch: int = 512) -> None:
    done = seq.length
    for start, end in chunks(done, done + len(tokens), ubatch):
        ids = tokens[start - done : end - done]
        write(seq.reserve(ids), ids)
        seq.commit(ids)


def views(seq: Sequence) -> list[PagedKV]:
    """By model layer."""
    sliding, full = seq.views()[0], seq.views()[1]
    return [sliding[0], full[0], sliding[1]]


def seen(kv: PagedKV, kind: str, length: int) -> list[torch.Tensor]:
    """Every row that the next query would read of what is there, page by page, decoded."""
    found = []
    first = max(0, length - WINDOW + 1) if kind == SLIDING else 0
    for page in range(first // SIZE, -(-length // SIZE)):
        lo, hi = max(first - page * SIZE, 0), min(SIZE, length - page * SIZE)
        there = kv.find(page * SIZE + lo, length)
        assert there is not None, page
        source, at = there
        k, v = source.rows(source.entries.memory[at], lo, hi)
        centre = source.centre(at, None)
        found += [k if centre is None else k + centre[:, lo:hi], v]
    return found


class SealedMachine(RuleBasedStateMachine):
    """Sequences on one pool; the oracle is the list of each one's tokens, fed to a fresh sequence in one piece."""

    sequences = Bundle("sequences")

    @initialize(
        target=sequences,
        types=st.sampled_from(TYPES),
        kept=st.sampled_from(((1, 1), (1, 1), (0, 1), (1, 0), (1, 3), (0, 2))),
    )
    def first(self, types: tuple[str, str], kept: tuple[int, int]) -> int:
        self.layout = tiny_layout(types, *kept)
        self.pool = PoisonedPool(self.layout)
        self.live: dict[int, tuple[Sequence, list[int]]] = {}
        self.tokens = iter(range(1, 1 << 20))
        return self._new(Sequence(self.pool), [])

    def teardown(self) -> None:
        if hasattr(self, "live"):
            for seq, known in self.live.values():
                self._compare(seq, known)
                seq.close()
            self.pool.check([])
            assert [self.pool.used(a) for a in range(4)] == [0] * 4

    def _new(self, seq: Sequence, tokens: list[int]) -> int:
        self.live[id(seq)] = seq, tokens
        return id(seq)

    def _append(self, key: int, tokens: list[int], ubatch: int) -> None:
        seq, known = self.live[key]
        append(seq, tokens, ubatch)
        known += tokens

    def _compare(self, seq: Sequence, known: list[int]) -> None:
        """Bit by bit with a sequence that never knew anything else."""
        if not known:
            return
        fresh = Sequence(PoisonedPool(self.layout))
        append(fresh, known)
        for layer, (mine, theirs) in enumerate(zip(views(seq), views(fresh), strict=True)):
            pairs = zip(seen(mine, KINDS[layer], len(known)), seen(theirs, KINDS[layer], len(known)), strict=True)
            for a, b in pairs:
                assert a.isfinite().all() and torch.equal(a, b), f"layer {layer} of {len(known)} tokens"

    @rule(target=sequences)
    def new(self) -> int:
        return self._new(Sequence(self.pool), [])

    @rule(key=sequences, n=st.integers(1, 70), ubatch=st.sampled_from((1, 7, 16, 17, 40, 80)))
    def append(self, key: int, n: int, ubatch: int) -> None:
        self._append(key, [next(self.tokens) for _ in range(n)], ubatch)

    @rule(key=sequences, n=st.integers(1, 60))
    def give_up_a_step(self, key: int, n: int) -> None:
        """Interrupted between reserve and commit: rows were written and sealed, and none of them count."""
        write(self.live[key][0].reserve([0] * n), [0] * n)

    @rule(target=sequences, key=sequences)
    def fork(self, key: int) -> int:
        seq, known = self.live[key]
        used = [self.pool.used(a) for a in range(4)]
        twin = seq.fork()
        assert [self.pool.used(a) for a in range(4)] == used
        return self._new(twin, list(known))

    @rule(key=sequences, share=st.floats(0, 1), replay=st.booleans(), ubatch=st.sampled_from((1, 9, 64)))
    def rewind(self, key: int, share: float, replay: bool, ubatch: int) -> None:
        seq, known = self.live[key]
        wanted = int(share * len(known))
        kept = seq.rewindable(wanted)
        assert kept == 0 or wanted - wanted % SIZE <= kept <= wanted
        if kept != wanted:
            with pytest.raises(ValueError, match="cannot go back"):
                seq.rewind(wanted)
        seq.rewind(kept)
        undone, known[:] = known[kept:], known[:kept]
        if replay:
            self._append(key, undone, ubatch)

    @rule(key=sequences)
    def compare(self, key: int) -> None:
        self._compare(*self.live[key])

    @rule(key=consumes(sequences))
    def close(self, key: int) -> None:
        seq, known = self.live.pop(key)
        self._compare(seq, known)
        seq.close()
        assert seq.tokens == [] and list(seq.holds()) == []

    @invariant()
    def nothing_is_lost_or_held_twice(self) -> None:
        if hasattr(self, "live"):
            self.pool.check(holding for seq, _ in self.live.values() for holding in seq.holds())


SealedMachine.TestCase.settings = settings(max_examples=10, stateful_step_count=25)
test_machine = pytest.mark.slow(SealedMachine.TestCase)


@pytest.mark.parametrize("ubatch", (1, 7, 40))
def test_the_first_page_fixes_the_mean_though_its_window_is_gone_when_the_first_page_is_sealed(ubatch: int):
    """Three pages of sinks are more than the window."""
    where, tokens = tiny_layout(("int8", "int8"), 1, 3), list(range(1, 130))
    ours, whole = Sequence(PoisonedPool(where)), Sequence(PoisonedPool(where))
    append(ours, tokens, ubatch)
    append(whole, tokens)
    for layer, (mine, theirs) in enumerate(zip(views(ours), views(whole), strict=True)):
        pairs = zip(seen(mine, KINDS[layer], 129), seen(theirs, KINDS[layer], 129), strict=True)
        assert all(a.isfinite().all() and torch.equal(a, b) for a, b in pairs), layer


# --- pages against the plan


@pytest.mark.parametrize(("tail", "sinks"), ((0, 1), (1, 1), (1, 0), (0, 3), (1, 3)))
@pytest.mark.parametrize("ubatch", (1, 16, 32, 80))
def test_the_peak_of_every_arena_is_the_planned_one(ubatch: int, tail: int, sinks: int):
    """Nothing is written: pages are taken and released whatever the rows are."""
    layout = tiny_layout(("int8", "int4"), tail, sinks)
    for n in (1, 15, 16, 17, 32, 33, 100, 200, 321):
        seq = Sequence(SmallPool(layout))
        for start, end in chunks(0, n, ubatch):
            seq.reserve([0] * (end - start))
            seq.commit([0] * (end - start))
        check_peaks(seq.pool, layout, n, ubatch)


def check_peaks(pool: PagePool, layout: KVLayout, n: int, ubatch: int) -> None:
    sinks = layout.groups[0].sinks
    peaks, planned = [pool.peak(a) for a in range(4)], layout.arena_pages(n, ubatch)
    assert all(peak <= most for peak, most in zip(peaks, planned, strict=True)), (peaks, planned)
    assert peaks[1] == planned[1]
    widest = max((-(-end // SIZE) - start // SIZE for start, end in chunks(0, n, ubatch) if start >= SIZE), default=0)
    assert peaks[3] == planned[3] or widest < -(-ubatch // SIZE)  # else the sink and a whole step were open at once
    if n >= WINDOW + 2 * ubatch + SIZE:  # a page less where windows end on page edges, or sinks have gone early
        assert all(planned[a] - peaks[a] <= max(1, sinks) for a in (0, 2))


def test_a_sealed_page_is_gone_back_to_only_at_its_start():
    seq = Sequence(PoisonedPool(tiny_layout(("int8", "int8"), 1)))
    append(seq, list(range(40)))
    assert [seq.rewindable(n) for n in (40, 39, 33, 32, 31, 17, 16, 15, 3)] == [40, 39, 33, 32, 16, 16, 16, 15, 3]


# --- tiny models


PROMPT = torch.randint(3, 370, (150,), generator=torch.manual_seed(5)).tolist()


def open_sealed(variant: str, backend: str, types: tuple[str, str], size: int = 16) -> Engine:
    return open_tiny(variant, backend, CacheOptions(0, *types, page_size=size))


def logits(engine: Engine, seq: Sequence, ids: list[int], ubatch: int = 512) -> torch.Tensor:
    """Feed ids in chunks; logits of every one of them."""
    return engine.logits(states(engine, seq, ids, ubatch))


CASES = [
    *(
        ("llama", (t, t)) if t in ("fp8", "int4") else pytest.param("llama", (t, t), marks=pytest.mark.thorough)
        for t in SEALED
    ),
    ("gemma3", ("int8", "int4")),
    pytest.param("gemma3", ("f16", "int4"), marks=pytest.mark.thorough),
]


@pytest.mark.slow
@pytest.mark.parametrize(("variant", "types"), CASES, ids=lambda x: x if isinstance(x, str) else "/".join(x))
def test_any_chunking_gives_the_same_logits(variant: str, types: tuple[str, str]):
    """Chunks of 1 to 130, pages of 16 and 64; every row's logits, to the bit. With int4 keys all sizes up to a
    page and every fourth one beyond, else some."""
    few = range(1, 131, 7)
    for backend, size, sizes in (
        ("native", 16, (*range(1, 18), *range(21, 68, 4), 95, 130) if types[0] == "int4" else few),
        ("native", 64, (1, 13, 63, 64, 65, 100, 130)),
        ("reference", 16, (7, 17, 64, 130)),
    ):
        engine = open_sealed(variant, backend, types, size)
        whole = logits(engine, engine.new_sequence(), PROMPT)
        assert whole.isfinite().all()
        for ubatch in sizes:
            seq = engine.new_sequence()
            assert same_bits(logits(engine, seq, PROMPT, ubatch), whole), (backend, size, ubatch)
            seq.close()


@pytest.mark.slow
@pytest.mark.parametrize("backend", ("native", "reference"))
@pytest.mark.parametrize("types", [("int4", "int4"), ("fp8", "int8")], ids="/".join)
def test_cold_warm_fork_and_undo_give_the_same_logits(types: tuple[str, str], backend: str):
    engine = open_sealed("llama", backend, types)
    others = [x + 1 for x in PROMPT[60:110]]
    cold = logits(engine, engine.new_sequence(), PROMPT)
    branch = logits(engine, engine.new_sequence(), PROMPT[:70] + others)[70:]
    seq = engine.new_sequence()
    assert same_bits(logits(engine, seq, PROMPT[:70]), cold[:70])
    twin = seq.fork()
    assert same_bits(logits(engine, twin, others, 7), branch)
    assert same_bits(logits(engine, seq, PROMPT[70:]), cold[70:])  # beside the twin
    for wanted, kept in ((149, 149), (145, 145), (139, 128), (70, 64), (20, 16), (9, 9)):  # undo, then the same again
        assert seq.rewind_to(wanted) == kept
        assert same_bits(logits(engine, seq, PROMPT[kept:], 29), cold[kept:]), wanted
    assert twin.rewind_to(5) == 5
    assert same_bits(logits(engine, twin, PROMPT[5:]), cold[5:])  # with a basis of its own now


def test_other_tokens_in_the_first_page_of_a_fork_change_nothing_in_the_other():
    """Forked before the basis is fixed, then one goes back behind the first page's end."""
    engine = open_sealed("llama", "auto", ("fp8", "int4"))
    cold = logits(engine, engine.new_sequence(), PROMPT)
    seq = engine.new_sequence()
    logits(engine, seq, PROMPT[:20])
    twin = seq.fork()
    assert twin.rewind_to(3) == 3
    logits(engine, twin, [x + 1 for x in PROMPT[3:60]])
    assert same_bits(logits(engine, seq, PROMPT[20:]), cold[20:])


@pytest.mark.parametrize("tail", (0, 1))
def test_a_row_is_encoded_once(tail: int):
    """Every row of every layer, through steps, a fork and a rewind to a page's start; sinks and the tail never."""
    engine = open_sealed("llama", "auto", ("int4", "int4"))
    layout = KVLayout.build(engine.config, "int4", "int4", 16, tail=tail)
    seq, encoded = Sequence(PoisonedPool(layout)), []
    original = engine.model.ops.seal

    def counted(kv: PagedKV, first: int, end: int, *more: object) -> None:
        encoded.extend((kv.layer, row) for row in range(first, end))
        original(kv, first, end, *more)

    with mock.patch.object(engine.model.ops, "seal", counted):
        logits(engine, seq, PROMPT[:100], 33)
        for token in PROMPT[100:]:
            logits(engine, seq, [token])
        last = len(PROMPT) // 16 * 16 if tail else len(PROMPT)
        assert sorted(row for _, row in encoded) == sorted([*range(16, last)] * engine.config.n_layers)
        assert len(set(encoded)) == len(encoded)
        encoded.clear()
        twin = seq.fork()
        logits(engine, twin, [5])
        seq.rewind_to(144)
        logits(engine, seq, PROMPT[144:])
        assert {row for _, row in encoded} == (set() if tail else set(range(144, 151)))
