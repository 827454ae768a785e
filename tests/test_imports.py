"""Imports go downward only, and what need not import torch does not."""

from __future__ import annotations

import ast
import functools
import graphlib
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import tiny
from conftest import PACKAGE_ROOT, ROOT

from kvcli.runtime.hub import recipes

# The house from the roof down; a name covers what is below it, unless that is named itself. See docs/architecture.md.
FLOORS = """
kvcli.keepalive.host
kvcli.keepalive.taking kvcli.keepalive.rehearsal
kvcli.keepalive.kept
kvcli.keepalive.holder
kvcli.keepalive.pressure
kvcli.__main__
kvcli.cli
kvcli.serve
kvcli.peers
kvcli.api
kvcli.runtime.evaluate
kvcli.runtime.engine
kvcli.runtime.promptcache kvcli.runtime.headers
kvcli.runtime.plan kvcli.runtime.model
kvcli.runtime.cache kvcli.runtime.host kvcli.runtime.hub
kvcli.runtime.model.archs
kvcli.runtime.model.architecture
kvcli.runtime.model.expertkeys kvcli.runtime.model.latentkeys kvcli.runtime.model.mixerkeys kvcli.runtime.model.ropekeys
kvcli.runtime.config
kvcli.kernels kvcli.runtime.formats
kvcli.runtime.text
kvcli.runtime.formats.boundedjson
kvcli.environment kvcli.startup
kvcli.keepalive
kvcli.blockformats kvcli.codecs kvcli.notices kvcli.options kvcli.paths kvcli.routing kvcli.versions kvcli.words
kvcli.errors
kvcli kvcli.runtime
"""
FLOOR = {name: number for number, line in enumerate(FLOORS.split("\n")) for name in line.split()}

# The kernels know nothing of ours but the formats of weights, the cache types and the errors: they could be lifted out.
KERNELS_MAY_IMPORT = ("kvcli.kernels", "kvcli.blockformats", "kvcli.codecs", "kvcli.errors", "kvcli.routing")

# Only these import torch when they are imported; all others must not, directly or through another module.
TORCH = """
kernels
runtime.model.altup runtime.model.decoder runtime.model.experts runtime.model.handover runtime.model.keysasvalues
runtime.model.latents
runtime.model.loading runtime.model.mixers
runtime.model.predictors runtime.model.rope runtime.model.sealing runtime.model.summarizing runtime.model.weights
runtime.cache.pagelist runtime.cache.pagerows runtime.cache.pool runtime.cache.selector runtime.cache.sequence
runtime.cache.journal runtime.cache.shown runtime.cache.states
runtime.engine.chunkcaches runtime.engine.chunks
runtime.engine.tokenstream runtime.engine.engine runtime.engine.loaded runtime.engine.request
runtime.engine.graph.batchgraph runtime.engine.graph.batching runtime.engine.graph.batchpages
runtime.engine.graph.capture runtime.engine.graph.compiling runtime.engine.graph.legs runtime.engine.graph.nexttoken
runtime.engine.graph.opening
runtime.engine.graph.pages runtime.engine.graph.rowgraph
runtime.engine.graph.stepgraph runtime.engine.graph.tokenexperts runtime.engine.graph.tokengraph
runtime.engine.guard runtime.engine.replaying runtime.engine.repetition runtime.engine.requestend
runtime.engine.sampler runtime.engine.scheduler
runtime.engine.steplist
runtime.engine.spec.draftmodel runtime.engine.spec.drawing runtime.engine.spec.predicting
runtime.evaluate.givenanswers runtime.evaluate.attentionmass runtime.evaluate.quality runtime.evaluate.recompute
runtime.evaluate.uncached
runtime.promptcache.caches runtime.promptcache.rowconversion runtime.promptcache.enginecaches runtime.promptcache.held
runtime.promptcache.filerows runtime.promptcache.keeper runtime.promptcache.ledger runtime.promptcache.lookup
runtime.promptcache.pagefiles runtime.promptcache.prefix runtime.promptcache.savedsequence
runtime.promptcache.userfile runtime.promptcache.writer
"""
TORCH_USERS = tuple(f"kvcli.{name}" for name in TORCH.split())


