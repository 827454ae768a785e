"""GGUF reading against the gguf package: a small file with every kind of value, and the real models."""

from __future__ import annotations

import struct
import tracemalloc
from pathlib import Path

import gguf
import numpy as np
import pytest
from ggufbytes import SCORES, WORDS, array, build, entry, key, parse, text, write_small

from kvcli.blockformats import FORMATS
from kvcli.errors import ModelError
from kvcli.runtime.formats.gguf import GGUFFile
from kvcli.runtime.formats.ggufheader import parse_header
from kvcli.runtime.formats.ggufvalues import LIST_LIMIT, NeedMoreBytes


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_small(tmp_path_factory.mktemp("gguf") / "small.gguf")


def test_block_table_is_that_of_the_gguf_package():
    ours = {name: (block.id, block.elements, block.bytes) for name, block in FORMATS.items()}
    theirs = {kind.name: (int(kind), *gguf.GGML_QUANT_SIZES[kind]) for kind in gguf.GGMLQuantizationType}
    assert {name: ours[name] for name in theirs if name in ours} == {n: theirs[n] for n in theirs if n in ours}
    assert len(set(theirs) & set(ours)) >= 30
    assert len({block.id for block in FORMATS.values()}) == len(FORMATS)


def test_metadata_values_and_types(small: Path):
    metadata = GGUFFile.open(small).metadata
    expected = {"n.u8": 200, "n.i8": -100, "n.u16": 60000, "n.i16": -30000, "n.i32": -7, "n.f32": 0.5}
    expected |= {"n.u64": 1 << 63, "n.i64": -(1 << 62), "n.f64": 0.1, "n.bool": True, "s": "Ünïcode 😀"}
    expected |= {"a.bool": [True, False, True], "a.int": [1, 2, 3], "a.str": ["x", "", "ÿ"]}
    found = {name: metadata[name] for name in expected}
    assert found == expected
    assert [type(value) for value in found.values()] == [type(value) for value in expected.values()]


def test_long_arrays_are_lazy_sequences(small: Path):
    file = GGUFFile.open(small)
    tokens, scores = file.metadata["tokens"], file.metadata["scores"]
    assert not isinstance(tokens, list) and len(tokens) == len(WORDS)
    assert list(tokens) == WORDS and tokens[7] == WORDS[7] and tokens[-2:] == WORDS[-2:] and "piece9" in tokens
    assert len(scores) == len(SCORES) and list(scores) == SCORES
    assert scores[3] == SCORES[3] and type(scores[3]) is float and scores[:2] == SCORES[:2]
    assert np.asarray(scores).dtype == np.float32 and np.asarray(scores, np.float64).tolist() == SCORES


def test_long_string_array_with_nul_inside():
    words = [f"w{i}" for i in range(LIST_LIMIT)] + ["a\0b", "\0", "", "é\0"]
    blob = build((key("k", 9, array(8, len(words), b"".join(map(text, words)))),))
    assert list(parse(blob).metadata["k"]) == words


def test_tensors_and_data(small: Path):
    file = GGUFFile.open(small)
    assert {name: (t.shape, t.type) for name, t in file.tensors.items()} == {
        "vec": ((5,), "F32"),
        "mat": ((3, 64), "F16"),
        "quant": ((2, 64), "Q4_1"),
        "cube": ((2, 3, 4), "F32"),
    }
    for theirs in gguf.GGUFReader(small).tensors:
        ours = file.tensors[theirs.name]
        assert (ours.offset, ours.nbytes) == (theirs.data_offset, theirs.n_bytes)
        data = file.data(theirs.name)
        assert data.dtype == np.uint8 and not data.flags.writeable
        assert data.tobytes() == np.ascontiguousarray(theirs.data).tobytes()
    assert file.size == small.stat().st_size and file.alignment == 32


def test_close_keeps_views_alive(small: Path):
    with GGUFFile.open(small) as file:
        view, tokens = file.data("vec"), file.metadata["tokens"]
    assert len(view.tobytes()) == 20 and tokens[0] == WORDS[0]
    with pytest.raises(ValueError, match="closed"):
        file.data("vec")


def test_version_2_nested_arrays_and_vocabulary_only():
    nested = array(9, 2, array(4, 2, struct.pack("<II", 1, 2)) + array(8, 1, text("x")))
    header = parse(build((key("k", 9, nested), key("e", 9, array(8, 0, b""))), version=2))
    assert header.version == 2 and header.metadata == {"k": [[1, 2], ["x"]], "e": []} and header.tensors == {}


