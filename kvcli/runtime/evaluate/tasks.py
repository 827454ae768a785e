"""Questions about long contexts, made here from a seed: what a model can still find, follow and count.

Their forms are those of RULER (arXiv 2404.06654): a key among others, variables that are set to each other, the
commonest of many words, facts in no order. Words and sentences are our own. Each ends in the first words of an answer,
so that a model which was never told to answer goes on with it. `passages` takes continuations from a user's text.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

from kvcli.errors import UsageError
from kvcli.runtime.text.tokenizer import Tokenizer

RECALL, TEXT = "recall", "text"  # one key at a depth; going on with a text
KEYS = 4  # of `needles`
HOPS = 3  # of `variables`: from one to the next
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
_PLACES = ("harbour", "library", "station", "garden", "tower", "market", "museum", "bakery", "theatre", "mill")
_FIRST = ("Mara", "Jonas", "Ines", "Tomas", "Lena", "Oscar", "Nadia", "Peter", "Ruth", "Simon", "Clara", "Victor")
_LAST = ("Ellis", "Brandt", "Costa", "Novak", "Hale", "Moreau", "Lind", "Weber", "Stone", "Rossi", "Kerr", "Dahl")
_TOWNS = ("Porto", "Bergen", "Lyon", "Turin", "Cork", "Graz", "Malmo", "Seville", "Ghent", "Leeds", "Basel", "Delft")
_TRADES = ("baker", "nurse", "painter", "sailor", "teacher", "tailor", "miner", "cook", "pilot", "farmer")
_THINGS = ("stamps", "maps", "clocks", "shells", "coins", "posters", "bells", "kites", "masks", "spoons")


@dataclass(frozen=True)
class Example:
    """Token ids of a context and of the answer that should follow. `tokens`: as many as both may have; `depth`: where
    the key stands, in per cent, where the task says so. `key`: the answer as text. `asked`: of the context, how many
    tokens at its end are the question."""

    task: str
    tokens: int
    context: list[int]
    answer: list[int]
    key: str
    depth: float | None = None
    asked: int = 0

    @property
    def name(self) -> str:
        """The task, with the depth if there is one."""
        return self.task if self.depth is None else f"{self.task} {self.depth:g} %"


Built = tuple[str, str]  # a text that ends in a question, behind an empty line, and before an answer; and the answer
Builder = Callable[[int], Built]  # with so many sentences, or words, around what matters


def example(tokenizer: Tokenizer, task: str, tokens: int, seed: int, depth: float | None = None) -> Example:
    """A question of at most `tokens` tokens, the answer's included, and not much less. `depth`: of the key of `recall`,
    in per cent. Raises UsageError for too few tokens."""
    drawn = f"{seed} {tokens} {task if depth is None else depth}"
    if depth is not None:
        return _fitted(tokenizer, task, tokens, lambda n: _recall(random.Random(drawn), n, depth), depth)
    return _fitted(tokenizer, task, tokens, lambda n: _BUILDERS[task](random.Random(drawn), n))


def passages(tokenizer: Tokenizer, text: str, tokens: int, count: int) -> list[Example]:
    """At most `count` stretches of a text of `tokens` tokens each, one behind the other. The last eighth, but at most
    256 tokens, is the answer. A BOS replaces the first token where the model wants one. Raises UsageError."""
    ids = tokenizer.encode(text)
    head = ids[:1] if tokenizer.add_bos else []
    if len(ids) < tokens:
        raise UsageError(
            f"the text has {len(ids):,} tokens, a passage needs {tokens:,}", "give more text, or ask for fewer tokens"
        )
    found, cut = [], tokens - min(256, max(2, tokens // 8))
    for start in range(0, min(count, len(ids) // tokens) * tokens, tokens):
        part = [*head, *ids[start + len(head) : start + tokens]]
        found.append(Example(TEXT, tokens, part[:cut], part[cut:], tokenizer.decode(part[cut:])))
    return found


def _fitted(tokenizer: Tokenizer, task: str, tokens: int, build: Builder, depth: float | None = None) -> Example:
    """The longest question that `build` makes in so many tokens."""

    def encoded(n: int) -> tuple[list[int], list[int], str, str]:
        asked, key = build(n)
        return tokenizer.encode(asked), tokenizer.encode(f"{asked} {key}"), key, asked

    low, high = 0, tokens // 2
    if len(encoded(0)[1]) > tokens:
        raise UsageError(f"a context of {tokens} tokens has no room for the question", "ask for more")
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if len(encoded(middle)[1]) <= tokens else (low, middle - 1)
    asked, whole, key, text = encoded(low)
    common = _common(asked, whole)
    before = _common(tokenizer.encode(text[: text.rindex("\n\n")]), whole)
    return Example(task, tokens, whole[:common], whole[common:], key, depth, max(0, common - before))


def _common(some: list[int], others: list[int]) -> int:
    """How many of the first ids are the same."""
    return next((i for i, (a, b) in enumerate(zip(some, others, strict=False)) if a != b), min(len(some), len(others)))


# --- tasks: each takes a generator and how many sentences or words there are to be beside what matters


def needle(key: str) -> str:
    """The sentence that `recall` hides."""
    return f"The pass key is {key}. Remember it: {key} is the pass key."


OPENING = "One sentence below names a pass key. Remember it."
QUESTION = "\n\nWhat is the pass key? The pass key is"


def _recall(chance: random.Random, count: int, depth: float) -> Built:
    """A pass key in filler, at a depth in per cent."""
    key, around = _digits(chance), [_sentence(chance) for _ in range(count)]
    at = round(count * depth / 100)
    return " ".join([OPENING, *around[:at], needle(key), *around[at:]]) + QUESTION, key


def _needles(chance: random.Random, count: int) -> Built:
    """Codes of several places in filler; one is asked for."""
    places = chance.sample(_PLACES, KEYS)
    codes = [_digits(chance) for _ in places]
    hidden = [f"The code of the {place} is {code}: {code}." for place, code in zip(places, codes, strict=True)]
    asked, text = chance.randrange(KEYS), _hide(chance, hidden, count)
    question = f"\n\nWhat is the code of the {places[asked]}? The code of the {places[asked]} is"
    return f"Some sentences below name codes. Remember them. {text}{question}", codes[asked]


def _variables(chance: random.Random, count: int) -> Built:
    """Two chains of variables, each set to the one before; those with one chain's value are asked for."""
    names = ["".join(pair) for pair in zip(chance.sample("ABCDEFGHJK", 8), chance.sample("MNPQRSTUVW", 8), strict=True)]
    values = [_digits(chance) for _ in range(2)]
    chains = [names[: HOPS + 1], names[HOPS + 1 : 2 * HOPS + 2]]
    hidden = []
    for step in range(HOPS + 1):
        for chain, value in zip(chains, values, strict=True):
            hidden.append(f"VAR {chain[step]} = {f'VAR {chain[step - 1]}' if step else value}.")
    text = _hide(chance, hidden, count)
    question = f"\n\nWhich variables have the value {values[0]}, in the order in which they are set? They are"
    return f"Some lines below set variables. Follow them. {text}{question}", ", ".join(chains[0])