def _modules() -> dict[str, Path]:
    found = {}
    for path in sorted((ROOT / "kvcli").rglob("*.py")):
        name = ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
        found[name] = path
    return found


MODULES = _modules()


@functools.cache
def _import_nodes(path: Path) -> list[ast.Import | ast.ImportFrom]:
    nodes = ast.walk(ast.parse(path.read_text(encoding="utf-8")))
    return [node for node in nodes if isinstance(node, ast.Import | ast.ImportFrom)]


def _imports(path: Path) -> Iterator[str]:
    """Every module of ours that a file imports, at its top, inside functions or for type checking."""
    for node in _import_nodes(path):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name.split(".")[0] == "kvcli")
        else:
            assert node.level == 0, f"{path} has a relative import"
            if node.module and node.module.split(".")[0] == "kvcli":
                for alias in node.names:
                    full = f"{node.module}.{alias.name}"
                    yield full if full in MODULES else node.module


def _room(module: str) -> str:
    """The longest name in FLOORS that covers a module."""
    return max((name for name in FLOOR if _is_in(module, (name,))), key=len)


def _is_in(module: str, packages: tuple[str, ...]) -> bool:
    return any(module == package or module.startswith(package + ".") for package in packages)


def test_imports_go_downward() -> None:
    assert set(FLOOR) <= set(MODULES), "FLOORS names what is gone"
    for module, path in MODULES.items():
        if module == "kvcli":  # the front door names what is above it, and imports that when it is asked for
            continue
        for imported in _imports(path):
            own, other = _room(module), _room(imported)
            assert own == other or FLOOR[own] < FLOOR[other], f"{module} imports {imported}, which is not below it"


def test_modules_import_each_other_in_no_circle() -> None:
    graph = {module: set(_imports(path)) - {module} for module, path in MODULES.items() if module != "kvcli"}
    graphlib.TopologicalSorter(graph).prepare()  # raises CycleError with the modules of a circle


def test_kernels_stand_alone() -> None:
    kernels = [module for module in MODULES if _is_in(module, ("kvcli.kernels",))]
    assert len(kernels) > 5
    for module in kernels:
        for imported in _imports(MODULES[module]):
            assert _is_in(imported, KERNELS_MAY_IMPORT), f"{module} imports {imported}"


