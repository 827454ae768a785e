"""Imports go downward only, and what need not import torch does not."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import tiny
from conftest import PACKAGE_ROOT, ROOT


def whole(name: str) -> str:
    """The name with what a leading dot stands for."""
    return f"kvcli.runtime{name}" if name.startswith(".") else name


# The house, from the cellar (first line) up. A name is a module, or a package and all that is in it. A module
# may import from lower floors and, if it is part of a package named here, from that package. A leading dot stands for
# kvcli.runtime.
LAYERS = """
kvcli
kvcli.errors kvcli.oldnames kvcli.options kvcli.paths kvcli.telling kvcli.versions kvcli.words
kvcli.jsonobjects kvcli.kernels
kvcli.runtime .cache .download .host .planning .promptcaches .text .events .sampling
.cache.cachetypes .eviction .download.growth .ggufkeys .repeats
.config .dry
.cache.grouplayout .download.headercache .host.memory
.host.processmemory .text.provenance .planning.repacked .text.stops .download.wire
.host.cores .host.mapped
.planning.cards .planning.footprint .formats .cache.layout .planning.overheads .planning.runnable
.text.pretokenizers .download.recipes .rope .text.sandbox .planning.shapes
.text.vocabulary .download.hubnames .download.websession
.planning.anygguf .text.bytebpe .cache.pages .download.ranges .sampler
.text.sentencepiece .download.hublisting .download.store .text.template .planning.titles .weights
.planning.facts .planning.hfconfig .download.fetching .download.hubcache .cache.pagelist
.download.hubdownload .cache.sequence
.promptcaches.fingerprint .guard .promptcaches.prefixpages .promptcaches.settings .cache.sealing .text.tokenizer
.promptcaches.caches .promptcaches.promptcache
.promptcaches.pagefiles .promptcaches.prefix .promptcaches.promptwriting
.promptcaches.conversion .promptcaches.held .promptcaches.promptstore .promptcaches.userfile
.promptcaches.cachewriter .promptcaches.chatfiles .promptcaches.missed
.promptcaches.keeping
.promptcaches.reuse
kvcli.estimate .text.conversation .layers .host.machine .download.sources
.archs .host.device .host.diskspeed .graphpages .download.hub .terms
.tokengraph
.decoding .promptcaches.sessions
.promptcaches.enginecaches .generation
.engine .planning.headers .download.inventory
.host.measuring .quality .recall
.download.remoteheaders
.benching .planning.plannedmodel .promptcaches.recompute
kvcli.comparison kvcli.overflow kvcli.verification kvcli.wrapping
kvcli.configfile kvcli.foreign kvcli.helptext kvcli.inputs kvcli.interrupt kvcli.streams
kvcli.cacheflags kvcli.commandline kvcli.settings
kvcli.flags kvcli.invocation
kvcli.render
kvcli.globaloptions kvcli.remarks
kvcli.app
kvcli.estimateflags kvcli.estimateview kvcli.evictflags kvcli.locate kvcli.report kvcli.sampleflags
kvcli.asking kvcli.cachefiles kvcli.explanation kvcli.opening kvcli.promptcacheflags kvcli.sinks
kvcli.answering kvcli.measuring kvcli.storage
kvcli.completion kvcli.doctor
kvcli.commands
kvcli.cli
kvcli.__main__
"""
# The one way up, taken inside a function: a local file needs nothing of HTTP and TLS.
UPWARD = {("kvcli.runtime.planning.headers", "kvcli.runtime.download.remoteheaders")}
RANKS = {whole(name): rank for rank, line in enumerate(LAYERS.split("\n")) for name in line.split()}

FOLDERS = {name for name in RANKS if any(other.startswith(f"{name}.") for other in RANKS)}

# The kernels know nothing of ours but the errors: they could be lifted out.
KERNELS_MAY_IMPORT = ("kvcli.kernels", "kvcli.errors")

# Only these import torch when they are imported; all others must not, directly or through another module.
TORCH = """
kvcli.kernels .archs .promptcaches.caches .promptcaches.cachewriter .promptcaches.conversion .decoding
.engine .promptcaches.enginecaches .generation .graphpages .guard .promptcaches.held .promptcaches.keeping
.layers .promptcaches.pagefiles .cache.pagelist .cache.pages .promptcaches.prefix .quality .recall
.promptcaches.recompute .promptcaches.reuse .rope .sampler .cache.sealing .cache.sequence
.tokengraph .promptcaches.userfile .weights
"""
TORCH_USERS = tuple(map(whole, TORCH.split()))


def _modules() -> dict[str, Path]:
    found = {}
    for path in sorted((ROOT / "kvcli").rglob("*.py")):
        name = ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
        found[name] = path
    return found


MODULES = _modules()


def _imports(path: Path) -> Iterator[str]:
    """Every module of ours that a file imports, at its top, inside functions or for type checking."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name.split(".")[0] == "kvcli")
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path} has a relative import"
            if node.module and node.module.split(".")[0] == "kvcli":
                for alias in node.names:
                    full = f"{node.module}.{alias.name}"
                    yield full if full in MODULES else node.module


