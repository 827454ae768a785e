"""safetensors headers: the same as the safetensors package reads, and anything wrong refused quickly."""

from __future__ import annotations

import json
import struct
import time
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import save

from kvcli.errors import ModelError
from kvcli.runtime.formats import boundedjson
from kvcli.runtime.formats.ggufvalues import NeedMoreBytes
from kvcli.runtime.formats.safetensors import (
    DTYPES,
    MAX_HEADER_BYTES,
    Header,
    merge_shards,
    parse_header,
    parse_index,
)

ARRAYS = {
    "embed": np.arange(24, dtype=np.float32).reshape(4, 6),
    "half": np.ones((3, 2, 2), np.float16),
    "scalar": np.array(7, np.int64),
    "empty": np.zeros((0, 5), np.uint8),
    "flags": np.array([True, False]),
}


def build(header: Any, data: int = 0, length: int | None = None) -> bytes:
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(raw) if length is None else length) + raw + bytes(data)


def tensor(dtype: Any = "F32", shape: Any = (2, 2), offsets: Any = (0, 16)) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


def parse(blob: bytes, size: int | None = None) -> Header:
    return parse_header(blob, len(blob) if size is None else size, "m.safetensors")


def refusal(blob: bytes, size: int | None = None) -> str:
    with pytest.raises(ModelError) as caught:
        parse(blob, size)
    message = caught.value.message
    assert message.startswith("m.safetensors") and "\n" not in message and len(message) < 300
    assert caught.value.hint
    return message


def test_what_the_package_writes() -> None:
    blob = save(ARRAYS, {"format": "np"})
    header = parse(blob)
    assert header.metadata == {"format": "np"} and set(header.tensors) == set(ARRAYS)
    for name, values in ARRAYS.items():
        found = header.tensors[name]
        assert found.shape == values.shape and found.nbytes == values.nbytes
        assert blob[found.offset : found.offset + found.nbytes] == values.tobytes()
    assert [header.tensors[n].dtype for n in ARRAYS] == ["F32", "F16", "I64", "U8", "BOOL"]


def test_only_the_header_is_needed() -> None:
    blob = save(ARRAYS)
    end = parse(blob).data_offset
    assert parse(blob[:end], len(blob)) == parse(blob)
    with pytest.raises(NeedMoreBytes) as caught:
        parse(blob[:8], len(blob))
    assert caught.value.needed == end
    with pytest.raises(NeedMoreBytes) as caught:
        parse(b"", len(blob))
    assert caught.value.needed == 8


@pytest.mark.parametrize("dtype", sorted(DTYPES))
def test_bytes_of_each_dtype(dtype: str) -> None:
    nbytes = 64 * DTYPES[dtype] // 8
    assert parse(build({"t": tensor(dtype, [8, 8], [0, nbytes])}, nbytes)).tensors["t"].nbytes == nbytes
    assert "would take" in refusal(build({"t": tensor(dtype, [8, 8], [0, nbytes + 1])}, nbytes + 1))


