"""Where a text repeats itself, against the definition; which answers count as a loop, and which do not."""

from __future__ import annotations

import itertools
import random
from pathlib import Path

import pytest
from conftest import ROOT
from tinyvocab import tiny

from kvcli.runtime.engine.events import Loop
from kvcli.runtime.engine.repeats import LOOP_PERIOD, LOOP_TOKENS, LoopDetector, Repeats


def length_at(text: list[int], distance: int) -> int:
    """How many of the last tokens are those `distance` places before them."""
    count = 0
    while count + distance < len(text) and text[-1 - count] == text[-1 - count - distance]:
        count += 1
    return count


@pytest.mark.parametrize("reach", [1, 5, 64, 1 << 40])
@pytest.mark.parametrize("vocabulary", [1, 2, 20])
def test_lengths_are_those_of_the_definition(reach: int, vocabulary: int):
    chance = random.Random(reach + vocabulary)
    for n in (1, 2, 30, 255, 256, 257, 600):
        text = chance.choices(range(vocabulary), k=n)
        for start, counted in ((0, 0), (n // 2, 0), (n // 2, 7), (n, n)):
            repeats = Repeats(reach, text[:start], counted)
            for token in text[start:]:
                repeats.push(token)
            distances = range(1, min(reach, n - 1) + 1)
            known = n - start + min(counted, start)
            expected = [min(length_at(text, d), known) for d in distances]
            assert repeats.lengths[: len(distances)].tolist() == expected, (n, start, counted)
            assert repeats.n_tokens == n and repeats.backwards[:n].tolist() == text[::-1]
            assert not repeats.lengths[n:].any()


def stopped(tokens: list[int]) -> tuple[int, Loop] | None:
    """After how many tokens the detector tells of a loop, and of which."""
    detector = LoopDetector()
    for number, token in enumerate(tokens, 1):
        loop = detector.push(token)
        if loop is not None:
            return number, loop
    return None


@pytest.mark.parametrize("period", [1, 2, 7, 64, 128, 300, LOOP_PERIOD])
def test_rounds_of_the_same_tokens_are_a_loop(period: int):
    beginning, needed = list(range(1000, 1333)), max(LOOP_TOKENS, 4 * period)
    tokens = beginning + [i % period for i in range(needed + 8)]
    found = stopped(tokens)
    assert found is not None
    number, loop = found
    assert len(beginning) + needed <= number < len(beginning) + needed + 8  # it looks at every eighth token
    assert loop == Loop(number - len(beginning), period) and loop.times == loop.tokens // period >= 4
    assert stopped(tokens[: len(beginning) + needed - 1]) is None


def test_a_round_whose_tokens_come_more_than_once_is_found_whole():
    found = stopped([1, 1, 2, 1, 1, 3] * 200)
    assert found is not None and found[1].period == 6


def test_what_is_longer_or_changes_is_no_loop():
    assert stopped(list(range(LOOP_PERIOD + 1)) * 20) is None
    assert stopped([token for i in range(300) for token in (*range(20), 1000 + i)]) is None
    assert stopped([5] * (LOOP_TOKENS - 8) + [6] * (LOOP_TOKENS - 8)) is None
    assert stopped([]) is None


REFRAIN = "Row, row, row your boat,\ngently down the stream,\nmerrily, merrily, merrily,\nlife is but a dream.\n"
VERSES = [
    f"{name} sang of the {thing} by the shore,\n" * 2
    for name, thing in zip("ABCD", ("sea", "sun", "oak", "bee"), strict=True)
]
LEGITIMATE = {
    "numbers": ", ".join(map(str, range(1, 501))),
    "numbered list": "\n".join(f"{i}. The sky is blue." for i in range(1, 200)),
    "table": "| name | age |\n|---|---|\n" + "\n".join(f"| user{i} | {20 + i % 50} |" for i in range(200)),
    "JSON": str([{"id": i, "name": f"user{i}", "active": True} for i in range(150)]),
    "times tables": "\n".join(f"{a} x {b} = {a * b}" for a, b in itertools.product(range(1, 13), repeat=2)),
    "zeros": "[" + ",\n ".join(["[" + ", ".join("0" * 10) + "]"] * 10) + "]",
    "rows of HTML": "<table>\n" + "<tr><td></td><td></td></tr>\n" * 16 + "</table>",
    "song": "\n".join(verse + REFRAIN for verse in VERSES),
    "alphabet": " ".join("abcdefghijklmnopqrstuvwxyz") * 4,
    "rule": "-" * 400,
}


@pytest.mark.parametrize("name", LEGITIMATE)
def test_legitimate_text_is_no_loop(name: str):
    for pre in ("gpt-2", "smollm"):
        assert stopped(tiny(pre).encode(LEGITIMATE[name])) is None


@pytest.mark.parametrize(
    "path", ["README.md", "kvcli/kernels/cpu/cpu.c", "kvcli/runtime/engine/engine.py", "pyproject.toml"]
)
def test_files_are_no_loop(path: str):
    assert stopped(tiny().encode(Path(ROOT / path).read_text("utf-8"))) is None
