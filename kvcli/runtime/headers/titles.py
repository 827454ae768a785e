"""How a model is called where people read it: as its makers write the name. No torch."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kvcli.runtime.hub.recipes import load_recipes

_SIZE = re.compile(r"\d+(\.\d+)?[mb]", re.ASCII)  # 270m: converters leave the letter small


def title_of(path: Path, size: int, metadata: Mapping[str, Any]) -> str:
    """The title of the recipe that the file is of, else its own name, tidied. `size`: its bytes."""
    file_names = {path.name, path.resolve().name}
    for recipe in load_recipes().values():
        if any(file.size == size and file.name in file_names for file in recipe.variants):
            return recipe.title.partition(", ")[0]  # behind the comma stands the type of the weights
    return named_in(metadata) or path.stem


def named_in(metadata: Mapping[str, Any]) -> str:
    """The name that the file gives itself, without that of a training run; "" = none."""
    name, basename, label, tuning = (
        " ".join(str(metadata.get(f"general.{key}", "")).split())
        for key in ("name", "basename", "size_label", "finetune")
    )
    words = (name or f"{basename} {label}").split()
    run = re.split(r"[-_ ]", tuning.lower())
    if _is_run(run) and [word.lower() for word in words[-len(run) :]] == run:
        words = words[: -len(run)]
    return " ".join(word.upper() if _SIZE.fullmatch(word) else word for word in words)


def _is_run(words: list[str]) -> bool:
    """Whether a fine-tune is called like '8k-lc100k-mix1-ep2', which names no model."""
    return len(words) > 1 and all(re.search(r"\d", word) for word in words)
