"""Generations that take from caches and give to them, on tiny engines that are opened once."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path

from engines import DRAWN, open_tiny, run

from kvcli.notices import Tell
from kvcli.options import CacheOptions, PromptCacheOptions
from kvcli.runtime.engine.engine import Engine
from kvcli.runtime.engine.events import End
from kvcli.runtime.promptcache.marks import Mark
from kvcli.runtime.promptcache.store import entries, folders

FOUR = replace(DRAWN, max_tokens=4)


class Told(Tell):
    """Keeps what was said."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        super().__init__(*(self.lines.append for _ in range(3)))


_ENGINES: dict[tuple[str, str, str, int, int], Engine] = {}


def engine_of(variant: str, k: str = "f16", v: str = "", tail: int = 1, page: int = 16) -> Engine:
    key = variant, k, v or k, tail, page
    if key not in _ENGINES:
        options = CacheOptions(ctx_size=320, type_k=k, type_v=v or k, page_size=page, tail=tail)
        _ENGINES[key] = open_tiny(variant, "native", options)
    return _ENGINES[key]


def store_in(root: Path, **more: object) -> PromptCacheOptions:
    return PromptCacheOptions(store=root / "prompts", min_tokens=8, **more)  # type: ignore[arg-type]


def ask(
    engine: Engine,
    prompt: list[int],
    options: PromptCacheOptions,
    told: Told | None = None,
    marks: Sequence[Mark] = (),
) -> End:
    """As a process of its own would: an empty sequence, empty caches, all written at the end."""
    with closing(engine.prompt_caches(options, told or Told())) as caches:
        seq = engine.new_sequence()
        end = run(engine, seq, prompt, FOUR, caches=caches, marks=marks)
        seq.close()
    engine.pool.check([])
    return end


def files_in(root: Path) -> list[Path]:
    return [entry.path for folder in folders(root / "prompts") for entry in entries(folder)]


NOWHERE = PromptCacheOptions(memory=True)
