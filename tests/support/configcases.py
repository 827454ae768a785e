"""A config file of its own for a test."""

from __future__ import annotations

from pathlib import Path

import pytest


def own_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where `kv` looks for its config file now; there is none yet."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.delenv("KV_CONFIG")
    file = tmp_path / "kv" / "config.toml"
    file.parent.mkdir()
    return file
