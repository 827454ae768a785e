"""Pass-key retrieval: does a model still find a sentence that stands somewhere in a long context?

The context is filler made here from a few words by a seeded generator, with one sentence that names a key. The model
continues "The pass key is": scored are the key's mean negative log likelihood, and whether greedy decoding would give
exactly the key. A small model may fail the second with any cache; the first still shows what a cache type costs.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

import torch

from kvcli.errors import UsageError
from kvcli.runtime.cache.pool import PagePool
from kvcli.runtime.cache.sequence import Sequence
from kvcli.runtime.engine.engine import Engine
from kvcli.runtime.text.tokenizer import Tokenizer

KEY_DIGITS = 5
OPENING = "One sentence below names a pass key. Remember it."
QUESTION = "\n\nWhat is the pass key? The pass key is"
_WHO = ("A clerk", "The gardener", "Our neighbour", "The night train", "An old map", "The second office", "A lantern")
_DOES = ("waits beside", "is older than", "was painted like", "belongs to", "stands behind", "has forgotten")
_WHAT = (
    "the quiet harbour",
    "a row of chairs",
    "the north window",
    "every other wall",
    "the paper mill",
    "a low bridge",
)
_WHEN = ("in the morning", "on most days", "when it rains", "after the market", "since last autumn", "for no reason")


@dataclass(frozen=True)
class PassKey:
    """Token ids of a context and of the key that should follow. `depth`: where the key stands, in per cent."""

    depth: float
    key: str
    context: list[int]
    answer: list[int]


@dataclass(frozen=True)
class Answer:
    """`nll`: mean over the key's tokens, in nats. `exact`: greedy decoding gives the key."""

    nll: float
    exact: bool


def needle(key: str) -> str:
    return f"The pass key is {key}. Remember it: {key} is the pass key."


def question(tokenizer: Tokenizer, ctx: int, depth: float, seed: int) -> PassKey:
    """A question of at most `ctx` tokens, the key's included, and not much less. Raises UsageError for too few."""
    chance = random.Random(f"{seed} {ctx} {depth}")
    key = "".join(chance.choices("123456789", k=KEY_DIGITS))
    filler = [_sentence(chance) for _ in range(ctx // 4)]
    low, high = 0, len(filler)  # the most sentences that fit: `low` always do, `high` + 1 never
    if len(_encode(tokenizer, key, filler[:0], depth)[1]) > ctx:
        raise UsageError(f"a context of {ctx} tokens has no room for the question", "use a longer --ctx")
    while low < high:
        middle = (low + high + 1) // 2
        fits = len(_encode(tokenizer, key, filler[:middle], depth)[1]) <= ctx
        low, high = (middle, high) if fits else (low, middle - 1)
    asked, whole = _encode(tokenizer, key, filler[:low], depth)
    common = next((i for i, (a, b) in enumerate(zip(asked, whole, strict=False)) if a != b), len(asked))
    return PassKey(depth, key, whole[:common], whole[common:])


def ask(engine: Engine, pool: PagePool, asked: PassKey) -> Answer:
    """The key after the context, through a fresh cache on `pool`; one forward pass of chunks."""
    ids = asked.context + asked.answer[:-1]
    first, seq, hidden = len(asked.context) - 1, Sequence(pool), []
    try:
        for start, end in engine.chunks(0, len(ids)):
            hidden.append(engine.forward(seq, ids[start:end])[max(0, first - start) :])
    finally:
        seq.close()
    log_p = engine.logits(torch.cat(hidden)).log_softmax(-1)  # [answer, vocab_size]
    wanted = torch.tensor(asked.answer, device=log_p.device)
    nll = -log_p.gather(1, wanted[:, None])
    return Answer(float(nll.mean()), bool((log_p.argmax(-1) == wanted).all()))


def _sentence(chance: random.Random) -> str:
    return " ".join(chance.choice(words) for words in (_WHO, _DOES, _WHAT, _WHEN)) + "."


def _encode(tokenizer: Tokenizer, key: str, filler: list[str], depth: float) -> tuple[list[int], list[int]]:
    """Token ids of the question, and of it with the key behind."""
    at = round(len(filler) * depth / 100)
    text = " ".join([OPENING, *filler[:at], needle(key), *filler[at:]]) + QUESTION
    return tokenizer.encode(text), tokenizer.encode(f"{text} {key}")
