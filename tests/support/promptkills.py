"""A program that starts writers of a store and kills each at some point of its work: forks of it are cheap, it has no
torch. `promptkills.py PATHS ROOT COUNT` prints how many were killed."""

from __future__ import annotations

import os
import random
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

if __name__ == "__main__":
    sys.path[:0] = sys.argv[1].split(":")

from promptfiles import IDENTITY, SIZE, blocks, contents

from kvcli.runtime.promptcache.file import Contents
from kvcli.runtime.promptcache.store import Limits, PromptStore

LIMITS = Limits(1 << 30, 3600)


def store_at(
    root: Path, limits: Limits = LIMITS, warn: Callable[[str], None] = lambda text: None, **changed: str
) -> PromptStore:
    return PromptStore(root / "prompts", {**IDENTITY, **changed}, SIZE, limits, warn)


def segment(store: PromptStore, tokens: list[int], start: int = 0) -> Contents:
    """The pages from `start` on, a page boundary."""
    whole = contents(tokens)
    pages = [key for key in whole.pages if key[1] >= start // SIZE]
    parent = store.chain(tokens)[start // SIZE]
    return Contents(IDENTITY, tokens[start:], pages, whole.page_bytes, whole.basis, whole.about, start, parent)


def killed_writer(root: Path, tokens: list[int], start: int, point: int, replaced: Sequence[Path] = ()) -> bool:
    """Write a segment, in place of others, in a child that is killed at the given checkpoint; whether it got there."""
    child = os.fork()
    if child == 0:
        reached = iter(range(1 << 20))

        def die(name: str) -> None:
            if next(reached) == point:
                os.kill(os.getpid(), signal.SIGKILL)

        try:
            store = store_at(root)
            part = segment(store, tokens, start)
            store.add(part, blocks(part), die, replaced)
        finally:
            os._exit(0)
    return os.WIFSIGNALED(os.waitpid(child, 0)[1])


def main(root: Path, count: int) -> None:
    generator, killed = random.Random(6), 0
    for number in range(count):
        tokens = [number % 25, *range(generator.randrange(1, 80))]
        start = generator.randrange(len(tokens)) // SIZE * SIZE
        killed += killed_writer(root / str(number % 10), tokens, start, generator.randrange(12))
    print(killed)


if __name__ == "__main__":
    main(Path(sys.argv[2]), int(sys.argv[3]))
