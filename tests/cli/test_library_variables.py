"""Variables of libraries that kv sets unless they are set."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from conftest import PACKAGE_ROOT

# --- the environment of libraries ---


def _environment(tmp_path: Path, names: list[str], given: dict[str, str]) -> list[str | None]:
    code = (
        f"import sys; sys.path.insert(0, {str(PACKAGE_ROOT)!r})\n"
        "from kvcli.cli import main; main._prepare_process()\n"
        f"import os, json; print(json.dumps([os.environ.get(name) for name in {names!r}]))"
    )
    kept = {"PATH": os.environ["PATH"], "HOME": str(tmp_path), "XDG_CACHE_HOME": str(tmp_path / "cache")}
    result = subprocess.run([sys.executable, "-c", code], env=kept | given, capture_output=True, text=True)
    return list(json.loads(result.stdout))


def test_openmp_does_not_spin_unless_told(tmp_path: Path) -> None:
    names = ["OMP_WAIT_POLICY", "GOMP_SPINCOUNT"]
    assert _environment(tmp_path, names, {}) == ["PASSIVE", "1000"]
    assert _environment(tmp_path, names, {"OMP_WAIT_POLICY": "ACTIVE"}) == ["ACTIVE", None]
    assert _environment(tmp_path, names, {"GOMP_SPINCOUNT": "5"}) == [None, "5"]


def test_memory_of_a_gpu_is_mapped_piece_by_piece_unless_told(tmp_path: Path) -> None:
    names = ["PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"]
    expanding = "expandable_segments:True" if sys.platform == "linux" else None
    assert _environment(tmp_path, names, {}) == [expanding, None]
    for name in names:
        told = [x if x == name else None for x in names]
        assert _environment(tmp_path, names, {name: name}) == told


def test_triton_fuses_multiplications_unless_told(tmp_path: Path) -> None:
    names = ["TRITON_DEFAULT_FP_FUSION"]
    assert _environment(tmp_path, names, {}) == ["1"]
    assert _environment(tmp_path, names, {names[0]: "0"}) == ["0"]


def test_triton_cache_folder(tmp_path: Path) -> None:
    names = ["TRITON_CACHE_DIR"]
    assert _environment(tmp_path, names, {}) == [str(tmp_path / "cache" / "kv" / "triton")]
    assert _environment(tmp_path, names, {"TRITON_CACHE_DIR": "/elsewhere"}) == ["/elsewhere"]
    (tmp_path / "file").write_text("")
    assert _environment(tmp_path, names, {"XDG_CACHE_HOME": str(tmp_path / "file")}) == [None]
