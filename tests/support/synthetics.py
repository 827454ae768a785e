"""Scripts of benchmarks/ as modules, and the smallest models of synthetic.py as files for tests."""

from __future__ import annotations

import functools
import importlib.util
import sys
from pathlib import Path
from types import ModuleType

from conftest import ROOT


@functools.cache
def module(name: str = "synthetic") -> ModuleType:
    """The script of that name, imported."""
    if (folder := str(ROOT / "benchmarks")) not in sys.path:
        sys.path.append(folder)  # scripts import others
    spec = importlib.util.spec_from_file_location(name, ROOT / f"benchmarks/{name}.py")
    assert spec is not None and spec.loader is not None
    found = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = found  # dataclasses look their module up
    spec.loader.exec_module(found)
    return found


@functools.cache
def small_model(folder: Path) -> Path:
    """Four layers with a cache that is large beside the weights: 16 KiB a token at f16, trained on 2,048 tokens."""
    path = folder / "small.gguf"
    shape = module().Shape(4, 256, 512, 16, 16, 64, vocab=512, context=2048)
    module().write(path, shape, "Q8_0")
    return path
