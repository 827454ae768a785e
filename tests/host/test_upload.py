"""Files on their way to a GPU before torch is there, by a driver that keeps them in main memory."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from kvcli.runtime.host import upload
from kvcli.runtime.host.cudadriver import Driver, Failed
from kvcli.runtime.host.upload import Upload

SIZE = 10_000


class Card(Driver):
    """`memory` in place of a GPU's, which begins at BASE. It refuses what is in `refuses`."""

    BASE = 4096

    def __init__(self, *refuses: str) -> None:
        self.memory, self.refuses, self.pinned = bytearray(), refuses, 0

    def _may(self, what: str) -> None:
        if what in self.refuses:
            raise Failed(what)

    def open(self, index: int) -> None:
        self._may("open")
        assert index == 1

    def enter(self) -> None:
        pass

    def allocate(self, size: int) -> int:
        self._may("allocate")
        self.memory = bytearray(size)
        return self.BASE

    def free(self, address: int) -> None:
        assert address == self.BASE
        self.memory = bytearray()

    def pin(self, size: int) -> memoryview:
        self._may("pin")
        self.pinned += 1
        return memoryview(bytearray(size))

    def unpin(self, pinned: memoryview) -> None:
        self.pinned -= 1

    def send(self, to: int, pinned: memoryview, size: int) -> None:
        self._may("send")
        self.memory[to - self.BASE : to - self.BASE + size] = pinned[:size]


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(upload, "CHUNK", 1024)
    path = tmp_path / "weights"
    path.write_bytes(os.urandom(SIZE))
    return path


def test_bytes_of_the_file_are_on_the_card(file: Path):
    card = Card()
    sent = Upload(file, SIZE, 1, card)
    for first, size in ((0, 1), (1000, 3000), (9999, 1), (0, SIZE)):
        found = sent.bytes_at(first, size)
        there, read_only = found.__cuda_array_interface__["data"]
        assert (there, read_only, found.__cuda_array_interface__["shape"]) == (card.BASE + first, False, (size,))
        assert card.memory[first : first + size] == file.read_bytes()[first : first + size]
    sent.close()
    assert not card.memory and not card.pinned
    assert sent.bytes_at(0, 1) is None
    sent.close()


@pytest.mark.parametrize("refused", ["open", "allocate", "pin", "send"])
def test_a_driver_that_refuses_sends_nothing(file: Path, refused: str):
    card = Card(refused)
    sent = Upload(file, SIZE, 1, card)
    assert sent.bytes_at(SIZE - 1, 1) is None
    sent.close()
    assert not card.memory and not card.pinned


def test_a_file_that_ends_early_is_not_there(file: Path):
    sent = Upload(file, SIZE + 5000, 1, Card())
    assert sent.bytes_at(SIZE, 5000) is None
    sent.close()


def test_without_room_nothing_is_sent(file: Path):
    assert upload.begin(file, SIZE, 0, 2 * SIZE + upload.MARGIN - 1) is None
