"""`cpu.c` as Python sees it: the compiled library, the arguments of its functions, and its instruction sets."""

from __future__ import annotations

import ctypes
import functools
import os
from ctypes import c_char_p, c_float, c_int, c_int64, c_void_p
from pathlib import Path

from kvcli.errors import KVError, UsageError
from kvcli.kernels.cpu.sources import checksum
from kvcli.kernels.grids import grids

_ARM = os.uname().machine in ("aarch64", "arm64")
_OF_PROCESSORS = ("neoni8mm", "neondot", "neon") if _ARM else ("avx512vnni", "avx512", "avxvnni", "avx2")
ISAS = (*_OF_PROCESSORS, "base")  # that cpu.c is compiled for here, the best first

_SIGNATURES = {
    "kv_matmul": [c_void_p, c_int64, c_void_p, c_int64, c_int64, c_int64, c_void_p, c_int64, c_int64],
    "kv_interleave": [c_void_p, c_int64, c_void_p, c_int64],
    "kv_keep": [c_void_p, c_int64],
    "kv_matmul_experts": [
        c_void_p, c_int64, c_int64, c_void_p, c_int64, c_int64, c_void_p, c_int64, c_int64, c_void_p, c_int64,
    ],
    "kv_route": [c_void_p, c_int64, c_void_p, c_void_p, c_void_p, c_void_p],
    "kv_mix": [c_void_p, c_void_p, c_int64, c_int64, c_int64, c_void_p],
    "kv_rows": [c_void_p, c_void_p, c_int64, c_int64, c_float, c_void_p],
    "kv_norm": [c_void_p, c_int64, c_void_p, c_void_p, c_int64, c_float, c_int64, c_int64, c_void_p, c_int64],
    "kv_add": [c_void_p, c_int64, c_void_p, c_int64, c_float, c_int64, c_int64],
    "kv_rope": [c_void_p, c_int64, c_int64, c_int64, c_int64, c_int64, c_void_p, c_void_p],
    "kv_activate": [c_void_p, c_int64, c_int64, c_int64, c_int64, c_void_p],
    "kv_rotate": [c_void_p, c_int64, c_int64, c_int64, c_int64],
    "kv_seal": [c_void_p, c_int64, c_int64],
    "kv_store": [c_void_p, c_int64, c_void_p, c_int64, c_void_p, c_int64],
    "kv_attention": [
        *(c_void_p, c_int64, c_void_p, c_int64, c_int64, c_int64, c_float, c_float, c_void_p, c_void_p, c_int64),
        c_void_p,
    ],
    "kv_short_conv": [c_void_p, c_int64, c_void_p, c_void_p, c_int64, c_int64, c_void_p, c_int64, c_void_p],
    "kv_mamba": [c_void_p, c_int64, c_void_p, c_void_p, c_int64, c_void_p, c_void_p],
    "kv_delta_net": [c_void_p, c_int64, c_void_p, c_void_p, c_int64, c_void_p, c_void_p],
}  # fmt: skip


@functools.cache
def library() -> ctypes.CDLL:
    """The compiled kernels. Raises KVError with the reason when they were not built or do not load."""
    built = sorted(Path(__file__).parent.glob("_cpu*.so")) + sorted(Path(__file__).parent.glob("_cpu*.pyd"))
    if not built:
        raise KVError(
            "the CPU kernels were not compiled when kv was installed", "install a C compiler and reinstall kv"
        )
    try:
        lib = ctypes.CDLL(str(built[0]))
    except OSError as e:
        raise KVError(f"the CPU kernels do not load: {e}", "reinstall kv") from None
    if (here := checksum(built[0].parent)) and _made_of(lib) != here:
        raise KVError("the CPU kernels were compiled from older sources than kv's", "reinstall kv (pip install)")
    lib.kv_init.argtypes, lib.kv_init.restype = [c_int, c_char_p], c_char_p
    lib.kv_has_codec.argtypes, lib.kv_has_codec.restype = [c_void_p], c_int
    lib.kv_block.argtypes, lib.kv_block.restype = [c_int64], c_int64
    lib.kv_has_fixed.argtypes, lib.kv_has_fixed.restype = [], c_int
    lib.kv_grids.argtypes, lib.kv_grids.restype = [c_void_p], None
    lib.kv_call_number.argtypes, lib.kv_call_number.restype = [c_char_p], c_int64
    lib.kv_run.argtypes, lib.kv_run.restype = [c_void_p, c_int64], None
    lib.kv_grids((c_void_p * len(grids()))(*(grid.ctypes.data for grid in grids().values())))
    for name, arguments in _SIGNATURES.items():
        getattr(lib, name).argtypes, getattr(lib, name).restype = arguments, None
    return lib


def _made_of(lib: ctypes.CDLL) -> str:
    """The checksum of the sources that the kernels were compiled from; "" where they do not say."""
    if not hasattr(lib, "kv_sources"):
        return ""
    lib.kv_sources.restype = c_char_p
    return str(lib.kv_sources().decode())


def asked_isa() -> str:
    """The instruction set that KV_CPU_ISA names; "" = the best one here. Raises UsageError for one that is none."""
    isa = os.environ.get("KV_CPU_ISA", "")
    if isa and isa not in ISAS:
        raise UsageError(f"KV_CPU_ISA must be one of {', '.join(ISAS)}, not '{isa}'")
    return isa