def test_torch_is_imported_late() -> None:
    """Importing every module that has no business with torch, one after the other, in one process."""
    names = [module for module in MODULES if not _is_in(module, TORCH_USERS) and module != "kvcli.__main__"]
    code = f"""
import importlib, json, sys
sys.path.insert(0, {str(PACKAGE_ROOT)!r})
guilty = []
for name in {names!r}:
    importlib.import_module(name)
    guilty += [(name, heavy) for heavy in ("torch", "triton", "transformers") if heavy in sys.modules]
    if guilty:
        break
print(json.dumps(guilty))
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert json.loads(result.stdout) == []


def test_every_dependency_is_used() -> None:
    """And what is used is a dependency, or one of an extra. pip is run as a program, by `kvcli.runtime.hub.sources`."""
    project = (ROOT / "pyproject.toml").read_text("utf-8")
    listed = re.search(r"^dependencies = \[\n(.*?)^\]", project, re.M | re.S)
    plot = re.search(r"^plot = \[(.*)\]", project, re.M)
    assert listed is not None and plot is not None
    named = {name.lower() for name in re.findall(r'^ +"([\w-]+)', listed[1], re.M) + re.findall(r'"([\w-]+)', plot[1])}
    others = {"nvidia-ml-py": "pynvml", "prompt-toolkit": "prompt_toolkit"}
    wanted = {others.get(name, name) for name in named} - {"pip"}
    found = set()
    for path in MODULES.values():
        for node in _import_nodes(path):
            if isinstance(node, ast.Import):
                found |= {alias.name.split(".")[0] for alias in node.names}
            elif node.module:
                found.add(node.module.split(".")[0])
    assert found - sys.stdlib_module_names - {"kvcli", "tomllib"} == wanted


def test_triton_is_imported_by_few(kv_env: dict[str, str]) -> None:
    """At their top, only the kernels of a GPU and graphs of them; all else works where triton is not installed, and so
    does `kv run`."""
    users = "kvcli.kernels.gpu", "kvcli.runtime.engine.graph"
    names = [module for module in MODULES if not _is_in(module, users) and module != "kvcli.__main__"]
    code = (
        f"import importlib, sys; sys.path.insert(0, {str(PACKAGE_ROOT)!r}); sys.modules['triton'] = None\n"
        f"for name in {names!r}: importlib.import_module(name)\n"
        f"sys.argv = ['kv', 'run', 'Hello', '-m', {str(tiny.make('llama').path)!r}, '-n', '2', '--raw']\n"
        "from kvcli.cli.main import main; main()"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, env=kv_env)
    assert result.returncode == 0 and result.stdout, result.stderr


@pytest.mark.parametrize(
    "arguments", ["--help", "--version", "run --help", "models ls", "nonsense", "estimate MODEL --gpu rtx3060-12g"]
)
def test_torch_is_not_imported_by(arguments: str) -> None:
    """Judged from inside the process, at its end. Nor is triton."""
    arguments = arguments.replace("MODEL", str(tiny.make("llama").path))
    code = (
        f"import atexit, sys; sys.path.insert(0, {str(PACKAGE_ROOT)!r})\n"
        "heavy = lambda: 'torch' in sys.modules or 'triton' in sys.modules\n"
        "report = lambda: print(heavy(), len(sys.modules), file=sys.stderr)\n"
        "atexit.register(report)\n"
        f"sys.argv = ['kv', *{arguments.split()!r}]\n"
        "from kvcli.cli.main import main; main()"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    loaded, count = result.stderr.splitlines()[-1].split()
    assert loaded == "False" and int(count) > 20


def test_a_command_that_another_process_does_imports_next_to_nothing(tmp_path: Path) -> None:
    """Each of these takes milliseconds, of a command that takes 150. Without `site`, which may import some itself."""
    code = (
        f"import sys; sys.path.insert(0, {str(PACKAGE_ROOT)!r}); known = set(sys.modules)\n"
        "import kvcli.__main__\n"
        "from kvcli.keepalive import client, socketfolder, wire\n"
        "socketfolder.sockets(socketfolder.kind())\n"
        "slow = {'collections', 'contextlib', 'enum', 'functools', 're', 'signal', 'socket', 'subprocess', 'typing'}\n"
        "print(sorted(slow & set(sys.modules) - known))"
    )
    environment = os.environ | {"XDG_RUNTIME_DIR": str(tmp_path)}
    result = subprocess.run(
        [sys.executable, "-I", "-S", "-c", code], capture_output=True, text=True, timeout=60, env=environment
    )
    assert result.stdout.strip() == "[]", result.stdout + result.stderr


@pytest.mark.parametrize("arguments", ["--help", "chat ls", "config show", "storage ls"])
def test_numpy_is_not_imported_by(arguments: str, kv_env: dict[str, str]) -> None:
    code = (
        f"import atexit, sys; sys.path.insert(0, {str(PACKAGE_ROOT)!r})\n"
        "atexit.register(lambda: print('numpy' in sys.modules, file=sys.stderr))\n"
        f"sys.argv = ['kv', *{arguments.split()!r}]\n"
        "from kvcli.cli.main import main; main()"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, env=kv_env)
    assert result.returncode == 0 and result.stderr.splitlines()[-1] == "False", result.stderr


def test_every_package_is_installed() -> None:
    """`pip install .` takes those that pyproject.toml names: a folder that is not there would be missing."""
    named = set(recipes.tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["tool"]["setuptools"]["packages"])
    folders = {path.parent.relative_to(ROOT) for path in (ROOT / "kvcli").rglob("*.py")}
    assert named - {"kvcli.models"} == {".".join(folder.parts) for folder in folders}