WRONG: dict[str, tuple[bytes, str]] = {
    "no bytes": (b"", "it has 0 bytes"),
    "a length alone": (struct.pack("<Q", 2), "it has 8 bytes"),
    "10^18 bytes of header": (build(b"{}", length=10**18), "first 8 bytes are not the size of a header"),
    "one byte over the limit": (build(b"{}", length=MAX_HEADER_BYTES + 1), "more than 100,000,000"),
    "longer than the file": (build(b"{}", length=3), "is truncated"),
    "a GGUF file": (b"GGUF\3\0\0\0" + bytes(80), "it is a GGUF file"),
    "no JSON": (build(b"hello world"), "not valid JSON"),
    "not UTF-8": (build(b'{"\xff": 1}'), "not UTF-8"),
    "a list": (build([]), "not an object"),
    "cut JSON": (build(b'{"t": {"dtype"'), "not valid JSON"),
    "deep lists": (build(b'{"t":' + b"[" * 100_000 + b"]" * 100_000 + b"}"), "nests too deeply"),
    "a key twice": (build(b'{"a": {"b": 1, "b": 1}}'), "repeats a key"),
    "an offset of 31 digits": (build({"t": tensor(offsets=[0, int(1e30)])}, 16), "impossible data_offsets"),
    "a million digits": (build(b'{"a": ' + b"9" * 1_000_000 + b"}"), "1,000,000 digits"),
    "metadata of numbers": (build({"__metadata__": {"a": 1}}), "__metadata__"),
    "metadata list": (build({"__metadata__": []}), "__metadata__"),
    "an entry that is no table": (build({"t": 5}), "lacks dtype"),
    "no shape": (build({"t": {"dtype": "F32", "data_offsets": [0, 4]}}, 4), "lacks dtype"),
    "unknown dtype": (build({"t": tensor("F99")}, 16), "unknown dtype 'F99'"),
    "dtype list": (build({"t": tensor(["F32"])}, 16), "unknown dtype"),
    "negative dim": (build({"t": tensor(shape=[-2, -2])}, 16), "impossible shape"),
    "float dim": (build({"t": tensor(shape=[2.0, 2])}, 16), "impossible shape"),
    "boolean dim": (build({"t": tensor(shape=[True, 4])}, 16), "impossible shape"),
    "huge dim": (build({"t": tensor(shape=[1 << 62, 0])}, 16), "impossible shape"),
    "many dims": (build({"t": tensor(shape=[1] * 9)}, 16), "impossible shape"),
    "shape text": (build({"t": tensor(shape="22")}, 16), "impossible shape"),
    "product beyond 64 bits": (build({"t": tensor(shape=[1 << 40] * 4)}, 16), "would take"),
    "backward offsets": (build({"t": tensor(offsets=[16, 0])}, 16), "impossible data_offsets"),
    "one offset": (build({"t": tensor(offsets=[0])}, 16), "impossible data_offsets"),
    "offset beyond the file": (build({"t": tensor(offsets=[1 << 40, (1 << 40) + 16])}, 16), "is truncated"),
    "data cut": (build({"t": tensor()}, 15), "is truncated"),
    "overlap": (build({"a": tensor(), "b": tensor(offsets=[15, 31])}, 31), "'a' and 'b' overlap"),
    "unprintable name": (build({"a\nb": tensor()}, 16), "unprintable"),
    "half a surrogate pair": (build(b'{"\\ud800": {}}'), "unprintable"),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_headers(case: str) -> None:
    blob, expected = WRONG[case]
    start = time.process_time()
    assert expected in refusal(blob)
    assert time.process_time() - start < 60, "it believed a number"


def test_values_are_counted_before_they_are_made() -> None:
    """Thirty megabytes of text that would become gigabytes of objects."""
    bomb = build(b'{"t":[' + b"{}," * 10_000_000 + b"{}]}")
    tracemalloc.start()
    try:
        assert "more values than kv accepts" in refusal(bomb)
        assert tracemalloc.get_traced_memory()[1] < 3 * len(bomb)
    finally:
        tracemalloc.stop()


def test_many_tensors_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvcli.runtime.formats.safetensors.MAX_TENSORS", 10)
    blob = build({f"t{i}": tensor(offsets=[16 * i, 16 * i + 16]) for i in range(11)}, 176)
    assert "11 tensors" in refusal(blob)
    monkeypatch.setattr(boundedjson, "MAX_COMMAS", 10)
    assert "more values" in refusal(blob)


def test_zero_size_tensors_may_stand_anywhere() -> None:
    entries = {"a": tensor(), "z": tensor(shape=[0, 3], offsets=[4, 4])}
    assert set(parse(build(entries, 16)).tensors) == {"a", "z"}


VALID = save(ARRAYS, {"format": "np"})


@settings(max_examples=300, deadline=2000)
@given(st.data())
def test_damaged_bytes(data: st.DataObject) -> None:
    blob = bytearray(VALID)
    for _ in range(data.draw(st.integers(1, 4))):
        blob[data.draw(st.integers(0, parse(VALID).data_offset - 1))] = data.draw(st.integers(0, 255))
    cut = data.draw(st.integers(0, len(blob)))
    try:
        header = parse_header(bytes(blob[:cut]), len(blob), "m.safetensors")
    except (ModelError, NeedMoreBytes):
        return
    assert all(t.offset + t.nbytes <= len(blob) for t in header.tensors.values())


@pytest.mark.slow
@settings(max_examples=200, deadline=2000)
@given(
    st.dictionaries(
        st.text(max_size=5),
        st.fixed_dictionaries(
            {
                "dtype": st.sampled_from([*DTYPES, "X"]),
                "shape": st.lists(st.integers(-1, 1 << 65), max_size=9),
                "data_offsets": st.lists(st.integers(-1, 100), max_size=3),
            }
        ),
        max_size=4,
    ),
    st.integers(0, 100),
)
def test_random_entries(entries: dict[str, Any], data: int) -> None:
    try:
        header = parse(build(entries, data))
    except ModelError as error:
        assert "\n" not in error.message
        return
    assert sum(t.nbytes for t in header.tensors.values()) <= data


# --- indexes ---


@pytest.mark.parametrize(
    ("index", "expected"),
    [
        (b"[]", "not an object"),
        (b"{}", "has no weight_map"),
        (b'{"weight_map": {}}', "has no weight_map"),
        (b'{"weight_map": {"a": 1}}', "names '1'"),
        (b'{"weight_map": {"a": "../../etc/x.safetensors"}}', "not a .safetensors file beside it"),
        (b'{"weight_map": {"a": "model.bin"}}', "not a .safetensors file beside it"),
        (json.dumps({"weight_map": {str(i): f"{i}.safetensors" for i in range(1025)}}).encode(), "more than"),
    ],
)
def test_wrong_indexes(index: bytes, expected: str) -> None:
    with pytest.raises(ModelError, match=r"^model\.index") as caught:
        parse_index(index, "model.index")
    assert expected in caught.value.message


def test_shards_are_checked_against_the_index() -> None:
    first, second = parse(build({"a": tensor()}, 16)), parse(build({"b": tensor()}, 16))
    both = {"1": first, "2": second}
    assert set(merge_shards(both, {"a": "1", "b": "2"}, "i")) == {"a", "b"}
    with pytest.raises(ModelError, match="'b' is not in 1"):
        merge_shards(both, {"a": "1", "b": "1"}, "i")
    with pytest.raises(ModelError, match="in several files"):
        merge_shards({"1": first, "2": first}, {"a": "1"}, "i")


def test_module_is_torch_free(kv_command: list[str], tmp_path: Path) -> None:
    import subprocess
    import sys

    code = kv_command[2].rpartition("from kvcli.cli.main")[0] + (
        "import sys, kvcli.runtime.headers.modelheaders, kvcli.runtime.headers.remote; "
        "assert not {'torch', 'huggingface_hub', 'safetensors'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=tmp_path, timeout=60)
