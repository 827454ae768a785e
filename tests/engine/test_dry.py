"""DRY's penalties, against a plain reading of its definition."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest

from kvcli.runtime.engine.dry import Dry

BREAKER = 1  # the token that adds a line break


def effective(**changes: Any) -> dict[str, Any]:
    values = {"multiplier": 0.8, "base": 1.75, "allowed_length": 2, "penalty_last_n": -1, "sequence_breakers": ("\n",)}
    return {f"dry_{name}": value for name, value in (values | changes).items()}


def token_bytes(token: int) -> bytes:
    return b"\n" if token == BREAKER else b"%d " % token


def penalties(text: list[int], pieces: Any = token_bytes, **changes: Any) -> dict[int, float]:
    ids, amounts = Dry(effective(**changes), pieces).penalties(text)
    return dict(zip(ids.tolist(), amounts.tolist(), strict=True))


def expected(text: list[int], base: float, allowed: int, last_n: int, breaks: bool) -> dict[int, float]:
    """For every place where the end of the text stood before, the token behind it."""
    text = text if last_n < 0 else text[max(0, len(text) - last_n) :]
    n, longest = len(text), {}
    unbroken = text[::-1].index(BREAKER) if breaks and BREAKER in text else n
    for end in range(n - 1):
        length = 0
        while length <= end and text[end - length] == text[n - 1 - length]:
            length += 1
        length = min(length, unbroken)
        if length >= allowed and not (breaks and text[end + 1] == BREAKER):
            longest[text[end + 1]] = max(length, longest.get(text[end + 1], 0))
    return {token: 0.8 * base ** (length - allowed) for token, length in longest.items()}


@pytest.mark.parametrize("breaks", [False, True])
@pytest.mark.parametrize("last_n", [-1, 5, 50, 1000])
def test_penalties_are_those_of_the_definition(last_n: int, breaks: bool):
    chance = random.Random(last_n)
    for vocabulary in (2, 3, 8, 30):
        for base, allowed in ((1.0, 1), (1.75, 2), (2.5, 4)):
            text = chance.choices(range(vocabulary), k=chance.randrange(2, 120))
            breakers = ("\n",) if breaks else ()
            values = effective(base=base, allowed_length=allowed, penalty_last_n=last_n, sequence_breakers=breakers)
            dry = Dry(values, token_bytes)
            known = text[: len(text) // 2]
            for token in text[len(known) :]:
                known.append(token)
                ids, amounts = dry.penalties(known)
                found = dict(zip(ids.tolist(), amounts.tolist(), strict=True))
                assert found == pytest.approx(expected(known, base, allowed, last_n, breaks), rel=1e-6)


def test_the_longest_repetition_counts():
    """7 8 9 was followed by 3, and 8 9 by 4."""
    assert penalties([7, 8, 9, 3, 5, 8, 9, 4, 7, 8, 9]) == pytest.approx({3: 0.8 * 1.75, 4: 0.8})
    assert penalties([7, 8, 9, 3], allowed_length=1) == {}


def test_a_breaker_may_span_tokens_or_be_part_of_one():
    pieces = {2: b"Us", 3: b"er: ", 4: b"a", 5: b"b", 6: b"c", 7: b"xUser:x"}.__getitem__
    text = [4, 5, 2, 3, 6, 4, 5, 2, 3]
    assert penalties(text, pieces, sequence_breakers=("User:",)) == {}
    assert penalties(text, pieces, sequence_breakers=("User;",)) == pytest.approx({6: 0.8 * 1.75**2})
    assert penalties([4, 5, 7, 4, 5], pieces, sequence_breakers=("User:",)) == {}  # 7 ends a sequence by itself
    assert penalties([4, 5, 6, 4, 5], pieces, sequence_breakers=("User:",)) == pytest.approx({6: 0.8})


def test_a_long_repetition_stays_a_number():
    found = penalties([5] * 3000)
    assert list(found) == [5] and 1e37 < found[5] < math.inf


def test_another_text_is_another_history():
    dry = Dry(effective(), token_bytes)
    assert dry.penalties([4, 5, 6, 4, 5])[0].tolist() == [6]
    assert dry.penalties([6, 5, 4, 6, 5])[0].tolist() == [4]
    assert dry.penalties([])[0].tolist() == []