def _entry(module: str) -> str:
    """The longest name in LAYERS that covers a module; what is in a folder whose files are named there must be, too."""
    parts = module.split(".")
    for end in range(len(parts), 0, -1):
        name = ".".join(parts[:end])
        if name in RANKS and (end == len(parts) or name not in FOLDERS):
            return name
    raise AssertionError(f"{module} has no place in LAYERS: give it one")


def _is_in(module: str, packages: tuple[str, ...]) -> bool:
    return any(module == package or module.startswith(package + ".") for package in packages)


def test_the_table_names_only_what_exists() -> None:
    assert len(MODULES) > 40
    assert set(RANKS) <= set(MODULES), "LAYERS names a module that is gone"


@pytest.mark.parametrize("module", MODULES)
def test_imports_go_downward(module: str) -> None:
    own = _entry(module)
    for imported in _imports(MODULES[module]):
        other = _entry(imported)
        allowed = other == own or RANKS[other] < RANKS[own] or (module, imported) in UPWARD
        assert allowed, f"{module} imports {imported}, which is not below it"


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


def test_triton_is_imported_by_few(kv_env: dict[str, str]) -> None:
    """At their top, only the kernels of a GPU and a token's graph; all else works where triton is not installed, and so
    does `kv run`."""
    users = ("kvcli.kernels.gpu", "kvcli.runtime.tokengraph")
    names = [module for module in MODULES if not _is_in(module, users) and module != "kvcli.__main__"]
    code = (
        f"import importlib, sys; sys.path.insert(0, {str(PACKAGE_ROOT)!r}); sys.modules['triton'] = None\n"
        f"for name in {names!r}: importlib.import_module(name)\n"
        f"sys.argv = ['kv', 'run', 'Hello', '-m', {str(tiny.make('llama').path)!r}, '-n', '2', '--raw']\n"
        "from kvcli.cli import main; main()"
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
        "from kvcli.cli import main; main()"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    loaded, count = result.stderr.splitlines()[-1].split()
    assert loaded == "False" and int(count) > 20


@pytest.mark.parametrize("arguments", ["--help", "chat ls", "config show", "storage ls"])
def test_numpy_is_not_imported_by(arguments: str, kv_env: dict[str, str]) -> None:
    code = (
        f"import atexit, sys; sys.path.insert(0, {str(PACKAGE_ROOT)!r})\n"
        "atexit.register(lambda: print('numpy' in sys.modules, file=sys.stderr))\n"
        f"sys.argv = ['kv', *{arguments.split()!r}]\n"
        "from kvcli.cli import main; main()"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, env=kv_env)
    assert result.returncode == 0 and result.stderr.splitlines()[-1] == "False", result.stderr
