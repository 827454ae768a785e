"""Small prompt-cache files without a model, and without torch."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import numpy as np

from kvcli.runtime.promptcache.file import Contents, nothing, write

SIZE = 16
IDENTITY = {"weights": "ab" * 32, "tokenizer": "cd", "model_config": "{}", "cache_type_k": "f16", "page_size": "16"}
ABOUT = {"model": "none", "lossless": "yes"}


def contents(tokens: list[int], seed: int = 0, **more: object) -> Contents:
    """Two arenas, a page for every SIZE tokens in each, of 64 and 5,000 bytes."""
    pages = [(arena, number) for arena in (0, 1) for number in range(-(-len(tokens) // SIZE))]
    basis = {"basis.0.0.centre": np.full((1, 4), seed, np.float32)}
    return Contents(IDENTITY, tokens, pages, {0: 64, 1: 5000}, basis, ABOUT, **more)  # type: ignore[arg-type]


def blocks(c: Contents, seed: int = 0) -> list[bytes]:
    return [random.Random(f"{seed} {key}").randbytes(c.page_bytes[key[0]]) for key in c.pages]


def make(path: Path, tokens: list[int], seed: int = 0, checkpoint: Callable[[str], None] = nothing) -> Contents:
    c = contents(tokens, seed)
    write(path, c, blocks(c, seed), checkpoint)
    return c
