"""Layers that keep a state, on a CPU: operations of `NativeBackend`."""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Sequence
from typing import Any, Protocol
from weakref import WeakKeyDictionary

import torch

from kvcli.kernels.states import Carried, DeltaLayer, MambaLayer


class Library(Protocol):
    """What these operations use of a `NativeBackend`."""

    _lib: Any
    _calls: Any

    def _new(self, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor: ...


def short_conv(
    ops: Library, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, carried: Sequence[Carried]
) -> torch.Tensor:
    """See `reference.shortconv.short_conv`."""
    (d, kernel), there = weight.shape, _carried(ops, carried)
    out = ops._new(x.shape[0], d)
    ops._lib.kv_short_conv(
        x.data_ptr(), x.stride(0), weight.data_ptr(), None if bias is None else bias.data_ptr(), d, kernel,
        there.buffer_info()[0], len(carried), out.data_ptr(),
    )  # fmt: skip
    return out


class _Delta(ctypes.Structure):
    """kv_delta of cpu.c."""

    _fields_ = [
        *((name, ctypes.c_int64) for name in ("key_heads", "value_heads", "dim_k", "dim_v", "kernel", "tiled")),
        *((name, ctypes.c_void_p) for name in ("conv", "decay", "time_bias", "norm")),
        ("eps", ctypes.c_float),
    ]


def _delta(layer: DeltaLayer) -> _Delta:
    """The C view of a layer."""
    if layer in _deltas:
        return _deltas[layer]
    sizes = layer.key_heads, layer.value_heads, layer.dim_k, layer.dim_v, layer.conv.shape[1], layer.tiled
    arrays = (each.data_ptr() for each in (layer.conv, layer.decay, layer.time_bias, layer.norm))
    return _deltas.setdefault(layer, _Delta(*sizes, *arrays, layer.eps))


def delta_net(ops: Library, x: torch.Tensor, layer: DeltaLayer, carried: Sequence[Carried]) -> torch.Tensor:
    """See `reference.deltanet.delta_net`: row by row, as many of them as there are."""
    there = _carried(ops, carried)
    mixed, out = ops._new(x.shape[0], layer.channels), ops._new(x.shape[0], layer.value_heads * layer.dim_v)
    ops._lib.kv_delta_net(
        x.data_ptr(), x.stride(0), ctypes.byref(_delta(layer)), there.buffer_info()[0], len(carried), mixed.data_ptr(),
        out.data_ptr(),
    )  # fmt: skip
    return out


class _Mamba(ctypes.Structure):
    """kv_mamba_layer of cpu.c."""

    _fields_ = [
        *((name, ctypes.c_int64) for name in ("heads", "dim", "groups", "state", "kernel")),
        *((name, ctypes.c_void_p) for name in ("conv", "conv_bias", "decay", "time_bias", "skip", "norm")),
        ("eps", ctypes.c_float),
    ]


def _mamba(layer: MambaLayer) -> _Mamba:
    """The C view of a layer."""
    if layer in _mambas:
        return _mambas[layer]
    tensors = layer.conv, layer.conv_bias, layer.decay, layer.time_bias, layer.skip, layer.norm
    arrays = (None if each is None else each.data_ptr() for each in tensors)
    sizes = layer.heads, layer.dim, layer.groups, layer.state, layer.conv.shape[1]
    return _mambas.setdefault(layer, _Mamba(*sizes, *arrays, layer.eps))


def mamba(ops: Library, x: torch.Tensor, layer: MambaLayer, carried: Sequence[Carried]) -> torch.Tensor:
    """See `reference.mamba.mamba`: row by row, as many of them as there are."""
    there = _carried(ops, carried)
    mixed, out = ops._new(x.shape[0], layer.channels), ops._new(x.shape[0], layer.inner)
    ops._lib.kv_mamba(
        x.data_ptr(), x.stride(0), ctypes.byref(_mamba(layer)), there.buffer_info()[0], len(carried), mixed.data_ptr(),
        out.data_ptr(),
    )  # fmt: skip
    return out


# Views of layers, as long as these live.
_deltas: WeakKeyDictionary[DeltaLayer, _Delta] = WeakKeyDictionary()
_mambas: WeakKeyDictionary[MambaLayer, _Mamba] = WeakKeyDictionary()


def _carried(ops: Library, carried: Sequence[Carried]) -> array[int]:
    """The C view of states (kv_carried); it has to live until the call that it is for has returned."""
    numbers: list[int] = []
    for each in carried:
        source = 0 if each.source is None else each.source.data_ptr()
        numbers += each.lo, each.hi, source, each.target.data_ptr()
    made = array("q", numbers)
    if ops._calls:
        ops._calls.keep.append(made)
    return made
