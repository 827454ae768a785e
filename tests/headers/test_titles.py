"""What models are called where people read it."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvcli.runtime.headers.titles import named_in, title_of
from kvcli.runtime.hub.recipes import load_recipes

RUN = {"general.name": "Smollm2 135M 8k Lc100K Mix1 Ep2", "general.finetune": "8k-lc100k-mix1-ep2"}


def test_a_known_file_has_the_title_of_its_recipe(tmp_path: Path) -> None:
    file = load_recipes()["smollm2"].file
    assert file is not None
    assert title_of(tmp_path / file.name, file.size, RUN) == "SmolLM2 135M Instruct"
    (tmp_path / "mine.gguf").symlink_to(tmp_path / file.name)
    assert title_of(tmp_path / "mine.gguf", file.size, RUN) == "SmolLM2 135M Instruct"
    assert title_of(tmp_path / file.name, file.size - 1, RUN) == "Smollm2 135M"
    assert title_of(tmp_path / "other.gguf", 5, {}) == "other"


@pytest.mark.parametrize(
    ("metadata", "title"),
    [
        ({"name": "Gemma 3 270m"}, "Gemma 3 270M"),
        ({"name": "Meta-Llama-3-8B-Instruct", "finetune": "Instruct"}, "Meta-Llama-3-8B-Instruct"),
        ({"name": "Dolphin 2.9 Llama3 8b", "finetune": "Dolphin-2.9"}, "Dolphin 2.9 Llama3 8B"),
        ({"basename": "qwen", "size_label": "1.5B"}, "qwen 1.5B"),
        ({"name": "  a\n b "}, "a b"),
        ({}, ""),
    ],
)
def test_the_name_in_a_file_is_tidied(metadata: dict[str, str], title: str) -> None:
    assert named_in({f"general.{key}": value for key, value in metadata.items()}) == title
