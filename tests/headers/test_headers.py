"""Headers of whole models: the hub's answer equals the local file's, for few bytes."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from headercases import read_header
from rangeserver import COMMIT, RangeSite, add_repository, as_hub, serving_ranges
from safetensors.numpy import save

from kvcli import paths
from kvcli.errors import DownloadError, ModelError
from kvcli.runtime.formats.gguf import GGUFFile
from kvcli.runtime.headers import modelheaders
from kvcli.runtime.headers.facts import FILE_TYPES, weight_type
from kvcli.runtime.headers.modelheaders import Alternative, HeaderTensor, ModelHeader
from kvcli.runtime.hub.repository import stored_token

REPO = "org/toy-GGUF"
VOCABULARY = 150_000


def written(path: Path, vocabulary: int, tensors: dict[str, np.ndarray], **keys: int) -> bytes:
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(2)
    if vocabulary:
        writer.add_array("tokenizer.ggml.tokens", [f"token{i}" for i in range(vocabulary)])
        writer.add_array("tokenizer.ggml.scores", [float(i) for i in range(vocabulary)])
    for name, number in keys.items():
        writer.add_uint16(name.replace("_", "."), number)
    for name, values in tensors.items():
        writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path.read_bytes()


@pytest.fixture(scope="session")
def big(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A GGUF file whose vocabulary does not fit into the first 2 MiB, with 8 MiB of data."""
    path = tmp_path_factory.mktemp("headers") / "toy-Q4_K_M.gguf"
    weights = {f"blk.{i}.w": np.zeros((1024, 1024), np.float32) for i in range(2)}
    content = written(path, VOCABULARY, weights)
    assert 2 << 20 < GGUFFile.open(path).header.data_offset < 4 << 20 and len(content) > 10 << 20
    return path


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[RangeSite]:
    with serving_ranges() as site:
        as_hub(site, tmp_path, monkeypatch)
        yield site


def same_model(one: ModelHeader, other: ModelHeader) -> bool:
    """Equal in all that is the model's; long arrays are compared item by item."""
    assert list(one.metadata) == list(other.metadata)
    for name, value in one.metadata.items():
        twin = other.metadata[name]
        assert list(value) == list(twin) if hasattr(value, "__len__") else value == twin, name
    figures = [(h.container, h.config, h.tensors, h.file_bytes) for h in (one, other)]
    return figures[0] == figures[1]


# --- GGUF ---


def test_local_file(big: Path) -> None:
    header, file = read_header(str(big)), GGUFFile.open(big)
    assert header.container == "gguf" and header.bytes_read == 0 and header.file_bytes == file.size
    assert header.metadata["llama.block_count"] == 2
    assert len(header.metadata["tokenizer.ggml.tokens"]) == VOCABULARY
    assert {n: tuple(t) for n, t in header.tensors.items()} == {
        n: (t.shape, t.type, t.nbytes) for n, t in file.tensors.items()
    }


@pytest.mark.slow
@pytest.mark.parametrize("named", [True, False])
@pytest.mark.parametrize("source", [REPO, f"hf:{REPO}", f"{REPO}:Q4_K_M", f"{REPO}:toy-Q4_K_M.gguf"])
def test_remote_file_is_the_local_one(source: str, named: bool, big: Path, site: RangeSite) -> None:
    content = big.read_bytes()
    folder = add_repository(site, REPO, {"README.md": b"x", big.name: content}, named)
    header = read_header(source)
    assert same_model(header, read_header(str(big)))
    assert header.source == f"{REPO}:Q4_K_M" and header.alternatives == () and header.notices == ()
    assert site.ranges(f"{folder}/{big.name}") == [
        f"bytes={first}-{stop - 1}" for first, stop in ((0, 1 << 20), (1 << 20, 2 << 20), (2 << 20, 4 << 20))
    ]
    assert header.bytes_read == site.sent == (4 << 20) + len(site.bodies[f"/api/models/{REPO}"])
    assert header.bytes_read < header.file_bytes / 2


@pytest.mark.models
def test_a_real_model(smollm2_path: Path, site: RangeSite) -> None:
    add_repository(site, REPO, {"smollm2-Q4_1.gguf": smollm2_path.read_bytes()})
    header = read_header(REPO)
    assert same_model(header, read_header(str(smollm2_path))) and len(header.tensors) == 272
    assert header.bytes_read < 5 << 20 < header.file_bytes


