"""The reference backend: every operation in plain torch, float32, rows independent of each other."""

from __future__ import annotations

import torch

from kvcli.kernels.attention import attention
from kvcli.kernels.matmul import matmul, place, rows
from kvcli.kernels.pointwise import glu, rms_norm, rope_
from kvcli.kernels.rotation import rotate_
from kvcli.kernels.store import seal, store


class ReferenceBackend:
    """The specification that the other backends are checked against. Slow; exact in float32."""

    name = "reference"
    device = torch.device("cpu")
    place = staticmethod(place)
    matmul = staticmethod(matmul)
    rows = staticmethod(rows)
    rms_norm = staticmethod(rms_norm)
    rope_ = staticmethod(rope_)
    glu = staticmethod(glu)
    rotate_ = staticmethod(rotate_)
    store = staticmethod(store)
    seal = staticmethod(seal)
    attention = staticmethod(attention)
