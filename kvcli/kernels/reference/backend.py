"""The reference backend: every operation in plain torch, float32, rows independent of each other."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Literal

import torch

from kvcli.kernels.attend import attend, attend_latents, attention_each, store_each
from kvcli.kernels.experts import experts
from kvcli.kernels.reference.attention import attention
from kvcli.kernels.reference.basis import fix_basis
from kvcli.kernels.reference.choosing import summarize
from kvcli.kernels.reference.deltanet import delta_net
from kvcli.kernels.reference.experts import by_head, matmul_experts, mix, place_experts, route
from kvcli.kernels.reference.mamba import mamba
from kvcli.kernels.reference.matmul import QuantTensor, matmul, place, rows
from kvcli.kernels.reference.pointwise import (
    activate,
    activated,
    add_,
    gated,
    glu,
    layer_norm,
    rms_norm,
    rope_,
    softcap,
)
from kvcli.kernels.reference.rotation import rotate_
from kvcli.kernels.reference.shortconv import short_conv
from kvcli.kernels.reference.store import seal, store


class ReferenceBackend:
    """The specification that the other backends are checked against. Slow; the same bits on every processor.

    `threads` take slices of weight matrices one by one. They are not torch's, which all wait for each other in every
    operation: a core that another program uses would hold up all of them.
    """

    name: Literal["reference"] = "reference"
    arithmetic = "cpu reference exact products"
    sums_by_page = True
    device = torch.device("cpu")
    place = place_rows = staticmethod(place)
    place_experts = place_heads = staticmethod(place_experts)
    route = staticmethod(route)
    mix = staticmethod(mix)
    rows = staticmethod(rows)
    rms_norm = normed = staticmethod(rms_norm)
    layer_norm = staticmethod(layer_norm)
    rope_ = staticmethod(rope_)
    activate = staticmethod(activate)
    glu = staticmethod(glu)
    softcap = staticmethod(softcap)
    add_ = staticmethod(add_)
    rotate_ = staticmethod(rotate_)
    fix_basis = fix_basis
    store = staticmethod(store)
    seal = staticmethod(seal)
    summarize = staticmethod(summarize)
    attention = staticmethod(attention)
    short_conv = staticmethod(short_conv)
    delta_net = staticmethod(delta_net)
    mamba = staticmethod(mamba)

    def __init__(self, threads: int = 1) -> None:
        self._pool = ThreadPoolExecutor(threads)

    def matmul(
        self, x: torch.Tensor, weights: Sequence[QuantTensor], add_to: torch.Tensor | None = None
    ) -> torch.Tensor:
        """See `matmul.matmul`."""
        return matmul(x, weights, add_to, self._each)

    activated = activated
    gated = gated
    matmul_experts = matmul_experts
    by_head = by_head
    experts = experts
    store_each = store_each
    attention_each = attention_each
    attend = attend
    attend_latents = attend_latents

    def _each(self, work: Callable[..., torch.Tensor], *arguments: Iterable[object]) -> Iterable[torch.Tensor]:
        inference = torch.is_inference_mode_enabled()  # a mode of the thread

        def as_here(*values: object) -> torch.Tensor:
            with torch.inference_mode(inference):
                return work(*values)

        return self._pool.map(as_here, *arguments)
