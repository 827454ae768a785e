"""Where prompts can go on from a file, beside what the look-up of a prompt would find there."""

from __future__ import annotations

from pathlib import Path

import pytest
from engines import PROMPT
from reusecases import ask, engine_of, files_in, store_in

from kvcli.runtime.promptcache.file import PromptCacheFile
from kvcli.runtime.promptcache.prefixpages import longest
from kvcli.runtime.promptcache.startpoints import layout_of, starts


@pytest.mark.parametrize(
    ("variant", "types"), [("llama", "f16"), ("llama", "int4"), ("gemma3", "f16"), ("gemma3", "int4")]
)
def test_a_prompt_starts_where_the_file_says(variant: str, types: str, tmp_path: Path) -> None:
    engine = engine_of(variant, types)
    ask(engine, PROMPT[:120], store_in(tmp_path))
    (path,) = files_in(tmp_path)
    with PromptCacheFile(path) as file:
        contents = file.contents
    assert [(g.kind, g.window, g.codec_k, g.layers) for g in layout_of(contents.identity).groups] == [
        (g.kind, g.window, g.codec_k, g.layers) for g in engine.layout.groups
    ]
    found = starts(contents)
    assert found and found[-1][1] == 120
    for length in range(16, 121, 8):
        usable = longest(engine.layout, length, dict.fromkeys(contents.pages, 120)) == length
        if length % 16 == 0 or length == 120:
            assert any(first <= length <= last for first, last in found) == usable, length


def test_nonsense(tmp_path: Path) -> None:
    for identity in ({}, {"model_config": "{"}, {"model_config": '{"layers": [{"kind": 1}]}', "page_size": "x"}):
        with pytest.raises(ValueError):
            layout_of(identity)
