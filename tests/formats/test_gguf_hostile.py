"""GGUF files that are wrong: each case by name, and fuzzing. Only ModelError may come out, and quickly."""

from __future__ import annotations

import os
import struct
from pathlib import Path

import pytest
from ggufbytes import array, build, entry, key, parse, text, write_small
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcli.blockformats import FORMATS
from kvcli.errors import ModelError
from kvcli.runtime.formats.gguf import GGUFFile
from kvcli.runtime.formats.ggufheader import parse_header
from kvcli.runtime.formats.ggufvalues import LIST_LIMIT, NeedMoreBytes


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_small(tmp_path_factory.mktemp("gguf") / "small.gguf")


def refusal(blob: bytes) -> str:
    with pytest.raises(ModelError) as caught:
        parse(blob)
    message = caught.value.message
    assert message.startswith("f.gguf") and "\n" not in message and len(message) < 250
    assert caught.value.hint and "\n" not in caught.value.hint
    return message


def open_refusal(path: Path) -> ModelError:
    with pytest.raises(ModelError) as caught:
        GGUFFile.open(path)
    assert "\n" not in caught.value.message and caught.value.exit_code == 3
    return caught.value


def test_missing_file(tmp_path: Path):
    assert "no such file" in open_refusal(tmp_path / "none.gguf").message


def test_directory(tmp_path: Path):
    assert "is a directory" in open_refusal(tmp_path).message


def test_empty_file(tmp_path: Path):
    (tmp_path / "e.gguf").touch()
    assert "is empty" in open_refusal(tmp_path / "e.gguf").message


def test_path_with_nul(tmp_path: Path):
    assert "cannot be opened" in open_refusal(tmp_path / "a\0b").message


def test_path_too_long(tmp_path: Path):
    assert "cannot be opened" in open_refusal(tmp_path / ("x" * 5000)).message


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no FIFOs here")
def test_fifo_is_refused_without_blocking(tmp_path: Path):
    os.mkfifo(tmp_path / "pipe.gguf")
    assert "not a regular file" in open_refusal(tmp_path / "pipe.gguf").message


@pytest.mark.skipif(not Path("/dev/zero").exists(), reason="no /dev/zero here")
def test_device():
    assert "not a regular file" in open_refusal(Path("/dev/zero")).message


