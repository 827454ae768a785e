"""The examples and the examples in docstrings do what they say, on tiny models."""

from __future__ import annotations

import contextlib
import doctest
import importlib
import io
import runpy
import subprocess
import sys
from pathlib import Path
from unittest import mock

import pytest
import tiny
from conftest import PACKAGE_ROOT, ROOT
from speaking import make_speaking

EXAMPLES = ROOT / "examples"


def run(name: str, *arguments: str) -> str:
    """What an example prints, in this process."""
    told = io.StringIO()
    with mock.patch.object(sys, "argv", [name, *arguments]), contextlib.redirect_stdout(told):
        runpy.run_path(str(EXAMPLES / name), run_name="__main__")
    return told.getvalue()


def run_alone(name: str, *arguments: str, stdin: str = "") -> str:
    """What it prints in a process of its own."""
    start = f"import sys, runpy; sys.path.insert(0, {str(PACKAGE_ROOT)!r}); sys.argv = {[name, *arguments]!r}\n"
    code = start + f"runpy.run_path({str(EXAMPLES / name)!r}, run_name='__main__')"
    done = subprocess.run([sys.executable, "-c", code], input=stdin, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_all_are_run_and_short() -> None:
    assert {path.name for path in EXAMPLES.glob("*.py")} == {
        "cache_reuse.py",
        "chat.py",
        "estimate.py",
        "summarize.py",
    }
    assert all(len(path.read_text("utf-8").splitlines()) <= 30 for path in EXAMPLES.glob("*.py"))


def test_chat() -> None:
    told = run_alone("chat.py", str(make_speaking()), stdin="the pages\nmore\n\n")
    assert told.count("prompt tokens were there]") == 2 and "[0 of" in told


def test_summarize(tmp_path: Path) -> None:
    for number in range(2):
        (tmp_path / f"{number}.txt").write_text("a page of tokens " * (number + 1))
    files = [str(tmp_path / f"{number}.txt") for number in range(2)]
    assert [line for line in run("summarize.py", str(make_speaking()), *files).split("\n") if ".txt: " in line]


def test_cache_reuse(tmp_path: Path) -> None:
    document = tmp_path / "book.txt"
    document.write_text("the pages of a cache, " * 20)
    words = (str(make_speaking()), str(document), "Who?", "Where?")
    first = run("cache_reuse.py", *words)
    assert first.count("[prefilled ") == 2 and Path(f"{document}.kvcache").exists()
    assert run("cache_reuse.py", *words) == first, "the same from the file"
    prefilled, _, total = first.partition("[prefilled ")[2].partition("]")[0].partition(" of ")
    assert int(prefilled) < int(total) // 4


def test_estimate() -> None:
    assert "best: " in run("estimate.py", str(tiny.make("llama").path), "256")
    assert "best: f16" in run("estimate.py")


@pytest.mark.parametrize("module", ["kvcli.api.checks", "kvcli.api.estimates", "kvcli.cli.wording"])
def test_docstrings(module: str) -> None:
    result = doctest.testmod(importlib.import_module(module))
    assert result.attempted and not result.failed
