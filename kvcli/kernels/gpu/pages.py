"""`DevicePages`: what a GPU kernel sees of one layer's cache."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kvcli.codecs import RecordLayout
from kvcli.kernels.paged import CENTRE_ROWS, Angles, PagedKV


@dataclass(frozen=True)
class DevicePages:
    """One layer's rows as pages by address; the twin of `PagedKV`, with everything on one device.

    `table`: int64 [n], the address of each page of the group; 0 = there is none. Slots: the first `front` pages of the
    sequence, then the others from `first_page` on; where `ring`, a power of two, is not 0, only so many of them, and
    page p stands where page p - ring stood. `offset`: bytes from a page's address to this layer's records. `centre`:
    float32 [kv_heads, dim_k], as in `Basis`. `scale_k`, `scale_v`: float32 [kv_heads], for codecs with one scale a
    head. `angles`: float16 [n, rope_dim], cosines then sines at the middle of each CENTRE_ROWS rows of the pages, slot
    after slot; None without RoPE. `open`, `sinks`, `tail`, `keep` and `retained` are those of `PagedKV`.
    """

    record: RecordLayout
    table: torch.Tensor
    offset: int
    first_page: int = 0
    open: DevicePages | None = None
    sinks: int = 0
    tail: int = 0
    centre: torch.Tensor | None = None
    scale_k: torch.Tensor | None = None
    scale_v: torch.Tensor | None = None
    angles: torch.Tensor | None = None
    front: int = 0
    ring: int = 0
    keep: int = 0
    retained: int = 0

    @property
    def evicts(self) -> bool:
        """Whether old rows are evicted."""
        return self.retained > 0

    @property
    def keeps(self) -> bool:
        """Whether first rows stay when others are evicted: a second query of each token and head asks for them."""
        return self.evicts and self.keep > 0

    @property
    def places(self) -> tuple[int, int, int]:
        """`origin`, `front` and `wrap` of `places.slot`."""
        return self.first_page, self.front, max(0, self.ring - 1)

    @property
    def rotated(self) -> tuple[bool, bool]:
        """Whether keys and values are kept in the rotated basis; see `PagedKV.rotated`."""
        if self.open is None:
            return False, False
        return self.record.codec_k != self.open.record.codec_k, self.record.codec_v != self.open.record.codec_v

    @property
    def where_rows_go(self) -> DevicePages:
        """The pages that new rows are written to: the open ones where there are some."""
        return self.open or self


NO_WRAP = 1 << 30  # a ring longer than any list of pages


def half_angles(angles: Angles, device: torch.device | str) -> torch.Tensor:
    """(cos, sin) float32 [n, rope_dim / 2] -> float16 [n, rope_dim] on the device.

    Sealing takes a mean out of the keys, and attention adds it to the scores, with these same rounded angles.
    """
    return torch.cat(angles, 1).to(device=device, dtype=torch.float16)


def device_pages(kv: PagedKV, device: torch.device | str, angles: torch.Tensor | None = None) -> DevicePages:
    """The pages of the runtime as the kernels want them. `angles`: see `DevicePages`; used where keys are centred."""
    check(kv.record)
    basis = kv.basis
    centre, scale_k, scale_v = (
        None if x is None else x.to(device, copy=True) for x in (basis.centre, basis.scale_k, basis.scale_v)
    )
    return DevicePages(
        kv.record,
        torch.from_numpy(kv.addresses).to(device),
        0,
        kv.first_page,
        None if kv.open is None else device_pages(kv.open, device),
        kv.sinks,
        kv.tail,
        centre,
        scale_k,
        scale_v,
        None if centre is None else angles,
        kv.front,
        NO_WRAP if kv.retained else 0,
        kv.keep,
        kv.retained,
    )


def check(record: RecordLayout) -> None:
    """Raises ValueError for records that the kernels cannot read."""
    for dim in (record.dim_k, record.dim_v):
        if dim % 8 or not 8 <= dim <= 256:
            raise ValueError(f"the GPU kernels want head dims that are multiples of 8 up to 256, not {dim}")
    if record.page_size % CENTRE_ROWS:
        raise ValueError(f"the GPU kernels want pages of whole {CENTRE_ROWS} rows, not of {record.page_size}")


def padded(dim: int) -> int:
    """The power of two that a tile of `dim` columns is padded to; a matrix product wants at least 64."""
    return max(64, 1 << (dim - 1).bit_length())
