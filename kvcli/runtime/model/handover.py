"""A decoder whose weights another process has on a GPU.

What describes it is the decoder itself, pickled, so nothing in it can be taken for anything else. Only tensors on the
GPU are not copied: in their place stands where they lie in allocations that the driver lets this user's processes open.
And what depends on the process or on the context (operations, sizes, RoPE) is that of whoever takes it.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from kvcli.kernels import Backend, HostBackend
from kvcli.runtime.config import ModelConfig
from kvcli.runtime.host.cudadriver import Driver, OnDevice
from kvcli.runtime.model.decoder import Decoder
from kvcli.runtime.model.rope import RopeTables

OPS, CONFIG, ROPES, ROPE, TENSOR = range(5)  # what stands in the place of what is not pickled
NOWHERE = -1  # of a tensor without elements


class Place(NamedTuple):
    """Of a tensor: the number of its allocation, bytes from the beginning of that, and its shape there."""

    allocation: int
    offset: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]


def describe(decoder: Decoder, driver: Driver | None) -> bytes:
    """A decoder for `take`. `driver`: of the GPU that it is on; None = it is on a CPU and is copied. Raises Failed.

    Its tensors on the GPU must stay, and must be written: nobody waits for a stream.
    """
    lent, stream = _Lent(driver), io.BytesIO()
    _Pickler(stream, decoder, lent.place if driver else None).dump(decoder)
    placed = None if isinstance(decoder.ops, HostBackend) else decoder.ops.placed
    return pickle.dumps((lent.handles, placed, stream.getvalue()))


def take(described: bytes, config: ModelConfig, ops: Backend, ropes: RopeTables, driver: Driver | None) -> Decoder:
    """The decoder, of `config` at any context, with these operations. Raises Failed where the driver opens nothing.

    `driver`: of the GPU of `ops`, whose context is open; None on a CPU.
    """
    handles, placed, pickled = pickle.loads(described)
    tensor = _Borrowed(handles, ops.device, driver).tensor if driver else None
    decoder: Decoder = _Unpickler(io.BytesIO(pickled), config, ops, ropes, tensor).load()
    if not isinstance(ops, HostBackend):
        ops.placed = placed
    return decoder


class _Pickler(pickle.Pickler):
    def __init__(self, stream: io.BytesIO, decoder: Decoder, place: Callable[[torch.Tensor], Place] | None) -> None:
        super().__init__(stream, pickle.HIGHEST_PROTOCOL)
        tables = decoder.ropes.named(decoder.config)
        self._place, self._kind = place, decoder.ops.device.type
        self._left_out: dict[int, tuple[int, ...]] = {id(table): (ROPE, *name) for name, table in tables.items()}
        self._left_out |= {id(decoder.ops): (OPS,), id(decoder.config): (CONFIG,), id(decoder.ropes): (ROPES,)}

    def persistent_id(self, obj: Any) -> tuple[Any, ...] | None:
        """What is written in the place of an object; None = itself."""
        if self._place and isinstance(obj, torch.Tensor) and obj.device.type == self._kind:
            return TENSOR, *self._place(obj)
        return self._left_out.get(id(obj))


class _Unpickler(pickle.Unpickler):
    def __init__(
        self, stream: io.BytesIO, config: ModelConfig, ops: Backend, ropes: RopeTables,
        tensor: Callable[[Place], torch.Tensor] | None,
    ) -> None:  # fmt: skip
        super().__init__(stream)
        self._config, self._ops, self._ropes, self._tensor = config, ops, ropes, tensor

    def persistent_load(self, pid: Any) -> Any:
        """The object in the place of which that was written."""
        kind, *name = pid
        if kind == TENSOR:
            assert self._tensor is not None
            return self._tensor(Place(*name))
        if kind == ROPE:
            layer, dims = name
            table = self._ropes.table(self._config.layers[layer].rope)
            return table.first(dims) if table and dims else table
        return {OPS: self._ops, CONFIG: self._config, ROPES: self._ropes}[kind]


class _Lent:
    """Allocations that tensors of this process lie in: what each is opened by, and its bytes."""

    def __init__(self, driver: Driver | None) -> None:
        self.handles: list[tuple[bytes, int]] = []
        self._driver, self._numbers = driver, dict[int, int]()

    def place(self, tensor: torch.Tensor) -> Place:
        """Raises Failed."""
        assert self._driver is not None
        shape = tensor.dtype, tuple(tensor.shape), tensor.stride()
        if not tensor.numel():
            return Place(NOWHERE, 0, *shape)
        base, size = self._driver.range_of(tensor.data_ptr())
        if base not in self._numbers:
            self._numbers[base] = len(self.handles)
            self.handles.append((self._driver.handle_of(base), size))
        return Place(self._numbers[base], tensor.data_ptr() - base, *shape)


class _Borrowed:
    """Those of another process, opened."""

    def __init__(self, handles: list[tuple[bytes, int]], device: torch.device, driver: Driver) -> None:
        """Raises Failed."""
        self._device = device
        self._whole = [_bytes_at(driver.opened(handle), size, device) for handle, size in handles]

    def tensor(self, place: Place) -> torch.Tensor:
        empty = torch.empty(0, dtype=place.dtype, device=self._device)
        if place.allocation == NOWHERE:
            return empty.new_empty(place.shape)
        whole = self._whole[place.allocation].untyped_storage()
        return empty.set_(whole, place.offset // place.dtype.itemsize, place.shape, place.stride)


def _bytes_at(address: int, size: int, device: torch.device) -> torch.Tensor:
    """Memory of a GPU as uint8 [size]."""
    return torch.as_tensor(OnDevice(address, size), device=device)
