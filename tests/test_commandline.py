"""What is said of a command line that has a word too many, or a text that begins with a dash."""

from __future__ import annotations

from pathlib import Path

import pytest
from conftest import KvHere


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    for name in ("a.txt", "b.txt", *(f"c{i}.txt" for i in range(60))):
        (tmp_path / name).write_text(name)
    return tmp_path


@pytest.mark.parametrize(
    ("args", "told"),
    [
        (("run", "hello", "world"), "unexpected argument: world\n  put the text in quotes"),
        (("tokenize", "a", "b", "c"), "unexpected arguments: b c\n  put the text in quotes"),
        (("run", "-f", "a.txt", "b.txt", "c0.txt"), "c0.txt\n  repeat -f for each file, or cat FILES | kv run"),
        (("tokenize", "-f", "a.txt", "b.txt", "c0.txt"), "c0.txt\n  cat FILES | kv tokenize"),
        (("run", "-f", *(f"c{i}.txt" for i in range(60))), "arguments: c2.txt c3.txt c4.txt and 55 more\n  repeat -f"),
        (("models", "path", "smollm2", "x"), "unexpected argument: x\n  see kv models path --help"),
        (
            ("run", "-hello"),
            "no such option: -e (in '-hello')\n  see kv run --help; for a text that begins with -: kv run",
        ),
        (("run", "-5"), "no such option: -5\n"),
        (("models", "ls", "-hello"), "No such option: -e\n  see kv models ls --help\n"),
    ],
    ids=lambda x: " ".join(x)[:30] if isinstance(x, tuple) else "",
)
def test_hints(args: tuple[str, ...], told: str, folder: Path, kv_here: KvHere) -> None:
    code, out, err = kv_here(*args)
    assert (code, out) == (2, "") and told in err and len(err) < 200
