"""Rows of several sequences at a time on a GPU, by graphs over rows that stand apart, against plain torch.

Without a GPU the kernels are interpreted, and prompts come from the reference, which writes to the same pages.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import closing
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import tiny
import torch
from engines import PROMPT, open_tiny
from gpucases import COMPILED, DEVICE, MORE, OPS
from kernelcases import one_thread

from kvcli.kernels.gpu.backend import GpuBackend
from kvcli.kernels.gpu.shares import NoRoom
from kvcli.options import AttendOptions, CacheOptions, SampleOptions
from kvcli.runtime.cache.eviction import Retention
from kvcli.runtime.cache.eviction.window import Rolling
from kvcli.runtime.cache.layout import KVLayout
from kvcli.runtime.cache.pool import PagePool
from kvcli.runtime.cache.sequence import Sequence, Step
from kvcli.runtime.engine.answertext import AnswerText
from kvcli.runtime.engine.engine import Engine
from kvcli.runtime.engine.events import End
from kvcli.runtime.engine.graph import batching
from kvcli.runtime.engine.graph.batchgraph import BatchGraph
from kvcli.runtime.engine.graph.batching import Batches
from kvcli.runtime.engine.request import Request
from kvcli.runtime.engine.scheduler import Scheduler
from kvcli.runtime.formats.gguf import GGUFFile
from kvcli.runtime.host.memory import CUDA
from kvcli.runtime.model.archs import from_gguf
from kvcli.runtime.model.decoder import Decoder
from kvcli.runtime.model.loading import load
from kvcli.runtime.model.weights import Weights

VOCAB, PAGE, CONTEXT = 64, 16, 96
INTERPRETED = pytest.mark.skipif(DEVICE != "cpu", reason="tensors of the plain model are on the CPU")
LIMITS = {"f16": 1e-4, "int8": 2e-3, "int4": 2e-2, "fp8": 2e-2}


@pytest.fixture(autouse=True)
def _plain():
    with one_thread(), torch.inference_mode():
        yield


def divergence(expected: torch.Tensor, found: torch.Tensor) -> float:
    """KL divergence of next-token probabilities, in nats; NaN where a logit is not finite."""
    p, q = (x.double().log_softmax(-1) for x in (expected, found))
    return float((p.exp() * (p - q)).sum())


class Pair:
    """Sequences of a tiny model that are computed together by a graph, and the same ones one by one in plain torch."""

    def __init__(self, arch: str, types: str, rows: int, retention: Retention | None = None, tail: int = 1) -> None:
        even = arch in ("llama", "gemma3", "qwen3moe")
        file = GGUFFile.open(tiny.make_even(arch, False, VOCAB) if even else tiny.make(arch).path)
        config = from_gguf(file.metadata, {name: t.shape for name, t in file.tensors.items()})
        layouts = [
            KVLayout.build(config, types, types, PAGE, tail=tail).by_layer(gpu).evicting(retention)
            for gpu in (False, True)
        ]
        gpu = GpuBackend(torch.device(DEVICE))
        self.theirs, self.ours = load(config, Weights(file), OPS), load(config, Weights(file), gpu)
        self.prompts = self.ours if DEVICE == "cuda" else load(config, Weights(file), OPS)
        self.pools = PagePool(layouts[0], device=OPS.device), PagePool(layouts[1], device=gpu.device)
        self.graph = BatchGraph(self.ours, layouts[1], CONTEXT, rows)
        self.seats: dict[int, tuple[Sequence, Sequence]] = {}
        self.generator = torch.manual_seed(7)

    def ids(self, n: int) -> list[int]:
        return torch.randint(VOCAB, (n,), generator=self.generator).tolist()

    def join(self, row: int, prompt: int) -> None:
        """A sequence with so many rows takes a seat."""
        ids, (a, b) = self.ids(prompt), (Sequence(self.pools[0]), Sequence(self.pools[1]))
        for model, seq in ((self.theirs, a), (self.prompts, b)):
            model.hidden(Step((seq.reserve(ids),)))
            seq.commit(ids)
        self.seats[row] = a, b
        self.graph.seat(row, b)

    def leave(self, row: int) -> None:
        for seq in self.seats.pop(row):
            seq.close()
        self.graph.seat(row, None)

    def step(self, limit: float, known: bool = True) -> None:
        """One row of each; `known`: the host brings the tokens, else they stand on the device."""
        tokens = dict(zip(self.seats, self.ids(len(self.seats)), strict=True))
        if not known:
            for row, token in tokens.items():
                self.graph.tokens[row] = token
        found = self.graph.run(tokens if known else None).cpu()
        for row, (seq, ours) in self.seats.items():
            hidden = self.theirs.hidden(Step((seq.reserve([tokens[row]], answering=True),)))
            seq.commit([tokens[row]])
            expected = self.theirs.logits(hidden)[0]
            assert divergence(expected, found[row]) < limit, (row, seq.length)
            assert ours.length == seq.length and ours.tokens[-1] == (tokens[row] if known else -1)
            ours.tokens[-1] = tokens[row]


CASES = [
    pytest.param("llama", "int4", None, 1, marks=MORE),
    ("gemma3", "int8", Rolling(5, 32, PAGE), 1),
    *(
        pytest.param(*case, marks=COMPILED)
        for case in (
            ("llama", "f16", None, 1),
            ("gemma3", "int8", None, 1),
            ("gemma3", "fp8", None, 1),
            ("llama", "int8", Rolling(20, 32, PAGE), 1),
            ("llama", "int8", None, 0),
            ("qwen3moe", "f16", None, 1),
            ("deepseek2", "int8", None, 1),
            ("gemma3n", "int8", None, 1),
            ("llama4", "int8", Rolling(4, 32, PAGE), 1),
            ("lfm2", "f16", None, 1),
            ("qwen35", "int8", None, 1),
            ("granitehybrid-dense", "f16", None, 1),
            ("falcon-h1", "int8", None, 1),
        )
    ),
]


@pytest.mark.slow
@pytest.mark.parametrize(("arch", "types", "retention", "tail"), CASES)
def test_rows_are_those_of_sequences_alone(arch: str, types: str, retention: Retention | None, tail: int) -> None:
    """Sequences of different lengths, across the ends of pages and in a first page; one leaves, another one joins."""
    prompts = {0: 15, 1: 46} if DEVICE == "cpu" else {0: 14, 2: 47, 3: 30}
    both = Pair(arch, types, 2 if DEVICE == "cpu" else 4, retention, tail)
    for row, prompt in prompts.items():
        both.join(row, prompt)
    both.step(LIMITS[types])
    both.step(LIMITS[types], known=False)
    both.leave(0)
    both.join(0, 61)
    for _ in range(1 if DEVICE == "cpu" else 4):
        both.step(LIMITS[types])
    for theirs, ours in both.seats.values():
        assert (theirs.states is None) == (ours.states is None)
        assert theirs.states is None or ours.states is None or theirs.states.kept.keys() == ours.states.kept.keys()


ANSWERS = [  # prompt, answer, options; several begin together, others later
    (14, 0, 9, SampleOptions(0.0)),
    (15, 0, 20, SampleOptions(4.0, 40, 1.0, 0.0, seed=3)),
    (30, 0, 12, SampleOptions(0.0, repeat_penalty=1.5)),
    (47, 3, 6, SampleOptions(3.0, 12, 0.9, 0.01, frequency_penalty=0.3, seed=5, sequence=2)),
    (5, 9, 7, SampleOptions(0.0, logprobs=1)),  # which the host chooses
]


class PlainGraph(BatchGraph):
    """Rows by the model of an engine in plain torch, one after the other: what is told of seats and tokens counts."""

    model_of: Decoder
    runs = 0

    def run(self, ids: Mapping[int, int] | None = None) -> torch.Tensor:
        there = {row: seq for row, seq in enumerate(self._seats) if seq is not None}
        for row, seq in there.items():
            token = int(self.tokens[row]) if ids is None else ids[row]
            hidden = self.model_of.hidden(Step((seq.reserve([token], answering=True),)))
            self.logits[row] = self.model_of.logits(hidden)[0]
            self.position[row] = seq.length + 1
        for row, seq in there.items():
            seq.commit([-1 if ids is None else ids[row]])
        type(self).runs += 1
        return self.logits


def as_if_on_a_gpu(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Answers are computed in batches."""
    engine.device = replace(engine.device, kind=CUDA)
    monkeypatch.setattr(engine, "synchronize", lambda: None)
    engine.batches = Batches(engine.model, engine.layout, engine.ctx_size)