def test_alignment_from_the_file():
    keys = (key("general.alignment", 4, struct.pack("<I", 64)),)
    blob = build(keys, (entry(dims=(4,)), entry("u", dims=(4,), offset=64)))
    blob += bytes(-len(blob) % 64) + bytes(80)
    header = parse(blob)
    assert header.data_offset % 64 == 0 and header.tensors["u"].offset == header.data_offset + 64
    assert header.tensors["u"].offset + 16 == len(blob)


def test_header_from_a_growing_prefix(small: Path):
    blob = small.read_bytes()
    whole, have, rounds = parse(blob), 0, 0
    while True:
        try:
            header = parse_header(blob[:have], len(blob), "f.gguf")
            break
        except NeedMoreBytes as more:
            assert have < more.needed <= whole.data_offset
            have, rounds = more.needed, rounds + 1
    assert header.tensors == whole.tensors and 10 < rounds < 200
    assert list(header.metadata["tokens"]) == WORDS and header.metadata["s"] == whole.metadata["s"]


@pytest.mark.models
def test_smollm2_equals_the_gguf_package(smollm2_path: Path):
    reader, file = gguf.GGUFReader(smollm2_path), GGUFFile.open(smollm2_path)
    fields = {name: field for name, field in reader.fields.items() if not name.startswith("GGUF.")}
    assert set(file.metadata) == set(fields)
    for name, field in fields.items():
        if len(field.data) > 10_000:  # slow in their reader: a sample of the vocabulary
            some = range(0, len(field.data), 97)
            assert len(file.metadata[name]) == len(field.data)
            assert [file.metadata[name][i] for i in some] == [field.contents(i) for i in some], name
            continue
        expected, found = field.contents(), file.metadata[name]
        assert (list(found) if isinstance(expected, list) else found) == expected, name
    assert list(file.tensors) == [tensor.name for tensor in reader.tensors]
    for theirs in reader.tensors:
        ours = file.tensors[theirs.name]
        assert (ours.type, ours.shape) == (theirs.tensor_type.name, tuple(reversed(theirs.shape.tolist())))
        assert (ours.offset, ours.nbytes) == (theirs.data_offset, theirs.n_bytes)
        assert np.array_equal(file.data(theirs.name)[:4096], theirs.data.reshape(-1).view(np.uint8)[:4096])


@pytest.mark.models
def test_gemma3_is_read_whole(gemma3_path: Path):
    """Their reader needs 20 s to open this vocabulary; its view of the file was compared once, by hand."""
    file = GGUFFile.open(gemma3_path)
    metadata = file.metadata
    vocabulary = [metadata[f"tokenizer.ggml.{name}"] for name in ("tokens", "scores", "token_type")]
    assert [len(array) for array in vocabulary] == [262_144] * 3
    assert vocabulary[0][:4] == ["<pad>", "<eos>", "<bos>", "<unk>"] and set(vocabulary[2]) <= set(range(1, 7))
    assert metadata["gemma3.block_count"] == 18 and len(file.tensors) == 236
    assert file.tensors["token_embd.weight"].shape == (262_144, 640)
    ordered = sorted(file.tensors.values(), key=lambda tensor: tensor.offset)
    end = file.header.data_offset
    for tensor in ordered:  # packed without gaps, to the last byte of the file
        assert tensor.offset == end
        end += -(-tensor.nbytes // file.alignment) * file.alignment
    assert end == file.size


@pytest.mark.models
def test_a_large_vocabulary_is_not_decoded_on_opening(gemma3_path: Path):
    tracemalloc.start()
    try:
        file = GGUFFile.open(gemma3_path)
        assert len(file.metadata["tokenizer.ggml.tokens"]) > 200_000
        assert tracemalloc.get_traced_memory()[1] < 8 << 20  # strings of Python would take more than twice as much
    finally:
        tracemalloc.stop()


@pytest.mark.models
def test_a_real_model_cut_at_half(smollm2_path: Path, tmp_path: Path):
    cut = tmp_path / "cut.gguf"
    with smollm2_path.open("rb") as source:
        cut.write_bytes(source.read(smollm2_path.stat().st_size // 2))
    with pytest.raises(ModelError, match="truncated"):
        GGUFFile.open(cut)