@pytest.mark.parametrize("named", [True, False])
def test_the_second_time_costs_nothing(named: bool, big: Path, site: RangeSite) -> None:
    folder = add_repository(site, REPO, {big.name: big.read_bytes()}, named)
    site.etags[f"{folder}/{big.name}"] = '"abc"'
    first, sent, requests = read_header(REPO), site.sent, len(site.log)
    second = read_header(REPO)
    assert same_model(first, second) and second.bytes_read == 0 and site.sent == sent
    assert len(site.log) - requests == (1 if named else 2) and second.etag == first.etag != ""
    requests = len(site.log)
    third = read_header(REPO, offline=True)
    assert same_model(first, third) and third.bytes_read == 0 and len(site.log) == requests


def test_a_new_commit_is_read_again(big: Path, site: RangeSite, tmp_path: Path) -> None:
    add_repository(site, REPO, {big.name: big.read_bytes()})
    assert len(read_header(REPO).tensors) == 2
    add_repository(site, REPO, {big.name: written(tmp_path / "x.gguf", 10, {"one": np.zeros(5, np.float32)})})
    assert set(read_header(REPO).tensors) == {"one"}


def test_offline_without_a_cache(site: RangeSite) -> None:
    with pytest.raises(DownloadError, match="network may not be used"):
        read_header(REPO, offline=True)
    assert not site.log


def test_offline_finds_what_the_hub_downloaded(big: Path, site: RangeSite, tmp_path: Path) -> None:
    snapshot = tmp_path / "hf" / "hub" / "models--org--toy-GGUF" / "snapshots" / COMMIT
    snapshot.mkdir(parents=True)
    (snapshot / big.name).symlink_to(big)
    assert same_model(read_header(REPO, offline=True), read_header(str(big))) and not site.log


def test_choosing_a_quantization(site: RangeSite, tmp_path: Path) -> None:
    small = {quant: written(tmp_path / f"{quant}.gguf", 0, {quant: np.zeros(8, np.float32)}) for quant in
             ("Q8_0", "Q4_K_M", "IQ2_XS")}  # fmt: skip
    files = {f"toy-{quant}.gguf": body for quant, body in small.items()}
    add_repository(site, REPO, {"mmproj-toy-F16.gguf": b"x", **files})
    header = read_header(REPO)
    assert set(header.tensors) == {"Q4_K_M"}
    assert header.alternatives == tuple(Alternative(q, len(small[q])) for q in ("Q8_0", "IQ2_XS"))
    assert set(read_header(f"{REPO}:iq2_xs").tensors) == {"IQ2_XS"}
    with pytest.raises(DownloadError, match="no file for 'Q5_K_M'") as caught:
        read_header(f"{REPO}:Q5_K_M")
    assert "there are Q8_0, Q4_K_M, IQ2_XS" in caught.value.hint
    del files["toy-Q4_K_M.gguf"]
    add_repository(site, REPO, files)
    assert set(read_header(REPO).tensors) == {"Q8_0"}, "without Q4_K_M the first one"


def _parts(tmp_path: Path, count: int = 3, announced: int | None = None) -> dict[str, bytes]:
    files = {}
    for number in range(count):
        path = tmp_path / f"toy-Q4_K_M-{number + 1:05d}-of-{count:05d}.gguf"
        keys = {"split_no": number, "split_count": announced or count}
        tensors = {f"blk.{number}.w": np.zeros((64, 64), np.float32)}
        files[path.name] = written(path, 500 if number == 0 else 0, tensors, **keys)
    return files


def test_parts_of_a_split_model(site: RangeSite, tmp_path: Path) -> None:
    files = _parts(tmp_path)
    folder = add_repository(site, REPO, {f"Q4_K_M/{name}": body for name, body in files.items()})
    header, local = read_header(f"{REPO}:Q4_K_M"), read_header(str(tmp_path / list(files)[1]))
    assert same_model(header, local) and set(header.tensors) == {f"blk.{i}.w" for i in range(3)}
    assert header.file_bytes == sum(map(len, files.values()))
    assert len(header.metadata["tokenizer.ggml.tokens"]) == 500
    assert site.ranges(f"{folder}/Q4_K_M/{list(files)[2]}") == ["bytes=0-65535"]


def test_missing_parts(site: RangeSite, tmp_path: Path) -> None:
    files = _parts(tmp_path)
    missing = list(files)[1]
    (tmp_path / missing).unlink()
    with pytest.raises(ModelError, match=r"part 2 of 3 of the model is missing: .*00002-of-00003"):
        read_header(str(tmp_path / next(iter(files))))
    del files[missing]
    add_repository(site, REPO, files)
    with pytest.raises(DownloadError, match="neither GGUF files"):
        read_header(REPO)


