"""What a model thinks of answers that are given: each token is scored where it would be chosen, after a prefill and a
decode as those of any prompt, with whatever the engine's cache forgets, compresses or does not look at on the way."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

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


def predictions(engine: Engine, example: Example, step: Callable[[int], None] = lambda tokens: None) -> torch.Tensor:
    """Log probabilities of all tokens where each token of the answer stands, float32 [answer, vocab_size] on the host,
    from an empty sequence. `step` is told of rows that were computed. Its context must have room
    for them. Raises DoesNotFit."""
    count = len(example.answer)
    # Log probabilities keep the choice on the host.
    options = SampleOptions(temperature=0.0, max_tokens=count, ignore_eos=True, logprobs=0)
    given, seq = _Given(example.answer, options, engine.config.vocab_size), engine.new_sequence()
    request = Request(engine, seq, example.context, options, given)
    try:
        while not request.finished:
            before = seq.length
            engine.step([request])
            step(seq.length - before)
    finally:
        request.close()
        seq.close()
    if request.error is not None:
        raise request.error
    return torch.stack(given.seen)


def score(log_p: torch.Tensor, full: torch.Tensor, answer: list[int]) -> Answer:
    """Of predictions float32 [answer, vocab_size], beside those over a full cache."""
    found = against(full, log_p, torch.tensor(answer))
    return Answer(
        float(found.nll.mean()), float(found.kld.mean()), bool((log_p.argmax(-1) == torch.tensor(answer)).all())
    )


def compare(
    engines: list[Engine], examples: list[Example], progress: Callable[[str, int, int], None]
) -> Iterator[tuple[Example, list[Answer]]]:
    """Each example with the answers of every engine; the first one has the full cache. `progress(task, done, total)`
    counts tokens over all engines."""
    total, done = sum(len(e.context) + len(e.answer) - 1 for e in examples) * len(engines), 0
    for example in examples:
        answers, full = list[Answer](), torch.empty(0)

        def step(tokens: int, example: Example = example) -> None:
            nonlocal done
            done += tokens
            progress(example.task, done, total)

        for engine in engines:
            found = predictions(engine, example, step)
            full = found if engine is engines[0] else full
            answers.append(score(found, full, example.answer))
        yield example, answers
