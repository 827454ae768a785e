"""The facade on a GPU, for any number of rows: prefill, and decoding without a graph.

Matrices are expanded to float16 a slice at a time and multiplied by the vendor's library with float32 sums; each row of
the activations is scaled by its largest element, so nothing overflows. The cache is read by the same kernels as in
decoding. Small pointwise parts are plain torch.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import groupby

import torch

from kvcli.errors import ModelError
from kvcli.kernels import pointwise
from kvcli.kernels.gpu import attention as paged
from kvcli.kernels.gpu import expand, rows
from kvcli.kernels.gpu.formats import GROUP, DeviceMatrix, repack
from kvcli.kernels.gpu.pages import DevicePages, device_pages
from kvcli.kernels.matmul import QuantTensor
from kvcli.kernels.paged import Angles, PagedKV
from kvcli.kernels.rotation import block, rotate

LOG2_E = math.log2(math.e)


class GpuBackend:
    """Same signatures as the reference, over tensors of one GPU. Results do not depend on chunking beyond rounding."""

    name = "cuda"

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._placed: dict[tuple[int, ...], tuple[DeviceMatrix, ...]] = {}
        self._hadamard: dict[int, torch.Tensor] = {}

    def place(self, weights: tuple[QuantTensor, ...], paired: bool = False) -> tuple[DeviceMatrix, ...]:
        """Repack on the device, stacked where the type is the same. One copy, however often it is asked for."""
        key = tuple(w.blocks.data_ptr() for w in weights)
        if key not in self._placed:
            if paired and len({(w.type, w.rows) for w in weights}) > 1:
                kinds = " and ".join(w.type for w in weights)
                raise ModelError(f"gates and what they gate are stored as {kinds}", "use --device cpu")
            runs = [tuple(run) for _, run in groupby(weights, key=lambda w: w.type)]
            paired = paired and weights[0].rows % GROUP == 0
            self._placed[key] = tuple(repack(run, self.device, paired) for run in runs)
        return self._placed[key]

    def matmul(
        self, x: torch.Tensor, weights: Sequence[DeviceMatrix], add_to: torch.Tensor | None = None
    ) -> torch.Tensor:
        largest = x.abs().amax(1, keepdim=True).clamp(min=1e-30)
        scaled = (x / largest).half()
        out = torch.empty(x.shape[0], sum(w.rows for w in weights), device=self.device)
        done = 0
        for w in weights:
            part = out[:, done : done + w.rows]
            for first, piece in expand.slices(w):
                part[:, first : first + piece.shape[0]] = torch.mm(scaled, piece.T, out_dtype=torch.float32)
            if w.paired:
                part.copy_(part.unflatten(1, (-1, 2, GROUP)).transpose(1, 2).flatten(1))
            done += w.rows
        out *= largest
        return out if add_to is None else add_to.add_(out)

    def rows(self, weight: DeviceMatrix, ids: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        return expand.rows(weight, torch.empty(len(ids), weight.cols, device=self.device), ids=ids, scale=scale)

    rms_norm = staticmethod(pointwise.rms_norm)
    rope_ = staticmethod(pointwise.rope_)
    glu = staticmethod(pointwise.glu)

    def rotate_(self, x: torch.Tensor) -> None:
        dim = x.shape[-1]
        if dim not in self._hadamard:
            self._hadamard[dim] = rotate(torch.eye(dim)).to(self.device)
        x.copy_(x @ self._hadamard[dim])
