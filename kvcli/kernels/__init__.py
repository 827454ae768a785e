"""The kernels' facade: `backend(name, threads, device)` gives the operations a model is written in.

| operation | shapes |
|---|---|
| `matmul(x, weights, add_to=None)` | x [T, cols], stacked packed matrices -> [T, sum of rows] |
| `rows(weight, ids, scale)` | ids int64 [T] -> [T, cols] |
| `rms_norm(x, weight, eps)` | [..., D] -> [..., D] |
| `normed(x, weight, eps)` | the same of [T, D], as `matmul` reads it |
| `layer_norm(x, weight, bias, eps)` | [T, D] -> [T, D]; bias may be None |
| `rope_(x, cos, sin)` | x [T, heads, D] rotated in place |
| `gated(x, weights, act, bias)` | x [T, cols], gates over what they gate -> activated [T, F], as `matmul` reads it |
| `activated(x, weights, act, bias)` | the same without gates |
| `add_(x, y, scale)` | x [T, D] += scale * y, for y [T, D] or [D] |
| `softcap(x, cap)` | [T, F] -> [T, F] |
| `experts(x, layer)` | x [T, D] -> the weighted sum of what each row's experts give, [T, D] (see experts.py) |
| `by_head(x, weights)` | x [T, heads, cols], a matrix of each head -> [T, heads, rows] |
| `attend(qkv, parts, layer)` | projections [T, ...] of all parts of a step -> [T, heads * dim_v]; rows are stored |
| `attend_latents(turned, others, row, parts, layer, keys, values)` | the same over latents (see attend.py) |
| `short_conv(x, weight, bias, carried)` | projections [T, 3D] of all parts -> [T, D]; states are carried on |
| `delta_net(x, layer, carried)` | projections of all parts -> [T, value_heads * dim_v]; likewise |
| `mamba(x, layer, carried)` | projections of all parts -> [T, heads * dim]; likewise |
| `rotate_(x)` | x [T, heads, D] rotated by Hadamard blocks, in place |
| `fix_basis(kv, rope)` | the mean of keys and the scales that a sequence's first page fixes, into `kv.basis` |
| `seal(kv, first, end, angles)` | rows [first, end) of open pages into codes |
| `summarize(kv, which, angles)` | means of the keys of entries `which`, by which queries choose what they read |

`place(matrices, paired)`, `place_rows(matrices)` of those that only `rows` is asked of, `place_experts(matrices,
paired)`, and `place_heads(matrices)` for `by_head` take matrices to where the backend computes, and `device` is where
that is; `arithmetic` says what decides the last bits, in words that change with them; `sums_by_page`: whether the size
of pages does, too. `attend` is all that a layer does with its cache (see attend.py), `experts` a whole mixture of
experts (experts.py); on a CPU they are written in more operations, on a GPU kernels do several of their steps at once.

| on a CPU | shapes |
|---|---|
| `store(k, v, kv, start)` | k [T, kv_heads, dim_k], v [T, kv_heads, dim_v] into pages |
| `attention(q, kv, start, window, scale, softcap, angles, turned_q, sinks, watch)` | [T, heads, dim_q] -> [T, n] |
| `route(logits, routing, bias)` | [T, experts] -> ids int64 and weights [T, used] |
| `matmul_experts(x, weights, ids)` | x [T or T * used, cols] -> [T * used, rows], each with its expert's matrix |
| `mix(y, weights)` | y [T * n, D], weights [T, n] -> [T, D] |

`store` and `attention` have a form for several parts, `store_each` and `attention_each` (see attend.py).

`glu(x, act)`, [T, 2F] -> [T, F], is what `gated` does behind its product, and `activate(x, act)`, [T, F] -> [T, F],
what `activated` does.

All float32, but a GPU hands rows from one product to the next as float16 (gpu/wide.py). The plain-torch functions in
reference/ are the specification.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Union

from kvcli.codecs import RecordLayout
from kvcli.errors import KVError, UsageError
from kvcli.kernels.attend import AttentionLayer
from kvcli.kernels.cpu.backend import NativeBackend
from kvcli.kernels.cpu.library import asked_isa
from kvcli.kernels.experts import ExpertLayer, SharedExpert
from kvcli.kernels.paged import (
    CENTRE_ROWS,
    MASS_UNIT,
    NEVER,
    Angles,
    Basis,
    Choice,
    Entries,
    Into,
    Moments,
    PagedKV,
    Stretch,
    Summaries,
    Watch,
)
from kvcli.kernels.reference.backend import ReferenceBackend
from kvcli.kernels.reference.experts import ExpertMatrices, ExpertTensor
from kvcli.kernels.reference.matmul import LowRank, QuantTensor
from kvcli.kernels.states import Carried, DeltaLayer, MambaLayer

if TYPE_CHECKING:
    from kvcli.kernels.gpu.backend import GpuBackend

HostBackend = NativeBackend | ReferenceBackend
Backend = Union[HostBackend, "GpuBackend"]
BACKENDS = ("auto", "native", "reference")
__all__ = [
    "BACKENDS", "CENTRE_ROWS", "MASS_UNIT", "NEVER", "Angles", "AttentionLayer", "Backend", "Basis", "Carried",
    "Choice", "DeltaLayer", "Entries", "ExpertLayer", "ExpertMatrices", "ExpertTensor", "HostBackend", "Into",
    "LowRank", "MambaLayer", "Moments", "NativeBackend", "PagedKV", "QuantTensor", "RecordLayout", "SharedExpert",
    "Stretch", "Summaries", "Watch", "backend", "on_host",
]  # fmt: skip


def on_host(ops: Backend, threads: int) -> HostBackend:
    """The backend itself if it computes on the CPU, else one that does."""
    return ops if isinstance(ops, (NativeBackend, ReferenceBackend)) else _cpu_backend("auto", threads)[0]


def backend(name: str, threads: int, device: str = "cpu", exact: bool = False, block: int = 0) -> tuple[Backend, str]:
    """The backend of that name, and a notice ("" = nothing to say).

    `device`: "cpu", or a GPU as torch writes it, which has one backend. "auto" takes the compiled CPU kernels; if they
    are missing it takes the reference and the notice says why. `exact`: on a CPU, rows of products are float32, not
    rounded (see reference/fixed.py). `block`: see `GpuBackend`.
    Raises UsageError for an unknown name or instruction set (KV_CPU_ISA), and KVError if "native" was asked for and is
    not there.
    """
    if name not in BACKENDS:
        raise UsageError(f"unknown backend '{name}'", f"backends: {', '.join(BACKENDS)}")
    if device != "cpu":
        import torch

        from kvcli.kernels.gpu import compiled
        from kvcli.kernels.gpu.backend import GpuBackend

        compiled.begin()
        torch.cuda.set_device(device)  # where kernels are launched, and graphs captured
        return GpuBackend(torch.device(device), block), ""
    return _cpu_backend(name, threads, exact)


def _cpu_backend(name: str, threads: int, exact: bool = False) -> tuple[HostBackend, str]:
    if name == "reference":
        return ReferenceBackend(threads), ""
    isa = asked_isa()
    try:
        return NativeBackend(threads, isa, exact), ""
    except KVError as e:
        if name == "native" or isinstance(e, UsageError):
            raise
        return ReferenceBackend(threads), f"slow path (plain torch): {e.message}; {e.hint}"
