"""A model in several files is the model in one: its tensors, keys, identity and answers, whichever part is named."""

from __future__ import annotations

import json
import shutil
import struct
from pathlib import Path

import gguf
import numpy as np
import pytest
import servers
import tiny
from conftest import KvHere
from ggufbytes import build, entry, key
from headercases import read_header

from kvcli.errors import ModelError
from kvcli.runtime.formats.gguf import GGUFFile
from kvcli.runtime.formats.splitgguf import part_name, part_of
from kvcli.runtime.promptcache.fingerprint import model_hashes, text_hashes

PARTS = 3


@pytest.fixture(scope="module")
def split(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """The tiny llama in three parts, the first without tensors, by the gguf package's own splitting."""
    return split_model(tiny.make("llama").path, tmp_path_factory.mktemp("split"))


def split_model(whole: Path, folder: Path) -> list[Path]:
    reader = gguf.GGUFReader(whole)
    most = -(-len(reader.tensors) // (PARTS - 1))
    arch = reader.fields["general.architecture"].contents()
    writer = gguf.GGUFWriter(folder / "x.gguf", arch, split_max_tensors=most, small_first_shard=True)
    for name, field in reader.fields.items():
        if name.startswith("GGUF.") or name == "general.architecture":
            continue
        kinds = [*field.types, None]
        writer.add_key_value(name, field.contents(), kinds[0], kinds[-2] if len(field.types) > 1 else None)
    for tensor in reader.tensors:
        writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    found = sorted(folder.glob("*.gguf"))
    assert [path.name for path in found] == [part_name("x.gguf", number, PARTS) for number in (1, 2, 3)]
    return found


def test_names_of_parts() -> None:
    assert part_of("folder/x-Q4_K_M-00002-of-00003.gguf") == ("folder/x-Q4_K_M.gguf", 2, 3)
    assert part_name("folder/x-Q4_K_M.gguf", 2, 3) == "folder/x-Q4_K_M-00002-of-00003.gguf"
    for name in ("x.gguf", "x-00004-of-00003.gguf", "x-00000-of-00003.gguf", "x-1-of-3.gguf", "x-00001-of-00003.bin"):
        assert part_of(name) is None, name


@pytest.mark.slow
@pytest.mark.parametrize("named", range(PARTS))
def test_the_parts_are_the_whole(named: int, split: list[Path]) -> None:
    whole, file = GGUFFile.open(tiny.make("llama").path), GGUFFile.open(split[named])
    assert file.paths == tuple(split) and file.path == split[0]
    assert file.size == sum(path.stat().st_size for path in split)
    assert set(file.tensors) == set(whole.tensors) and {t.part for t in file.tensors.values()} == {1, 2}
    for name in whole.tensors:
        np.testing.assert_array_equal(file.data(name), whole.data(name))
    assert {name for name in file.metadata if not name.startswith("split.")} == set(whole.metadata)
    assert model_hashes(file) == model_hashes(whole), "rows that were kept for one serve the other"


def test_a_change_of_any_part_is_another_model(split: list[Path], tmp_path: Path) -> None:
    paths = [Path(shutil.copy(path, tmp_path)) for path in split]
    before = model_hashes(GGUFFile.open(paths[0]))
    content = bytearray(paths[2].read_bytes())
    content[-1] ^= 1
    paths[2].write_bytes(content)
    after = model_hashes(GGUFFile.open(paths[0]))
    assert after["weights"] != before["weights"] and after["tokenizer"] == before["tokenizer"]


def test_text_hashes_are_those_of_the_model_and_need_no_weights(
    split: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))  # with no hashes on record
    file = GGUFFile.open(split[0])
    with monkeypatch.context() as patched:
        patched.setattr(GGUFFile, "data", lambda self, name: pytest.fail(f"{name} was read"))
        hashes = text_hashes(file)
    assert set(hashes) == {"tokenizer", "template"} and hashes.items() <= model_hashes(file).items()
    assert text_hashes(file) == hashes, "now on record"


@pytest.mark.slow
def test_commands_take_any_part(split: list[Path], kv_here: KvHere) -> None:
    texts = set()
    for path in (tiny.make("llama").path, split[0], split[2]):
        command = (
            "run",
            "Hello",
            "-m",
            str(path),
            "-n",
            "6",
            "--raw",
            "--temp",
            "0",
            "--json",
            "--no-cache",
            "--no-stdin",
        )
        code, out, err = kv_here(*command)
        assert code == 0, err
        texts.add(json.loads(out)["text"])
    assert len(texts) == 1
    size = sum(path.stat().st_size for path in split)
    code, out, err = kv_here("inspect", str(split[1]), "--json")
    assert code == 0, err
    facts = json.loads(out)
    assert (facts["path"], facts["parts"], facts["file_bytes"]) == (str(split[0]), PARTS, size)
    assert f"{split[0]} (3 parts, " in kv_here("inspect", str(split[1]))[1]
    header = read_header(str(split[1]))
    assert header is not None and header.file_bytes == size
    assert set(header.tensors) == set(GGUFFile.open(tiny.make("llama").path).tensors)


def test_a_missing_part_is_one_line(split: list[Path], tmp_path: Path, kv_here: KvHere) -> None:
    for path in (split[0], split[2]):
        shutil.copy(path, tmp_path)
    first, missing = str(tmp_path / split[0].name), tmp_path / split[1].name
    for command in (("run", "hi", "--no-stdin", "-m", first), ("inspect", first), ("estimate", first)):
        code, out, err = kv_here(*command)
        assert (code, out) == (3, ""), err
        assert f"kv: error: part 2 of 3 of the model is missing: {missing}\n" in err
        assert err.count("\n") == 2, "what, and what next"


def test_from_the_hub(split: list[Path], site: servers.Site, world: dict[str, str], kv_here: KvHere) -> None:
    servers.add_repository(site, "org/x-GGUF", {f"x-F32/{path.name}": path.read_bytes() for path in split})
    command = ("run", "Hello", "-n", "2", "--raw", "--temp", "0", "--json", "--no-cache", "--no-stdin", "-m")
    code, out, err = kv_here(*command, "org/x-GGUF:f32")
    assert code == 0 and "downloading F32, 3 of 3 files" in err, err
    code, again, err = kv_here(*command, "org/x-GGUF", "--offline")
    assert code == 0 and json.loads(again)["text"] == json.loads(out)["text"], err
    header = read_header("org/x-GGUF")
    assert header is not None and set(header.tensors) == set(GGUFFile.open(split[0]).tensors)
    code, out, err = kv_here("inspect", "hf.co/org/x-GGUF/x-F32/x-00003-of-00003.gguf", "--json")
    assert code == 0 and json.loads(out)["parts"] == PARTS, err


def _part(number: int, name: str, count: int = 2, announced: int = 2) -> bytes:
    keys = [("split.no", number), ("split.count", count), ("split.tensors.count", announced)]
    return build(tuple(key(k, 2, struct.pack("<H", n)) for k, n in keys), (entry(name),), data=128)


@pytest.mark.parametrize(
    "second, reason",
    [
        (_part(1, "a"), "tensor 'a' is in an earlier part, too"),
        (_part(0, "b"), "is not part 2 of 2 of this model"),
        (_part(1, "b", count=3), "is not part 2 of 2 of this model"),
        (build((), (entry("b"),), data=128), "is not part 2 of 2 of this model"),
        (_part(1, "b")[:-100], "is truncated"),
    ],
)
def test_parts_that_do_not_belong_together(second: bytes, reason: str, tmp_path: Path) -> None:
    (tmp_path / "x-00001-of-00002.gguf").write_bytes(_part(0, "a"))
    path = tmp_path / "x-00002-of-00002.gguf"
    path.write_bytes(second)
    with pytest.raises(ModelError, match=reason) as caught:
        GGUFFile.open(path)
    assert caught.value.message.startswith(str(path))


def test_tensors_that_no_part_has(tmp_path: Path) -> None:
    for number, name in enumerate("ab"):
        path = tmp_path / f"x-{number + 1:05d}-of-00002.gguf"
        path.write_bytes(_part(number, name, announced=5))
    with pytest.raises(ModelError, match="its parts hold 2 tensors, 5 are announced"):
        GGUFFile.open(path)
