"""GGUF files for tests: one by the gguf package's writer, others byte by byte, so that they can be wrong."""

from __future__ import annotations

import struct
from pathlib import Path

import gguf
import numpy as np

from kvcli.runtime.formats.ggufheader import Header, parse_header
from kvcli.runtime.formats.ggufvalues import LIST_LIMIT

WORDS = [f"piece{i}" if i % 7 else "é漢😀" for i in range(LIST_LIMIT + 300)]
SCORES = [i / 8 for i in range(LIST_LIMIT + 300)]


def text(value: str | bytes) -> bytes:
    raw = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(raw)) + raw


def entry(
    name: str | bytes = "t",
    dims: tuple[int, ...] = (32,),
    type_id: int = 0,
    offset: int = 0,
    n_dims: int | None = None,
) -> bytes:
    head = text(name) + struct.pack("<I", len(dims) if n_dims is None else n_dims)
    return head + struct.pack(f"<{len(dims)}Q", *dims) + struct.pack("<IQ", type_id, offset)


def key(name: str | bytes, value_type: int, value: bytes) -> bytes:
    return text(name) + struct.pack("<I", value_type) + value


def array(item_type: int, count: int, items: bytes) -> bytes:
    return struct.pack("<IQ", item_type, count) + items


def build(
    keys: tuple[bytes, ...] = (),
    tensors: tuple[bytes, ...] = (),
    data: int = 0,
    version: int = 3,
    n_keys: int | None = None,
    n_tensors: int | None = None,
) -> bytes:
    counts = len(tensors) if n_tensors is None else n_tensors, len(keys) if n_keys is None else n_keys
    header = b"GGUF" + struct.pack("<IQQ", version, *counts) + b"".join(keys) + b"".join(tensors)
    return header + bytes(-len(header) % 32) + bytes(data) if data else header


def parse(blob: bytes) -> Header:
    return parse_header(blob, len(blob), "f.gguf")


def write_small(path: Path) -> Path:
    """A file by the gguf package's writer with every kind of value and four tensors."""
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_uint8("n.u8", 200)
    writer.add_int8("n.i8", -100)
    writer.add_uint16("n.u16", 60000)
    writer.add_int16("n.i16", -30000)
    writer.add_int32("n.i32", -7)
    writer.add_float32("n.f32", 0.5)
    writer.add_uint64("n.u64", 1 << 63)
    writer.add_int64("n.i64", -(1 << 62))
    writer.add_float64("n.f64", 0.1)
    writer.add_bool("n.bool", True)
    writer.add_string("s", "Ünïcode 😀")
    writer.add_array("a.bool", [True, False, True])
    writer.add_array("a.int", [1, 2, 3])
    writer.add_array("a.str", ["x", "", "ÿ"])
    writer.add_array("tokens", WORDS)
    writer.add_array("scores", SCORES)
    rng = np.random.default_rng(1)
    writer.add_tensor("vec", rng.standard_normal(5).astype(np.float32))
    writer.add_tensor("mat", rng.standard_normal((3, 64)).astype(np.float16))
    packed = gguf.quants.quantize(rng.standard_normal((2, 64)).astype(np.float32), gguf.GGMLQuantizationType.Q4_1)
    writer.add_tensor("quant", packed, raw_dtype=gguf.GGMLQuantizationType.Q4_1)
    writer.add_tensor("cube", rng.standard_normal((2, 3, 4)).astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
