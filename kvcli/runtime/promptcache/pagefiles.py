"""Between the pool and prompt-cache files: pages and bases to bytes and back, on whichever device the pool is."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch

from kvcli.errors import CacheFileError
from kvcli.kernels import Basis
from kvcli.runtime.cache.layout import KVLayout, PageKey
from kvcli.runtime.cache.pagelist import Bases
from kvcli.runtime.cache.pool import PagePool
from kvcli.runtime.host.cores import usable_cpus
from kvcli.runtime.promptcache.file import PromptCacheFile, damaged

READERS = 4  # threads that read and check pages
_FIELDS = ("centre", "scale_k", "scale_v")


def host_bytes(page: torch.Tensor) -> memoryview:
    """The bytes of a page: its own memory on a CPU, a copy from a GPU."""
    return memoryview(page.cpu().flatten().numpy().data)


def load_pages(pool: PagePool, wanted: Mapping[PageKey, PromptCacheFile]) -> dict[PageKey, int]:
    """New pages with the contents that files have for them; the caller releases them.

    All are checked before any is returned. Raises CacheFileError or DoesNotFit, with nothing taken.
    """
    taken: dict[PageKey, int] = {}
    try:
        for key, file in wanted.items():
            if file.contents.page_bytes[key[0]] != pool.layout.arenas[key[0]].page_bytes:
                raise damaged(file.path, "its pages have another size")
            taken[key] = pool.take(key[0])
        with ThreadPoolExecutor(min(READERS, len(usable_cpus()))) as threads:
            list(threads.map(lambda key: _load(wanted[key], key, pool.page(key[0], taken[key])), taken))
    except BaseException:
        for key, page in taken.items():
            pool.release(key[0], page)
        raise
    return taken


def _load(file: PromptCacheFile, key: PageKey, page: torch.Tensor) -> None:
    if page.device.type == "cpu" and page.is_contiguous():
        file.read(key, host_bytes(page))
        return
    with torch.inference_mode():  # of this thread
        staging = torch.empty(page.shape, dtype=torch.uint8, pin_memory=page.device.type == "cuda")
        file.read(key, host_bytes(staging))
        page.copy_(staging)


def basis_arrays(bases: Bases) -> dict[str, np.ndarray]:
    """What a file keeps of the bases: float32 arrays, named by group, layer of the group and field."""
    found = {}
    for g, layers in enumerate(bases):
        for i, basis in enumerate(layers):
            for name in _FIELDS:
                value = getattr(basis, name)
                if basis.known and value is not None:
                    found[f"basis.{g}.{i}.{name}"] = value.cpu().numpy()
    return found


def bases_of(arrays: Mapping[str, np.ndarray], layout: KVLayout, length: int, device: torch.device) -> Bases:
    """The bases of a sequence of `length` rows. Raises CacheFileError where the file lacks one."""
    if length < layout.page_size:
        return tuple(tuple(Basis() for _ in group.layers) for group in layout.groups)
    found = []
    for g, group in enumerate(layout.groups):
        wanted = {
            "centre": (group.kv_heads, group.dim_k) if group.codec_k.centred else None,
            "scale_k": (group.kv_heads,) if group.codec_k.static_bytes else None,
            "scale_v": (group.kv_heads,) if group.codec_v.static_bytes else None,
        }
        layers = []
        for i in range(len(group.layers)):
            values = {}
            for name, shape in wanted.items():
                array = arrays.get(f"basis.{g}.{i}.{name}")
                if shape is not None and (array is None or array.shape != shape):
                    raise CacheFileError(f"the file lacks the {name.replace('_', ' ')} of layer {group.layers[i]}")
                values[name] = None if shape is None or array is None else torch.from_numpy(array.copy()).to(device)
            layers.append(Basis(**values, known=group.sealed))
        found.append(tuple(layers))
    return tuple(found)