def finish(engine: Engine, requests: list[Request]) -> None:
    while not all(request.finished for request in requests):
        engine.step([request for request in requests if not request.finished])


def together(engine: Engine, cancel: int) -> tuple[list[Request], int]:
    """Answers that run side by side, of which the second is cancelled in that step; and how many steps there were."""
    scheduler, found, cancelled, step = Scheduler(engine, 8), list[Request](), list[bool](), 0
    while step < 12 or not scheduler.idle:
        for number, (prompt, begins, most, options) in enumerate(ANSWERS):
            if begins == step:
                own = replace(options, max_tokens=most, ignore_eos=True)
                ends = partial(bool, cancelled) if number == 1 else bool
                found.append(engine.request(engine.new_sequence(), PROMPT[number : number + prompt], own, ends))
                scheduler.submit(found[-1])
        if step == cancel:
            cancelled.append(True)
        scheduler.step()
        step += 1
    return found, step


@pytest.mark.slow
@pytest.mark.parametrize("plain", [pytest.param(True, marks=INTERPRETED), pytest.param(False, marks=COMPILED)])
def test_answers_side_by_side_are_those_alone(monkeypatch: pytest.MonkeyPatch, plain: bool) -> None:
    """Each with options of its own; some come later, some end before others, one is cancelled. `plain`: what stands
    around the kernels, alone."""
    options = CacheOptions(160, "int8", "int8", page_size=16, ubatch=48)
    engine = open_tiny("llama", "reference", options)
    alone = []
    for number, (prompt, _, most, sampling) in enumerate(ANSWERS):
        text, own = PROMPT[number : number + prompt], replace(sampling, max_tokens=most, ignore_eos=True)
        with closing(engine.new_sequence()) as seq:
            *_, end = engine.generate(seq, text, own)
            assert isinstance(end, End)
            alone.append(end.ids)
    monkeypatch.setattr(batching, "BATCH_ROWS", (2, 4))
    monkeypatch.setattr(batching, "MOST", 4)
    if plain:
        monkeypatch.setattr(batching, "BatchGraph", PlainGraph)
        monkeypatch.setattr(PlainGraph, "model_of", engine.model, raising=False)
        as_if_on_a_gpu(engine, monkeypatch)
    else:
        engine = open_tiny("llama", "auto", options)
    found, steps = together(engine, 8)
    for number, (request, expected) in enumerate(zip(found, alone, strict=True)):
        assert request.end is not None
        if number == 1:
            assert request.end.finish_reason == "interrupted" and 2 < len(request.end.ids) < len(expected)
            expected = expected[: len(request.end.ids)]
        assert request.end.ids == expected, number
        text = request.history[: request.seq.length]
        assert request.seq.tokens == text and len(text) >= len(request.history) - 1 - 16
        request.seq.close()
    assert steps < sum(len(ids) for ids in alone) and engine.one_by_one == ""
    assert not plain or PlainGraph.runs > 10
    engine.pool.check([])


