"""How fast a prompt cache is written and restored, against the disk's sequential read and the copy to the device.

python benchmarks/restore.py [--tokens 32768] [--types f16 int4] [--device cuda] [--folder FOLDER]

The cache has the shape of an 8B model (32 layers, 8 KV heads of 128) and random contents. Before each measurement the
file is dropped from the page cache. Prints a table, and one JSON line last.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from pathlib import Path

import torch

from kvcli.runtime.cache.layout import KVLayout
from kvcli.runtime.cache.pool import PagePool
from kvcli.runtime.config import FULL, LayerConfig, ModelConfig
from kvcli.runtime.promptcache.file import Contents, PromptCacheFile, write
from kvcli.runtime.promptcache.found import Found
from kvcli.runtime.promptcache.pagefiles import host_bytes, load_pages
from kvcli.runtime.promptcache.prefixpages import needed

IDENTITY = {"shape": "8B"}
BLOCK = 8 << 20


def layout_of(types: str, device: str = "cpu") -> KVLayout:
    layers = tuple(LayerConfig(FULL, 8, 128, 128) for _ in range(32))
    config = ModelConfig("llama", "8B", 128256, 4096, 14336, 32, 131072, 1e-5, layers, 1.0)
    return KVLayout.build(config, types, types).by_layer(device != "cpu")


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def drop(path: Path) -> None:
    """Let the system forget the file's pages: what is read next comes from the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    os.fsync(descriptor)
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(descriptor)


def sequential(path: Path) -> float:
    """GB/s of reading the file from its beginning to its end."""
    drop(path)
    memory, began = bytearray(BLOCK), time.perf_counter()
    with path.open("rb", buffering=0) as file:
        while file.readinto(memory):
            pass
    return path.stat().st_size / (time.perf_counter() - began) / 1e9


def copying(pool: PagePool, pages: dict[tuple[int, int], int]) -> float:
    """GB/s of copies of whole pages from pinned memory to the device (on a CPU: in memory)."""
    cuda, total = pool.device.type == "cuda", 0
    largest = max(arena.page_bytes for arena in pool.layout.arenas)
    staging = torch.empty(largest, dtype=torch.uint8, pin_memory=cuda)
    there = torch.zeros(64, largest, dtype=torch.uint8, device=pool.device)
    synchronize(pool.device)
    began = time.perf_counter()
    for i, (arena, _) in enumerate(pages):
        size = pool.layout.arenas[arena].page_bytes
        there[i % 64, :size].copy_(staging[:size], non_blocking=True)
        total += size
    synchronize(pool.device)
    return total / (time.perf_counter() - began) / 1e9


def measure(types: str, tokens: int, device: str, folder: Path) -> dict[str, object]:
    layout = layout_of(types, device)
    keys = sorted(needed(layout, tokens))
    sizes = {arena: layout.arenas[arena].page_bytes for arena, _ in keys}
    path, pool = folder / f"{types}.safetensors", PagePool(layout, None, device)
    pages = {key: pool.take(key[0]) for key in keys}
    for (arena, _), page in pages.items():
        pool.page(arena, page).random_(0, 255)
    contents = Contents(IDENTITY, list(range(tokens)), keys, sizes)
    began = time.perf_counter()
    write(path, contents, (host_bytes(pool.page(key[0], pages[key])) for key in keys))
    size = path.stat().st_size
    written = size / (time.perf_counter() - began) / 1e9
    copied = copying(pool, pages)
    disk = sequential(path)
    for (arena, _), page in pages.items():
        pool.release(arena, page)
    rates = []
    for cold in (True, False):
        if cold:
            drop(path)
        began = time.perf_counter()
        with PromptCacheFile(path, IDENTITY) as file:
            loaded = load_pages(pool, Found.in_file(file, tokens, pool.layout.page_size).pieces(keys))
        synchronize(pool.device)
        rates.append(size / (time.perf_counter() - began) / 1e9)
        for (arena, _), page in loaded.items():
            pool.release(arena, page)
    path.unlink()
    return {"types": types, "tokens": tokens, "bytes": size, "write": written, "disk": disk, "copy": copied,
            "restore": rates[0], "restore_cached": rates[1], "share": rates[0] / min(disk, copied)}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=32768)
    parser.add_argument("--types", nargs="+", default=["f16", "int8", "int4"])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--folder", type=Path, default=None)
    options = parser.parse_args()
    columns = ("types", "tokens", "bytes", "write", "disk", "copy", "restore", "restore_cached", "share")
    print(" ".join(f"{name:>15}" for name in columns) + "   (rates in GB/s)")
    results = []
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        for types in options.types:
            results.append(measure(types, options.tokens, options.device, Path(folder)))
            cells = (f"{v:15.2f}" if isinstance(v, float) else f"{v:>15}" for v in results[-1].values())
            print(" ".join(cells), flush=True)
    print(json.dumps({"device": options.device, "results": results}))


if __name__ == "__main__":
    main()
