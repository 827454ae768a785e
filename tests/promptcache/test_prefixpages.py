"""The longest prefix that pages make up."""

from __future__ import annotations

import pytest
from cachecases import SIZE, tiny_layout

from kvcli.runtime.promptcache import prefixpages
from kvcli.runtime.promptcache.prefixpages import longest, needed


def test_no_prefix_is_tried_that_is_longer_than_what_any_page_agrees_with(monkeypatch: pytest.MonkeyPatch) -> None:
    layout, tried = tiny_layout(), []

    def watched(layout: object, length: int) -> object:
        tried.append(length)
        return needed(layout, length)  # type: ignore[arg-type]

    valid = dict.fromkeys(needed(layout, 5 * SIZE), 5 * SIZE)
    monkeypatch.setattr(prefixpages, "needed", watched)
    assert longest(layout, 1000 * SIZE, valid) == 5 * SIZE == tried.pop() and not tried
    assert longest(layout, 1000 * SIZE, {}) == 0
