"""Folders by the XDG rules, private, and what happens where they cannot be made."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvcli import paths


@pytest.mark.parametrize(
    "folder, variable, fallback",
    [
        (paths.cache_dir, "XDG_CACHE_HOME", ".cache/kv"),
        (paths.data_dir, "XDG_DATA_HOME", ".local/share/kv"),
        (paths.state_dir, "XDG_STATE_HOME", ".local/state/kv"),
    ],
)
def test_where(folder, variable: str, fallback: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:  # type: ignore[no-untyped-def]
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv(variable, str(tmp_path / "x"))
    assert folder() == tmp_path / "x" / "kv"
    for useless in ("", "relative/path"):
        monkeypatch.setenv(variable, useless)
        assert folder() == tmp_path / fallback
    assert list(tmp_path.iterdir()) == [], "asking makes nothing"


def test_made_folders_are_private(tmp_path: Path) -> None:
    paths.make_private(tmp_path / "a" / "b")
    paths.make_private(tmp_path / "a" / "b")
    assert [(tmp_path / name).stat().st_mode & 0o777 for name in ("a", "a/b")] == [0o700, 0o700]


def test_a_file_is_replaced_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / ("x" * 250)
    for flush, data in ((False, b"one"), (True, b"two")):
        paths.replace_file(path, data, flush)
        assert path.read_bytes() == data and path.stat().st_mode & 0o777 == 0o600

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("os.replace", interrupted)
    with pytest.raises(KeyboardInterrupt):
        paths.replace_file(path, b"three")
    assert list(tmp_path.iterdir()) == [path] and path.read_bytes() == b"two"


def test_a_folder_that_cannot_be_made_is_told_once(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    told: list[str] = []
    blocked = tmp_path / "file" / "kv"
    assert not paths.can_be_made(blocked)
    assert [paths.make_or_warn(blocked, told.append) for _ in range(2)] == [False, False]
    assert len(told) == 1 and str(blocked) in told[0] and "going on without it" in told[0]
    assert paths.can_be_made(tmp_path / "new" / "kv") and not (tmp_path / "new").exists()
    assert paths.make_or_warn(tmp_path / "new" / "kv", told.append) and len(told) == 1
