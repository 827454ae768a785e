"""What all tests share: the right copy of kvcli, the real models, and `kv` as a subprocess."""

from __future__ import annotations

import gc
import importlib.metadata
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import hypothesis
import pytest

hypothesis.settings.register_profile("kv", deadline=None, max_examples=30)  # a busy machine takes its time
hypothesis.settings.register_profile("thorough", deadline=None, max_examples=100)
hypothesis.settings.load_profile("kv")

ROOT = Path(__file__).resolve().parent.parent

# Settings of whoever runs the tests are not those of the tests.
os.environ["KV_CONFIG"] = "none"
for _name in [name for name in os.environ if name.startswith(("KV_", "OLLAMA_", "LLAMA_ARG_"))]:
    if _name not in ("KV_CONFIG", "KV_CPU_ISA", "KV_TEST_MODELS", "KV_TEST_INTERPRET"):
        del os.environ[_name]


def _prefer_installed_package() -> None:
    """Let an installed kvcli be the one under test.

    `python -m pytest` puts the working folder, that is the checkout, first on sys.path. There `import kvcli`
    would find the sources, which lack the compiled kernels unless the install is editable: the tests would
    pass or fail on another program than the installed one. So where kvcli is installed and not editable, the
    checkout is taken off the path. (A kvcli.egg-info left in the checkout by a build does not count.)
    """
    elsewhere = [entry for entry in sys.path if Path(entry or ".").resolve() != ROOT]
    for distribution in importlib.metadata.distributions(name="kvcli", path=elsewhere):
        origin = json.loads(distribution.read_text("direct_url.json") or "{}")
        if not origin.get("dir_info", {}).get("editable", False):
            sys.path[:] = elsewhere
        return


_prefer_installed_package()

from toyworld import site, start, world  # noqa: E402, F401  # fixtures

import kvcli  # noqa: E402
from kvcli import environment  # noqa: E402

environment.prepare()  # before torch is imported

PACKAGE_ROOT = Path(kvcli.__file__).resolve().parent.parent  # what subprocesses must import, too

Kv = Callable[..., "subprocess.CompletedProcess[str]"]
KvHere = Callable[..., tuple[int, str, str]]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--thorough", action="store_true", help="run the cases marked thorough, too")


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--thorough"):
        hypothesis.settings.load_profile("thorough")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: item.get_closest_marker("long") is None)  # else one process waits for the other's
    if config.getoption("--thorough"):
        return
    left = [item for item in items if item.get_closest_marker("thorough")]
    if left:
        config.hook.pytest_deselected(items=left)
        items[:] = [item for item in items if not item.get_closest_marker("thorough")]


_freeze, _unfreeze, _frozen = gc.freeze, gc.unfreeze, list[bool]()


def pytest_collection_finish() -> None:
    """Modules and tests stay to the end: to seek garbage among them takes a second each time. So they are frozen, also
    where code that freezes nothing itself thaws."""

    def freeze() -> None:
        _frozen.append(True)
        _freeze()

    gc.collect()
    _freeze()
    gc.freeze, gc.unfreeze = freeze, lambda: _unfreeze() if _frozen else None


def pytest_runtest_logfinish() -> None:
    if _frozen:
        _frozen.clear()
        gc.collect()
        _freeze()


def pytest_unconfigure() -> None:
    gc.freeze, gc.unfreeze = _freeze, _unfreeze
    gc.unfreeze()


@pytest.fixture(scope="session")
def kv_command() -> list[str]:
    """The words that start the `kv` under test, in any working folder."""
    code = f"import sys; sys.path.insert(0, {str(PACKAGE_ROOT)!r}); from kvcli.__main__ import main; main()"
    return [sys.executable, "-c", code]


@pytest.fixture
def kv_env(tmp_path: Path) -> dict[str, str]:
    """An environment in which `kv` finds none of the user's own models, settings and proxies."""
    ours = {name: str(tmp_path / name.lower()) for name in ("XDG_DATA_HOME", "XDG_CACHE_HOME", "XDG_STATE_HOME")}
    ours |= {"XDG_CONFIG_HOME": str(tmp_path / "config"), "HF_HOME": str(tmp_path / "hf"), "NO_PROXY": "*"}
    dropped = ("HF_", "HUGGING", "KV_", "FORCE_COLOR", "NO_COLOR", "CLICOLOR")
    kept = {name: v for name, v in os.environ.items() if name == "KV_CPU_ISA" or not name.startswith(dropped)}
    return kept | ours


@pytest.fixture
def kv(kv_command: list[str], kv_env: dict[str, str], tmp_path: Path) -> Kv:
    """Run `kv` to its end: kv("pull", "smollm2", input="...", env={...}) -> CompletedProcess with text."""

    def run(*args: str, env: dict[str, str] | None = None, **options: object) -> subprocess.CompletedProcess[str]:
        settings: dict[str, object] = {"capture_output": True, "text": True, "timeout": 120, "cwd": tmp_path}
        settings |= {} if "input" in options else {"stdin": subprocess.DEVNULL}
        return subprocess.run([*kv_command, *args], env=kv_env | (env or {}), **(settings | options))  # type: ignore[call-overload]

    return run


@pytest.fixture
def kv_here(capfd: pytest.CaptureFixture[str]) -> KvHere:
    """Run `kv` in this process, which is fast: kv_here("models", "ls") -> (exit code, stdout, stderr)."""

    def run(*args: str) -> tuple[int, str, str]:
        from kvcli.cli import main

        capfd.readouterr()
        code = main.run_command(list(args))
        sys.stdout.flush()
        out, err = capfd.readouterr()
        return code, out, err

    return run


def _real_model(name: str, short: str) -> Path:
    """A real model: from the folder KV_TEST_MODELS, else as `kv pull` gets it, into the user's store."""
    given = os.environ.get("KV_TEST_MODELS")
    if given:
        path = Path(given) / f"{short}.gguf"
        assert path.is_file(), f"KV_TEST_MODELS names {given}, which lacks {path.name}"
        return path
    from kvcli.runtime.hub.modelfiles import find_model

    return find_model(name)


@pytest.fixture(scope="session")
def smollm2_path() -> Path:
    """SmolLM2-135M-Instruct Q4_1 (94 MiB). A failed download fails the test: it must not pass unseen."""
    return _real_model("smollm2", "smollm2")


@pytest.fixture(scope="session")
def gemma3_path() -> Path:
    """Gemma 3 270M Q4_K_M (241 MiB)."""
    return _real_model("gemma-3-270m", "gemma3")


@pytest.fixture(scope="session")
def server() -> Iterator[Any]:
    """`kv serve` in this process, over a tiny model: see serving.py."""
    from serving import running

    with running() as found:
        yield found
