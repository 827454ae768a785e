"""The documentation: links lead somewhere, tables and pictures are those that scripts make, code blocks run."""

from __future__ import annotations

import doctest
import re
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import ROOT

PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").glob("*.md"))]
FOLDERS = ("kvcli", "tests", "benchmarks", "examples", "models")
SOURCE = re.compile(r"(?<![\w/.$}<-])((?:[\w-]+/)*[\w-]+\.(?:py|c|h|toml))\b(?![\w(.=])")
OF_OTHERS = {
    "convert_lora_to_gguf.py",
    "gguf_convert_endian.py",
    "main.c",
    "main.h",
    "torch.py",
    "Python.h",
    "config.toml",
}
sys.path.insert(0, str(ROOT / "benchmarks"))


def _anchors(page: Path) -> set[str]:
    """What the headings of a page are called in addresses."""
    headings = re.findall(r"^#+ (.+)$", page.read_text("utf-8"), re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    for address in re.findall(r"\]\(([^)]+)\)", page.read_text("utf-8")):
        if "://" in address:
            continue
        name, _, anchor = address.partition("#")
        target = (page.parent / name).resolve() if name else page
        assert target.exists(), address
        assert not anchor or anchor in _anchors(target), address


def test_files_that_text_names_are_there() -> None:
    """In the pages, and in comments and docstrings of the package: by the last parts of their paths."""
    files = [path.relative_to(ROOT).parts for name in FOLDERS for path in (ROOT / name).rglob("*.*")]
    there = {"/".join(parts[first:]) for parts in files for first in range(len(parts))} | {"setup.py"}
    texts = [*PAGES, *(path for path in (ROOT / "kvcli").rglob("*") if path.suffix in (".py", ".c", ".h"))]
    named = {
        (name, path.name) for path in texts for name in SOURCE.findall(path.read_text("utf-8")) if "NAME" not in name
    }
    assert len(named) > 300
    assert sorted((name, page) for name, page in named if name not in there | OF_OTHERS) == []


def test_the_readme_is_short_and_names_every_page() -> None:
    text = (ROOT / "README.md").read_text("utf-8")
    assert len(text.splitlines()) <= 160
    assert [page.name for page in PAGES if page.name not in text and page.name != "README.md"] == []


def test_the_table_of_models_has_every_architecture() -> None:
    from kvcli.runtime.model.archs import RUNNABLE

    text = (ROOT / "docs" / "models.md").read_text("utf-8").partition("\n## ")[0]
    rows = re.findall(r"^\| (`.*?`) \|", text, re.M)
    assert sorted(name for row in rows for name in re.findall(r"`(.*?)`", row)) == list(RUNNABLE)


def test_every_cache_type_and_policy_has_its_place() -> None:
    from kvcli.codecs import CODECS
    from kvcli.runtime.cache import eviction

    types, policies = ((ROOT / "docs" / f"{name}.md").read_text("utf-8") for name in ("cache-types", "eviction"))
    assert [name for name in CODECS if not re.search(rf"\b{name}\b", types)] == []
    assert [name for name in eviction.names() if not re.search(rf"\b{name}\b", policies)] == []


def test_the_map_of_files() -> None:
    """Everything in it is there, and every folder of the package is in it."""
    block = re.search(r"```\n(kvcli/\n.*?)```", (ROOT / "docs" / "architecture.md").read_text("utf-8"), re.S)
    assert block is not None
    folders: list[str] = []
    shown = set()
    for line in block[1].splitlines():
        name, depth = line.split()[0], (len(line) - len(line.lstrip())) // 2
        folders[depth:] = [name.rstrip("/")]
        path = ROOT.joinpath(*folders)
        assert path.is_dir() if name.endswith("/") else path.is_file(), path
        shown.add(path)
        folder = path if name.endswith("/") else path.parent
        assert [each for each in SOURCE.findall(line.partition(name)[2]) if not (folder / each).is_file()] == [], line
    packages = {path.parent for path in (ROOT / "kvcli").rglob("*.py")} - {ROOT / "kvcli"}
    assert packages - shown == set()


def test_the_short_table_is_made_of_the_long_one() -> None:
    import cache_types

    readme, page = cache_types.README.read_text("utf-8"), cache_types.PAGE.read_text("utf-8")
    assert cache_types.written(readme, "cache-types-short", cache_types.summary(page)) == readme
    assert "| int8 | 8.25 |" in readme


@pytest.mark.parametrize("script", ["depth_plot.py", "screens.py", "engine_options.py"])
def test_what_scripts_write_is_current(script: str) -> None:
    words = [sys.executable, str(ROOT / "benchmarks" / script), "--check"]
    assert subprocess.run(words, cwd=ROOT).returncode == 0, f"run benchmarks/{script}"


def test_jobs_for_a_gpu_name_what_is_there() -> None:
    import on_gpu

    for command in [each for commands in on_gpu.JOBS.values() for each in commands]:
        words = on_gpu.parts(command, ROOT / "models")
        assert "*" not in command or len(words) > 20
        files = [word for word in words if word.startswith(("tests/", "benchmarks/"))]
        assert all((ROOT / name).is_file() for name in files), command


def test_the_figures_of_the_plot_are_those_of_the_page() -> None:
    import depth_plot

    page = (ROOT / "docs" / "benchmarks.md").read_text("utf-8")
    for points in depth_plot.read().values():
        assert all(f"| {rate:g} |" in page for _, rate in points)


@pytest.mark.models
def test_the_python_of_the_pages(smollm2_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    text = (ROOT / "docs" / "python.md").read_text("utf-8").replace('"smollm2"', repr(str(smollm2_path)))
    test = doctest.DocTestParser().get_doctest(text, {}, "python.md", None, 0)
    result = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS).run(test)
    assert result.attempted > 15 and not result.failed


@pytest.mark.models
def test_the_python_of_the_readme(smollm2_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code = re.search(r"```python\n(.*?)```", (ROOT / "README.md").read_text("utf-8"), re.S)
    assert code is not None and len(code[1].strip().splitlines()) <= 10
    exec(code[1].replace('"smollm2"', repr(str(smollm2_path))), {})
    assert re.search(r"\w.* \w.*(stop|length|repetition) \d+ \d+\.\d+\n$", capsys.readouterr().out, re.S)


def test_tokenizers_and_marks_of_thinking_are_listed() -> None:
    from kvcli.runtime.text.pretokenizers import PRETOKENIZERS
    from kvcli.runtime.text.reasoning import STYLES

    text = (ROOT / "docs" / "models.md").read_text("utf-8")
    rules = re.findall(r"`([^`]+)`", text.partition("known by name:")[2].partition("\nA GGUF file")[0])
    assert rules == sorted(name for name, rule in PRETOKENIZERS.items() if rule.spelled)
    rows = [row.replace("\\|", "|") for row in re.findall(r"^\| `(.+?)` \|", text.partition("## Thinking")[2], re.M)]
    assert rows == [style.opens[0].strip() for style in STYLES]