@INTERPRETED
@pytest.mark.parametrize(("most", "runs"), [((6, 6), 5), ((4, 6), 5), ((4, 9), 5)])
def test_no_step_is_computed_behind_the_last_tokens_of_all(
    monkeypatch: pytest.MonkeyPatch, most: tuple[int, int], runs: int
) -> None:
    """First tokens come of prompts; where one answer goes on, rows behind the other's last token are computed, too."""
    engine = open_tiny("llama", "reference", CacheOptions(160, page_size=16, ubatch=48))
    monkeypatch.setattr(batching, "BatchGraph", PlainGraph)
    monkeypatch.setattr(PlainGraph, "model_of", engine.model, raising=False)
    monkeypatch.setattr(PlainGraph, "runs", 0)
    as_if_on_a_gpu(engine, monkeypatch)
    options = [SampleOptions(0.0, max_tokens=n, ignore_eos=True) for n in most]
    requests = [engine.request(engine.new_sequence(), PROMPT[n:20], o) for n, o in enumerate(options)]
    finish(engine, requests)
    assert [len(r.history) - r.n_prompt for r in requests] == list(most) and PlainGraph.runs == runs
    for request in requests:
        request.seq.close()
    engine.pool.check([])


class Crowded(PlainGraph):
    """A graph whose lists are too short from the fourth step on."""

    def run(self, ids: Mapping[int, int] | None = None) -> torch.Tensor:
        if self.runs == 3:
            raise NoRoom("lists longer than planned")
        return super().run(ids)


