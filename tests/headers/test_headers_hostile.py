"""Hubs and headers that lie: each is one clear error, in bounded time, memory and bytes."""

from __future__ import annotations

import json
import re
import struct
import time
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from ggufbytes import array, build, entry, key, text
from headercases import read_header
from rangeserver import COMMIT, RangeHandler, RangeSite, add_repository, as_hub, serving_ranges

from kvcli.errors import DownloadError, KVError, ModelError

REPO, FILE = "org/toy-GGUF", "toy-Q4_K_M.gguf"
TINY = build(tensors=(entry(),), data=128)


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[RangeSite]:
    with serving_ranges() as site:
        as_hub(site, tmp_path, monkeypatch)
        yield site


def no_time_lost(source: str, error: type[KVError], within_s: float = 60) -> str:
    start = time.process_time()
    tracemalloc.start()
    try:
        with pytest.raises(error) as caught:
            read_header(source)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert time.process_time() - start < within_s and peak < 300 << 20
    assert "\n" not in caught.value.message
    return caught.value.message


@pytest.mark.parametrize(
    ("listing", "expected"),
    [
        (b"<html>", "not valid JSON"),
        (b"[]", "not an object"),
        (b"{}", "lists no files"),
        (b'{"siblings": [1]}', "lists no files"),
        (b'{"siblings": []}', "neither GGUF files"),
        (b'{"siblings": [{"rfilename": "../../x-Q4_K_M.gguf", "size": 5}]}', "neither GGUF files"),
        (
            b'{"siblings": [{"rfilename": "a\\u001b-Q4_K_M.gguf"}, {"rfilename": 5}, {}]}',
            "neither GGUF files",
        ),
    ],
)
def test_wrong_listings(listing: bytes, expected: str, site: RangeSite) -> None:
    site.bodies[f"/api/models/{REPO}"] = listing
    assert expected in no_time_lost(REPO, DownloadError)


@pytest.mark.parametrize("status", [401, 403, 404, 429, 500])
def test_refused_listings_and_files(status: int, site: RangeSite) -> None:
    folder = add_repository(site, REPO, {FILE: TINY})
    site.acts[f"{folder}/{FILE}"] = lambda handler: handler.reply(status)
    assert f"{REPO}/{FILE}" in no_time_lost(REPO, DownloadError)
    site.acts[f"/api/models/{REPO}"] = lambda handler: handler.reply(status)
    assert REPO in no_time_lost(REPO, DownloadError)


# --- hostile headers ---

HUGE = 10**18


def _claims(size: int, content: bytes) -> Callable[[RangeHandler], None]:
    """A server that says its file has `size` bytes; it sends `content` and then zeros, as many as asked."""

    def answer(handler: RangeHandler) -> None:
        start, stop = handler.asked() or (0, 0)
        part = (content[start : stop + 1] + bytes(stop + 1 - start))[: stop + 1 - start]
        handler.reply(206, part, Content_Range=f"bytes {start}-{stop}/{size}")

    return answer


def hostile_gguf() -> dict[str, tuple[bytes, str]]:
    words = array(8, HUGE, text("word") * 100)
    return {
        "10^18 tensors": (build(n_tensors=HUGE), "claims 1,000,000,000,000,000,000 tensors"),
        "10^18 keys": (build(n_keys=HUGE), "claims 1,000,000,000,000,000,000 keys"),
        "10^18 strings": (
            build(keys=(key("tokenizer.ggml.tokens", 9, words),)),
            "claims 1,000,000,000,000,000,000 elements",
        ),
        "10^18 numbers": (
            build(keys=(key("a", 9, array(4, HUGE, b"")),)),
            "claims 1,000,000,000,000,000,000 elements",
        ),
        "a string of 10^18": (build(keys=(key("a", 8, struct.pack("<Q", HUGE)),)), "runs past the end"),
        "a name of 10^18": (build(keys=(struct.pack("<Q", HUGE),)), "runs past the end"),
        "a tensor of 2^160": (build(tensors=(entry(dims=(1 << 40,) * 4),)), "truncated"),
        "ten million strings": (
            build(keys=(key("a", 9, array(8, 10_000_000, b"")),)),
            "header would need|claims 10,000,000",
        ),
        "a million keys of nothing": (build(n_keys=1 << 16), "appears twice"),
        "not GGUF": (b"\x7fELF" + bytes(100), "not a GGUF file"),
    }


@pytest.mark.parametrize("case", hostile_gguf())
@pytest.mark.parametrize("size", [1 << 20, 1 << 34, 1 << 50])
def test_hostile_gguf(case: str, size: int, site: RangeSite) -> None:
    content, expected = hostile_gguf()[case]
    folder = add_repository(site, REPO, {FILE: content})
    site.bodies[f"/api/models/{REPO}"] = json.dumps(
        {"sha": COMMIT, "siblings": [{"rfilename": FILE, "size": size}]}
    ).encode()
    site.acts[f"{folder}/{FILE}"] = _claims(size, content)
    message = no_time_lost(REPO, ModelError, 20)
    assert message.startswith(f"{REPO}/{FILE}") and re.search(expected, message), message
    assert site.sent < (65 << 20) + 1000


@pytest.mark.slow
@pytest.mark.parametrize("length", [HUGE, 100_000_001, 99_000_000])
def test_hostile_safetensors(length: int, site: RangeSite, monkeypatch: pytest.MonkeyPatch) -> None:
    add_repository(site, "org/toy", {"config.json": b"{}"})
    site.bodies["/api/models/org/toy"] = json.dumps(
        {"sha": COMMIT, "siblings": [{"rfilename": "model.safetensors", "size": 1 << 40}]}
    ).encode()
    content = struct.pack("<Q", length) + b'{"t":[' + b"{}," * 5_000_000
    site.acts[f"/org/toy/resolve/{COMMIT}/model.safetensors"] = _claims(1 << 40, content)
    message = no_time_lost("org/toy", ModelError, 20)
    expected = "more than 100,000,000" if length < HUGE else "its first 8 bytes are not the size of a header"
    expected = "more values than kv accepts" if length < 100_000_000 else expected
    assert expected in message
    assert site.sent < (length + 1000 if length < 100_000_000 else 1000)


def test_a_listing_that_disagrees_with_the_file(site: RangeSite) -> None:
    folder = add_repository(site, REPO, {FILE: TINY})
    site.bodies[f"{folder}/{FILE}"] = TINY + b"x"
    assert "were expected" in no_time_lost(REPO, DownloadError)
