"""Kernels of an engine on a GPU are compiled once, and those of longer prompts when one comes."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch
from gpucases import DEVICE

from kvcli.errors import DoesNotFit
from kvcli.kernels.gpu import compiled
from kvcli.kernels.gpu.launching import collecting
from kvcli.runtime.engine.graph import compiling
from kvcli.runtime.engine.graph.compiling import Kernels


def test_each_is_compiled_when_it_is_needed_and_never_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    monkeypatch.setattr(compiling, "compile_all", lambda variants, threads: asked.append("compiled"))
    launches = [(partial(asked.append, name),) for name in ("first", "others")]
    kernels = Kernels(tmp_path / "kv" / "mark", *launches)
    assert asked == ["first", "compiled"]
    for _ in range(2):
        kernels.need_all()
        assert asked == ["first", "compiled", "others", "compiled"]
    Kernels(tmp_path / "kv" / "mark", *launches).need_all()
    assert len(asked) == 4
    Kernels(tmp_path / "kv" / "another", *launches)
    assert asked[4:] == ["first", "compiled"]


def test_a_prompt_without_pages_is_not_noted_as_compiled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiling, "compile_all", lambda variants, threads: None)

    def refused() -> None:
        raise DoesNotFit("no pages")

    Kernels(tmp_path / "mark", (), (refused,)).need_all()
    assert not list(tmp_path.iterdir())
    with collecting() as variants:  # nothing is collected any more
        assert variants == set()


def test_marks_differ_by_every_fact(tmp_path: Path) -> None:
    device = torch.device(DEVICE)
    marks = {compiled.mark_of(device, *facts) for facts in ((1, 2), (1, 3), (1, (2,)), ())}
    assert len(marks) == 4 and compiled.mark_of(device, 1, 2) in marks
    blocked = tmp_path / "file"
    blocked.touch()
    compiled.leave(blocked / "mark")  # nothing can be written there, and nothing fails
