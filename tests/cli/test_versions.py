"""Which kv this is: the version, the commit, and the libraries."""

from __future__ import annotations

import importlib.metadata
import json
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import PACKAGE_ROOT, Kv, KvHere

import kvcli
from kvcli import versions


@pytest.mark.parametrize("words", ["--version", "-V", "version", "--offline --version"])
def test_the_version(words: str, kv_here: KvHere) -> None:
    assert kv_here(*words.split()) == (0, f"kv {kvcli.__version__}\n", "")


@pytest.mark.parametrize("words", ["--version -v", "-v -V", "version --verbose", "--offline -v --version"])
def test_what_it_runs_on(words: str, kv_here: KvHere) -> None:
    code, out, err = kv_here(*words.split())
    assert (code, err) == (0, "")
    first, python, libraries, place = out.splitlines()
    assert first == f"kv {kvcli.__version__} (commit {versions.commit() or 'not known'})"
    assert python.startswith(f"Python {sys.version.split()[0]}, ")
    assert f"torch {importlib.metadata.version('torch')}, triton " in libraries
    assert place == str(Path(kvcli.__file__).resolve().parent)


def test_nothing_heavy_is_imported() -> None:
    code = (
        f"import atexit, sys; sys.path.insert(0, {str(PACKAGE_ROOT)!r})\n"
        "heavy = ('torch', 'triton', 'numpy', 'typer', 'tokenizers')\n"
        "atexit.register(lambda: print([name for name in heavy if name in sys.modules], file=sys.stderr))\n"
        "sys.argv = ['kv', '--version', '-v']\n"
        "from kvcli.cli.main import main; main()"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stderr == "[]\n" and done.stdout.startswith("kv ")


def _git(folder: Path, *words: str) -> str:
    identity = ["-c", "user.name=x", "-c", "user.email=x@y"]
    return subprocess.run(["git", *identity, *words], cwd=folder, check=True, capture_output=True, text=True).stdout


def test_the_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a checkout, of a build, of an address that pip was given; or none."""
    assert versions.of_checkout(tmp_path) is None
    _git(tmp_path, "init", "-q")
    (tmp_path / "file").write_text("1")
    _git(tmp_path, "add", "file")
    _git(tmp_path, "commit", "-q", "-m", "one")
    commit = _git(tmp_path, "rev-parse", "HEAD")[:12]
    assert versions.of_checkout(tmp_path) == commit
    (tmp_path / "file").write_text("2")
    assert versions.of_checkout(tmp_path) == f"{commit}-dirty"

    package = tmp_path / "kvcli"
    package.mkdir()
    monkeypatch.setattr(versions, "_PACKAGE", package)
    assert versions.commit() == f"{commit}-dirty"
    (package / versions.COMMIT_FILE).write_text("abc\n")
    assert versions.commit() == "abc"

    monkeypatch.setattr(versions, "_PACKAGE", tmp_path / "elsewhere" / "kvcli")
    text = {"url": "https://x/kv.git", "vcs_info": {"vcs": "git", "commit_id": "0123456789abcdef"}}

    class Distribution:
        def read_text(self, name: str) -> str | None:
            return json.dumps(text)

    monkeypatch.setattr(importlib.metadata, "distribution", lambda name: Distribution())
    assert versions.commit() == "0123456789ab"
    text.clear()
    assert versions.commit() is None


def test_help_of_a_command(kv: Kv, kv_here: KvHere) -> None:
    assert kv_here("help") == kv_here("--help")
    assert kv_here("help", "models", "ls") == kv_here("models", "ls", "--help")
    assert kv_here("help", "nonsense")[0] == 2
    assert kv_here("ppl", "--help") == kv_here("perplexity", "--help")
    assert kv_here("info")[2] == "kv: error: MODEL is missing\n  see kv inspect --help\n"