def test_no_permission(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    path = tmp_path / "secret.gguf"
    path.write_bytes(build())
    path.chmod(0)
    if os.access(path, os.R_OK):  # root reads everything: let the system call answer as it would for others

        def denied(*args: object) -> int:
            raise PermissionError(13, "Permission denied")

        monkeypatch.setattr("kvcli.runtime.formats.gguf.os.open", denied)
    assert "permission denied" in open_refusal(path).message


@pytest.mark.parametrize(
    ("start", "what"),
    [
        (b"\x89PNG\r\n\x1a\n" + bytes(50), "a PNG image"),
        (b"PK\x03\x04" + bytes(50), "a zip archive"),
        (struct.pack("<Q", 50) + b'{"__metadata__":{}}', "safetensors"),
        (b"version https://git-lfs.github.com/spec/v1\n", "Git LFS"),
        (b"<!DOCTYPE html><html>", "a web page"),
        (b"tjgg" + bytes(40), "GGML file"),
        (b"hello\n", "(it begins with 'hello')"),
        (b"root:x:0:0:root:/root:/bin/bash\n", "(it begins with 'root:x:0')"),
        (b"GG", "(it begins with 'GG')"),
        (b"\x00", "(it begins with the bytes 00)"),
        (b"\xc3\xa9t\xc3\xa9", "(it begins with the bytes c3 a9 74 c3 a9)"),
        (b"GGUf" + bytes(60), "(it begins with the bytes 47 47 55 66 00 00 00 00)"),
    ],
)
def test_not_a_gguf_file(start: bytes, what: str):
    message = refusal(start)
    assert "is not a GGUF file" in message and what in message


def test_big_endian():
    assert "big-endian" in refusal(b"GGUF" + struct.pack(">IQQ", 3, 0, 0))


@pytest.mark.parametrize("version", [0, 1, 4, 99, 0xFFFFFFFF])
def test_unknown_version(version: int):
    assert f"GGUF version {version} is not supported" in refusal(build(version=version))


@pytest.mark.parametrize("count", [1, 1000, 1 << 32, (1 << 64) - 1])
def test_counts_beyond_the_file(count: int):
    assert f"{count:,} tensors" in refusal(build(n_tensors=count))
    assert f"{count:,} keys" in refusal(build(n_keys=count))


def test_counts_beyond_sense():
    blob = build(n_keys=70_000) + bytes(70_000 * 13)
    assert "more than kv accepts" in refusal(blob)


@pytest.mark.parametrize("length", [1, 1 << 31, (1 << 63) - 1, 1 << 63, (1 << 64) - 1])
def test_string_beyond_the_file(length: int):
    long = struct.pack("<Q", length)
    assert "past the end" in refusal(build((long + bytes(5),)) if length > 5 else build((key("s", 8, long),)))
    assert "past the end" in refusal(build((key("s", 8, long),)))
    assert "past the end" in refusal(build((key("s", 9, array(8, 2, text("ok") + long)),)))
    assert "past the end" in refusal(build((key("s", 9, array(8, 1, long)),)))


@pytest.mark.parametrize("count", [9, 1 << 40, (1 << 64) - 1])
@pytest.mark.parametrize("item_type", range(13))
def test_array_beyond_the_file(item_type: int, count: int):
    message = refusal(build((key("arr", 9, array(item_type, count, bytes(8))),)))
    assert f"{count:,} elements in key 'arr'" in message


def test_deeply_nested_arrays():
    value = array(0, 0, b"")
    for _ in range(50):
        value = array(9, 1, value)
    assert "nests arrays" in refusal(build((key("k", 9, value),)))


def test_unknown_value_types():
    assert "unknown value type 13" in refusal(build((key("k", 13, bytes(8)),)))
    assert "unknown value type 77" in refusal(build((key("k", 9, array(77, 0, b"")),)))


def test_booleans_other_than_0_and_1():
    assert "boolean of 2" in refusal(build((key("k", 7, b"\2"),)))
    assert "boolean of 255" in refusal(build((key("k", 9, array(7, 3, b"\0\xff\1")),)))


def test_strings_that_are_not_utf8():
    assert "not UTF-8" in refusal(build((key(b"\xff", 0, b"\0"),)))
    assert "not UTF-8" in refusal(build((key("k", 8, text(b"\xc3")),)))
    assert "not UTF-8" in refusal(build((key("k", 9, array(8, 1, text(b"\x80"))),)))
    long = array(8, LIST_LIMIT + 1, text("ok") * LIST_LIMIT + text(b"\xe2\x82"))
    lazy = parse(build((key("k", 9, long),))).metadata["k"]
    with pytest.raises(ModelError, match=r"f\.gguf: key 'k' holds a string that is not UTF-8"):
        list(lazy)


def test_a_name_that_is_not_utf8_is_no_reason_to_refuse_a_model():
    name, tags = key("general.name", 8, text(b"Mod\xe8le")), array(8, 2, text(b"fran\xe7ais") + text("x"))
    metadata = parse(build((name, key("general.tags", 9, tags)))).metadata
    assert metadata == {"general.name": "Mod\ufffdle", "general.tags": ["fran\ufffdais", "x"]}
    long = array(8, LIST_LIMIT + 1, text("ok") * LIST_LIMIT + text(b"\xe2\x82"))
    assert parse(build((key("general.tags", 9, long),))).metadata["general.tags"][-1] == "\ufffd"


def test_keys_twice():
    assert "'k' appears twice" in refusal(build((key("k", 0, b"\0"),) * 2))


def test_tensors_twice():
    assert "'t' appears twice" in refusal(build(tensors=(entry(), entry(offset=128)), data=256))


@pytest.mark.parametrize("alignment", [0, 3, 48, (1 << 32) - 1])
def test_alignment_not_a_power_of_two(alignment: int):
    assert "general.alignment" in refusal(build((key("general.alignment", 4, struct.pack("<I", alignment)),)))


def test_alignment_of_another_type():
    assert "general.alignment" in refusal(build((key("general.alignment", 8, text("32")),)))
    assert "general.alignment" in refusal(build((key("general.alignment", 7, b"\1"),)))


@pytest.mark.parametrize("n_dims", [0, 5, (1 << 32) - 1])
def test_dimension_count(n_dims: int):
    assert f"'t' has {n_dims} dimensions" in refusal(build(tensors=(entry(n_dims=n_dims),), data=64))


def test_dimension_of_zero():
    assert "dimension of 0" in refusal(build(tensors=(entry(dims=(32, 0)),), data=64))


@pytest.mark.parametrize("dims", [(1 << 32, 1 << 32), (1 << 63, 2), ((1 << 64) - 1,) * 4, (1 << 40,)])
def test_dimensions_that_overflow(dims: tuple[int, ...]):
    assert "truncated" in refusal(build(tensors=(entry(dims=dims),), data=64))


@pytest.mark.parametrize("type_id", [99, 200, (1 << 32) - 1])
def test_unknown_tensor_type(type_id: int):
    assert f"tensor 't' has the unknown type {type_id}" in refusal(build(tensors=(entry(type_id=type_id),), data=64))


def test_rows_that_are_no_whole_blocks():
    message = refusal(build(tensors=(entry(dims=(48, 2), type_id=FORMATS["Q4_1"].id),), data=64))
    assert "rows of 48 elements, Q4_1 needs a multiple of 32" in message


def test_offset_not_aligned():
    assert "not aligned" in refusal(build(tensors=(entry(offset=4),), data=256))


@pytest.mark.parametrize("offset", [64, 1 << 40, (1 << 64) - 32])
def test_offset_past_the_end(offset: int):
    blob = build(tensors=(entry(offset=offset),), data=128)
    message = refusal(blob)
    assert "truncated" in message and f"ends at byte {len(blob) - 128 + offset + 128:,}" in message
    assert f"has {len(blob):,} bytes" in message


def test_tensors_that_overlap():
    tensors = (entry("a", dims=(32,)), entry("b", dims=(32,), offset=96))
    assert "'a' and 'b' overlap" in refusal(build(tensors=tensors, data=512))


def test_names_with_control_characters_stay_on_one_line():
    assert "\\x1b[2J\\n" in refusal(build(tensors=(entry("\x1b[2J\nx", type_id=200),), data=64))
    assert len(refusal(build(tensors=(entry("n" * 5000, type_id=200),), data=64))) < 200


@pytest.mark.parametrize(
    "type_id, name, instead",
    [
        (4, "Q4_2", "Q4_0"),
        (31, "Q4_0_4_4", "Q4_0"),
        (32, "Q4_0_4_8", "Q4_0"),
        (33, "Q4_0_8_8", "Q4_0"),
        (36, "IQ4_NL_4_4", "IQ4_NL"),
    ],
)
def test_formats_that_were_removed_are_not_called_new(type_id: int, name: str, instead: str):
    with pytest.raises(ModelError, match=f"is stored as {name}.*, an old format that no longer exists") as caught:
        parse(build(tensors=(entry(type_id=type_id),), data=64))
    assert f"use a file of this model in {instead}" in caught.value.hint


def test_split_models(tmp_path: Path):
    path = tmp_path / "part.gguf"
    path.write_bytes(build((key("split.count", 2, struct.pack("<H", 3)),)))
    error = open_refusal(path)
    assert "is one of 3 parts of a split model, 1 is there" in error.message and "side by side" in error.hint
    path.write_bytes(build((key("split.count", 2, struct.pack("<H", 1)),)))
    assert GGUFFile.open(path).metadata["split.count"] == 1


def test_cut_at_half(small: Path, tmp_path: Path):
    blob = small.read_bytes()
    file = tmp_path / "half.gguf"
    last = max(t.offset + t.nbytes for t in parse(blob).tensors.values())
    file.write_bytes(blob[: last - 1])
    message = open_refusal(file).message
    assert f"truncated: tensor 'cube' ends at byte {last:,}, the file has {last - 1:,} bytes" in message


def test_every_truncation_is_refused(small: Path):
    blob = small.read_bytes()
    last = max(t.offset + t.nbytes for t in parse(blob).tensors.values())
    for size in [*range(1, 700), *range(700, last, 97)]:
        with pytest.raises(ModelError):
            parse(blob[:size])


@pytest.mark.slow
@settings(max_examples=300)
@given(data=st.data())
def test_fuzzed_files_raise_nothing_but_model_errors(small: Path, data: st.DataObject):
    blob = bytearray(small.read_bytes())
    hot = parse(bytes(blob)).data_offset
    for _ in range(data.draw(st.integers(1, 4))):
        # Lengths and counts stand near the start and, for tensors, near the end of the header.
        where = data.draw(st.integers(0, 600) | st.integers(hot - 300, hot - 8) | st.integers(0, len(blob) - 8))
        patch = data.draw(
            st.binary(min_size=1, max_size=8)
            | st.sampled_from([b"\xff" * 8, b"\0" * 8, struct.pack("<Q", 1 << 63), struct.pack("<Q", len(blob))])
        )
        blob[where : where + len(patch)] = patch
    blob = blob[: data.draw(st.integers(0, len(blob)) | st.just(len(blob)))]
    try:
        for value in parse(bytes(blob)).metadata.values():
            _ = list(value) if hasattr(value, "__len__") else value
    except ModelError as error:
        assert "\n" not in error.message


@settings(max_examples=200)
@given(blob=st.binary(max_size=200), version=st.sampled_from([2, 3]), counts=st.tuples(*[st.integers(0, 3)] * 2))
def test_random_headers_raise_nothing_but_model_errors(blob: bytes, version: int, counts: tuple[int, int]):
    blob = b"GGUF" + struct.pack("<IQQ", version, *counts) + blob
    for size in (len(blob), len(blob) + 1000):
        try:
            parse_header(blob, size, "f.gguf")
        except ModelError as error:
            assert "\n" not in error.message
        except NeedMoreBytes as more:
            assert len(blob) < more.needed <= size
