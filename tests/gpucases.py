"""GPU kernels in tests: compiled on a CUDA machine, else in Triton's interpreter on the CPU.

Import this before anything of `kvcli.kernels.gpu`, and before Triton: the interpreter is chosen when it is imported.
"""

from __future__ import annotations

import os
import random
from dataclasses import replace

import pytest
import torch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
if DEVICE == "cpu":
    os.environ["TRITON_INTERPRET"] = "1"
triton = pytest.importorskip("triton")
if DEVICE == "cpu" and not isinstance(triton.language.sum, triton.runtime.interpreter.InterpretedFunction):
    pytest.skip("triton was imported without its interpreter", allow_module_level=True)

from sealedcases import Cache, layout  # noqa: E402

from kvcli.kernels import Angles, PagedKV  # noqa: E402
from kvcli.kernels.gpu.pages import DevicePages, device_pages  # noqa: E402
from kvcli.kernels.gpu.rows import LOG2_E, Queries  # noqa: E402
from kvcli.kernels.reference import ReferenceBackend  # noqa: E402
from kvcli.kernels.rotation import rotate  # noqa: E402
from kvcli.runtime.rope import RopeTable  # noqa: E402

OPS = ReferenceBackend()


class HalfCentres(RopeTable):
    """Angles of the mean in the precision in which the GPU kernels take them, for sealing and for attention."""

    def centres(self, rows: int) -> Angles:
        cos, sin = super().centres(rows)
        return cos.half().float(), sin.half().float()


class GpuCache(Cache):
    """A `Cache` written by the reference, whose pages come in random order and go to the device to be read."""

    def __init__(
        self, types: tuple[str, str], dims: tuple[int, int], kv_heads: int = 1, size: int = 16, **more: int
    ) -> None:
        super().__init__(OPS, layout(types, dims, kv_heads, size, **more))
        self.rope.__class__ = HalfCentres
        for arena in range(len(self.layout.arenas)):
            pages = [self.pool.take(arena) for _ in range(24)]
            random.Random(arena).shuffle(pages)
            for page in pages:
                self.pool.release(arena, page)

    def on_device(self) -> DevicePages:
        """The pages of the last step, in copies where the device is not the CPU; `self.there` keeps them."""
        self.there = moved(self.kv)
        return device_pages(self.there, DEVICE, self.angles)

    def back(self) -> None:
        """What kernels wrote, into the pages of the pool."""
        for here, there in ((self.kv, self.there), (self.kv.open, self.there.open)):
            for a, b in zip(here.pages, there.pages, strict=True) if here else ():
                if a is not None:
                    a.copy_(b)

    def queries(self, q: torch.Tensor, pages: DevicePages) -> tuple[torch.Tensor, Queries]:
        """Turned queries float32 [T, heads, dim_k], in the basis of the keys, and as `prepare` gives them."""
        (t, heads, dim), r = q.shape, pages.record
        rope = 0 if pages.angles is None else pages.angles.shape[1]
        factor, half = LOG2_E * dim**-0.5, rope // 2
        made = Queries.empty(t, heads, dim, rope, "cpu")
        kept = rotate(q) if pages.rotated[0] else q
        made.q.copy_(kept * factor)
        if pages.centre is not None:
            c = pages.centre.cpu().repeat_interleave(heads // r.kv_heads, 0)
            q1, q2, c1, c2 = q[..., :half], q[..., half:rope], c[:, :half], c[:, half:rope]
            made.qc.copy_(torch.cat((q1 * c1 + q2 * c2, q2 * c1 - q1 * c2), -1) * factor)
            made.qb.copy_((q[..., rope:] * c[:, rope:]).sum(-1) * factor)
        return kept, Queries(made.q.to(DEVICE), made.qc.to(DEVICE), made.qb.to(DEVICE))


def moved(kv: PagedKV) -> PagedKV:
    """The same pages on the device."""
    if DEVICE == "cpu":
        return kv
    pages = tuple(None if p is None else p.to(DEVICE) for p in kv.pages)
    addresses = kv.addresses.copy()
    for i, page in enumerate(pages):
        addresses[i] = 0 if page is None else page.data_ptr() + kv.offset
    opened = None if kv.open is None else moved(kv.open)
    return replace(kv, addresses=addresses, pages=pages, open=opened, descriptors={})


def position(start: int) -> torch.Tensor:
    return torch.tensor([start], dtype=torch.int64, device=DEVICE)


def error(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Root mean square of the difference, relative to what is expected; NaN where something is not finite."""
    found, expected = found.detach().cpu().double(), expected.double()
    return ((found - expected).norm() / expected.norm()).item()