def test_parts_that_claim_another_count(site: RangeSite, tmp_path: Path) -> None:
    add_repository(site, REPO, _parts(tmp_path, 2, announced=5))
    with pytest.raises(ModelError, match="is one of 5 parts of a split model, 2 are there"):
        read_header(REPO)


def test_the_same_tensor_in_two_parts(site: RangeSite, tmp_path: Path) -> None:
    files = _parts(tmp_path, 2)
    first, second = files
    again = written(tmp_path / second, 0, {"blk.0.w": np.zeros(4, np.float32)}, split_no=1, split_count=2)
    add_repository(site, REPO, {first: files[first], second: again})
    with pytest.raises(ModelError, match=r"blk\.0\.w' is in an earlier part"):
        read_header(REPO)


# --- safetensors ---

CONFIG = {"model_type": "llama", "num_hidden_layers": 2, "rms_norm_eps": 1e-05}
SHARDS = {
    "model-00001-of-00002.safetensors": {"a": np.zeros((64, 8), np.float32), "b": np.zeros(3, np.float16)},
    "model-00002-of-00002.safetensors": {"c": np.zeros((4096, 64), np.float32)},
}


def sharded() -> dict[str, bytes]:
    weight_map = {name: file for file, arrays in SHARDS.items() for name in arrays}
    files = {file: save(arrays) for file, arrays in SHARDS.items()}
    files["model.safetensors.index.json"] = json.dumps({"metadata": {}, "weight_map": weight_map}).encode()
    return files | {"config.json": json.dumps(CONFIG).encode(), "tokenizer.json": b"{}"}


def single() -> dict[str, bytes]:
    arrays = {name: values for part in SHARDS.values() for name, values in part.items()}
    return {"model.safetensors": save(arrays), "config.json": json.dumps(CONFIG).encode()}


def on_disk(folder: Path, files: dict[str, bytes]) -> Path:
    folder.mkdir()
    for name, body in files.items():
        (folder / name).write_bytes(body)
    return folder


@pytest.mark.parametrize("files", [sharded(), single()], ids=["sharded", "single"])
def test_safetensors(files: dict[str, bytes], site: RangeSite, tmp_path: Path) -> None:
    path = on_disk(tmp_path / "model", files)
    add_repository(site, "org/toy", files)
    local, header = read_header(str(path)), read_header("org/toy")
    assert same_model(local, header) and header.container == "safetensors" and header.source == "org/toy:safetensors"
    assert header.config == CONFIG and header.metadata == {}
    assert header.tensors["a"] == ((64, 8), "F32", 2048) and header.tensors["b"] == ((3,), "F16", 6)
    weights = {name: body for name, body in files.items() if name.endswith(".safetensors")}
    assert header.file_bytes == sum(map(len, weights.values())) > 1 << 20
    for name, body in weights.items():
        end = 8 + struct.unpack("<Q", body[:8])[0]
        assert site.ranges(f"/org/toy/resolve/{COMMIT}/{name}") == ["bytes=0-7", f"bytes=8-{end - 1}"]
    small = sum(len(body) for name, body in files.items() if name.endswith(".json") and name != "tokenizer.json")
    assert header.bytes_read < small + 2000 + len(site.bodies["/api/models/org/toy"])
    sent = site.sent
    assert same_model(read_header("org/toy"), local) and site.sent == sent
    assert same_model(read_header("org/toy", offline=True), local) and site.sent == sent


def test_gguf_is_preferred_and_safetensors_offered(big: Path, site: RangeSite) -> None:
    files = single()
    add_repository(site, REPO, {**files, big.name: big.read_bytes()})
    header = read_header(REPO)
    assert header.container == "gguf"
    assert header.alternatives == (Alternative("safetensors", len(files["model.safetensors"])),)
    assert read_header(f"{REPO}:safetensors").container == "safetensors"


def test_a_lone_safetensors_file(tmp_path: Path) -> None:
    folder = on_disk(tmp_path / "model", {"other.safetensors": single()["model.safetensors"]})
    header = read_header(str(folder / "other.safetensors"))
    assert set(header.tensors) == {"a", "b", "c"} and header.config == {}


def test_a_missing_shard(site: RangeSite, tmp_path: Path) -> None:
    files = sharded()
    del files["model-00002-of-00002.safetensors"]
    add_repository(site, "org/toy", files)
    with pytest.raises(DownloadError, match="lacks model-00002-of-00002"):
        read_header("org/toy")
    with pytest.raises(ModelError, match="lacks model-00002-of-00002"):
        read_header(str(on_disk(tmp_path / "model", files)))


