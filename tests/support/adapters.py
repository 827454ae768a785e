"""LoRA adapters for models in files, and the same models with the adapters merged into float32 matrices."""

from __future__ import annotations

import shutil
from collections.abc import Iterable
from pathlib import Path

import gguf
import numpy as np

from kvcli.runtime.formats.adapter import EMBEDDING
from kvcli.runtime.formats.gguf import GGUFFile

RANK, ALPHA = 5, 8.0


def parts_of(model: Path, name: str, rank: int = RANK, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Random lora_a and lora_b for that matrix, as they stand in a file."""
    rng = np.random.default_rng([seed, *name.encode()])
    rows, cols = GGUFFile.open(model).tensors[name].shape
    shapes = ((rows, rank), (cols, rank)) if name == EMBEDDING else ((rank, cols), (rows, rank))
    a, b = (rng.standard_normal(shape).astype(np.float32) for shape in shapes)
    return a / np.float32(np.sqrt(cols)), b * np.float32(0.2)


def matrices(model: Path) -> list[str]:
    """The names of all matrices."""
    return [name for name, tensor in GGUFFile.open(model).tensors.items() if len(tensor.shape) == 2]


def write(path: Path, model: Path, names: Iterable[str], alpha: float = ALPHA, arch: str = "", **more: object) -> Path:
    """An adapter that changes these matrices of the model; `more`: other keys."""
    writer = gguf.GGUFWriter(path, arch or GGUFFile.open(model).metadata["general.architecture"])
    writer.add_type("adapter")
    writer.add_string("adapter.type", "lora")
    writer.add_float32("adapter.lora.alpha", alpha)
    for key, value in more.items():
        writer.add_string(key, str(value))
    for name in names:
        for part, values in zip("ab", parts_of(model, name), strict=True):
            writer.add_tensor(f"{name}.lora_{part}", values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def merge(path: Path, model: Path, names: Iterable[str], scale: float = 1.0) -> Path:
    """A copy of a model in float32 with scale * ALPHA / RANK * b . a added to these matrices."""
    shutil.copy(model, path)
    file = GGUFFile.open(model)
    for name in names:
        tensor = file.tensors[name]
        assert tensor.type == "F32"
        a, b = (x.astype(np.float64) for x in parts_of(model, name))
        change = a @ b.T if name == EMBEDDING else b @ a
        there = np.memmap(path, "<f4", "r+", tensor.offset, tensor.shape)
        there[...] = there + scale * ALPHA / RANK * change
        there.flush()
    return path
