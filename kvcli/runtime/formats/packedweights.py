"""Weights of a safetensors model as plain numbers: those that lie there so, and those that were quantized. No torch.

A `Source` is one weight as the model knows it, whatever tensors it is made of:

| layout | tensors of the weight w | value |
|---|---|---|
| plain | w | |
| FP8 in blocks | w (F8_E4M3), w_scale_inv | w * scale of its block |
| compressed-tensors | w (F8_E4M3 or I8), w_scale | w * scale of its row, group or of all |
| compressed-tensors, packed | w_packed, w_scale, w_shape, perhaps w_zero_point and w_g_idx | (q - zero) * scale |
| GPTQ | qweight, qzeros, scales, perhaps g_idx, in place of "weight" | (q - zero) * scale |
| AWQ | qweight, qzeros, scales, with columns in another order ("gemm"), or by rows ("gemv") | (q - zero) * scale |
| MXFP8 of compressed-tensors | w (F8_E4M3), w_scale (U8) of 32 elements | w * 2^(scale - 127) |
| MXFP4 of compressed-tensors | w_packed (pairs of E2M1), w_scale (U8) of 32 elements | e2m1 * 2^(scale - 127) |
| NVFP4 of ModelOpt | w (pairs of E2M1), w_scale (F8_E4M3) of 16 elements, w_scale_2 of all | e2m1 * scale * scale_2 |
| NVFP4 of compressed-tensors | w_packed, w_scale, w_global_scale | e2m1 * scale / global_scale |
| bitsandbytes, nf4 and fp4 | w, w.absmax, w.quant_map, w.quant_state, perhaps w.nested_* | table[q] * absmax |
| bitsandbytes, int8 | w, SCB in place of "weight" | w * SCB of its row / 127 |
| MXFP4 of gpt-oss | w_blocks [..., n, 16], w_scales [..., n] | kept, in the order of GGML's blocks |

Products are computed in float32 and rounded to the type that the config names, bfloat16 or float16.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from kvcli.errors import ModelError
from kvcli.runtime.formats.elements import STORAGE, blocks_of, fp8_values, narrowed, spread, unpacked, widened
from kvcli.runtime.formats.safetensors import TensorInfo
from kvcli.runtime.formats.tableweights import BESIDE, INT8_BESIDE, MX_BLOCK, NVFP4_BLOCK, STATE, STATES, State, e2m1

_PLAIN = {**STORAGE, "F64": np.float64}
_RAW = {
    **_PLAIN, "F8_E4M3": np.uint8, "I8": np.int8, "U8": np.uint8, "I16": np.int16, "I32": np.int32, "I64": np.int64,
}  # fmt: skip
_AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)  # column i of eight stands at this nibble
_PARTS = (
    "_scale_inv",
    "_scale",
    "_scale_2",
    "_global_scale",
    "_shape",
    "_zero_point",
    "_g_idx",
)  # behind the name of a weight
_OF_ACTIVATIONS = (
    "input_scale",
    "input_global_scale",
    "output_scale",
    "activation_scale",
    "k_scale",
    "v_scale",
    "q_scale",
)
_AT_ONCE = 1 << 21  # numbers that are float32 at a time
_AS_THEY_LIE = "plain"

Read = Callable[[str], np.ndarray]


@dataclass(frozen=True)
class Source:
    """One weight. `read()` gives its elements in the memory of `type`, a key of STORAGE; of `direct` ones a view of the
    file; of the type MXFP4 packed rows. `layout` says how it lies there, "plain" or for a notice."""

    name: str
    shape: tuple[int, ...]
    type: str
    read: Callable[[], np.ndarray]
    direct: bool = False
    layout: str = _AS_THEY_LIE


def sources_of(
    tensors: Mapping[str, TensorInfo], raw: Callable[[TensorInfo], np.ndarray], config: Mapping[str, Any]
) -> dict[str, Source]:
    """All weights by name. `raw`: the bytes of a tensor, uint8 [nbytes]; `config`: the whole config.json.

    Raises ModelError for a quantization whose layout kv does not read, by its name.
    """
    return _Sources(tensors, raw, config).all()


class _Sources:
    def __init__(
        self, tensors: Mapping[str, TensorInfo], raw: Callable[[TensorInfo], np.ndarray], config: Mapping[str, Any]
    ) -> None:
        self.tensors, self.raw = tensors, raw
        how = config.get("quantization_config") or config.get("compression_config") or {}
        text = config.get("text_config")
        if not how and isinstance(text, Mapping):
            how = text.get("quantization_config") or {}
        if not isinstance(how, Mapping):
            raise ModelError("quantization_config in config.json is no table", "the file is damaged")
        self.how = how
        self.method = str(how.get("quant_method", "")) if how else ""
        kinds = (config.get("dtype"), config.get("torch_dtype"))
        self.type = "F16" if "float16" in kinds else "BF16"  # what products are rounded to

    def all(self) -> dict[str, Source]:
        found: dict[str, Source] = {}
        for name, tensor in self.tensors.items():
            if (source := self._source(name, tensor)) is not None:
                found[source.name] = source
        return found

    def _source(self, name: str, tensor: TensorInfo) -> Source | None:
        """The weight that this tensor is the main part of, None for the other parts and for what is no weight."""
        if name.endswith(".qweight"):
            return self._grouped(name.removesuffix("qweight"))
        if name.endswith("_packed"):
            weight = name.removesuffix("_packed")
            if f"{weight}_global_scale" in self.tensors:
                return self._nvfp4(weight)
            return self._mxfp4_pairs(weight) if tensor.dtype == "U8" else self._packed(weight)
        if f"{name}_scale_2" in self.tensors:
            return self._nvfp4(name)
        if kind := next((each for each in STATES if f"{name}{STATE}{each}" in self.tensors), ""):
            return self._of_table(name, kind)
        if f"{name.removesuffix('weight')}SCB" in self.tensors and tensor.dtype == "I8":
            return self._of_bytes(name, tensor)
        if name.endswith("_blocks") and name.removesuffix("_blocks") + "_scales" in self.tensors:
            return self._mxfp4(name.removesuffix("_blocks"))
        if self._is_part(name):
            return None
        if tensor.dtype in _PLAIN:
            if name.endswith(".weight") and f"{name}_scale" in self.tensors:
                raise ModelError(f"tensor {name} is stored as {tensor.dtype} with a scale, which kv does not read")
            return self._plain(name, tensor)
        if tensor.dtype in ("F8_E4M3", "I8"):
            return self._scaled(name, tensor)
        if tensor.dtype in ("I64", "I32", "BOOL", "U8", "I16") and not name.endswith(".weight"):
            return None  # counters and masks
        raise ModelError(f"tensor {name} is stored as {tensor.dtype}{self._by()}, which kv does not read")

    def _is_part(self, name: str) -> bool:
        """Whether a tensor only helps to read another one."""
        stem, _, last = name.rpartition(".")
        if name.endswith("_scales") and name.removesuffix("_scales") + "_blocks" in self.tensors:
            return True
        if last in ("qzeros", "scales", "g_idx"):
            return f"{stem}.qweight" in self.tensors
        if last in INT8_BESIDE:
            return f"{stem}.weight" in self.tensors
        if any(name.endswith(end) and name.removesuffix(end) in self.tensors for end in BESIDE):
            return True
        weights = [name.removesuffix(end) for end in _PARTS if name.endswith(end)]
        if any(weight in self.tensors or f"{weight}_packed" in self.tensors for weight in weights):
            return True
        by_any = self.method or f"{stem}.weight_scale_2" in self.tensors
        return bool(by_any) and last in _OF_ACTIVATIONS

    def _by(self) -> str:
        return f" ({self.method})" if self.method else ""

    def _elements(self, name: str, shape: tuple[int, ...] | None = None) -> np.ndarray:
        """A tensor's elements as they lie there. Raises ModelError if it is missing or misshapen."""
        tensor = self.tensors.get(name)
        if tensor is None:
            raise ModelError(f"tensor {name} is missing beside the others of its weight", "the model is incomplete")
        if tensor.dtype not in _RAW:
            raise ModelError(f"tensor {name} is stored as {tensor.dtype}{self._by()}, which kv does not read")
        if shape is not None and tensor.shape != shape:
            raise ModelError(f"tensor {name} has the shape {list(tensor.shape)}, {list(shape)} is needed")
        return self.raw(tensor).view(_RAW[tensor.dtype]).reshape(tensor.shape)

    def _numbers(self, name: str, shape: tuple[int, ...] | None = None) -> np.ndarray:
        """The elements of a tensor of plain or FP8 numbers, or of powers of two (E8M0 of OCP Microscaling Formats,
        scales of U8 in files), as float32. Raises ModelError likewise."""
        values, kind = self._elements(name, shape), self.tensors[name].dtype
        if kind == "U8" and name.endswith("_scale"):
            return np.where(values == 255, np.nan, np.exp2(values.astype(np.float32) - 127)).astype(np.float32)
        return fp8_values()[values] if kind == "F8_E4M3" else widened(kind, values)

    def _plain(self, name: str, tensor: TensorInfo) -> Source:
        if tensor.dtype == "F64":
            return Source(name, tensor.shape, "F32", lambda: self._elements(name).astype(np.float32))
        return Source(name, tensor.shape, tensor.dtype, lambda: self._elements(name), direct=True)

    def _made(self, name: str, shape: tuple[int, ...], make: Callable[[], np.ndarray], layout: str) -> Source:
        return Source(name, shape, self.type, lambda: narrowed(self.type, make()), layout=layout)

    def _scaled(self, name: str, tensor: TensorInfo) -> Source:
        """FP8 or int8 numbers with scales."""
        inverse = f"{name}_scale_inv" in self.tensors
        scales = f"{name}_scale_inv" if inverse else f"{name}_scale"
        if scales not in self.tensors:
            raise ModelError(f"tensor {name} is stored as {tensor.dtype} and has no tensor {scales}")
        scale_shape = self.tensors[scales].shape
        blocks = blocks_of(tensor.shape, scale_shape, self.how.get("weight_block_size"))
        if blocks is None:
            raise ModelError(f"tensor {scales} has the shape {list(scale_shape)}, of no use to {list(tensor.shape)}")

        def read() -> np.ndarray:
            values, scale = self._elements(name), self._numbers(scales)
            result = np.empty(tensor.shape, STORAGE[self.type])
            block = blocks[0] if scale.ndim and len(scale) > 1 else 0  # rows that share scales; 0 = all do
            step = max(1, block) * max(1, _AT_ONCE // max(1, max(1, block) * math.prod(tensor.shape[1:])))
            for at in range(0, len(values), step):
                some = values[at : at + step]
                few = scale[at // block : -(-(at + step) // block)] if block else scale
                wide = fp8_values()[some] if tensor.dtype == "F8_E4M3" else some.astype(np.float32)
                result[at : at + step] = narrowed(self.type, wide * spread(few, some.shape, blocks))
            return result

        layout = "FP8" if tensor.dtype == "F8_E4M3" else "int8"
        layout = "MXFP8" if self.tensors[scales].dtype == "U8" else layout
        return Source(name, tensor.shape, self.type, read, layout=layout)

    def _mxfp4(self, name: str) -> Source:
        """Blocks of 32 numbers of 4 bits with a power of two. Neighbours share a byte here, in GGML those half a block
        apart."""
        *outer, blocks, width = self.tensors[f"{name}_blocks"].shape
        if width != 16 or self.tensors[f"{name}_blocks"].dtype != "U8":
            raise ModelError(f"tensor {name}_blocks is of a form{self._by()} that kv does not read")
        self._elements(f"{name}_scales", (*outer, blocks))

        def read() -> np.ndarray:
            pairs, scales = self._elements(f"{name}_blocks"), self._elements(f"{name}_scales")
            codes = np.stack([pairs & 15, pairs >> 4], -1).reshape(*outer, blocks, 32)
            halves = codes[..., :16] | codes[..., 16:] << 4
            return np.concatenate([scales[..., None], halves], -1).reshape(*outer, blocks * 17)

        return Source(name, (*outer, blocks * 32), "MXFP4", read)

    def _mxfp4_pairs(self, name: str) -> Source:
        """Numbers of 4 bits with powers of two of 32, by compressed-tensors."""
        rows, pairs = self.tensors[f"{name}_packed"].shape
        if 2 * pairs % MX_BLOCK or f"{name}_scale" not in self.tensors or self.tensors[f"{name}_scale"].dtype != "U8":
            raise ModelError(f"tensor {name}_packed is of a form{self._by()} that kv does not read")
        self._elements(f"{name}_scale", (rows, 2 * pairs // MX_BLOCK))

        def make() -> np.ndarray:
            return e2m1(self._elements(f"{name}_packed"), self._numbers(f"{name}_scale"), MX_BLOCK)

        return self._made(name, (rows, 2 * pairs), make, "MXFP4")

    def _nvfp4(self, name: str) -> Source:
        """Numbers of 4 bits with FP8 scales of 16, and one factor of all: by ModelOpt or by compressed-tensors."""
        inverse = f"{name}_packed" in self.tensors
        pairs, factor = (f"{name}_packed", f"{name}_global_scale") if inverse else (name, f"{name}_scale_2")
        found = self.tensors[pairs]
        if found.dtype != "U8" or len(found.shape) != 2 or found.shape[1] % (NVFP4_BLOCK // 2):
            raise ModelError(f"tensor {pairs} is of a form of NVFP4{self._by()} that kv does not read")
        if f"{name.removesuffix('weight')}pre_quant_scale" in self.tensors:
            raise ModelError(f"tensor {name} has a pre_quant_scale beside it, which kv does not read")
        rows, cols = found.shape[0], 2 * found.shape[1]
        self._elements(f"{name}_scale", (rows, cols // NVFP4_BLOCK))

        def make() -> np.ndarray:
            one = self._numbers(factor).reshape(-1)[:1]
            scales = self._numbers(f"{name}_scale")
            return e2m1(self._elements(pairs), scales / one if inverse else scales * one, NVFP4_BLOCK)

        return self._made(name, (rows, cols), make, "NVFP4")

    def _of_table(self, name: str, kind: str) -> Source:
        """bitsandbytes, 4 bits: numbers of a table, in blocks."""
        label = f"{name}{STATE}{kind}"
        state = State.of(self._elements(label).tobytes(), label)
        parts = ["", ".absmax", ".quant_map", *([".nested_absmax", ".nested_quant_map"] if state.nested else [])]
        sizes = {"": -(-state.elements // 2), ".absmax": state.blocks, ".quant_map": 16}
        sizes |= {".nested_absmax": -(-state.blocks // max(1, state.nested)), ".nested_quant_map": 256}
        for part in parts:
            if (size := self._elements(name + part).size) != sizes[part]:
                raise ModelError(f"tensor {name}{part} has {size} elements, {sizes[part]} fit")
            if part in state.codes and (dtype := self.tensors[name + part].dtype) != "U8":
                raise ModelError(f"tensor {name}{part} is stored as {dtype}{self._by()}, which kv does not read")
        made = functools.partial(self._table_values, name, state, parts)
        return self._made(name, state.shape, made, f"{kind.upper()} of bitsandbytes")

    def _table_values(self, name: str, state: State, parts: list[str]) -> np.ndarray:
        return state.values({x: (self._elements if x in state.codes else self._numbers)(name + x) for x in parts})

    def _of_bytes(self, name: str, tensor: TensorInfo) -> Source:
        """bitsandbytes, 8 bits: the largest of a row is 127."""
        scales = f"{name.removesuffix('weight')}SCB"
        self._elements(scales, tensor.shape[:1])

        def make() -> np.ndarray:
            return self._elements(name).astype(np.float32) * (self._numbers(scales) / np.float32(127))[:, None]

        return self._made(name, tensor.shape, make, "int8 of bitsandbytes")

    def _packed(self, name: str) -> Source:
        """compressed-tensors: integers of a row in 32-bit words, the first in the lowest bits."""
        bits = _bits_of(self.how)
        if self.tensors[f"{name}_packed"].dtype != "I32" or bits not in (4, 8):
            raise ModelError(f"tensor {name}_packed is of a form{self._by()} that kv does not read")
        rows, cols = (int(n) for n in self._elements(f"{name}_shape", (2,)))
        each = 32 // bits
        self._elements(f"{name}_packed", (rows, -(-cols // each)))
        groups = self.tensors[f"{name}_scale"].shape[-1] if f"{name}_scale" in self.tensors else 0

        def make() -> np.ndarray:
            q = unpacked(self._elements(f"{name}_packed"), bits)[:, :cols].astype(np.float32)
            scale, zero = self._numbers(f"{name}_scale", (rows, groups)), np.float32(1 << (bits - 1))
            group = self._group_of(f"{name}_g_idx", cols, groups)
            if f"{name}_zero_point" not in self.tensors:
                return (q - zero) * scale[:, group]
            zeros = unpacked(self._elements(f"{name}_zero_point").T, bits).T[:rows].astype(np.float32)
            return (q - zeros[:, group]) * scale[:, group]

        return self._made(name, (rows, cols), make, f"{bits}-bit integers")

    def _grouped(self, stem: str) -> Source:
        """GPTQ and AWQ: a matrix by columns, in groups along its inputs."""
        bits, awq = int(self.how.get("bits") or self.how.get("w_bit") or 0), self.method == "awq"
        if self.method not in ("gptq", "awq") or bits not in ((4,) if awq else (2, 3, 4, 8)):
            raise ModelError(f"tensor {stem}qweight is of a form{self._by()} with {bits} bits that kv does not read")
        if awq and (form := str(self.how.get("version", "gemm")).lower()) != "gemm":
            if form != "gemv":
                raise ModelError(f"AWQ in the form '{form}' is not read by kv", "it reads 'gemm' and 'gemv'")
            return self._by_rows(stem)
        packed = self.tensors[f"{stem}qweight"].shape
        rows, cols = (packed[1] * 32 // bits, packed[0]) if awq else (packed[1], packed[0] * 32 // bits)
        groups = self.tensors[f"{stem}scales"].shape[0] if f"{stem}scales" in self.tensors else 0
        zero_shift = 0 if awq or self.how.get("checkpoint_format") == "gptq_v2" else 1

        def make() -> np.ndarray:
            if awq:
                q = unpacked(self._elements(f"{stem}qweight"), bits, _AWQ_ORDER)
                zeros = unpacked(self._elements(f"{stem}qzeros", (groups, rows * bits // 32)), bits, _AWQ_ORDER)
            else:
                q = unpacked(self._elements(f"{stem}qweight").T, bits).T
                zeros = unpacked(self._elements(f"{stem}qzeros", (groups, rows * bits // 32)), bits)
            scale = self._numbers(f"{stem}scales", (groups, rows))
            group = self._group_of(f"{stem}g_idx", cols, groups)
            zeros = ((zeros + zero_shift) & ((1 << bits) - 1)).astype(np.float32)
            return ((q.astype(np.float32) - zeros[group]) * scale[group]).T

        return self._made(f"{stem}weight", (rows, cols), make, f"{self.method.upper()}, {bits} bits")

    def _by_rows(self, stem: str) -> Source:
        """AWQ for single rows: a matrix by rows, zeros and scales [rows, groups] with more of them than there are."""
        rows, cols = self.tensors[f"{stem}qweight"].shape[0], self.tensors[f"{stem}qweight"].shape[1] * 8
        size = int(self.how.get("group_size") or self.how.get("q_group_size") or 0)
        if size <= 0 or cols % size:
            raise ModelError(f"tensor {stem}qweight has {cols} columns, which are no groups of {size}")
        groups = cols // size

        def make() -> np.ndarray:
            q, zeros = (unpacked(self._elements(f"{stem}{part}"), 4) for part in ("qweight", "qzeros"))
            scale = self._numbers(f"{stem}scales")
            if min(zeros.shape[1], scale.shape[1]) < groups or {len(zeros), len(scale)} != {rows}:
                raise ModelError(f"the scales beside {stem}qweight are not {groups} of each row", "the file is damaged")
            zero, scale = (np.repeat(x[:, :groups].astype(np.float32), size, 1) for x in (zeros, scale))
            return (q.astype(np.float32) - zero) * scale

        return self._made(f"{stem}weight", (rows, cols), make, "AWQ (gemv), 4 bits")

    def _group_of(self, name: str, cols: int, groups: int) -> np.ndarray:
        """The group of each column: as the file says, else in turn."""
        if not groups:
            raise ModelError(f"the scales beside {name} are missing", "the model is incomplete")
        if name not in self.tensors:
            size = -(-cols // groups)
            return np.arange(cols) // size
        found = self._elements(name, (cols,))
        if found.min(initial=0) < 0 or found.max(initial=0) >= groups:
            raise ModelError(f"tensor {name} names groups that are not there", "the file is damaged")
        return found


def _bits_of(how: Mapping[str, Any]) -> int:
    """Of compressed-tensors, which has a table of them for groups of layers; kv reads models with one kind."""
    groups = how.get("config_groups")
    tables = list(groups.values()) if isinstance(groups, Mapping) else []
    found = {each["weights"].get("num_bits") for each in tables if isinstance(each.get("weights"), Mapping)}
    return found.pop() if len(found) == 1 else 0
