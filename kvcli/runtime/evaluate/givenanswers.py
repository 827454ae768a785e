"""What a model thinks of answers that are given: each token is scored where it would be chosen, after a prefill and a
decode as those of any prompt, with whatever the engine's cache forgets, compresses or does not look at on the way."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch

from kvcli.options import SampleOptions
from kvcli.runtime.engine.engine import Engine
from kvcli.runtime.engine.request import Request
from kvcli.runtime.engine.sampler import Sampler
from kvcli.runtime.evaluate.quality import against
from kvcli.runtime.evaluate.tasks import Example


@dataclass(frozen=True)
class Answer:
    """Means over the tokens of an answer, in nats: `nll`, the negative log likelihood, and `kld`, the divergence
    KL(full || this) of the predictions from those over a full cache. `exact`: greedy decoding gives the answer."""

    nll: float
    kld: float
    exact: bool


class _Given(Sampler):
    """Chooses the tokens of an answer one after the other, and keeps the log probabilities of all tokens at each."""

    def __init__(self, answer: list[int], options: SampleOptions, vocab_size: int) -> None:
        super().__init__(options, {}, vocab_size)
        self.answer, self.seen = answer, list[torch.Tensor]()

    def sample(self, logits: torch.Tensor, history: object, position: int) -> int:
        self.seen.append(logits.float().log_softmax(-1).cpu())  # a copy: the next token's may come in its place
        return self.answer[len(self.seen) - 1]


def predictions(
    engine: Engine, example: Example, step: Callable[[int], None] = lambda tokens: None, later: bool = False
) -> torch.Tensor:
    """Log probabilities of all tokens where each token of the answer stands, float32 [answer, vocab_size] on the host,
    from an empty sequence. `step` is told of rows that were computed. `later`: the question comes when the text that
    it is about was a prompt of its own. The engine's context must have room for all. Raises DoesNotFit."""
    count, vocabulary, seq = len(example.answer), engine.config.vocab_size, engine.new_sequence()
    # Log probabilities keep the choice on the host.
    options = SampleOptions(temperature=0.0, max_tokens=count, ignore_eos=True, logprobs=0)
    given = _Given(example.answer, options, vocabulary)
    turns = [(example.context, options, given)]
    if later and example.asked:
        nothing = replace(options, max_tokens=0)
        turns.insert(0, (example.context[: -example.asked], nothing, _Given([], nothing, vocabulary)))
    try:
        for prompt, how, sampler in turns:
            _run(engine, Request(engine, seq, prompt, how, sampler), step)
    finally:
        seq.close()
    return torch.stack(given.seen)


def _run(engine: Engine, request: Request, step: Callable[[int], None]) -> None:
    """Have all of a request. Raises what ends it."""
    try:
        while not request.finished:
            before = request.seq.length
            engine.step([request])
            step(max(0, request.seq.length - before))
    finally:
        request.close()
    if request.error is not None:
        raise request.error


def score(log_p: torch.Tensor, full: torch.Tensor, answer: list[int]) -> Answer:
    """Of predictions float32 [answer, vocab_size], beside those over a full cache."""
    found = against(full, log_p, torch.tensor(answer))
    return Answer(
        float(found.nll.mean()), float(found.kld.mean()), bool((log_p.argmax(-1) == torch.tensor(answer)).all())
    )


def compare(
    engines: list[Engine], examples: list[Example], progress: Callable[[str, int, int], None], later: bool = False
) -> Iterator[tuple[Example, list[Answer]]]:
    """Each example with the answers of every engine; the first one has the full cache. `progress(task, done, total)`
    counts tokens over all engines. `later`: see `predictions`."""
    total, done = sum(len(e.context) + len(e.answer) - 1 for e in examples) * len(engines), 0
    for example in examples:
        answers, full = list[Answer](), torch.empty(0)

        def step(tokens: int, example: Example = example) -> None:
            nonlocal done
            done += tokens
            progress(example.task, done, total)

        for engine in engines:
            found = predictions(engine, example, step, later)
            full = found if engine is engines[0] else full
            answers.append(score(found, full, example.answer))
        yield example, answers