@pytest.mark.slow
@INTERPRETED
@pytest.mark.parametrize("most", [(7, 9), (7, 9, 8, 8)])
def test_lists_that_are_too_long_end_the_batches(monkeypatch: pytest.MonkeyPatch, most: tuple[int, ...]) -> None:
    """Answers go on one by one, those of other batches, too, and whoever asks is told why."""
    engine = open_tiny("llama", "reference", CacheOptions(160, page_size=16, ubatch=48))
    options = [SampleOptions(0.0, max_tokens=n, ignore_eos=True) for n in most]
    monkeypatch.setattr(batching, "BATCH_ROWS", (2,))
    monkeypatch.setattr(batching, "MOST", 2)
    monkeypatch.setattr(batching, "BatchGraph", Crowded)
    monkeypatch.setattr(Crowded, "model_of", engine.model, raising=False)
    monkeypatch.setattr(Crowded, "runs", 0)
    found: dict[str, list[list[int]]] = {}
    for kind in ("alone", "together"):
        if kind == "together":
            as_if_on_a_gpu(engine, monkeypatch)
        requests = [engine.request(engine.new_sequence(), PROMPT[n:20], o) for n, o in enumerate(options)]
        for each in ([r] for r in requests) if kind == "alone" else [requests]:
            finish(engine, each)
        found[kind] = [r.history[r.n_prompt :] for r in requests]
        for request in requests:
            request.seq.close()
    assert found["together"] == found["alone"] and Crowded.runs == 3
    assert engine.one_by_one == "lists longer than planned"
    engine.pool.check([])


def test_what_is_not_computed_together() -> None:
    """And why."""
    config = open_tiny("llama", "reference").config
    plain = KVLayout.build(config, "int8", "int8", PAGE)
    assert batching.unsupported(plain) == ""
    assert batching.unsupported(replace(plain, attend=AttendOptions(4))) == "tokens choose the pages that they read"
    assert batching.unsupported(replace(plain, grain=64)) == "answers from cached rows are to be the same"


class OneToken:
    """A grammar that has one token, and no option names it."""

    stopped = False

    def __init__(self, token: int, vocab: int, waits: bool) -> None:
        self.waits, self.mask = waits, torch.arange(vocab).numpy() == token
        self.unfinished = self.mask | True

    def begin(self, text: str) -> bool:
        self.waits = False
        return True

    def allowed(self) -> Any:
        return self.mask.copy()

    def accept(self, token: int) -> None:
        assert self.mask[token]


@INTERPRETED
@pytest.mark.parametrize(("count", "codec"), [(1, "f16"), (2, "int8")])
def test_tokens_of_calls_are_chosen_by_their_grammar(count: int, codec: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """From the first token on, or where a call begins: behind the last row of a page that was sealed, too."""
    engine = open_tiny("llama", "reference", CacheOptions(160, codec, codec, page_size=16, ubatch=48))
    monkeypatch.setattr(batching, "BatchGraph", PlainGraph)
    monkeypatch.setattr(PlainGraph, "model_of", engine.model, raising=False)
    as_if_on_a_gpu(engine, monkeypatch)
    options = SampleOptions(0.0, max_tokens=16, ignore_eos=True)
    for waits in (False, True):
        requests = [engine.request(engine.new_sequence(), PROMPT[n:20], options) for n in range(count)]
        first, history = requests[0], requests[0].history
        first.sampler.constraint = OneToken(7, engine.config.vocab_size, waits)  # type: ignore[assignment]
        begun = property(
            lambda text, first=first, history=history: "x" if text is first._text and len(history) > 31 else ""
        )
        monkeypatch.setattr(AnswerText, "calls_begun", begun)
        finish(engine, requests)
        assert first.error is None and first.end is not None
        assert first.end.ids[12 if waits else 0 :] == [7] * (4 if waits else 16)
        for request in requests:
            request.seq.close()
    engine.pool.check([])


@INTERPRETED
def test_lists_that_were_not_sent_are_sent_before_the_next_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    pair = Pair("llama", "f16", 2)
    graph, send, failures = pair.graph, pair.graph.pages.send, [NoRoom("more work than planned")]

    def fails_once() -> None:
        if failures:
            raise failures.pop()
        send()

    sent: list[int] = []
    monkeypatch.setattr(graph.pages, "send", lambda: (fails_once(), sent.append(1)))
    monkeypatch.setattr(graph, "_replay", lambda: None)
    pair.join(0, 20)
    with pytest.raises(NoRoom):
        graph.run({0: 5})
    graph.run({0: 5})
    assert sent


@INTERPRETED
def test_an_answer_alone_makes_no_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, made = open_tiny("llama", "reference", CacheOptions(160, page_size=16, ubatch=48)), list[Any]()
    as_if_on_a_gpu(engine, monkeypatch)
    monkeypatch.setattr(batching, "Batch", lambda *sizes: made.append(sizes))
    finish(engine, [engine.request(engine.new_sequence(), PROMPT[:20], SampleOptions(0.0, max_tokens=5))])
    assert not made