@pytest.mark.parametrize("config", [b"[]", b"{", b"\xff", b"{}" + b" " * (5 << 20)])
def test_a_wrong_config(config: bytes, site: RangeSite, tmp_path: Path) -> None:
    files = single() | {"config.json": config}
    add_repository(site, "org/toy", files)
    for source in ("org/toy", str(on_disk(tmp_path / "model", files))):
        with pytest.raises(ModelError, match=r"config\.json"):
            read_header(source)


# --- what names mean ---


def test_names_that_are_nothing(tmp_path: Path) -> None:
    for source in ("no-such-model", str(tmp_path / "none.gguf"), "", "a b"):
        with pytest.raises(ModelError):
            read_header(source)
    with pytest.raises(ModelError, match=r"is a folder without model\.safetensors"):
        read_header(str(tmp_path))
    (tmp_path / "model.safetensors").mkdir()
    with pytest.raises(ModelError, match=r"is a directory"):
        read_header(str(tmp_path))


# --- the token ---


def test_the_token_goes_to_the_hub_only(big: Path, site: RangeSite, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", " hf_mine\n")
    folder = add_repository(site, REPO, {big.name: big.read_bytes()})
    with serving_ranges() as store:
        store.bodies["/blob"] = big.read_bytes()
        moved = f"{store.url}/blob?X-Amz-Signature=secret"
        site.acts[f"{folder}/{big.name}"] = lambda handler: handler.reply(302, Location=moved)
        assert same_model(read_header(REPO), read_header(str(big)))
        assert len(store.log) == 3 and not any("hf_mine" in str(request.headers) for request in store.log)
    assert [request.headers["authorization"] for request in site.log] == ["Bearer hf_mine"] * 2
    cached = [path.read_bytes() for path in (paths.cache_dir() / "headers").iterdir()]
    assert cached and not any(b"hf_mine" in body or b"secret" in body for body in cached)


def test_where_the_token_is_found(site: RangeSite, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert stored_token() is None
    (tmp_path / "hf").mkdir()
    (tmp_path / "hf" / "token").write_text("hf_stored\n")
    assert stored_token() == "hf_stored"
    monkeypatch.setenv("HF_HUB_DISABLE_IMPLICIT_TOKEN", "1")
    assert stored_token() is None
    monkeypatch.setenv("HF_TOKEN", "hf_given")
    assert stored_token() == "hf_given"
    monkeypatch.delenv("HF_TOKEN")
    monkeypatch.delenv("HF_HUB_DISABLE_IMPLICIT_TOKEN")
    (tmp_path / "hf" / "token").write_bytes(b"\xff\xfe")
    with pytest.raises(DownloadError, match="cannot be read"):
        stored_token()


def test_a_damaged_cache_is_not_believed(big: Path, site: RangeSite, tmp_path: Path) -> None:
    add_repository(site, REPO, {big.name: big.read_bytes()})
    first = read_header(REPO)
    for path in (tmp_path / "cache" / "kv" / "headers").iterdir():
        path.write_bytes(path.read_bytes()[:-100])
    again = read_header(REPO)
    assert same_model(first, again) and again.bytes_read == first.bytes_read


def test_limits_are_the_documented_ones() -> None:
    assert (modelheaders.FIRST_GGUF_BYTES, modelheaders.MAX_GGUF_BYTES) == (1 << 20, 64 << 20)


@pytest.mark.parametrize(
    ("name", "said", "told"),
    [
        ("m-UD-Q4_K_XL.gguf", 15, "UD-Q4_K_XL"),
        ("m.gguf", 15, "Q4_K_M"),
        ("m.gguf", 999, "Q8_0"),
        ("m.gguf", [15], "Q8_0"),
        ("m-Q4_K_M", None, "Q8_0"),
    ],
)
def test_weights_are_named_as_their_file_is(name: str, said: Any, told: str) -> None:
    """Though most bytes may be those of an embedding of another type."""
    tensors = {
        "token_embd.weight": HeaderTensor((64, 64), "Q8_0", 4352),
        "output.weight": HeaderTensor((1,), "Q4_K", 9),
    }
    assert weight_type(name, {} if said is None else {"general.file_type": said}, tensors) == told


def test_types_of_files_are_those_of_the_gguf_package() -> None:
    theirs = {each.value: each.name.removeprefix("MOSTLY_").removeprefix("ALL_") for each in gguf.LlamaFileType}
    assert FILE_TYPES.items() <= theirs.items()