def _words(chance: random.Random, count: int) -> Built:
    """A list of words, of which one stands in every eighth place or so, and no other more than three times."""
    common = max(4, count // 8)
    others = max(0, count - common)
    several: dict[str, None] = {}
    while len(several) < 1 + -(-others // 3):
        several[_word(chance)] = None
    most, *rest = several
    listed = [most] * common + (rest * 3)[:others]
    chance.shuffle(listed)
    question = "\n\nWhich word is the most common in the list? The most common word is"
    return f"One word of this list is far more common than all others. {' '.join(listed)}{question}", most


def _facts(chance: random.Random, count: int) -> Built:
    """People, where each lives, what each does and collects, in no order; one is asked about."""
    facts = []
    for name in map(_name, range(count + 1)):
        town, trade, things = (chance.choice(each) for each in (_TOWNS, _TRADES, _THINGS))
        facts.append((name, town, f"{name} lives in {town}, works as a {trade} and collects {things}."))
    chance.shuffle(facts)
    name, town, _ = chance.choice(facts)
    question = f"\n\nWhere does {name} live? {name} lives in"
    return "Facts about people. " + " ".join(fact for *_, fact in facts) + question, town


_BUILDERS: dict[str, Callable[[random.Random, int], Built]] = {
    "needles": _needles,
    "variables": _variables,
    "words": _words,
    "facts": _facts,
}


# --- pieces


def filler(chance: random.Random, count: int) -> str:
    """So many sentences that mean nothing much."""
    return " ".join(_sentence(chance) for _ in range(count))


def _hide(chance: random.Random, hidden: list[str], count: int) -> str:
    """These sentences, in their order, at places of `count` sentences of filler that are drawn."""
    shares = sorted(chance.random() for _ in hidden)
    around = [_sentence(chance) for _ in range(count)]
    for share, sentence in reversed(list(zip(shares, hidden, strict=True))):
        around.insert(int(share * (count + 1)), sentence)
    return " ".join(around)


def _sentence(chance: random.Random) -> str:
    return " ".join(chance.choice(words) for words in (_WHO, _DOES, _WHAT, _WHEN)) + "."


def _name(number: int) -> str:
    """The name of one person; no two have the same."""
    more, number = divmod(number, len(_FIRST) * len(_LAST))
    turn, first = divmod(number, len(_FIRST))
    initials = ""
    while more:
        more, letter = divmod(more - 1, 20)
        initials += f" {'ABCDEFGHIJKLMNOPRSTW'[letter]}."
    return f"{_FIRST[first]}{initials} {_LAST[(first + turn) % len(_LAST)]}"


def _word(chance: random.Random) -> str:
    return "".join(chance.choice("bdfklmnprst") + chance.choice("aeiou") for _ in range(3))


def _digits(chance: random.Random) -> str:
    return "".join(chance.choices("123456789", k=5))
