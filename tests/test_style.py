"""The linter, the formatter and the type checker, and rules for what no tool checks."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import ROOT


@pytest.mark.slow
@pytest.mark.parametrize(
    "arguments",
    [("ruff", "check", "."), ("ruff", "format", "--check", "."), pytest.param(("mypy",), marks=pytest.mark.long)],
)
def test_clean(arguments: tuple[str, ...]) -> None:
    result = subprocess.run([sys.executable, "-m", *arguments], cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 0, "\n" + result.stdout + result.stderr


def test_modules_stay_readable() -> None:
    """A file that is longer has probably more than one subject."""
    sources = sorted((ROOT / "kvcli").rglob("*.py"))
    assert len(sources) > 40
    lines = {str(path.relative_to(ROOT)): len(path.read_text("utf-8").splitlines()) for path in sources}
    assert {name: count for name, count in lines.items() if count > 400} == {}


def test_readme_commands_are_the_ones_that_ci_runs() -> None:
    readme = (ROOT / "README.md").read_text("utf-8").splitlines()
    assert 'pip install . && kv run "Why is the sky blue?"' in readme
    assert "pip install '.[test]' && python -m pytest" in readme
    script = (ROOT / ".ci" / "run").read_text("utf-8")
    pattern = re.search(r"grep -x -m 1 '(.+)' README\.md", script)
    assert pattern is not None
    matching = [line for line in readme if re.fullmatch(pattern[1], line)]
    assert matching == ["pip install '.[test]' && python -m pytest"]


def test_every_command_is_in_the_readme() -> None:
    from kvcli.cli.main import COMMANDS

    text = (ROOT / "README.md").read_text("utf-8")
    missing = [name for name in COMMANDS if f"kv {name}" not in text]
    assert missing == []


def test_version_is_said_once() -> None:
    import kvcli

    project = (ROOT / "pyproject.toml").read_text("utf-8")
    assert f'\nversion = "{kvcli.__version__}"\n' in project
    changelog = Path(ROOT / "CHANGELOG.md").read_text("utf-8")
    assert "\n## [Unreleased]\n" in changelog or f"\n## [{kvcli.__version__}]" in changelog
